"""Every key of a DeepSpeed configuration, what it takes, and what becomes of it here: one table, block by block.

    honoured      it sets something; the text says what
    no effect     what it tunes is done another way here; the text says how, and so does a note when it is written
    refused       ignoring it would change the numbers or break what it promises; any value but its default is an error
    follows       it says how to do what another key asks for, so what becomes of that key becomes of it

Keys, types and defaults are those of the reference of DeepSpeed 0.19 (docs/_pages/config-json.md) and of what its code
reads beside them; keys of older versions stand here too. A name may have dots. `*` stands for a name of the user's own,
`[]` for the items of a list.
"""

from megazero.deepspeed.config_features import DATA, MODEL, MONITORS, REMOVED, STORAGE
from megazero.deepspeed.config_kinds import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    LIST,
    NOT_NEGATIVE,
    NUMBER,
    SHARE,
    SIZE,
    STRING,
    TABLE,
    WHOLE,
    Key,
    Kind,
    block,
    follows,
    honoured,
    integer,
    no_effect,
    refused,
    words,
)

_NEVER = (None, float("inf"))
_FORMAT = words("fp32", "fp16", "bf16")
_NVME = "files are read and written by threads, with buffers of their own size"
_OWN_UPDATE = "the update of offloaded state has one way to run"
_EXPERTS = "there is no mixture of experts"
_REMOVED = "DeepSpeed 0.19 removed it too"
_BUCKETS = "parameters and gradients lie in flat buckets of reduce_bucket_size, and are gathered and reduced by these"
_PREFETCH = "stage 3 keeps two gather buffers, one in use and one being filled with what is needed next"

TOP = (
    block(
        "",
        honoured("train_batch_size", COUNT, None, "samples in an optimizer step; from the two below if left out"),
        honoured("train_micro_batch_size_per_gpu", COUNT, None, "samples in one forward pass; else from the others"),
        honoured("gradient_accumulation_steps", COUNT, None, "micro-batches in a step; else from the others, or 1"),
        refused("managed_gradient_accumulation", BOOLEAN, True, "micro-batches are counted by the engine"),
        honoured("dataloader_drop_last", BOOLEAN, False, "whether the engine's loader drops an incomplete batch"),
        title="Batch sizes",
    ),
    block(
        "",
        honoured("optimizer.type", STRING, None, "the optimizer; its name and parameters are checked with it"),
        honoured("optimizer.params", TABLE, None, "its parameters"),
        no_effect("optimizer.legacy_fusion", BOOLEAN, False, "the update runs over flat shards, always fused"),
        honoured("scheduler.type", STRING, None, "the learning-rate schedule; name and parameters checked with it"),
        honoured("scheduler.params", TABLE, None, "its parameters"),
        honoured("gradient_clipping", NOT_NEGATIVE, 1.0, "largest global gradient norm; 0: none (`grad_clip`)"),
        honoured("zero_allow_untested_optimizer", BOOLEAN, False, "whether ZeRO takes an optimizer of your own"),
        no_effect("zero_force_ds_cpu_optimizer", BOOLEAN, True, _OWN_UPDATE),
        title="Optimizer and learning rate",
    ),
    block(
        "",
        honoured("communication_data_type", _FORMAT, None, "`precision.reduce_dtype`; fp32 if left out"),
        refused("gradient_allreduce_op", words("mean", "sum"), "mean", "gradients are averaged over dp"),
        no_effect("prescale_gradients", BOOLEAN, False, "losses are divided by dp before the backward"),
        no_effect("gradient_predivide_factor", NUMBER, 1.0, "losses are divided by dp before the backward"),
        no_effect("disable_allgather", BOOLEAN, False, "updated parameters are always all-gathered"),
        no_effect("allgather_size", SIZE, 5e8, _BUCKETS),
        no_effect("sparse_gradients", BOOLEAN, False, "gradients of embeddings are reduced whole; the sum is the same"),
        no_effect("seq_parallel_communication_data_type", _FORMAT, "fp32", "no samples are split over ranks"),
        refused("sequence_parallel_size", COUNT, 1, "no samples are split over ranks (Ulysses)"),
        no_effect("use_data_before_expert_parallelism", BOOLEAN, False, _EXPERTS),
        title="Communication",
    ),
    block(
        "",
        honoured(
            "steps_per_print", integer(1, None, *_NEVER), 10, "steps between two reports; null or Infinity: never"
        ),
        honoured("wall_clock_breakdown", BOOLEAN, False, "time of forward, backward and update in the reports"),
        honoured("dump_state", BOOLEAN, False, "print this configuration once the engine is built"),
        no_effect("memory_breakdown", BOOLEAN, False, "memory is not reported by phase"),
        no_effect("disable_python_gc", BOOLEAN, False, "Python's garbage collector is left as it is"),
        no_effect("log_level", STRING, None, "logging is set up by the script"),
        no_effect("vocabulary_size", COUNT, None, "tables are padded where tensor parallelism needs it"),
        no_effect("timers.throughput.enabled", BOOLEAN, True, "throughput is part of every report"),
        no_effect("timers.throughput.synchronized", BOOLEAN, True, "steps are timed from report to report"),
        title="Logging and the process",
    ),
)

