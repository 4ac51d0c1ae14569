"""What an engine says to DeepSpeed's names that are no methods of its own: a setting, "no", or an error with a reason.

A name that is in none of the tables is looked for in the module, as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from megazero.zero.bucket import DTYPES

if TYPE_CHECKING:
    from megazero.deepspeed.training_engine import TrainingEngine

SETTINGS: dict[str, Callable[[TrainingEngine], Any]] = {
    "bfloat16_enabled": lambda engine: engine.config.precision.dtype == "bf16",
    "communication_data_type": lambda engine: engine.config.precision.reduce_dtype,
    "dataloader_drop_last": lambda engine: engine.config.json.dataloader_drop_last,
    "dump_state": lambda engine: engine.config.json.dump_state,
    "dynamic_loss_scale": lambda engine: (
        engine.sharded_model.scaler is not None and not engine.config.json.fp16.loss_scale
    ),
    "fp16_auto_cast": lambda engine: engine.config.casts_inputs,
    "fp16_enabled": lambda engine: engine.config.precision.dtype == "fp16",
    "get_batch_info": lambda engine: (
        engine.config.train_batch_size,
        engine.config.micro_batch_size,
        engine.config.accumulation,
    ),
    "get_data_parallel_rank": lambda engine: engine.parallel_state.dp.index,
    "get_data_types": lambda engine: (
        DTYPES[engine.config.precision.dtype],
        DTYPES[engine.config.precision.accumulate_dtype],
    ),
    "get_model_parallel_rank": lambda engine: engine.parallel_state.tp.index,
    "get_tensor_parallel_rank": lambda engine: engine.parallel_state.tp.index,
    "gradient_accumulation_steps": lambda engine: engine.config.accumulation,
    "gradient_clipping": lambda engine: engine.config.json.gradient_clipping,
    "optimizer_name": lambda engine: engine.config.json.optimizer.type or type(engine.optimizer.inner).__name__,
    "optimizer_params": lambda engine: engine.config.json.optimizer.params,
    "scheduler_name": lambda engine: engine.config.json.scheduler.type,
    "scheduler_params": lambda engine: engine.config.json.scheduler.params,
    "steps_per_print": lambda engine: engine.config.json.steps_per_print,
    "train_batch_size": lambda engine: engine.config.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda engine: engine.config.micro_batch_size,
    "wall_clock_breakdown": lambda engine: engine.config.wall_clock_breakdown,
    "zero_allow_untested_optimizer": lambda engine: engine.config.json.zero_allow_untested_optimizer,
    "zero_cpu_offload": lambda engine: engine.config.zero.offload.optimizer == "cpu",
    "zero_gather_16bit_weights_on_model_save": lambda _: True,
    "zero_offload_optimizer": lambda engine: engine.config.json.zero_optimization.offload_optimizer.if_on,
    "zero_offload_param": lambda engine: engine.config.json.zero_optimization.offload_param.if_on,
    "zero_optimization": lambda engine: engine.config.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.config.zero.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.config.zero.stage >= 3,
    "zero_optimization_stage": lambda engine: engine.config.zero.stage,
    "zero_param_persistence_threshold": lambda engine: (
        engine.config.json.zero_optimization.stage3_param_persistence_threshold
    ),
    "zero_quantized_gradients": lambda engine: engine.config.json.zero_optimization.zero_quantized_gradients,
    "zero_quantized_weights": lambda engine: engine.config.json.zero_optimization.zero_quantized_weights,
    "zero_reduce_bucket_size": lambda engine: engine.config.json.zero_optimization.reduce_bucket_size,
}
"""Methods without arguments that return what the configuration says, or where this rank is."""

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


def answer(engine: TrainingEngine, name: str) -> Any:
    """Return what stands for an attribute of DeepSpeed's engine, or the module's of that name.  Raises: AttributeError."""
    if name in SETTINGS:
        return partial(SETTINGS[name], engine)
    if name in NEVER:
        return bool
    for reason, patterns in REFUSED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            raise AttributeError(f"megazero does not support engine.{name}: {reason}")
    return getattr(engine.module, name)
