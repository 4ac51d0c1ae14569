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
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, exchange, wait_all
from megazero.parallel_state import Axis
from megazero.schedules.action import Action, MessageAction, Op, Placement, Schedule
from megazero.schedules.proof import plan_of_rank

#: A message between stages: the tensors of an activation, or a gradient for each floating-point one.
Message: TypeAlias = tuple[Tensor, ...]


class Stage(Protocol):
    """The interface of a rank's part of the model to the executor."""

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
            x, grad: inputs of the first and the second action.

        Returns: the results of the first and the second action.
        """

    def expect(self, following: Action) -> None:
        """Announce the action that follows the forward or backward that is about to run."""


@dataclass
class _InFlight:
    """The messages of one step that are under way or not used yet."""

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
        axes: the pipeline axis, with the communicator for messages to lower and to higher ranks.
        new_message: allocates the tensors that an action of this rank receives.
        watch: called with each computed action before it starts and after it has ended; for traces.

    Raises:
        ScheduleError: the schedule cannot run.
    """

    def __init__(
        self,
        schedule: Schedule,
        axes: tuple[Axis, Axis],
        new_message: Callable[[Action], Message],
        watch: Callable[[Action], None],
    ) -> None:
        self.schedule, self._axes, self._new_message, self._watch = schedule, axes, new_message, watch
        device = torch.device("cpu") if axes[0].group is None else axes[0].group.device
        self._plan = plan_of_rank(schedule, axes[0].index, device.type)
        self._device = torch.get_device_module(device)  # torch.cuda, or torch.cpu, whose streams and events do nothing
        self._aside = self._device.Stream()

    def run(self, stage: Stage) -> None:
        """Run the actions of one step.  Raises: LostPeerError."""
        messages = _InFlight()
        for step in self._plan.steps:
            if isinstance(step, Action):
                pair = self._plan.pairs.get(step)
                if pair is None or not stage.interleaves(pair):
                    self._compute((step,), stage, partial(_run_alone, stage, step), messages)
                elif step == pair[0]:
                    self._compute(pair, stage, partial(stage.beside, pair), messages)
            elif step.op is Op.SEND:
                self._send(step, messages)
            elif step.op is Op.OPEN:
                self._open(step, messages)
            else:
                self._receive(step, messages)
        for pendings, _ in messages.sending.values():
            wait_all(pendings)

    def _compute(
        self, actions: Sequence[Action], stage: Stage, run: Callable[..., Sequence[Message | None]], messages: _InFlight
    ) -> None:
        """Run an action, or the actions of a pair.  `run` takes the inputs of the forward and the backward among them,
        and returns their results; a weight gradient has neither.
        """
        plan, passes = self._plan, [action for action in actions if action.op is not Op.WEIGHT]
        inputs = [messages.take(action) for action in passes]
        for sent in chain.from_iterable(plan.confirmed.get(action, ()) for action in actions):
            wait_all(messages.sending.pop(sent)[0])
        for action in actions:
            self._watch(action)
        if passes and (following := plan.following.get(passes[-1])):
            stage.expect(following)
        for action, result in zip(passes, run(*inputs), strict=True):
            if result is not None and (held_for := plan.held_for.get(action)) is not None:
                messages.results[held_for] = tuple(tensor.detach() for tensor in result)
        for action in actions:
            self._watch(action)

    def _send(self, step: MessageAction, messages: _InFlight) -> None:
        axis = self._axes[step.goes_down(self._plan.rank)]
        message = tuple(tensor.contiguous() for tensor in messages.results.pop(step.carries))
        pendings = exchange([(tensor, axis.ranks[step.peer]) for tensor in message], [], axis)
        messages.sending[step.carries] = (pendings, message)

    def _open(self, step: MessageAction, messages: _InFlight) -> None:
        message, opened = self._new_message(step.lands), self._device.Event()
        opened.record()
        messages.opened[step.lands] = (message, opened)

    def _receive(self, step: MessageAction, messages: _InFlight) -> None:
        axis = self._axes[step.goes_down(self._plan.rank)]
        message, opened = messages.opened.pop(step.lands)
        with self._device.stream(self._aside):
            opened.wait()
            pendings = exchange([], [(tensor, axis.ranks[step.peer]) for tensor in message], axis)
        messages.arriving[step.lands] = (pendings, message)


def _run_alone(stage: Stage, action: Action, message: Message | None = None) -> Sequence[Message | None]:
    if action.op is Op.WEIGHT:
        stage.backward_weight(action.chunk, action.microbatch)
        return ()
    run = stage.forward if action.op is Op.FORWARD else stage.backward
    return (run(action.chunk, action.microbatch, message),)


def connect(placement: Placement, down: Axis, up: Axis) -> None:
    """Connect every two ranks that will exchange messages, by sending a number between them.  All ranks of the pipeline
    must call this.

    NCCL connects two ranks at their first message, and their hosts wait for each other.  In a step, that could
    deadlock: one of them may have to post something else first.

    Args:
        placement: where stages run; consecutive stages exchange messages.
        down, up: the pipeline axis, with the communicator for messages to higher and to lower ranks.

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
