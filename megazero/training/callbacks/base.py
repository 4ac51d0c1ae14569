"""What a callback is, and what it gets to know of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megazero.config import ResolvedRun
from megazero.data import Corpus
from megazero.engine import Engine, Position
from megazero.training.record import StepDecision, StepRecord


@dataclass(frozen=True)
class RunContext:
    """The run that a callback belongs to."""

    run: ResolvedRun
    engine: Engine  # the model (`engine.chunks`, asked for anew after every step), its optimizer, and `engine.state`
    corpus: Corpus  # training and validation samples
    start: Position  # where the run starts, or resumes
    say: Callable[[str], None]  # prints a line on the terminal, on rank 0 only


class Callback:
    """Something that happens beside the steps of a run.  Every hook does nothing unless a subclass defines it.

    All ranks call the same hooks in the same order, so a hook may make collective calls if it makes them on every rank;
    what makes a callback must make none.  A decision must be the same on all ranks.  A rank that alone wants the run to end
    sets `context.engine.wants_stop`: the next step tells all ranks.

    A class that a script registers is made of the run's `RunContext`, so it has an `__init__(self, context)`.
    """

    def on_start(self) -> None:
        """Called once before the first step."""

    def before_step(self, position: Position) -> StepDecision | None:
        """Called before each step with the position of the run so far.  SKIP leaves the step out."""

    def after_step(self, record: StepRecord) -> StepDecision | None:
        """Called after each step; STOP and ROLL_BACK are obeyed, None means to go on, and anything else is an error.

        After ROLL_BACK the callbacks that follow do not see the step.
        """

    def on_rollback(self, position: Position) -> None:
        """Called when the run has gone back to a checkpoint; steps after `position` will be done again."""

    def on_end(self, position: Position) -> None:
        """Called once after the last step; not when the run fails."""

    def close(self) -> None:
        """Release what the callback holds.  Called once at the very end, also when the run fails."""
