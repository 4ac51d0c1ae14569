"""What to do after a step whose loss or gradient norm is not a number; such a step has changed no weight."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.schema import TrainingConfig
from megazero.engine import NonFiniteError
from megazero.training.callbacks.base import Callback
from megazero.training.callbacks.skip_steps import setting_to_skip
from megazero.training.record import StepDecision, StepRecord


class NonFinitePolicy(Callback):
    """Stops the run, leaves the update out, or rolls back, as `training.on_non_finite` says.

    All ranks see the same loss and norm, so they decide alike without a collective call.  `training.non_finite_limit` such
    steps in a row end the run (skip); or that many rollbacks are allowed (rollback).

    Source: rolling back and skipping the samples: PaLM, Chowdhery et al. 2022, section 5.1.
    """

    def __init__(self, training: TrainingConfig, say: Callable[[str], None]) -> None:
        self._policy, self._limit = training.on_non_finite, training.non_finite_limit
        self._skip_steps, self._say = training.skip_steps, say
        self._in_a_row = self._rollbacks = 0

    def after_step(self, record: StepRecord) -> StepDecision | None:
        """Decide how the run continues after a step that was computed.  Raises: NonFiniteError, the run must stop."""
        statistics = record.statistics
        if statistics is None:
            return None
        if statistics.finite:
            self._in_a_row = 0
            return None
        found = (
            f"step {record.step}, {record.samples}: loss={statistics.loss} and grad_norm={statistics.grad_norm} must be "
            "finite; the weights were not changed. "
        )
        if self._policy == "stop":
            raise NonFiniteError(
                f"{found}Resume from the last checkpoint with a lower learning rate, skip these samples with "
                f"{setting_to_skip(record.step, self._skip_steps)}, or let the run do so itself with "
                "training.on_non_finite=skip or rollback"
            )
        self._in_a_row += 1
        self._rollbacks += 1
        if self._policy == "rollback":
            if self._rollbacks > self._limit:
                raise NonFiniteError(
                    f"{found}The run has already rolled back {self._limit} times (training.non_finite_limit). "
                    "Resume from an earlier checkpoint with a lower learning rate"
                )
            return StepDecision.ROLL_BACK
        if self._in_a_row >= self._limit:
            raise NonFiniteError(
                f"{found}That makes {self._in_a_row} such steps in a row (training.non_finite_limit={self._limit}), so "
                "the samples are not the cause. Resume from an earlier checkpoint with a lower learning rate"
            )
        self._say(f"step {record.step} is not finite: {record.samples} are left out, no weight has changed")
        return None
