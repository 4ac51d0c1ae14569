"""Leaves out the steps that `training.skip_steps` names: their samples are consumed, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megazero.config import ResolvedRun
from megazero.engine import Position
from megazero.training.callbacks.base import Callback
from megazero.training.record import SampleRange, StepDecision


class SkipSteps(Callback):
    """Decides before each step whether it is skipped, and announces each range of skipped steps once."""

    def __init__(self, run: ResolvedRun, say: Callable[[str], None]) -> None:
        self._training, self._batch, self._say = run.config.training, run.global_batch_size, say
        self._announced = 0  # the last step that was announced

    def before_step(self, position: Position) -> StepDecision | None:
        step = position.step + 1
        count = count_skipped(step, self._training.skip_steps)
        if not count:
            return None
        if step > self._announced:
            count = min(count, self._training.steps - position.step)
            self._announced = position.step + count
            samples = SampleRange(position.samples, position.samples + count * self._batch - 1)
            which = f"step {step} is" if count == 1 else f"steps {step} to {self._announced} are"
            self._say(f"{which} skipped (training.skip_steps): {samples}")
        return StepDecision.SKIP


def count_skipped(step: int, ranges: Sequence[tuple[int, int]]) -> int:
    """How many steps to skip from `step` on, including it; 0 if none of the (first, last) ranges contains it."""
    last = step - 1
    while ends := [end for first, end in ranges if first <= last + 1 <= end]:
        last = max(ends)
    return last - step + 1


def setting_to_skip(step: int, ranges: Sequence[tuple[int, int]]) -> str:
    """The setting that skips a step in addition to those of the (first, last) ranges."""
    listed = [f"{first}" if first == last else f"[{first},{last}]" for first, last in ranges]
    return f"training.skip_steps=[{','.join([*listed, str(step)])}]"