PRECISION = (
    block(
        "fp16",
        honoured("enabled", BOOLEAN, False, '`precision.dtype = "fp16"`; with bf16 an error, without either fp32'),
        honoured("auto_cast", BOOLEAN, False, "whether the engine casts floating-point inputs to fp16"),
        honoured("loss_scale", NOT_NEGATIVE, 0.0, "`precision.loss_scale`; 0: adapted to the run"),
        honoured("initial_scale_power", integer(0, 64), 16, "`precision.initial_scale_power`"),
        honoured("loss_scale_window", COUNT, 1000, "`precision.loss_scale_window`"),
        honoured("hysteresis", COUNT, 2, "`precision.hysteresis`"),
        honoured("consecutive_hysteresis", BOOLEAN, False, "`precision.consecutive_hysteresis`"),
        honoured("min_loss_scale", COUNT, 1, "`precision.min_loss_scale`"),
        refused("fp16_master_weights_and_grads", BOOLEAN, False, "master weights are fp32"),
    ),
    block(
        "bf16",
        honoured("enabled", BOOLEAN, False, '`precision.dtype = "bf16"`; with fp16 an error, without either fp32'),
        honoured("auto_cast", BOOLEAN, False, "the same for bf16, where DeepSpeed has no such key"),
        refused("bf16_master_weights_and_grads", BOOLEAN, False, "master weights are fp32"),
        refused("bf16_optimizer_states", BOOLEAN, False, "optimizer state is fp32"),
        no_effect("immediate_grad_update", BOOLEAN, False, "a gradient is added to its bucket as soon as it is there"),
        no_effect("check_grad_overflow", BOOLEAN, True, "every step checks that the gradient norm is finite"),
        title="bf16 (or, as older files call it, bfloat16)",
    ),
    block(
        "torch_autocast",
        refused("enabled", BOOLEAN, False, "weights and activations have one format; write bf16 or fp16"),
        *follows(
            "enabled",
            ("dtype", words("bfloat16", "float16"), "bfloat16"),
            ("lower_precision_safe_modules", LIST, None),
        ),
    ),
    block(
        "data_types",
        honoured("grad_accum_dtype", _FORMAT, None, "`precision.accumulate_dtype`; fp32 if left out"),
        refused("param_dtype", _FORMAT, None, "fp16 and bf16 say the format of the weights"),
        refused("buffer_dtype", _FORMAT, None, "fp16 and bf16 say the format of the model"),
        refused("keep_in_fp32_modules", Kind("list", choices=("auto",)), "auto", "a model has one format throughout"),
    ),
)

