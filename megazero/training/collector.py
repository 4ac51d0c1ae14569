"""Python's garbage collector, run between steps, at the same step on every rank.

    left alone       any allocation may start a collection: one rank pauses inside a step, and the others wait for it
    here             build -> freeze what is there -> | step step ... step | collect | step step ...

Reference counting frees what a step makes, tensors included; the collector is for cycles, of which a step makes none that
holds a tensor.  What was there before the first step is frozen: no collection walks through it again.
"""

from __future__ import annotations

import gc
from types import TracebackType

EVERY_STEPS = 100


class Collector:
    """A context in which garbage is collected when `after_step` says so, and at no other time.

    Args:
        every_steps: steps between two collections.

    It leaves the collector as it found it.  In a program that has frozen objects of its own nothing more is frozen, since
    they could not be told apart afterwards.
    """

    def __init__(self, every_steps: int = EVERY_STEPS) -> None:
        self._every_steps = every_steps
        self._was_enabled, self._freezes = gc.isenabled(), gc.get_freeze_count() == 0

    def __enter__(self) -> Collector:
        if self._freezes:
            gc.collect()  # what is garbage already would be frozen too
            gc.freeze()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if it is time.

        Args:
            step: the step that is done; all ranks count alike.
        """
        if step % self._every_steps == 0:
            gc.collect()
