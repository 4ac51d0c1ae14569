"""The optimizers that `optimizer.name` and the shapes that `lr_schedule.name` may name; a script may register its own.

OPTIMIZERS.register("signsgd", ElementwiseOptimizer(SignSGD, elementwise=True))
LR_SCHEDULES.register("inverse-sqrt", lambda step, steps, section: (step + 1) ** -0.5)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from megazero.registry import Registry

if TYPE_CHECKING:
    from megazero.optim.config import LrScheduleConfig
    from megazero.optim.optimizers import ElementwiseOptimizer

    LrShape: TypeAlias = Callable[[int, int, LrScheduleConfig], float]

# The keys of [optimizer] that each of the package's optimizers reads, besides lr and weight_decay.
BUILT_IN_KEYS = {
    "adamw": ("betas", "eps"),
    "adam": ("betas", "eps"),
    "sgd": ("momentum",),
    "lion": ("betas",),
    "adagrad": ("eps",),
}
OPTIMIZERS: Registry[ElementwiseOptimizer] = Registry(
    "optimizer", {name: f"megazero.optim.optimizers:{name.upper()}" for name in BUILT_IN_KEYS}
)

_WATCHED_STEPS = 64

LR_SCHEDULES: Registry[LrShape] = Registry(
    "learning-rate schedule",
    {name: f"megazero.optim.lr_schedule:{name}" for name in ("constant", "linear", "cosine", "wsd")},
)
"""(step from 0, steps of the run, section) -> factor on the peak rate; the warm-up is applied to every one of them."""


def optimizers_reading(key: str) -> tuple[str, ...]:
    """Give the optimizers that read a key of [optimizer]; torch is not imported for those of the package."""
    read = {name: BUILT_IN_KEYS.get(name) or OPTIMIZERS[name].keys for name in OPTIMIZERS}
    return tuple(name for name, keys in read.items() if key in keys)


def lr_schedules_reading(key: str, section: LrScheduleConfig) -> tuple[str, ...]:
    """Give the learning-rate schedules that read a key of [lr_schedule], found by watching each over a short run."""
    return tuple(name for name in LR_SCHEDULES if key in _keys_read(LR_SCHEDULES[name], section))


def _keys_read(shape: LrShape, section: LrScheduleConfig) -> set[str]:
    every, read = set(type(section).model_fields), set[str]()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            read.update({name} if name in every else every)
            return getattr(section, name)

    try:
        for step in range(_WATCHED_STEPS):
            shape(step, _WATCHED_STEPS, Watched())  # type: ignore[arg-type]
    except Exception:  # it fails in the run, too, and says there why
        return every
    return read
