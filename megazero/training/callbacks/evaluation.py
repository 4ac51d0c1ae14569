"""Evaluates the model on validation samples every `training.eval_every_steps` steps and after the last one."""

from __future__ import annotations

from megazero.config.derive import micro_batch_multiple
from megazero.training.batches import read_batches
from megazero.training.callbacks.base import Callback, RunContext
from megazero.training.record import StepDecision, StepRecord


class Evaluation(Callback):
    """Sets `record.val_loss` where an evaluation is due: mean nats per token of the validation samples."""

    def __init__(self, context: RunContext) -> None:
        self._run, self._engine, self._validation = context.run, context.engine, context.corpus.validation

    def after_step(self, record: StepRecord) -> StepDecision | None:
        """Evaluate if it is due.  STOP where a rank was asked to stop meanwhile."""
        training = self._run.config.training
        every = training.eval_every_steps
        if not every or (record.step % every and record.step != training.steps):
            return None
        if self._validation is None:
            raise ValueError("training.eval_every_steps needs data.validation_fraction above 0")
        samples = min(training.eval_samples, len(self._validation))
        multiple = micro_batch_multiple(self._run.config.parallel)
        share, size = self._engine.share, self._run.micro_batch_size
        statistics = self._engine.evaluate(read_batches(self._validation, 0, samples, size, share, multiple=multiple))
        record.val_loss = statistics.loss
        # An evaluation may take long, and a skipped step asks no rank whether to stop.
        return StepDecision.STOP if statistics.stop else None
