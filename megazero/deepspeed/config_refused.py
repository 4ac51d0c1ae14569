"""The keys of a DeepSpeed configuration that set nothing here: without effect, or refused.

NO_EFFECT    it tunes what is done another way here; the line says how, and so does a note when the key is written
REFUSED      ignoring it would change the numbers or break a promise; any value but a harmless one is an error
UNCHECKED    the other keys of these blocks say how to do what is refused or has no effect, so nobody reads them
"""

from dataclasses import dataclass

_NVME = "files are read and written by threads, with buffers of their own size"
_IN_FILES = "under nvme all of the shard lies in files"
_OWN_UPDATE = "the update of offloaded state has one way to run"
_WHOLE = "saved weights are always whole, gathered one by one on rank 0"
_EXPERTS = "there is no mixture of experts"
_REMOVED = {
    "amp": "write bf16 or fp16",
    "compression_training": "weights are not compressed",
    "quantize_training": "weights are not quantized",
    "eigenvalue": "it serves quantize_training",
    "sparse_attention": "attention is what your model computes",
    "progressive_layer_drop": "every layer runs in every step",
    "curriculum_learning": "sequences have their full length",
    "elasticity": "write the batch sizes",
    "nebula": "checkpoints go to a directory",
    "zero_optimization.zeropp_loco_param": "errors of rounding are not fed back",
}
_BUCKETS = "parameters and gradients lie in flat buckets of reduce_bucket_size, and are gathered and reduced by these"
_PREFETCH = "stage 3 holds the unit in use and stage3_prefetch_bucket_size of what follows"
_TP = "build the model from megazero.layers and pass the parallel state as mpu; a model is not rewritten for you"


@dataclass(frozen=True)
class Refusal:
    """Why a key is refused.

    Args:
        harmless: values that ask for nothing, so that they are no error; null, {} and {"enabled": false} are never one.
    """

    reason: str
    harmless: tuple[object, ...] = (False,)


def _below(block: str, notes: dict[str, str]) -> dict[str, str]:
    """Give each key of a block its note; names with spaces between them share one."""
    return {f"{block}.{name}": note for names, note in notes.items() for name in names.split()}


NO_EFFECT = {
    "optimizer.legacy_fusion": "the update runs over flat shards, always fused",
    "zero_force_ds_cpu_optimizer": _OWN_UPDATE,
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"), "losses are divided by dp before the backward"
    ),
    "disable_allgather": "updated parameters are always all-gathered",
    "allgather_size": _BUCKETS,
    "sparse_gradients": "gradients of embeddings are reduced whole; the sum is the same",
    "seq_parallel_communication_data_type": "no samples are split over ranks",
    "use_data_before_expert_parallelism": _EXPERTS,
    "memory_breakdown": "memory is not reported by phase",
    "disable_python_gc": "Python's garbage collector is left as it is",
    "log_level": "logging is set up by the script",
    "cuda_visible_devices": "the launcher and the environment choose the devices",
    "vocabulary_size": "tables are padded where tensor parallelism needs it",
    "timers.throughput.enabled": "throughput is part of every report",
    "timers.throughput.synchronized": "steps are timed from report to report",
    "bf16.immediate_grad_update": "a gradient is added to its bucket as soon as it exists",
    "bf16.check_grad_overflow": "every step checks that the gradient norm is finite",
    **_below(
        "zero_optimization",
        {
            "mics_hierarchical_params_gather": "a shard group gathers in one collective",
            "cpu_offload_use_pin_memory": "write offload_optimizer.pin_memory",
            "allgather_partitions": "updated parameters are always all-gathered",
            "allgather_bucket_size": _BUCKETS,
            "overlap_comm": "gradients are always reduced beside the backward",
            "reduce_scatter": "stages 1 to 3 always reduce-scatter, stage 0 all-reduces",
            "use_multi_rank_bucket_allreduce": "one collective reduces a bucket for all ranks",
            "contiguous_gradients": "gradients always lie in flat buckets",
            "round_robin_gradients": "shards are even, so ranks copy as much as each other",
            "parameter_alignment": "a bucket has a layout of its own",
            "compute_grad_norm": "the norm is part of every step",
            "sub_group_size": "the update runs bucket by bucket",
            "stage3_max_live_parameters stage3_max_reuse_distance": _PREFETCH,
            "stage3_model_persistence_threshold": "what stays whole is bounded by parameter only",
            "stage3_module_granularity_threshold": "weights are gathered by unit of the model",
            "stage3_use_all_reduce_for_fetch_params": "weights are gathered by all-gather",
            "stage3_allgather_sequential": "a unit is gathered straight into its weights",
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save": _WHOLE,
            "load_from_fp32_weights": "master weights are always loaded in fp32",
            "elastic_checkpoint": "a checkpoint of any shape loads on any other",
            "pipeline_loading_checkpoint": "each rank reads only what it keeps",
            "memory_efficient_linear": "the backward reads weights from the same gather buffers",
            "override_module_apply": "no method of your modules is replaced",
            "log_trace_cache_warnings": "nothing is traced",
            "enable_sanity_checks": "checks are always on",
            "legacy_stage1": "there is one stage 1",
            "save_muon_momentum_buffer_in_memory": "Muon is for run files (optimizer.name), not for scripts",
        },
    ),
    **_below("activation_checkpointing", {"synchronize_checkpoint_boundary profile": "time with torch.profiler"}),
    "activation_checkpointing.partition_activations": "sequence parallelism of the tensor-parallel layers cuts activations",
    "activation_checkpointing.number_checkpoints": "the buffer takes the size that a step needs",
    **_below(
        "zero_optimization.leaf_module", {"classes names name_suffixes": "a unit is gathered whole, whatever is in it"}
    ),
    **_below("zero_optimization.offload_optimizer", {"buffer_count fast_init pipeline_read pipeline_write": _NVME}),
    **_below("zero_optimization.offload_optimizer", {"super_offload cpuadam_cores_perc": _OWN_UPDATE}),
    **_below("zero_optimization.offload_param", {"buffer_count buffer_size": _NVME, "max_in_cpu": _IN_FILES}),
    **_below(
        "aio", {"block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds": _NVME}
    ),
    **_below(
        "pipeline",
        {
            "stages": "the model that you pass says its stages",
            "partition": "the model that you pass says how its layers are cut",
            "seed_layers": "the model that you pass says how it is initialised",
            "use_reentrant": "what is recomputed never runs a backward within a backward",
            "pipe_partitioned": "stages send activations as they are",
            "grad_partitioned": "stages send gradients as they are",
        },
    ),
    "csv_monitor.enabled": "no CSV files are written; tensorboard writes the same values",
    **dict.fromkeys(
        ("wandb.enabled", "comet.enabled"), "nothing is sent elsewhere; tensorboard writes the same values"
    ),
    "comms_logger.enabled": "collectives are not printed one by one",
    "checkpoint.tag_validation": "pass the same tag on every rank",
    "checkpoint.load_universal": "checkpoints hold whole tensors, so each loads on any shape",
    "checkpoint.parallel_write.pipeline_stage": "the ranks always share the writing",
    "checkpoint.checkpoint_serialization": "files are safetensors",
    "checkpoint.writer": "files are safetensors, written as they are",
    "comms_config": "DeepSpeed reads comms_logger alone",
    "monitor_config": "DeepSpeed reads tensorboard, csv_monitor, wandb and comet at the top of the file",
    "graph_harvesting": "no graph is captured; DeepSpeed 0.19 removed it too",
    "datastates_ckpt": "checkpoints have one writer",
}

