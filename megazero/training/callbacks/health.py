"""Steps that should not have trained: left out by `training.skip_steps`, not finite or without a loss, or with one far above
the others."""

from collections.abc import Sequence
from math import isfinite, sqrt

from megazero.config.schema import TrainingConfig
from megazero.engine import NonFiniteError, Position
from megazero.engine.phases import unfinished_schedule
from megazero.settings import Log
from megazero.training.callbacks.base import Callback, RunContext, SampleRange, StepDecision, StepRecord

_WARM_UP_STEPS = 20  # losses to see before the first judgement
_MEMORY_STEPS = 50  # a loss this many steps back has weight 1/e


class SkipSteps(Callback):
    """Skips the steps of `training.skip_steps`, consumes their samples, and prints a line for each range."""

    def __init__(self, context: RunContext) -> None:
        run = context.run
        self._context, self._training, self._log = context, run.config.training, context.log
        self._announced = 0  # the last step that was announced

    def on_start(self) -> None:
        """Warn if skipped steps prevent the learning rate from reaching the end of its schedule."""
        start, updates = self._context.start, self._context.engine.sharded_model.optimizer.steps_taken
        for line in unfinished_schedule(self._context.run.config, start.phase, start.step, updates):
            self._log(line)

    def before_step(self, position: Position) -> StepDecision | None:
        step = position.step + 1
        count = count_skipped(step, self._training.skip_steps)
        if not count:
            return None
        if step > self._announced:
            count = min(count, self._training.steps - position.step)
            self._announced = position.step + count
            samples = SampleRange(position.samples, self._context.run.samples_after(position.samples, count) - 1)
            which = f"step {step} is" if count == 1 else f"steps {step} to {self._announced} are"
            self._log(f"{which} skipped (training.skip_steps): {samples}")
        return StepDecision.SKIP


def count_skipped(step: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Return how many steps to skip from `step` on, including it; 0 if none of the (first, last) ranges contains it."""
    last = step - 1
    while ends := [end for first, end in ranges if first <= last + 1 <= end]:
        last = max(ends)
    return last - step + 1


def setting_to_skip(step: int, ranges: Sequence[tuple[int, int]]) -> str:
    """Return the text of a setting that skips a step in addition to the (first, last) ranges."""
    listed = [f"{first}" if first == last else f"[{first},{last}]" for first, last in ranges]
    return f"training.skip_steps=[{','.join([*listed, str(step)])}]"


class NonFinitePolicy(Callback):
    """Stops, continues or rolls back after a step whose loss or norm is not finite, by `training.on_non_finite`.

    Such a step changes no weights.  All ranks see the same loss and norm, so they decide alike without a collective.
    After `training.non_finite_limit` such steps in a row (skip) or so many rollbacks (rollback), the run ends.

    Source: rolling back and skipping the samples: PaLM, Chowdhery et al. 2022, section 5.1.
    """

    def __init__(self, training: TrainingConfig, log: Log) -> None:
        self._policy, self._limit = training.on_non_finite, training.non_finite_limit
        self._skip_steps, self._log = training.skip_steps, log
        self._in_a_row = self._rollbacks = 0

    def after_step(self, record: StepRecord) -> StepDecision | None:
        """Decide how the run continues after a step.  Raises: NonFiniteError: the run must stop."""
        statistics = record.statistics
        if statistics is None:
            return None
        if statistics.finite:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        self._rollbacks += 1
        lower, why = "with a lower learning rate" if statistics.tokens else "with other data", ""
        if self._policy == "stop":
            skips = setting_to_skip(record.step, self._skip_steps)
            why = f"Or skip these samples with {skips}, or let the run do so by training.on_non_finite=skip or rollback"
        elif self._policy == "rollback" and self._rollbacks > self._limit:
            why = f"The run has already rolled back {self._limit} times (training.non_finite_limit)"
        elif self._policy == "skip" and self._in_a_row >= self._limit:
            cause = ", so the samples are not the cause" if statistics.tokens else ""
            why = f"These are {self._in_a_row} such steps in a row (training.non_finite_limit={self._limit}){cause}"
        if why:
            found = f"step {record.step}, {record.samples}: {statistics.problem}"
            raise NonFiniteError(f"{found}Resume from the last checkpoint or an earlier one {lower}. {why}")
        if self._policy == "rollback":
            return StepDecision.ROLL_BACK
        what = "is not finite" if statistics.tokens else "has no loss"
        self._log(f"step {record.step} {what}: {record.samples} are left out, no weight has changed")
        return None


class LossSpikes(Callback):
    """Reports a loss far above the exponentially weighted mean of earlier losses, with the samples of the step.

    A spike enters the mean only up to the threshold. So a spike does not hide the next one, while a loss that stays high
    becomes the new normal.

    A spike is `sigmas` standard deviations above the mean; 0 finds none.

    Source: Finch 2009, Incremental calculation of weighted mean and variance, section 9.
    """

    def __init__(self, sigmas: float, skip_steps: Sequence[tuple[int, int]], log: Log) -> None:
        self._sigmas, self._skip_steps, self._log = sigmas, skip_steps, log
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def after_step(self, record: StepRecord) -> None:
        """Print a spike on the terminal, and set the metric `loss_spike` to its number of standard deviations."""
        if record.loss is None or not self._sigmas or not isfinite(record.loss):
            return
        mean, sigmas = self._mean, self._take(record.loss)
        if sigmas is not None:
            record.metrics["loss_spike"] = sigmas
            self._log(
                f"step {record.step}: loss {record.loss:.4f} is {sigmas:.1f} deviations above its recent mean {mean:.4f}; "
                f"to train without {record.samples}, resume from an earlier step with "
                f"{setting_to_skip(record.step, self._skip_steps)}"
            )

    def _take(self, loss: float) -> float | None:
        """Update the mean with the next loss; if the loss is a spike, return its number of deviations above the mean."""
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
