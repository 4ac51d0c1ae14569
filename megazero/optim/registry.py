"""The optimizers that `optimizer.name` and the shapes that `lr_schedule.name` may name; a script may register its own.

OPTIMIZERS.register("signsgd", ElementwiseOptimizer(SignSGD, elementwise=True))
LR_SCHEDULES.register("inverse-sqrt", lambda step, steps, section: (step + 1) ** -0.5)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from megazero.registry import Registry

if TYPE_CHECKING:
    from megazero.optim.config import LrScheduleConfig
    from megazero.optim.optimizers import ElementwiseOptimizer

    LrShape: TypeAlias = Callable[[int, int, LrScheduleConfig], float]

OPTIMIZERS: Registry[ElementwiseOptimizer] = Registry(
    "optimizer",
    {name: f"megazero.optim.optimizers:{name.upper()}" for name in ("adamw", "adam", "sgd", "lion", "adagrad")},
)

LR_SCHEDULES: Registry[LrShape] = Registry(
    "learning-rate schedule",
    {name: f"megazero.optim.lr_schedule:{name}" for name in ("constant", "linear", "cosine", "wsd")},
)
"""(step from 0, steps of the run, section) -> factor on the peak rate; the warm-up is applied to every one of them."""