REFUSED = {
    "managed_gradient_accumulation": Refusal("micro-batches are counted by the engine", (True,)),
    "gradient_allreduce_op": Refusal("gradients are averaged over dp", ("mean",)),
    "sequence_parallel_size": Refusal("no samples are split over ranks (Ulysses)", (1,)),
    "fp16.fp16_master_weights_and_grads": Refusal("master weights are fp32"),
    "bf16.bf16_master_weights_and_grads": Refusal("master weights are fp32"),
    "bf16.bf16_optimizer_states": Refusal("optimizer state is fp32"),
    "torch_autocast.enabled": Refusal("weights and activations have one format; write bf16 or fp16"),
    "data_types.param_dtype": Refusal("fp16 and bf16 say the format of the weights", ()),
    "data_types.buffer_dtype": Refusal("buffers keep theirs; cast in forward, as self.table.to(x.dtype)", ()),
    "data_types.keep_in_fp32_modules": Refusal("a model has one format throughout", ("auto",)),
    "zero_optimization.ignore_unused_parameters": Refusal("nothing checks this; no gradient counts as zero", (True,)),
    "zero_optimization.zero_quantized_nontrainable_weights": Refusal("weights are kept in their own format"),
    "zero_optimization.zenflow": Refusal("every gradient takes part in every update", ()),
    "tensor_parallel.autotp_size": Refusal(_TP, (0, 1)),
    "tensor_parallel.tp_size": Refusal(_TP, (1,)),
    "tensor_parallel.tp.tp_size": Refusal(_TP, (1,)),
    "tensor_parallel.tensor_parallel.tp_size": Refusal(_TP, (1,)),
    "pipeline.activation_checkpoint_interval": Refusal("give it to the PipelineModule that you pass", (0,)),
    "expert_parallel.enabled": Refusal(_EXPERTS),
    "compile.deepcompile": Refusal("no graph is compiled; torch.compile your modules before you pass them"),
    "compile.passes": Refusal("no graph is compiled", ([],)),
    "compile.autoep_non_moe": Refusal(_EXPERTS),
    "hybrid_engine.enabled": Refusal("the engine trains; it does not generate"),
    "data_efficiency.enabled": Refusal("samples are drawn evenly and every layer sees every token"),
    "autotuning.enabled": Refusal("a run has the settings that it is given"),
    "checkpoint.use_node_local_storage": Refusal("a checkpoint is one directory that all ranks share"),
    "msamp": Refusal("weights and activations have one format; write bf16 or fp16", ()),
    "weight_quantization": Refusal("weights are not quantized", ()),
    **{name: Refusal(f"{why}; DeepSpeed 0.19 removed it too", ()) for name, why in _REMOVED.items()},
}

UNCHECKED = (
    *("torch_autocast", "tensor_parallel", "expert_parallel", "compile", "hybrid_engine"),
    *("data_efficiency", "autotuning", "csv_monitor", "wandb", "comet", "comms_logger", "flops_profiler"),
)
