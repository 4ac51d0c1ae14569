"""Python's garbage collector, run between steps, at the same step on every rank.

    by default   any allocation may start a collection: one rank pauses inside a step, and the others wait for it
    here         build the engine -> freeze all objects -> | step step ... step | collect | step step ...

Reference counting frees what a step makes, tensors included. The collector is for cycles, and no cycle that a step makes
holds a tensor. Objects older than the first step are frozen: no collection visits them again.
"""

from __future__ import annotations

import gc

from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord


class GarbageCollection(Callback):
    """Collects garbage every so many steps, and at no other time between `on_start` and `close`, which undoes everything.

    If the program has frozen objects of its own, nothing more is frozen: the two could not be told apart afterwards.
    """

    def __init__(self, every_steps: int = 100) -> None:
        self._every_steps = every_steps
        self._was_enabled = self._has_frozen = False

    def on_start(self) -> None:
        self._was_enabled, self._has_frozen = gc.isenabled(), gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.collect()  # otherwise garbage would be frozen too
            gc.freeze()
        gc.disable()

    def after_step(self, record: StepRecord) -> None:
        if record.step % self._every_steps == 0:
            gc.collect()

    def close(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
