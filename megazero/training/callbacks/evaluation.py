"""Evaluates the model on validation samples, and averages its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megazero.config import ResolvedRun
from megazero.config.schema import RunConfig
from megazero.data.corpus import ValidationStream
from megazero.engine import Engine, StepStatistics
from megazero.training.batches import read_batches
from megazero.training.callbacks.base import Callback, RunContext, StepDecision, StepRecord
from megazero.training.heartbeat import BETWEEN, EVALUATING
from megazero.training.watchdog import Watchdog

if TYPE_CHECKING:
    from megazero.zero.average import WeightAverage


@dataclass(frozen=True)
class Validation:
    """A source to evaluate the model on."""

    name: str  # "" for what is held out of the training sources
    stream: ValidationStream
    every_steps: int
    samples: int

    def is_due(self, step: int, last: int) -> bool:
        """Whether the source is due after `step`, in a run of `last` steps.  Every source is due after the last step."""
        return step % self.every_steps == 0 or step == last

    def evaluate(self, run: ResolvedRun, engine: Engine) -> StepStatistics:
        """Return the mean loss on the source's samples; see `Engine.evaluate`.  Every rank calls this."""
        return engine.evaluate(read_batches(self.stream, 0, self.samples, run.micro_batch_size, engine.batch_slice))


def validations_of(
    config: RunConfig, held_out: ValidationStream | None, named: Mapping[str, ValidationStream]
) -> list[Validation]:
    """Return the sources that a run evaluates on: samples held out of its training data, then `data.validation_sources`.

    Args:
        held_out: the held-out samples; None if there are none.
        named: the samples of each validation source, by name.
    """
    every, samples = config.training.eval_every_steps, config.training.eval_samples
    found = [Validation("", held_out, every, min(samples, len(held_out)))] if held_out is not None and every else []
    for source in config.data.validation_sources:
        stream = named[source.label]
        wanted = min(source.samples or samples, len(stream))
        found.append(Validation(source.label, stream, source.every_steps or every, wanted))
    return found


def evaluate_on(sources: Sequence[Validation], run: ResolvedRun, engine: Engine) -> dict[str, StepStatistics]:
    """Return the model's loss by source.  Every rank calls this.

    Once averaging has begun, also return the losses of the averaged weights, as "SOURCE averaged".
    """
    found = {source.name: source.evaluate(run, engine) for source in sources}
    average = engine.sharded_model.average
    if average is not None and average.has_begun:
        with engine.sharded_model.averaged():
            found |= {f"{source.name} averaged".lstrip(): source.evaluate(run, engine) for source in sources}
    return found


class Evaluation(Callback):
    """Evaluates the sources that are due, and sets `record.val_loss` and `record.val_losses`, in mean nats per token.

    The callbacks in `before` see the step first.  They save it and write its metrics, so a failed evaluation loses nothing.
    """

    def __init__(self, context: RunContext, before: Sequence[Callback], watchdog: Watchdog) -> None:
        self._run, self._engine, self._log = context.run, context.engine, context.log
        self._before, self._watchdog = before, watchdog
        corpus = context.corpus
        self._validations = validations_of(context.run.config, corpus.validation, corpus.named_validation)

    def after_step(self, record: StepRecord) -> StepDecision | None:
        """Evaluate the sources that are due.  Return STOP if a rank was asked to stop meanwhile."""
        run, stops = self._run, False
        due = [source for source in self._validations if source.is_due(record.step, run.config.training.steps)]
        if not due:
            return None
        for callback in self._before:
            callback.after_step(record)
        self._watchdog.at(record.step, EVALUATING)
        for name, statistics in evaluate_on(due, run, self._engine).items():
            if not statistics.tokens:
                hint = "no token of it is counted"
                self._log(f"step {record.step}: {name or 'what is held out'} has no val_loss: {hint}")
            elif name:
                record.val_losses[name] = statistics.loss
            else:
                record.val_loss = statistics.loss
            stops |= statistics.stop
        self._watchdog.at(record.step, BETWEEN)
        # An evaluation may take long, and a skipped step asks no rank whether to stop.
        return StepDecision.STOP if stops else None


class Averages(Callback):
    """Updates the average of the weights: after each step that changes them ("ema"), or at each save ("saves")."""

    def __init__(self, config: RunConfig, average: WeightAverage) -> None:
        self._config, self._average = config, average

    def after_step(self, record: StepRecord) -> None:
        own, every, steps = self._config.average, self._config.checkpoint.save_every_steps, self._config.training.steps
        if own.kind == "ema":
            if record.skipped is None:
                self._average.update(1 - own.decay)
        elif record.step % every == 0 or record.step == steps:
            later = -(-(steps - record.step) // every)  # saves that are still to come
            self._average.update(1 / max(own.last - later, 1))
