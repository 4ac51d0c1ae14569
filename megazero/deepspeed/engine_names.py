"""What an engine says to DeepSpeed's names that are no methods of its own: a setting, "no", or an error with a reason.

A name that is in none of the tables is looked for in the module, as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

SETTINGS = {
    "communication_data_type": "precision.reduce_dtype",
    "dataloader_drop_last": "json.dataloader_drop_last",
    "dump_state": "json.dump_state",
    "fp16_auto_cast": "casts_inputs",
    "optimizer_params": "json.optimizer.params",
    "scheduler_name": "json.scheduler.type",
    "scheduler_params": "json.scheduler.params",
    "steps_per_print": "json.steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allow_untested_optimizer": "json.zero_allow_untested_optimizer",
    "zero_offload_optimizer": "json.zero_optimization.offload_optimizer.if_on",
    "zero_offload_param": "json.zero_optimization.offload_param.if_on",
    "zero_param_persistence_threshold": "json.zero_optimization.stage3_param_persistence_threshold",
    "zero_quantized_gradients": "json.zero_optimization.zero_quantized_gradients",
    "zero_quantized_weights": "json.zero_optimization.zero_quantized_weights",
    "zero_reduce_bucket_size": "json.zero_optimization.reduce_bucket_size",
}
"""Methods that return a setting: name -> where it is in `engine.config`."""

_NEVER = """autotuning_enabled bf16_master_weights_and_gradients bf16_optimizer_states curriculum_learning_enabled
    data_efficiency_enabled data_sampling_enabled fp16_master_weights_and_gradients is_deepcompile_active
    is_deepcompile_enabled load_universal_checkpoint random_ltd_enabled super_offload torch_autocast_enabled
    use_node_local_storage zero_legacy_stage1 zero_quantized_nontrainable_weights"""
NEVER = frozenset(_NEVER.split())
"""Methods that ask whether something is on that does not exist here: False."""

_COMPILE = "compile the module with torch.compile before initialize"
_CONFIGURED = "it is set in the configuration, and has no method; engine.config has what was read"
_DATA = "it has no curriculum and drops no tokens; order the data set yourself"
_GRADIENTS = "engine.backward reduces gradients as they come; engine.no_sync() holds them back"
_MONITOR = "set the tensorboard block of the configuration, or write what engine.get_lr() and the loss say yourself"
_MOE = "it has no mixture-of-experts layers"
_OFFLOAD = "state is offloaded for the whole run by the configuration (zero_optimization.offload_optimizer)"
_PROFILER = "count operations with torch.utils.flop_counter.FlopCounterMode, time with torch.profiler"
_OF_ZERO = "it says how DeepSpeed cuts and sends state, which is decided otherwise here (docs/deepspeed_config.md)"

_REFUSED = {
    "compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend get_autotp_backend "
    "get_compile_time get_deepcompile_backend get_deepspeed_compile_backend is_compiled register_compile_pass "
    "uses_parallelization_pass_only": _COMPILE,
    "aio_config autotp_size checkpoint_serialization_enabled checkpoint_tag_validation_enabled "
    "checkpoint_tag_validation_fail checkpoint_writer_enabled collect_python_gc cpuadam_cores_perc data_efficiency_config "
    "dynamic_loss_scale_args get_optimizer_configuration get_type gradient_predivide_factor initial_dynamic_scale "
    "is_sanity_checks_enabled log_level managed_gradient_accumulation memory_breakdown optimizer_legacy_fusion "
    "postscale_gradients swap_tensor_config tensor_parallel_config torch_autocast_dtype "
    "torch_autocast_lower_precision_safe_modules zenflow_config": _CONFIGURED,
    "autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info_path "
    "autotuning_profile_model_info autotuning_start_profile_step": "there is no autotuner; engine.memory_bytes() says what "
    "each kind of state takes",
    "curriculum_learning_config data_sampling_config random_ltd_config random_ltd_initialize random_ltd_scheduler "
    "set_custom_curriculum_learning_schedule set_data_post_process_func": _DATA,
    "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback "
    "clip_fp32_gradients coalesce_grad_reduction sparse_all_gather sparse_allreduce sparse_allreduce_bucket "
    "sparse_allreduce_no_retain": _GRADIENTS,
    "load_moe_state_dict": _MOE,
    "monitor summary_writer": _MONITOR,
    "block_eigenvalue eigenvalue": "it measures no curvature; compute eigenvalues with torch.func in the script",
    "offload_states reload_states": _OFFLOAD,
    "flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file "
    "flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules get_wall_clock_timers "
    "print_forward_breakdown": _PROFILER,
    "get_sequence_parallel_group": "sequences are cut over tp; engine.parallel_state.tp is the axis",
    "is_iterable_style_dataset is_map_style_dataset deepspeed_io": "make a torch DataLoader with a DistributedSampler, "
    "or give training_data to initialize",
    "load_module_state_dict": "change whole weights under `with zero.GatheredParameters(parameters, modifier_rank=0)`",
    "is_first_weights_partition_group zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential "
    "zero_compute_grad_norm zero_contiguous_gradients zero_elastic_checkpoint zero_force_ds_cpu_optimizer "
    "zero_hpz_partition_size zero_ignore_unused_parameters "
    "zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance "
    "zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce "
    "zero_nvme_offload_optimizer zero_overlap_comm zero_parameter_alignment zero_partial_offload zero_prefetch_bucket_size "
    "zero_reduce_scatter zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory zero_sub_group_size "
    "zero_use_cpu_optimizer": _OF_ZERO,
    "get_additional_losses log_for_device set_batch_fn set_dataiterator set_dataloader set_has_attention_mask "
    "tput_log": "give train_batch an iterator of (inputs, labels), and return one loss from loss_fn",
    "DTYPE_TO_ID ID_TO_DTYPE get_pipeline_parallel_rank": "engine.parallel_state.pp is the axis of the stages",
}  # fmt: skip
REFUSED = {name: reason for names, reason in _REFUSED.items() for name in names.split()}
"""Names that end in an error -> why, and what to do."""


def answer(name: str, config: Any) -> Callable[[], Any] | None:
    """What stands for a method of DeepSpeed's engine; None if no table has it.  Raises: AttributeError, it is refused."""
    if name in SETTINGS:
        return partial(attrgetter(SETTINGS[name]), config)
    if name in NEVER:
        return bool
    if name in REFUSED:
        raise AttributeError(f"megazero does not support engine.{name}: {REFUSED[name]}")
    return None
