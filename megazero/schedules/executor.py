"""The one executor: walks a proved program on one pipeline rank.

It knows a stage only by `forward`, `backward` and `backward_weight`.  Receives are posted ahead of their use.  Sends are not
waited for: their tensors are kept until the send is done, or until a message from the peer shows that it has used them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Protocol, TypeAlias

from torch import Tensor

from megazero.comm.collectives import Pending, exchange
from megazero.parallel_state import Axis
from megazero.schedules.action import Action, ActionKind, MessageAction, Schedule
from megazero.schedules.proof import Program, program

Message: TypeAlias = tuple[Tensor, ...]
"""What passes between stages: the tensors of an activation, or a gradient for each of them that is floating-point."""


class Stage(Protocol):
    """What the executor asks of a rank's part of the model."""

    def forward(self, chunk: int, microbatch: int, x: Message | None) -> Message | None:
        """Run a chunk; x is None on the first virtual stage.  Returns what the next stage needs, None on the last."""

    def backward(self, chunk: int, microbatch: int, grad: Message | None) -> Message | None:
        """Run a chunk's backward; grad is None on the last virtual stage.  Returns what the previous stage needs.

        In a schedule that splits the backward it leaves the weight gradients to `backward_weight`.
        """

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that `backward` left."""

    def expect(self, chunk: int, is_forward: bool) -> None:
        """Called before a forward or backward runs, with the one that follows it."""


class Executor:
    """Runs one schedule on one pipeline rank, any number of times.  All ranks of the pipeline make it together.

    Args:
        schedule: proved when the executor is made.
        down, up: the pipeline axis, with the communicator for messages to higher and to lower ranks.
        new_message: makes empty tensors for what an action of this rank receives.
        watch: called with each computed action before it starts and after it has ended; for traces.

    Raises:
        ScheduleError: the schedule cannot run.
    """

    def __init__(
        self,
        schedule: Schedule,
        down: Axis,
        up: Axis,
        new_message: Callable[[Action], Message],
        watch: Callable[[Action], None],
    ) -> None:
        self.schedule, self._rank, self._axes, self._new_message = schedule, down.index, (up, down), new_message
        self._watch = watch
        passes = [a for a in schedule.ranks[down.index] if a.kind is not ActionKind.WEIGHT]
        self._next = dict(pairwise(passes))
        placed = program(schedule)
        self._received = _what_messages_confirm(placed, down.index)
        # Neighbouring batch of a direction are posted as one batch.
        self._steps: list[Action | tuple[bool, list[MessageAction]]] = []
        for is_message, members in groupby(placed[down.index], key=lambda step: isinstance(step, MessageAction)):
            steps = list(members)
            if not is_message:
                self._steps += [step for step in steps if isinstance(step, Action)]
                continue
            for goes_down in (True, False):
                batch = [s for s in steps if isinstance(s, MessageAction) and s.goes_down(down.index) == goes_down]
                if batch:
                    self._steps.append((goes_down, batch))

    def run(self, stage: Stage) -> None:
        """Run one step's actions.  Raises: LostPeerError."""
        messages = _InFlight()
        for step in self._steps:
            if isinstance(step, Action):
                self._compute(step, stage, messages)
            else:
                self._post(*step, messages)
        for pendings, _ in messages.sending.values():
            _wait(pendings)

    def _compute(self, action: Action, stage: Stage, messages: _InFlight) -> None:
        given = messages.take(action)
        for sent in self._received.get(action, ()):
            _wait(messages.sending.pop(sent)[0])
        self._watch(action)
        result = None
        following = self._next.get(action)
        if following is not None:
            stage.expect(following.chunk, following.kind is ActionKind.FORWARD)
        if action.kind is ActionKind.FORWARD:
            result = stage.forward(action.chunk, action.microbatch, given)
        elif action.kind is ActionKind.BACKWARD:
            result = stage.backward(action.chunk, action.microbatch, given)
        else:
            stage.backward_weight(action.chunk, action.microbatch)
        self._watch(action)
        target = self.schedule.target(self._rank, action)
        if target is not None and result is not None:
            rank, use = target
            messages.results[use if rank == self._rank else action] = tuple(tensor.detach() for tensor in result)

    def _post(self, goes_down: bool, batch: list[MessageAction], messages: _InFlight) -> None:
        axis = self._axes[goes_down]
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        going: list[tuple[Action, Message]] = []
        coming: list[tuple[Action, Message]] = []
        for side in batch:
            peer = axis.ranks[side.peer]
            if side.kind is ActionKind.SEND:
                message = tuple(tensor.contiguous() for tensor in messages.results.pop(side.carries))
                sends += [(tensor, peer) for tensor in message]
                going.append((side.carries, message))
            else:
                message = self._new_message(side.lands)
                receives += [(tensor, peer) for tensor in message]
                coming.append((side.lands, message))
        pendings = iter(exchange(sends, receives, axis))
        for action, message in going:
            sent = [next(pendings) for _ in message]
            messages.sending[action] = (sent, message)
        for action, message in coming:
            messages.arriving[action] = ([next(pendings) for _ in message], message)


def _what_messages_confirm(placed: Program, rank: int) -> dict[Action, list[Action]]:
    """By the action that uses a message from a peer: the sends that the peer had used when it sent that message.

    Their tensors can be freed then, without a wait.  Not every backend can say by itself that a send is done.
    """
    confirmed: dict[Action, list[Action]] = {}
    for peer, steps in enumerate(placed):
        if peer == rank:
            continue
        coming = {
            t.lands: t.carries
            for t in steps
            if isinstance(t, MessageAction) and t.kind is ActionKind.RECV and t.peer == rank
        }
        used: list[Action] = []
        for step in steps:
            if isinstance(step, Action):
                if step in coming:
                    used.append(coming[step])
            elif step.kind is ActionKind.SEND and step.peer == rank and used:
                confirmed[step.lands] = used
                used = []
    return confirmed


class _InFlight:
    """Messages of one step: results by the action that uses or carries them, receives, and sends."""

    def __init__(self) -> None:
        self.results: dict[Action, Message] = {}
        self.arriving: dict[Action, tuple[list[Pending], Message]] = {}
        self.sending: dict[Action, tuple[list[Pending], Message]] = {}

    def take(self, use: Action) -> Message | None:
        """What an action needs, from another rank or from this one; None where it needs nothing."""
        if use not in self.arriving:
            return self.results.pop(use, None)
        pendings, message = self.arriving.pop(use)
        _wait(pendings)
        return message


def _wait(pendings: Sequence[Pending]) -> None:
    for pending in pendings:
        pending.wait()
