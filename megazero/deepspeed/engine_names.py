"""What an engine answers to DeepSpeed's names that are no methods of its own: a setting, or no.

Any other name is the module's, as in DeepSpeed.  docs/deepspeed.md says what to do instead of those that neither has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megazero.zero.bucket import DTYPES

if TYPE_CHECKING:
    from megazero.deepspeed.training_engine import TrainingEngine

# name=attribute of the engine's configuration
_OF_CONFIG = """communication_data_type=precision.reduce_dtype dataloader_drop_last=json.dataloader_drop_last
    dump_state=json.dump_state fp16_auto_cast=casts_inputs gradient_accumulation_steps=accumulation
    gradient_clipping=json.gradient_clipping optimizer_params=json.optimizer.params scheduler_name=json.scheduler.type
    scheduler_params=json.scheduler.params steps_per_print=json.steps_per_print train_batch_size=train_batch_size
    train_micro_batch_size_per_gpu=micro_batch_size wall_clock_breakdown=wall_clock_breakdown
    zero_allow_untested_optimizer=json.zero_allow_untested_optimizer zero_optimization_stage=zero.stage
    zero_offload_optimizer=json.zero_optimization.offload_optimizer.if_on
    zero_offload_param=json.zero_optimization.offload_param.if_on
    zero_param_persistence_threshold=json.zero_optimization.stage3_param_persistence_threshold
    zero_quantized_gradients=json.zero_optimization.zero_quantized_gradients
    zero_quantized_weights=json.zero_optimization.zero_quantized_weights
    zero_reduce_bucket_size=json.zero_optimization.reduce_bucket_size"""

SETTINGS: dict[str, Callable[[TrainingEngine], Any]] = {
    **{name: attrgetter(f"config.{path}") for name, _, path in (pair.partition("=") for pair in _OF_CONFIG.split())},
    "bfloat16_enabled": lambda engine: engine.config.precision.dtype == "bf16",
    "dynamic_loss_scale": lambda engine: bool(engine.sharded_model.scaler) and not engine.config.json.fp16.loss_scale,
    "fp16_enabled": lambda engine: engine.config.precision.dtype == "fp16",
    "get_batch_info": attrgetter("config.train_batch_size", "config.micro_batch_size", "config.accumulation"),
    "get_data_parallel_rank": attrgetter("parallel_state.dp.index"),
    "get_data_types": lambda engine: (
        DTYPES[engine.config.precision.dtype],
        DTYPES[engine.config.precision.accumulate_dtype],
    ),
    **dict.fromkeys(("get_model_parallel_rank", "get_tensor_parallel_rank"), attrgetter("parallel_state.tp.index")),
    "optimizer_name": lambda engine: engine.config.json.optimizer.type or type(engine.optimizer.inner).__name__,
    "zero_cpu_offload": lambda engine: engine.config.zero.offload.optimizer == "cpu",
    "zero_gather_16bit_weights_on_model_save": lambda _: True,
    "zero_optimization": lambda engine: engine.config.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.config.zero.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.config.zero.stage >= 3,
}
"""Methods without arguments that return what the configuration says, or where this rank is."""

_NEVER = """autotuning_enabled bf16_master_weights_and_gradients bf16_optimizer_states curriculum_learning_enabled
    data_efficiency_enabled data_sampling_enabled fp16_master_weights_and_gradients is_deepcompile_active
    is_deepcompile_enabled load_universal_checkpoint random_ltd_enabled super_offload torch_autocast_enabled
    use_node_local_storage zero_legacy_stage1 zero_quantized_nontrainable_weights"""
NEVER = frozenset(_NEVER.split())
"""Methods that ask whether something is on that does not exist here: False."""


def answer(engine: TrainingEngine, name: str) -> Any:
    """Return what stands for an attribute of DeepSpeed's engine, or the module's of that name.  Raises: AttributeError."""
    if name in SETTINGS:
        return partial(SETTINGS[name], engine)
    if name in NEVER:
        return bool
    try:
        return getattr(engine.module, name)
    except AttributeError as error:
        owners = f"neither megazero's engine nor its {type(engine.module).__name__}"
        raise AttributeError(f"{owners} has {name!r}; docs/deepspeed.md says what to do instead") from error
