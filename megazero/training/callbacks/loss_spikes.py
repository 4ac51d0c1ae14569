"""Reports a loss far above those before it, with the samples that were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, sqrt

from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.skip_steps import setting_to_skip
from megazero.training.record import StepRecord

_WARM_UP_STEPS = 20  # losses to see before the first judgement
_MEMORY_STEPS = 50  # a loss this many steps back has weight 1/e


class LossSpikes(Callback):
    """Exponentially weighted mean and deviation of the loss, and a report of every loss far above them.

    A spike enters the mean only up to the threshold. So one spike does not hide the next, while a loss that stays high
    becomes the new normal.

    Args:
        sigmas: deviations above the mean that make a spike; 0 finds none.
        skip_steps: (first, last) ranges of steps that the run skips already.
        say: takes the report.

    Source: Finch 2009, Incremental calculation of weighted mean and variance, section 9.
    """

    def __init__(self, sigmas: float, skip_steps: Sequence[tuple[int, int]], say: Callable[[str], None]) -> None:
        self._sigmas, self._skip_steps, self._say = sigmas, skip_steps, say
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def after_step(self, record: StepRecord) -> None:
        """Report a spike on the terminal and as the metric `loss_spike`: its number of deviations."""
        if record.loss is None or not self._sigmas or not isfinite(record.loss):
            return
        mean, sigmas = self._mean, self._take(record.loss)
        if sigmas is not None:
            record.metrics["loss_spike"] = sigmas
            self._say(
                f"step {record.step}: loss {record.loss:.4f} is {sigmas:.1f} deviations above its recent mean {mean:.4f}; "
                f"to train without {record.samples}, resume from an earlier step with "
                f"{setting_to_skip(record.step, self._skip_steps)}"
            )

    def _take(self, loss: float) -> float | None:
        """Take the next loss; the number of deviations by which it lies above the mean, if it is a spike."""
        spike = None
        if self._seen >= _WARM_UP_STEPS:
            # Rounding must not make a spike of a loss that hardly moves.
            deviation = max(sqrt(self._variance), 1e-3 * abs(self._mean), 1e-12)
            sigmas = (loss - self._mean) / deviation
            if sigmas > self._sigmas:
                spike, loss = sigmas, self._mean + self._sigmas * deviation
        self._seen += 1
        weight = max(1 / _MEMORY_STEPS, 1 / self._seen)  # a plain mean until the memory is full
        change = loss - self._mean
        self._mean += weight * change
        self._variance = (1 - weight) * (self._variance + weight * change * change)
        return spike
