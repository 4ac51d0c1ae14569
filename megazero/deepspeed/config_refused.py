"""The keys of a DeepSpeed configuration that set nothing here: without effect, or refused.

NO_EFFECT    it tunes what is done another way here; a note lists those that are written
REFUSED      ignoring it would change the numbers or break a promise; any value but a harmless one is an error
UNCHECKED    the other keys of these blocks say how to do what is refused or has no effect, so nobody reads them

docs/deepspeed_config.md has the reason of each.
"""

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
    **dict.fromkeys(("csv_monitor", "wandb", "comet", "comms_logger"), "enabled"),
    "checkpoint": "tag_validation load_universal checkpoint_serialization writer",
    "checkpoint.parallel_write": "pipeline_stage",
}
NO_EFFECT = [f"{block}.{name}".lstrip(".") for block, names in _BLOCKS.items() for name in names.split()]

# Refused with any value but these.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "managed_gradient_accumulation": (True,),
    "gradient_allreduce_op": ("mean",),
    "sequence_parallel_size": (1,),
    "data_types.keep_in_fp32_modules": ("auto",),
    "zero_optimization.ignore_unused_parameters": (True,),
    "tensor_parallel.autotp_size": (0, 1),
    **dict.fromkeys((f"tensor_parallel.{block}tp_size" for block in ("", "tp.", "tensor_parallel.")), (1,)),
    "pipeline.activation_checkpoint_interval": (0,),
    "compile.passes": ([],),
}
_REFUSED_UNLESS_FALSE = """fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads
    bf16.bf16_optimizer_states torch_autocast.enabled zero_optimization.zero_quantized_nontrainable_weights
    expert_parallel.enabled compile.deepcompile compile.autoep_non_moe hybrid_engine.enabled data_efficiency.enabled
    autotuning.enabled checkpoint.use_node_local_storage"""
_REFUSED = """data_types.param_dtype data_types.buffer_dtype zero_optimization.zenflow msamp weight_quantization amp
    compression_training quantize_training eigenvalue sparse_attention progressive_layer_drop curriculum_learning
    elasticity nebula zero_optimization.zeropp_loco_param"""
REFUSED = _HARMLESS | dict.fromkeys(_REFUSED_UNLESS_FALSE.split(), (False,)) | dict.fromkeys(_REFUSED.split(), ())
"""By key, the values that ask for nothing; null, {} and {"enabled": false} never do."""

UNCHECKED = (
    *("torch_autocast", "tensor_parallel", "expert_parallel", "compile", "hybrid_engine"),
    *("data_efficiency", "autotuning", "csv_monitor", "wandb", "comet", "comms_logger", "flops_profiler"),
)
