"""The one executor: walks a proved program on one pipeline rank.

It knows a stage only by `forward(chunk, microbatch, x)` and `backward(chunk, microbatch, grad)`.  Receives are posted where
the program says, ahead of their use; sends are left behind and only waited for at the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import groupby
from typing import Protocol

from torch import Tensor

from megazero.comm.collectives import Pending, exchange
from megazero.parallel_state import Axis
from megazero.schedules.action import Action, Kind, Schedule, Transfer
from megazero.schedules.simulate import program


class Stage(Protocol):
    """What the executor asks of a rank's part of the model."""

    def forward(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Run a chunk; x is None on the first virtual stage.  Returns what the next stage needs, None on the last."""

    def backward(self, chunk: int, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Run a chunk's backward; grad is None on the last virtual stage.  Returns what the previous stage needs."""


class Executor:
    """Runs one schedule on one pipeline rank, any number of times.

    Args:
        schedule: proved when the executor is made.
        pp: the pipeline axis.
        new_activation: makes an empty tensor of the shape and dtype that passes between stages.

    Raises:
        ScheduleError: the schedule cannot run.
    """

    def __init__(self, schedule: Schedule, pp: Axis, new_activation: Callable[[], Tensor]) -> None:
        self.schedule, self._pp, self._new_activation = schedule, pp, new_activation
        steps = program(schedule)[pp.index]
        # Neighbouring transfers are posted as one batch.
        self._steps: list[Action | list[Transfer]] = []
        for is_transfer, members in groupby(steps, key=lambda step: isinstance(step, Transfer)):
            if is_transfer:
                self._steps.append([step for step in members if isinstance(step, Transfer)])
            else:
                self._steps += [step for step in members if isinstance(step, Action)]

    def run(self, stage: Stage) -> None:
        """Run one step's actions.  Raises: LostPeerError."""
        results: dict[Action, Tensor | None] = {}  # by the action that will use them, on this rank
        arriving: dict[Action, tuple[Pending, Tensor]] = {}
        sending: deque[tuple[Pending, Tensor]] = deque()
        for step in self._steps:
            if isinstance(step, list):
                self._post(step, results, arriving, sending)
            else:
                self._compute(step, stage, results, arriving)
        for pending, _ in sending:
            pending.wait()

    def _compute(
        self,
        action: Action,
        stage: Stage,
        results: dict[Action, Tensor | None],
        arriving: dict[Action, tuple[Pending, Tensor]],
    ) -> None:
        if action in arriving:
            pending, given = arriving.pop(action)
            pending.wait()
        else:
            given = results.pop(action, None)  # type: ignore[assignment]
        run = stage.forward if action.kind is Kind.FORWARD else stage.backward
        result = run(action.chunk, action.microbatch, given)
        target = self.schedule.target(self._pp.index, action)
        if target is not None:
            rank, use = target
            results[use if rank == self._pp.index else action] = result

    def _post(
        self,
        transfers: list[Transfer],
        results: dict[Action, Tensor | None],
        arriving: dict[Action, tuple[Pending, Tensor]],
        sending: deque[tuple[Pending, Tensor]],
    ) -> None:
        while sending and sending[0][0].done():
            sending.popleft()[0].wait()
        sends, receives = [], []
        for transfer in transfers:
            peer = self._pp.ranks[transfer.peer]
            if transfer.kind is Kind.SEND:
                result = results.pop(transfer.carries)
                if result is None:
                    raise RuntimeError(f"{transfer.carries} gave nothing to send to pipeline rank {transfer.peer}")
                sends.append((result.detach().contiguous(), peer))
            else:
                buffer = self._new_activation()
                receives.append((buffer, peer))
                arriving[transfer.lands] = (Pending(), buffer)
        pendings = exchange(sends, receives, self._pp)
        sending.extend((pending, tensor) for pending, (tensor, _) in zip(pendings, sends, strict=False))
        landing = [transfer.lands for transfer in transfers if transfer.kind is Kind.RECV]
        for use, pending in zip(landing, pendings[len(sends) :], strict=True):
            arriving[use] = (pending, arriving[use][1])
