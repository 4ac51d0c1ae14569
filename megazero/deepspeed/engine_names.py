"""What an engine says to DeepSpeed's names that are no methods of its own: a setting, "no", or an error with a reason.

A name that is in none of the tables is looked for in the module, as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
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

REFUSED = {
    "compile the module with torch.compile before initialize": (
        "compile_* get_auto*_backend get_*compile_* is_compiled register_compile_pass uses_parallelization_pass_only"
    ),
    "it is set in the configuration, and has no method; engine.config has what was read": (
        "aio_config autotp_size checkpoint_*_enabled checkpoint_tag_* collect_python_gc cpuadam_cores_perc "
        "data_efficiency_config dynamic_loss_scale_args get_optimizer_configuration get_type gradient_predivide_factor "
        "initial_dynamic_scale is_sanity_checks_enabled log_level managed_gradient_accumulation memory_breakdown "
        "optimizer_legacy_fusion postscale_gradients swap_tensor_config tensor_parallel_config torch_autocast_* "
        "zenflow_config"
    ),
    "there is no autotuner; engine.memory_bytes() says what each kind of state takes": "autotuning_*",
    "it has no curriculum and drops no tokens; order the data set yourself": (
        "curriculum_learning_* data_sampling_* random_ltd_* set_custom_curriculum_* set_data_post_process_func"
    ),
    "engine.backward reduces gradients as they come; engine.no_sync() holds them back": (
        "all_gather_scalar allreduce_* buffered_allreduce_fallback clip_fp32_gradients coalesce_grad_reduction sparse_all*"
    ),
    "it has no mixture-of-experts layers": "load_moe_state_dict",
    "set the tensorboard block of the configuration, or write what engine.get_lr() and the loss say yourself": (
        "monitor summary_writer"
    ),
    "it measures no curvature; compute eigenvalues with torch.func in the script": "block_eigenvalue eigenvalue",
    "state is offloaded for the whole run by the configuration (zero_optimization.offload_optimizer)": (
        "offload_states reload_states"
    ),
    "count operations with torch.utils.flop_counter.FlopCounterMode, time with torch.profiler": (
        "flops_profiler_* get_wall_clock_timers print_forward_breakdown"
    ),
    "sequences are cut over tp; engine.parallel_state.tp is the axis": "get_sequence_parallel_group",
    "make a torch DataLoader with a DistributedSampler, or give training_data to initialize": (
        "is_iterable_style_dataset is_map_style_dataset deepspeed_io"
    ),
    "change whole weights under `with zero.GatheredParameters(parameters, modifier_rank=0)`": "load_module_state_dict",
    "it says how DeepSpeed cuts and sends state, which is decided otherwise here (docs/deepspeed_config.md)": (
        "is_first_weights_partition_group zero_*"
    ),
    "give train_batch an iterator of (inputs, labels), and return one loss from loss_fn": (
        "get_additional_losses log_for_device set_batch_fn set_dataiterator set_dataloader set_has_attention_mask tput_log"
    ),
    "engine.parallel_state.pp is the axis of the stages": "DTYPE_TO_ID ID_TO_DTYPE get_pipeline_parallel_rank",
}
"""What to do instead -> names that end in an error, as patterns."""


def answer(name: str, config: Any) -> Callable[[], Any] | None:
    """Return what stands for a method of DeepSpeed's engine; None if no table has it.  Raises: AttributeError."""
    if name in SETTINGS:
        return partial(attrgetter(SETTINGS[name]), config)
    if name in NEVER:
        return bool
    for reason, patterns in REFUSED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            raise AttributeError(f"megazero does not support engine.{name}: {reason}")
    return None