ZERO = (
    block(
        "zero_optimization",
        honoured("stage", words(0, 1, 2, 3), 0, '`zero.stage`; 2 and 3 have `zero.reduce = "micro_batch"`'),
        honoured("reduce_bucket_size", Kind("size", 1), 5e8, "`zero.bucket_bytes`, 4 bytes each; 40 MiB if left out"),
        honoured("stage3_param_persistence_threshold", SIZE, 1e5, "`zero.resident_elements` at stage 3, else nothing"),
        honoured("mics_shard_size", integer(-1), -1, "`zero.shard_group_size` where > 0 (DeepSpeed 0.19 removed it)"),
        no_effect("mics_hierarchical_params_gather", BOOLEAN, False, "a shard group gathers in one collective"),
        honoured("cpu_offload", BOOLEAN, None, '`zero.offload.optimizer = "cpu"` (deprecated)'),
        honoured("cpu_offload_param", BOOLEAN, None, '`zero.offload.parameters = "cpu"` (deprecated)'),
        no_effect("cpu_offload_use_pin_memory", BOOLEAN, None, "offload_optimizer.pin_memory says it"),
        no_effect("allgather_partitions", BOOLEAN, True, "updated parameters are always all-gathered"),
        no_effect("allgather_bucket_size", SIZE, 5e8, _BUCKETS),
        no_effect("overlap_comm", BOOLEAN, None, "gradients are always reduced beside the backward"),
        no_effect("reduce_scatter", BOOLEAN, True, "stages 1 to 3 always reduce-scatter, stage 0 all-reduces"),
        no_effect("use_multi_rank_bucket_allreduce", BOOLEAN, True, "one collective reduces a bucket for all ranks"),
        no_effect("contiguous_gradients", BOOLEAN, True, "gradients always lie in flat buckets"),
        no_effect("round_robin_gradients", BOOLEAN, False, "shards are even, so ranks copy as much as each other"),
        no_effect("parameter_alignment", BOOLEAN, False, "a bucket has a layout of its own"),
        no_effect("compute_grad_norm", BOOLEAN, True, "the norm is part of every step"),
        refused("ignore_unused_parameters", BOOLEAN, True, "nothing checks this; no gradient counts as zero"),
        no_effect("sub_group_size", SIZE, 1e9, "the update runs bucket by bucket"),
        no_effect("stage3_max_live_parameters", SIZE, 1e9, _PREFETCH),
        no_effect("stage3_max_reuse_distance", SIZE, 1e9, _PREFETCH),
        no_effect("stage3_prefetch_bucket_size", SIZE, 5e8, _PREFETCH),
        no_effect("stage3_model_persistence_threshold", SIZE, None, "what stays whole is bounded by parameter only"),
        no_effect("stage3_module_granularity_threshold", WHOLE, 0, "weights are gathered by unit of the model"),
        no_effect("stage3_use_all_reduce_for_fetch_params", BOOLEAN, False, "weights are gathered by all-gather"),
        no_effect("stage3_allgather_sequential", BOOLEAN, False, "a unit is gathered straight into its weights"),
        no_effect("stage3_gather_16bit_weights_on_model_save", BOOLEAN, False, "saved weights are always whole"),
        no_effect("stage3_gather_fp16_weights_on_model_save", BOOLEAN, False, "saved weights are always whole"),
        no_effect("load_from_fp32_weights", BOOLEAN, True, "master weights are always loaded in fp32"),
        no_effect("elastic_checkpoint", BOOLEAN, False, "a checkpoint of any shape loads on any other"),
        no_effect("pipeline_loading_checkpoint", BOOLEAN, False, "each rank reads only what it keeps"),
        no_effect("memory_efficient_linear", BOOLEAN, True, "the backward reads weights from the same gather buffers"),
        no_effect("override_module_apply", BOOLEAN, True, "no method of your modules is replaced"),
        no_effect("log_trace_cache_warnings", BOOLEAN, False, "nothing is traced"),
        no_effect("enable_sanity_checks", BOOLEAN, False, "checks are always on"),
        no_effect("legacy_stage1", BOOLEAN, False, "there is one stage 1"),
        no_effect("save_muon_momentum_buffer_in_memory", BOOLEAN, False, "there is no Muon"),
        refused("zero_hpz_partition_size", WHOLE, 1, "there is no second copy of the shards in a node (hpZ)", (0,)),
        refused("zero_quantized_weights", BOOLEAN, False, "weights are gathered in their own format"),
        refused("zero_quantized_nontrainable_weights", BOOLEAN, False, "weights are kept in their own format"),
        refused("zero_quantized_gradients", BOOLEAN, False, "gradients travel in communication_data_type"),
        refused("zeropp_loco_param", ANYTHING, None, f"gradients travel unquantized; {_REMOVED}"),
        refused("zenflow", TABLE, None, "every gradient takes part in every update"),
        no_effect("leaf_module.classes", LIST, None, "a unit is gathered whole, whatever is in it"),
        no_effect("leaf_module.names", LIST, None, "a unit is gathered whole, whatever is in it"),
        no_effect("leaf_module.name_suffixes", LIST, None, "a unit is gathered whole, whatever is in it"),
        title="zero_optimization (true alone means stage 1)",
    ),
    block(
        "zero_optimization.offload_optimizer",
        honoured("device", words("none", "cpu", "nvme"), None, "`zero.offload.optimizer`, at stages 1 to 3"),
        honoured("nvme_path", STRING, None, "`zero.offload.nvme_path`; one directory for both blocks"),
        honoured("pin_memory", BOOLEAN, True, "`zero.offload.pin_memory`; false in either block is false for both"),
        honoured("ratio", SHARE, 1.0, "`zero.offload.ratio`, at every stage"),
        no_effect("buffer_count", WHOLE, 4, _NVME),
        no_effect("fast_init", BOOLEAN, False, _NVME),
        no_effect("pipeline_read", BOOLEAN, False, _NVME),
        no_effect("pipeline_write", BOOLEAN, False, _NVME),
        no_effect("super_offload", BOOLEAN, False, _OWN_UPDATE),
        no_effect("cpuadam_cores_perc", SHARE, 0.8, _OWN_UPDATE),
    ),
    block(
        "zero_optimization.offload_param",
        honoured("device", words("none", "cpu", "nvme"), None, "`zero.offload.parameters`, at stage 3"),
        honoured("nvme_path", STRING, None, "`zero.offload.nvme_path`; one directory for both blocks"),
        honoured("pin_memory", BOOLEAN, True, "`zero.offload.pin_memory`; false in either block is false for both"),
        no_effect("buffer_count", WHOLE, 5, _NVME),
        no_effect("buffer_size", SIZE, 1e8, _NVME),
        no_effect("max_in_cpu", SIZE, 1e9, "under nvme all of the shard lies in files"),
    ),
    block(
        "aio",
        no_effect("block_size", COUNT, 1048576, _NVME),
        no_effect("queue_depth", COUNT, 8, _NVME),
        no_effect("thread_count", COUNT, 1, _NVME),
        no_effect("intra_op_parallelism", COUNT, 1, _NVME),
        no_effect("single_submit", BOOLEAN, False, _NVME),
        no_effect("overlap_events", BOOLEAN, True, _NVME),
        no_effect("use_gds", BOOLEAN, False, _NVME),
    ),
)

BLOCKS = (*TOP, *PRECISION, *ZERO, *MODEL, *DATA, *MONITORS, *STORAGE, *REMOVED)


def keys_by_path() -> dict[str, Key]:
    """Give every key by its path from the top, in the order of the table."""
    return {f"{block.path}.{key.name}".removeprefix("."): key for block in BLOCKS for key in block.keys}
