"""The one executor: walks a proved program on one pipeline rank.

It knows a stage only by `forward`, `backward` and `backward_weight`.  Receives are posted ahead of their use.  Sends are not
waited for: their tensors are kept until the send is done, or until a message from the peer shows that it has used them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

    def expect(self, following: Action) -> None:
        """Called before a forward or backward runs, with the one that follows it."""


@dataclass
class _InFlight:
    """Messages of one step."""

    # By the action whose result is sent, or by the one that uses it: on this rank, or as it arrives.
    results: dict[Action, Message] = field(default_factory=dict)
    arriving: dict[Action, tuple[list[Pending], Message]] = field(default_factory=dict)
    sending: dict[Action, tuple[list[Pending], Message]] = field(default_factory=dict)

    def take(self, use: Action) -> Message | None:
        """What an action needs, from another rank or from this one; None where it needs nothing."""
        if use not in self.arriving:
            return self.results.pop(use, None)
        pendings, message = self.arriving.pop(use)
        _wait(pendings)
        return message


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
        self.schedule, self._rank, self._axes = schedule, down.index, (up, down)
        self._new_message, self._watch = new_message, watch
        self._next = dict(pairwise(a for a in schedule.ranks[self._rank] if a.kind is not ActionKind.WEIGHT))
        placed = program(schedule)
        self._received = _what_messages_confirm(placed, self._rank)
        # Neighbouring messages of a direction are posted as one batch.
        self._steps: list[Action | list[MessageAction]] = []
        for _, neighbours in groupby(placed[self._rank], key=type):
            steps = list(neighbours)
            self._steps += [step for step in steps if isinstance(step, Action)]
            messages = [step for step in steps if isinstance(step, MessageAction)]
            batches = ([m for m in messages if m.goes_down(self._rank) is down] for down in (True, False))
            self._steps += [batch for batch in batches if batch]

    def run(self, stage: Stage) -> None:
        """Run one step's actions.  Raises: LostPeerError."""
        messages = _InFlight()
        for step in self._steps:
            if isinstance(step, Action):
                self._compute(step, stage, messages)
            else:
                self._post(step, messages)
        for pendings, _ in messages.sending.values():
            _wait(pendings)

    def _compute(self, action: Action, stage: Stage, messages: _InFlight) -> None:
        given = messages.take(action)
        for sent in self._received.get(action, ()):
            _wait(messages.sending.pop(sent)[0])
        self._watch(action)
        result = None
        if following := self._next.get(action):
            stage.expect(following)
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

    def _post(self, batch: list[MessageAction], messages: _InFlight) -> None:
        axis = self._axes[batch[0].goes_down(self._rank)]
        posted = sorted(batch, key=lambda side: side.kind is ActionKind.RECV)  # `exchange` starts the sends first
        tensors: dict[ActionKind, list[tuple[Tensor, int]]] = {ActionKind.SEND: [], ActionKind.RECV: []}
        contents: list[Message] = []
        for side in posted:
            if side.kind is ActionKind.SEND:
                message = tuple(tensor.contiguous() for tensor in messages.results.pop(side.carries))
            else:
                message = self._new_message(side.lands)
            tensors[side.kind] += [(tensor, axis.ranks[side.peer]) for tensor in message]
            contents.append(message)
        pendings = iter(exchange(tensors[ActionKind.SEND], tensors[ActionKind.RECV], axis))
        for side, message in zip(posted, contents, strict=True):
            under_way = ([next(pendings) for _ in message], message)
            if side.kind is ActionKind.SEND:
                messages.sending[side.carries] = under_way
            else:
                messages.arriving[side.lands] = under_way


def _what_messages_confirm(placed: Program, rank: int) -> dict[Action, list[Action]]:
    """By the action that uses a message from a peer: the sends that the peer had used when it sent that message.

    Their tensors can be freed then, without a wait.  Not every backend can say by itself that a send is done.
    """
    confirmed: dict[Action, list[Action]] = {}
    for steps in placed:
        ours = [step for step in steps if isinstance(step, MessageAction) and step.peer == rank]
        coming = {message.lands: message.carries for message in ours if message.kind is ActionKind.RECV}
        used: list[Action] = []
        for step in steps:
            if isinstance(step, Action):
                used += [coming[step]] if step in coming else []
            elif step.kind is ActionKind.SEND and step.peer == rank and used:
                confirmed[step.lands], used = used, []
    return confirmed


def _wait(pendings: Sequence[Pending]) -> None:
    for pending in pendings:
        pending.wait()
