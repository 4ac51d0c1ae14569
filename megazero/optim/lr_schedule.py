"""Learning rate as a pure function of the step.

    constant   ____________      linear   \\           cosine  ‾\\_         wsd   ‾‾‾‾‾‾\\
              /                          / \\                 /   \\_           /       \\
"""

from collections.abc import Callable
from math import cos, isfinite, pi, sqrt

from megazero.optim.config import LrScheduleConfig
from megazero.optim.registry import LR_SCHEDULES

#: Completed fraction of wsd's fall, by completed fraction of its decay.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - cos(pi * done)),
    "exponential": lambda done: 2.0 - 2.0 * 0.5**done,
    "1-sqrt": sqrt,
}


def learning_rate_factor(schedule: LrScheduleConfig, step: int, steps: int) -> float:
    """Return the factor on the peak learning rate.

    During warm-up the factor grows linearly to 1 at step warmup_steps - 1.  If warm-up and decay overlap, the smaller
    factor applies.  If the decay ends before the run, the factor then stays at the floor.

    Args:
        step: 0 is the first, steps - 1 the last, which has the smallest factor.

    Raises: ValueError, a script's schedule returned something other than a finite factor from 0 on.

    Source: Loshchilov and Hutter 2017 (cosine), Hu et al. 2024 (wsd: warm-up, stable, decay), Hägele et al. 2024
    (1-sqrt); Megatron-LM, optimizer_param_scheduler.py (the four decays).
    """
    return learning_rates(schedule, 1.0, steps)(step)


def learning_rates(schedule: LrScheduleConfig, peak: float, steps: int, first: int = 0) -> Callable[[int], float]:
    """Return the learning rate as a function of the step: `peak` times the `learning_rate_factor`.

    Args:
        steps: steps of the schedule.
        first: the step at which it begins.
    """
    factor_of, steps = LR_SCHEDULES[schedule.name], schedule.end_step or steps

    def learning_rate(step: int) -> float:
        step -= first
        warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
        step = min(step, steps - 1)
        factor: object = factor_of(step, steps, schedule)
        if not (isinstance(factor, int | float) and isfinite(factor) and factor >= 0.0):
            raise ValueError(
                f"lr_schedule {schedule.name!r} must return a finite factor from 0 on, and has returned {factor!r} for step "
                f"{step} (the first is 0) of {steps}"
            )
        return peak * min(warmup, factor)

    return learning_rate


def constant(step: int, steps: int, schedule: LrScheduleConfig) -> float:
    """Constant at the peak."""
    return 1.0


def linear(step: int, steps: int, schedule: LrScheduleConfig) -> float:
    """Linear decay to the floor."""
    return 1.0 - (1.0 - schedule.min_lr_ratio) * _done(step, steps, schedule)


def cosine(step: int, steps: int, schedule: LrScheduleConfig) -> float:
    """Cosine decay to the floor."""
    floor = schedule.min_lr_ratio
    return floor + (1.0 - floor) * 0.5 * (1.0 + cos(pi * _done(step, steps, schedule)))


def wsd(step: int, steps: int, schedule: LrScheduleConfig) -> float:
    """Constant, then decay to the floor over the last fraction of the steps, with a shape of `DECAYS`."""
    start = (steps - 1) * (1.0 - schedule.decay_fraction)
    falling = max(0.0, step - start) / max(1e-9, steps - 1 - start)
    return 1.0 - (1.0 - schedule.min_lr_ratio) * DECAYS[schedule.decay_shape](min(1.0, falling))


def _done(step: int, steps: int, schedule: LrScheduleConfig) -> float:
    """Return the completed fraction of the steps after the warm-up."""
    last = max(1, steps - 1 - schedule.warmup_steps)
    return min(1.0, max(0.0, (step - schedule.warmup_steps) / last))
