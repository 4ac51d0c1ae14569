"""The `[optimizer]` and `[lr_schedule]` sections of a run file."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from megazero.optim.registry import LR_SCHEDULES, OPTIMIZERS, lr_schedules_reading, optimizers_reading
from megazero.settings import (
    ActsWhere,
    Count,
    CountOrZero,
    Epsilon,
    Fraction,
    NameIn,
    Positive,
    PositiveOrZero,
    ProperFraction,
    Section,
    Spelling,
)


def _pairs(table: object) -> tuple[tuple[str, object], ...]:
    """Return the keys and values of a table as a hashable tuple."""
    if not isinstance(table, dict | tuple):
        raise PydanticCustomError("table", "be a table")
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in dict(table).items())


def _of_optimizers(key: str) -> ActsWhere:
    return ActsWhere("optimizer.name", lambda _: optimizers_reading(key), "it does not read this key")


def _of_lr_schedules(key: str) -> ActsWhere:
    return ActsWhere("lr_schedule.name", lambda _: lr_schedules_reading(key), "it does not read this key")


Options = Annotated[
    tuple[tuple[str, object], ...],
    BeforeValidator(_pairs, json_schema_input_type=dict[str, object]),
    PlainSerializer(dict),
    Spelling("table"),
]


class OptimizerConfig(Section):
    """The optimizer."""

    #: adamw and muon decouple weight decay; adam, sgd and adagrad add it to the gradient. muon: docs/optimizers.md.
    name: Annotated[str, NameIn(OPTIMIZERS)] = "adamw"
    #: Peak learning rate.
    lr: Positive = 3e-4
    #: Decay of the running means of the gradient and of its square.
    betas: Annotated[tuple[ProperFraction, ProperFraction], Field(strict=False), _of_optimizers("betas")] = (0.9, 0.95)
    #: Fraction of the last update that is added to the next.
    momentum: Annotated[ProperFraction, _of_optimizers("momentum")] = 0.0
    #: Decay of the running mean of a matrix's gradient, which muon makes orthogonal.
    matrix_momentum: Annotated[ProperFraction, _of_optimizers("matrix_momentum")] = 0.95
    #: Largest attention score beyond which muon shrinks a head's q and k (QK-clip; Kimi K2: 100). See docs/recipes.md.
    qk_clip: Annotated[Positive | None, _of_optimizers("qk_clip")] = None
    #: Peak learning rate of what muon leaves to AdamW: embeddings, head, norms and biases; None for `lr`.
    adamw_lr: Annotated[Positive | None, _of_optimizers("adamw_lr")] = None
    #: Added to the denominator of the update.
    eps: Annotated[Epsilon, _of_optimizers("eps")] = 1e-8
    #: Weight decay; on matrices only, not on norms and biases.
    weight_decay: PositiveOrZero = 0.1
    #: Largest global gradient norm; 0 turns clipping off.
    grad_clip: PositiveOrZero = 1.0
    #: Further keyword arguments of an optimizer that a script has registered.
    options: Options = ()


class LrScheduleConfig(Section):
    """Learning rate over as many updates as `training.steps`; a step without an update does not advance it."""

    #: Shape after the warm-up; wsd (warm-up, stable, decay) stays at the peak and decays at the end.
    name: Annotated[str, NameIn(LR_SCHEDULES)] = "cosine"
    #: Steps of linear rise to the peak.
    warmup_steps: CountOrZero = 0
    #: Learning rate of the last update, as a fraction of the peak; steps without an update keep it from there.
    min_lr_ratio: Annotated[Fraction, _of_lr_schedules("min_lr_ratio")] = 0.1
    #: Last fraction of the updates, in which the rate decays.
    decay_fraction: Annotated[Fraction, _of_lr_schedules("decay_fraction")] = 0.2
    #: Form of that decay; exponential is 2 * 0.5^x - 1 (Megatron-LM), 1-sqrt is 1 - sqrt(x) (Hägele et al. 2024).
    decay_shape: Annotated[Literal["linear", "cosine", "exponential", "1-sqrt"], _of_lr_schedules("decay_shape")] = (
        "linear"
    )
    #: Update at which the decay ends, as if the run did; min_lr_ratio from there. Unset: with training.steps.
    end_step: Annotated[Count | None, _of_lr_schedules("end_step")] = None
