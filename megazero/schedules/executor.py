"""The one executor: runs a proved program on one pipeline rank.

It uses only the passes of a stage.  Receives are posted before they are needed.  Sends are not waited for: their
tensors are held until the send is done, or until a message from the peer shows that it has used them.

[Note: a receive on a GPU]  The host runs ahead of the device.  Before an action, it opens each message that arrives
during it: it allocates memory and records an event.  After it has queued the action, it posts the receive, in a stream
that waits only for the event.  So the message travels while the action runs.  But if the host waits for the device
within the action, that wait does not include the message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, exchange, wait_all
from megazero.parallel_state import Axis
from megazero.schedules.action import Action, ActionKind, MessageAction, Placement, Schedule
from megazero.schedules.proof import Program, Steps, program, received_when_opened

#: A message between stages: the tensors of an activation, or a gradient for each floating-point one.
Message: TypeAlias = tuple[Tensor, ...]


class Stage(Protocol):
    """A rank's part of the model, as the executor uses it."""

    def forward(self, chunk: int, microbatch: int, x: Message | None) -> Message | None:
        """Run a chunk's forward.  x is None on the first virtual stage.  Returns the input of the next stage, None on
        the last.
        """

    def backward(self, chunk: int, microbatch: int, grad: Message | None) -> Message | None:
        """Run a chunk's backward.  grad is None on the last virtual stage.  Returns the gradient for the previous
        stage.

        In a schedule that splits the backward, it defers the weight gradients to `backward_weight`.
        """

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that `backward` deferred."""

    def interleaves(self, pair: Sequence[Action]) -> bool:
        """Whether `beside` can run a pair; otherwise its actions run one after the other."""

    def beside(self, pair: Sequence[Action], x: Message | None, grad: Message | None) -> Sequence[Message | None]:
        """Run the actions of a pair together.

        Args:
            x, grad: input of the first action, and of the second.

        Returns: the results of the first and the second action.
        """

    def expect(self, following: Action) -> None:
        """Learn which action follows the forward or backward that is about to run."""


@dataclass
class _InFlight:
    """The messages of one step."""

    # Results to be sent, by the action that computed them; results for this rank, by the action that uses them.
    results: dict[Action, Message] = field(default_factory=dict)
    opened: dict[Action, tuple[Message, Any]] = field(default_factory=dict)  # event: memory may be written after it
    arriving: dict[Action, tuple[list[Pending], Message]] = field(default_factory=dict)
    sending: dict[Action, tuple[list[Pending], Message]] = field(default_factory=dict)

    def take(self, use: Action) -> Message | None:
        """Return the input of an action, from another rank or this one; None if it has none."""
        if use not in self.arriving:
            return self.results.pop(use, None)
        pendings, message = self.arriving.pop(use)
        wait_all(pendings)
        return message


class Executor:
    """Runs one schedule on one pipeline rank, any number of times.  All ranks of the pipeline must create it together.

    Args:
        schedule: checked here before it runs.
        down, up: the pipeline axis, with the communicator for messages to higher and to lower ranks.
        new_message: allocates the tensors that an action of this rank receives.
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
        self._pairs = {action: schedule.together(self._rank, action) for action in schedule.ranks[self._rank]}
        placed = program(schedule)
        self._received = what_messages_confirm(placed, self._rank)
        device = torch.device("cpu") if down.group is None else down.group.device
        self._device = torch.get_device_module(device)  # torch.cuda, or torch.cpu, whose streams and events do nothing
        self._aside = self._device.Stream()
        self._steps = steps_of(placed, self._rank, device)

    def run(self, stage: Stage) -> None:
        """Run the actions of one step.  Raises: LostPeerError."""
        messages = _InFlight()
        for step in self._steps:
            if isinstance(step, Action):
                parts = self._pairs[step]
                if len(parts) > 1 and not stage.interleaves(parts):
                    parts = (step,)
                if step == parts[0]:
                    self._compute(parts, stage, messages)
            elif step.kind is ActionKind.SEND:
                self._send(step, messages)
            elif step.kind is ActionKind.OPEN:
                self._open(step, messages)
            else:
                self._receive(step, messages)
        for pendings, _ in messages.sending.values():
            wait_all(pendings)

    def _compute(self, parts: Sequence[Action], stage: Stage, messages: _InFlight) -> None:
        """Run an action, or the actions of a pair."""
        given = [messages.take(action) for action in parts]
        for sent in chain.from_iterable(self._received.get(action, ()) for action in parts):
            wait_all(messages.sending.pop(sent)[0])
        for action in parts:
            self._watch(action)
        if following := self._next.get(parts[1] if len(parts) > 1 else parts[0]):
            stage.expect(following)
        results = _run(parts, stage, given)
        for action, result in zip(parts, results, strict=False):
            target = self.schedule.target(self._rank, action)
            if target is not None and result is not None:
                rank, use = target
                messages.results[use if rank == self._rank else action] = tuple(tensor.detach() for tensor in result)
        for action in parts:
            self._watch(action)

    def _send(self, step: MessageAction, messages: _InFlight) -> None:
        axis = self._axes[step.goes_down(self._rank)]
        message = tuple(tensor.contiguous() for tensor in messages.results.pop(step.carries))
        pendings = exchange([(tensor, axis.ranks[step.peer]) for tensor in message], [], axis)
        messages.sending[step.carries] = (pendings, message)

    def _open(self, step: MessageAction, messages: _InFlight) -> None:
        message, opened = self._new_message(step.lands), self._device.Event()
        opened.record()
        messages.opened[step.lands] = (message, opened)

    def _receive(self, step: MessageAction, messages: _InFlight) -> None:
        axis = self._axes[step.goes_down(self._rank)]
        message, opened = messages.opened.pop(step.lands)
        with self._device.stream(self._aside):
            opened.wait()
            pendings = exchange([], [(tensor, axis.ranks[step.peer]) for tensor in message], axis)
        messages.arriving[step.lands] = (pendings, message)


