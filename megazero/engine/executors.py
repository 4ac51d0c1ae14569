"""The executors of one engine: one for each schedule and shape of micro-batch, proved once and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from megazero.parallel_state import ParallelState
from megazero.schedules.action import Action, Schedule
from megazero.schedules.executor import Executor, Message
from megazero.schedules.kind import forward_only

SampleShape = TypeVar("SampleShape", bound=Hashable)


class Executors(Generic[SampleShape]):
    """Makes an executor when it is first asked for.  All ranks of a pipeline ask in the same order.

    Args:
        generate: number of micro-batches -> the training schedule.
        state: the pipeline axis of this rank.
        new_message: (shape, action) -> empty tensors for what the action receives.
        on_action: called before and after every computed action.
    """

    def __init__(
        self,
        generate: Callable[[int], Schedule],
        state: ParallelState,
        new_message: Callable[[SampleShape, Action], Message],
        on_action: Callable[[Action], None] = lambda _: None,
    ) -> None:
        self._generate, self._state = generate, state
        self._new_message, self._on_action = new_message, on_action
        self._made: dict[tuple[bool, int, SampleShape], Executor] = {}

    def get(self, micro_batches: int, shape: SampleShape, *, trains: bool) -> Executor:
        """The executor for so many micro-batches of a shape.  Raises: ScheduleError."""
        key = trains, micro_batches, shape
        if key not in self._made:
            schedule = self._generate(micro_batches)
            self._made[key] = Executor(
                schedule if trains else forward_only(schedule),
                self._state.pp,
                self._state.pp_up,
                partial(self._new_message, shape),
                self._on_action,
            )
        return self._made[key]
