"""The keys of a DeepSpeed configuration that set nothing here: without effect, or refused.

NO_EFFECT    it tunes what is done another way here; a note lists those that are written
REFUSED      ignoring it would change the numbers or break a promise; any value but a harmless one is an error
UNCHECKED    the other keys of these blocks say how to do what is refused or has no effect, so nobody reads them

docs/deepspeed_config.md has the reason of each.
"""

from dataclasses import dataclass

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
_TP = "build the model from megazero.layers and pass the parallel state as mpu; a model is not rewritten for you"


@dataclass(frozen=True)
class Refusal:
    """Why a key is refused.

    Args:
        harmless: values that ask for nothing, so that they are no error; null, {} and {"enabled": false} are never one.
    """

    reason: str
    harmless: tuple[object, ...] = (False,)


# The keys without effect, by the block that they are in.
_BLOCKS = {
    "optimizer": "legacy_fusion",
    "": (
        "zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor disable_allgather allgather_size "
        "sparse_gradients seq_parallel_communication_data_type use_data_before_expert_parallelism memory_breakdown "
        "disable_python_gc log_level cuda_visible_devices vocabulary_size comms_config monitor_config "
        "graph_harvesting datastates_ckpt"
    ),
    "timers.throughput": "enabled synchronized",
    "bf16": "immediate_grad_update check_grad_overflow",
    "zero_optimization": (
        "mics_hierarchical_params_gather cpu_offload_use_pin_memory allgather_partitions allgather_bucket_size "
        "overlap_comm reduce_scatter use_multi_rank_bucket_allreduce contiguous_gradients round_robin_gradients "
        "parameter_alignment compute_grad_norm sub_group_size stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save load_from_fp32_weights elastic_checkpoint "
        "pipeline_loading_checkpoint memory_efficient_linear override_module_apply log_trace_cache_warnings "
        "enable_sanity_checks legacy_stage1 save_muon_momentum_buffer_in_memory"
    ),
    "activation_checkpointing": "synchronize_checkpoint_boundary profile number_checkpoints",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_optimizer": (
        "buffer_count fast_init pipeline_read pipeline_write super_offload cpuadam_cores_perc"
    ),
    "zero_optimization.offload_param": "buffer_count buffer_size max_in_cpu",
    "aio": "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
    "pipeline": "stages partition seed_layers use_reentrant pipe_partitioned grad_partitioned",
    "csv_monitor": "enabled",
    "wandb": "enabled",
    "comet": "enabled",
    "comms_logger": "enabled",
    "checkpoint": "tag_validation load_universal checkpoint_serialization writer",
    "checkpoint.parallel_write": "pipeline_stage",
}
NO_EFFECT = [f"{block}.{name}".lstrip(".") for block, names in _BLOCKS.items() for name in names.split()]

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