def _run(parts: Sequence[Action], stage: Stage, given: Sequence[Message | None]) -> Sequence[Message | None]:
    if len(parts) > 1:
        return stage.beside(parts, given[0], given[1])
    (action,), (message,) = parts, given
    if action.kind is ActionKind.WEIGHT:
        stage.backward_weight(action.chunk, action.microbatch)
        return ()
    run = stage.forward if action.kind is ActionKind.FORWARD else stage.backward
    return (run(action.chunk, action.microbatch, message),)


def steps_of(placed: Program, rank: int, device: torch.device) -> Steps:
    """Return the steps of a rank: on NCCL those of the program, on gloo with every receive as early as possible."""
    return placed[rank] if device.type == "cuda" else received_when_opened(placed[rank])


def what_messages_confirm(placed: Program, rank: int) -> dict[Action, list[Action]]:
    """For each action that uses a message of a peer, return the sends that this message confirms: the peer had used
    their data before it sent the message.

    Their tensors can then be freed without a wait.  Not every backend can tell that a send is done.
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


def connect(placement: Placement, down: Axis, up: Axis) -> None:
    """Send a number between every two ranks that will exchange messages.  All ranks of the pipeline must call this.

    NCCL connects two ranks at their first message, and their hosts wait for each other.  In a step, that could
    deadlock: one of them may have to post something else first.

    Args:
        placement: where stages run; consecutive stages exchange messages.
        down, up: see `Executor`.

    Raises: LostPeerError.
    """
    forwards = {(rank, other) for (rank, _), (other, _) in pairwise(placement) if rank != other}
    pairs = sorted(forwards | {(other, rank) for rank, other in forwards})
    for axis, goes_down in ((down, True), (up, False)):
        device = None if axis.group is None else axis.group.device
        along = [(sender, receiver) for sender, receiver in pairs if (sender < receiver) is goes_down]
        sends = [(torch.zeros(1, device=device), axis.ranks[to]) for sender, to in along if sender == axis.index]
        receives = [(torch.zeros(1, device=device), axis.ranks[sender]) for sender, to in along if to == axis.index]
        wait_all(exchange(sends, receives, axis))
