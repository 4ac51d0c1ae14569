"""Runs a rank's chunks on the micro-batches of one step, for the schedule's executor.

forward(chunk, m, x)      saves the graph, but neither x nor the output, beyond what operations saved for the backward
backward(chunk, m, grad)  runs the graph; the last stage starts from the loss, with the gradient that makes sums means
backward_weight(chunk, m) computes the weight gradients that a schedule with W deferred
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.layers.linear import WeightGradQueue
from megazero.layers.saved_tensors import forget_failed_backward
from megazero.parallel_state import ParallelState
from megazero.schedules.action import Action, Op
from megazero.schedules.executor import Executor, Message, connect
from megazero.schedules.factory import ScheduleFactory
from megazero.zero.sharded_model import ShardedModel

if TYPE_CHECKING:
    from megazero.layers.activation_offload import ActivationStore

SampleShape = TypeVar("SampleShape", bound=Hashable)
#: Returns the gradient of a step's scaled loss with respect to each micro-batch's loss.
LossGradient: TypeAlias = Callable[[], Tensor]


def executors(
    factory: ScheduleFactory,
    chunks: int,
    state: ParallelState,
    new_message: Callable[[SampleShape, Action], Message],
    on_action: Callable[[Action], None] = lambda _: None,
) -> Callable[[int, SampleShape, bool], Executor]:
    """Return a cached function (micro-batches, shape, trains) -> executor.  Each executor's schedule is checked once.

    All ranks of a pipeline must call this, and then the function, in the same order.

    Args:
        chunks: model chunks of each rank.
        new_message: allocates the tensors that an action receives, from their shape.
        on_action: called before and after every action.

    Raises: ScheduleError, by the returned function.
    """
    connect(factory.placement(state.pp.size, chunks), state.pp, state.pp_up)

    def watch(action: Action) -> None:
        state.traffic.advance()
        on_action(action)

    @cache
    def executor(micro_batches: int, shape: SampleShape, trains: bool) -> Executor:
        build = factory.build if trains else factory.build_forward
        schedule = build(state.pp.size, micro_batches, chunks)
        return Executor(schedule, (state.pp_up, state.pp), partial(new_message, shape), watch)

    return executor


@dataclass(frozen=True)
class ChunkRunner:
    """One model chunk of this rank in a step.

    Args:
        forward: (micro-batch, message of the previous stage or None) -> message for the next stage, or the loss, a
            scalar.
        is_last: its result is the loss.
        wgrad_queue: passes its weight gradients to the buckets; if the schedule splits backwards, it defers them.
    """

    forward: Callable[[int, Message | None], Message]
    is_last: bool
    wgrad_queue: WeightGradQueue = field(default_factory=WeightGradQueue)


class _Received(torch.autograd.Function):
    """Makes a received activation a leaf of the graph.  Its gradient is appended to a list, and the graph does not hold a
    reference to x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: list[Tensor], _: Tensor) -> Tensor:
        ctx.gradients = gradients
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradients.append(gradient.contiguous())  # the next rank receives into contiguous memory
        return None, None, None


class _Input(NamedTuple):
    """A floating-point input of a forward."""

    gradients: list[Tensor]  # its gradient, once the backward has computed it
    like: Tensor  # a meta tensor of its shape


class _SavedPass(NamedTuple):
    """What a forward leaves for its backward."""

    inputs: list[_Input]
    edges: list[GradientEdge | None]  # each takes the gradient of an output; None if the output requires none


class StageRunner:
    """Runs this rank's chunks for the executor in one step; see `Stage` in schedules/executor.py.

    Args:
        model: reduces the gradients, and gathers the weights under ZeRO-3.
        loss_gradient: returns the gradient of the step's scaled loss with respect to each micro-batch's loss; called
            when the first backward begins.  None in an evaluation, which saves nothing for a backward.
        offload: stores activations of the chunks' layers.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkRunner],
        model: ShardedModel,
        loss_gradient: LossGradient | None,
        offload: "ActivationStore | None" = None,
    ) -> None:
        self._chunks, self._model, self._loss_gradient = chunks, model, loss_gradient
        self._trains = loss_gradient is not None
        self._offload = offload if self._trains else None
        self._saved: dict[tuple[int, int], _SavedPass] = {}  # by chunk and micro-batch
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=model.policy.device)  # 0 without a last stage

    def forward(self, chunk: int, microbatch: int, x: Message | None) -> Message | None:
        inputs: list[_Input] = []

        def receive(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            inputs.append(_Input([], torch.empty_like(tensor, device="meta")))
            received: Tensor = _Received.apply(tensor, inputs[-1].gradients, torch.empty(0, requires_grad=True))
            return received

        if self._trains and x is not None:
            x = tuple(map(receive, x))
        if self._offload is not None:
            self._offload.begin_pass((chunk, microbatch))
        y = self._chunks[chunk].forward(microbatch, x)
        if self._trains:
            floating = [tensor for tensor in y if tensor.is_floating_point()]
            edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in floating]
            self._saved[chunk, microbatch] = _SavedPass(inputs, edges)
        if not self._chunks[chunk].is_last:
            return y
        self.loss_sum += y[0].detach()
        return None

    def backward(self, chunk: int, microbatch: int, grad: Message | None) -> Message | None:
        inputs, edges = self._saved.pop((chunk, microbatch))
        assert self._loss_gradient is not None
        grads = grad or (self._loss_gradient(),)
        paired = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
        wgrad_queue = self._chunks[chunk].wgrad_queue
        wgrad_queue.begin_pass()
        try:
            torch.autograd.backward([edge for edge, _ in paired], [grad for _, grad in paired])
        except BaseException:
            forget_failed_backward()  # otherwise the tensors it saved stay until the next backward
            raise
        if not wgrad_queue.defers:
            self._model.reducer.close_pass(chunk)
        device = self._model.policy.device
        return tuple(found[0] if found else torch.zeros_like(like, device=device) for found, like in inputs) or None

    def backward_weight(self, chunk: int, microbatch: int) -> None:  # noqa: ARG002  the oldest is always next
        wgrad_queue = self._chunks[chunk].wgrad_queue
        if wgrad_queue.defers:  # otherwise `backward` computed all gradients
            wgrad_queue.run_oldest()
            self._model.reducer.close_pass(chunk)

    def interleaves(self, pair: Sequence[Action]) -> bool:  # noqa: ARG002  pairs that overlap: turns.py
        return False

    def beside(self, pair: Sequence[Action], x: Message | None, grad: Message | None) -> Sequence[Message | None]:
        raise NotImplementedError

    def expect(self, following: Action) -> None:
        is_forward, gatherer = following.op is Op.FORWARD, self._model.parameters.gatherer
        if gatherer is not None:
            gatherer.order.expect(following.chunk, is_forward)
        if self._offload is not None:
            self._offload.expect(None if is_forward else (following.chunk, following.microbatch))
