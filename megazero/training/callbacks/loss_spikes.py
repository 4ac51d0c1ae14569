"""Reports a loss far above those before it, with the samples that were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.skip_steps import setting_to_skip
from megazero.training.record import SampleRange, StepRecord


@dataclass(frozen=True)
class Spike:
    """A loss far above those before it.

    Args:
        mean: weighted mean of the losses before.
        sigmas: how many of their standard deviations the loss lies above it.
    """

    mean: float
    sigmas: float

    def line(self, step: int, loss: float, samples: SampleRange, skip_steps: Sequence[tuple[int, int]] = ()) -> str:
        """The report; `skip_steps` are those that the run skips already."""
        return (
            f"step {step}: loss {loss:.4f} is {self.sigmas:.1f} deviations above its recent mean {self.mean:.4f}; "
            f"to train without {samples}, resume from an earlier step with {setting_to_skip(step, skip_steps)}"
        )


class LossSpikes(Callback):
    """Exponentially weighted mean and deviation of the loss, and a report of every loss far above them.

    A spike enters the mean only up to the threshold. So one spike does not hide the next, while a loss that stays high
    becomes the new normal.

    Args:
        sigmas: deviations above the mean that make a spike; 0 finds none.
        skip_steps: steps that the run skips already.
        say: takes the report.
        warm_up_steps: losses to see before the first judgement.
        memory_steps: a loss this many steps back has weight 1/e.

    Source: Finch 2009, Incremental calculation of weighted mean and variance, section 9.
    """

    def __init__(
        self,
        sigmas: float,
        skip_steps: Sequence[tuple[int, int]] = (),
        say: Callable[[str], None] = lambda _: None,
        *,
        warm_up_steps: int = 20,
        memory_steps: int = 50,
    ) -> None:
        self._sigmas, self._skip_steps, self._say = sigmas, skip_steps, say
        self._warm_up, self._weight = warm_up_steps, 1 / memory_steps
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def after_step(self, record: StepRecord) -> None:
        """Report a spike on the terminal and as the metric `loss_spike`: its number of deviations."""
        spike = None if record.loss is None else self.look(record.loss)
        if spike is not None and record.loss is not None:
            record.metrics["loss_spike"] = spike.sigmas
            self._say(spike.line(record.step, record.loss, record.samples, self._skip_steps))

    def look(self, loss: float) -> Spike | None:
        """Take the next loss; return the spike, if it is one."""
        if not (self._sigmas and isfinite(loss)):
            return None
        spike = None
        if self._seen >= self._warm_up:
            # Rounding must not make a spike of a loss that hardly moves.
            deviation = max(sqrt(self._variance), 1e-3 * abs(self._mean), 1e-12)
            sigmas = (loss - self._mean) / deviation
            if sigmas > self._sigmas:
                spike = Spike(self._mean, sigmas)
                loss = self._mean + self._sigmas * deviation
        self._seen += 1
        weight = max(self._weight, 1 / self._seen)  # a plain mean until the memory is full
        change = loss - self._mean
        self._mean += weight * change
        self._variance = (1 - weight) * (self._variance + weight * change * change)
        return spike
