"""What an engine answers to DeepSpeed's names that are no methods of its own: a setting, or no.

Any other name is the module's, as in DeepSpeed.  docs/deepspeed.md says what to do instead of those that neither has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megazero.deepspeed.names import NAMES
from megazero.zero.bucket import DTYPES

if TYPE_CHECKING:
    from megazero.deepspeed.training_engine import TrainingEngine

_TABLE = NAMES["engine"]
SETTINGS: dict[str, Callable[[TrainingEngine], Any]] = {
    **{name: attrgetter(path) for name, path in _TABLE["settings"].items()},
    "bfloat16_enabled": lambda engine: engine.config.precision.dtype == "bf16",
    "dynamic_loss_scale": lambda engine: bool(engine.sharded_model.scaler) and not engine.config.json.fp16.loss_scale,
    "fp16_enabled": lambda engine: engine.config.precision.dtype == "fp16",
    "get_batch_info": attrgetter("config.train_batch_size", "config.micro_batch_size", "config.accumulation"),
    "get_data_types": lambda engine: (
        DTYPES[engine.config.precision.dtype],
        DTYPES[engine.config.precision.accumulate_dtype],
    ),
    "optimizer_name": lambda engine: engine.config.json.optimizer.type or type(engine.optimizer.inner).__name__,
    "zero_cpu_offload": lambda engine: engine.config.zero.offload.optimizer == "cpu",
    "zero_gather_16bit_weights_on_model_save": lambda _: True,
    "zero_optimization": lambda engine: engine.config.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.config.zero.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.config.zero.stage >= 3,
}
"""Methods without arguments that return what the configuration says, or where this rank is."""

NEVER = frozenset(_TABLE["never"].split())
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
        raise AttributeError(f"neither the engine nor its module has {name!r}: see docs/deepspeed.md") from error
