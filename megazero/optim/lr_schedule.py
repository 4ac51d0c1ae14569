"""Learning rate as a pure function of the step.

    constant   ____________      linear   \\           cosine  ‾\\_         wsd   ‾‾‾‾‾‾\\
              /                          / \\                 /   \\_           /       \\
"""

from __future__ import annotations

from math import cos, pi

from megazero.optim.config import LrScheduleConfig


def learning_rate_factor(schedule: LrScheduleConfig, step: int, steps: int) -> float:
    """Factor on the peak learning rate.

    Args:
        schedule: the configuration's section.
        step: 0 for the first step.
        steps: steps of the whole run; the last one has the smallest factor.

    During warm-up the factor grows linearly to 1 at step warmup_steps - 1; where warm-up and decay overlap the smaller
    counts.  Source: Loshchilov and Hutter 2017 (cosine), Hu et al. 2024 (wsd: warm-up, stable, decay).
    """
    warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    floor = schedule.min_lr_ratio
    last = max(1, steps - 1 - schedule.warmup_steps)
    done = min(1.0, max(0.0, (step - schedule.warmup_steps) / last))
    if schedule.name == "constant":
        decay = 1.0
    elif schedule.name == "linear":
        decay = 1.0 - (1.0 - floor) * done
    elif schedule.name == "cosine":
        decay = floor + (1.0 - floor) * 0.5 * (1.0 + cos(pi * done))
    else:
        start = (steps - 1) * (1.0 - schedule.decay_fraction)
        falling = max(0.0, step - start) / max(1e-9, steps - 1 - start)
        decay = 1.0 - (1.0 - floor) * min(1.0, falling)
    return min(warmup, decay)
