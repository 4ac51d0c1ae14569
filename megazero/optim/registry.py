"""The optimizers that `optimizer.name` and the shapes that `lr_schedule.name` may name.  A script may register its own.

OPTIMIZERS.register("signsgd", ElementwiseOptimizer(SignSGD, elementwise=True))
LR_SCHEDULES.register("inverse-sqrt", lambda step, steps, section: (step + 1) ** -0.5)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from megazero.registry import Registry

if TYPE_CHECKING:
    from megazero.optim.config import LrScheduleConfig
    from megazero.optim.optimizers import ElementwiseOptimizer, MatrixOptimizer

    LrShape: TypeAlias = Callable[[int, int, LrScheduleConfig], float]

# The keys of [optimizer] that each of the package's optimizers reads, besides lr and weight_decay.
BUILT_IN_KEYS = {
    "adamw": ("betas", "eps"),
    "adam": ("betas", "eps"),
    "sgd": ("momentum",),
    "lion": ("betas",),
    "adagrad": ("eps",),
    "muon": ("betas", "eps", "matrix_momentum", "adamw_lr", "qk_clip"),
}
OPTIMIZERS: Registry[ElementwiseOptimizer | MatrixOptimizer] = Registry(
    "optimizer",
    {name: f"megazero.optim.{'muon' if name == 'muon' else 'optimizers'}:{name.upper()}" for name in BUILT_IN_KEYS},
    "megazero.optim.optimizers:RegisteredOptimizer",
)

# The keys of [lr_schedule] that each of the package's shapes reads, besides warmup_steps.
LR_SCHEDULE_KEYS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("min_lr_ratio", "end_step"),
    "cosine": ("min_lr_ratio", "end_step"),
    "wsd": ("min_lr_ratio", "end_step", "decay_fraction", "decay_shape"),
}
#: Called as (step from 0, steps of the run, section) -> factor on the peak rate; the warm-up is applied to all of them.
LR_SCHEDULES: Registry[LrShape] = Registry(
    "learning-rate schedule", {name: f"megazero.optim.lr_schedule:{name}" for name in LR_SCHEDULE_KEYS}
)


def optimizers_reading(key: str) -> tuple[str, ...]:
    """Return the optimizers that read a key of [optimizer].  For those of the package this does not import torch."""
    read = {name: BUILT_IN_KEYS.get(name) or OPTIMIZERS[name].keys for name in OPTIMIZERS}
    return tuple(name for name, keys in read.items() if key in keys)


def lr_schedules_reading(key: str) -> tuple[str, ...]:
    """Return the learning-rate schedules that read a key of [lr_schedule].  A script's own may read all of them."""
    return tuple(name for name in LR_SCHEDULES if key in LR_SCHEDULE_KEYS.get(name, (key,)))
