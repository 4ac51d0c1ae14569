"""Reduces the gradients of a script's own modules.  A backward may reach only some parameters, in an unknown order.

A parameter that the backward does not reach counts as zero at the end of its pass.  Under stage 3, it counts as zero when
the backward leaves its unit, since autograd can tell that it will not be reached (`Reach`).  The reason: a rank that waits
for a reduction, to get its memory, does not take part in the next gather.  So every rank starts a unit's reduction before it
waits for a gather that is two units further, and no rank starts it before the other ranks have reached the unit.

`ScriptReducer` is for pipelines of layers, `ModuleReducer` for a module whose backward the script itself may call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from megazero.comm.collectives import from_first
from megazero.parallel_state import Axis
from megazero.zero.bucket import Landing
from megazero.zero.gradients import Accumulation, ChunkGradients, GradientReducer, LaunchOrder

if TYPE_CHECKING:
    from megazero.deepspeed.script_units import ScriptGatherer


class _Graph:
    """The parameters of a virtual stage that the running backward does not reach.

    Attributes:
        unused: by bucket chunk, the indices of the parameters in it.
        visited: the units of stage 3 that the backward has reached.
    """

    def __init__(self, unused: dict[ChunkGradients, list[int]]) -> None:
        self.unused, self.visited = unused, set[int]()


class ScriptReducer(GradientReducer):
    """Counts a gradient as zero once it is certain that the running backward does not reach its parameter.

    Args: see the base class.

    Attributes:
        accumulates: while set, micro-batches add up in the buffers and nothing is sent.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        every = [gradients for order in self.orders.values() for gradients in order.chunks]
        self._by_round = [gradients for gradients in every if gradients.accumulation is Accumulation.SHARDS]
        self.accumulates = False
        self._mark_end_of_pass: Callable[[], None] = lambda: None  # so that ranks that gather other units get an error
        self._graphs: dict[tuple[int, int], _Graph] = {}  # by virtual stage, and autograd's number of the backward
        self._reach: dict[int, Reach] = {}  # by virtual stage

    def follow_units(self, gatherer: ScriptGatherer) -> None:
        """Mark the end of each pass, and count unreached gradients as zero unit by unit."""
        self._mark_end_of_pass = gatherer.buffers.mark_end_of_pass
        if any(bucket.layout.shards > 1 for bucket in self.buckets):  # else all ranks use the same parameters
            gatherer.on_backward = self.close_unused

    def is_in_pass(self) -> bool:
        """Whether the running backward belongs to this step."""
        return True

    def reopen(self) -> None:
        """Allow one more micro-batch after the last one, whose reductions may have started."""
        self.reductions.finish()
        for order in self.orders.values():
            for gradients in order.chunks:
                bucket, memory = gradients.bucket, gradients.memory
                if gradients.reduced == self.rounds and bucket.placement.replica.index > 0:
                    bucket.owned_slice(bucket.gradient, gradients.lands).zero_()  # one replica keeps the sum of all
                if gradients.reduced and bucket.landing is Landing.IN_PLACE and memory is not None:
                    own = bucket.layout.shard(bucket.placement.shard.index)
                    memory[: own.start].zero_()  # each rank keeps its own shard of the sum, so that the sum counts once
                    memory[own.stop :].zero_()
                    gradients.is_empty, gradients.reduced = [False] * len(gradients.is_empty), 0

    def close_unused(self, virtual_stage: int, unit: int) -> None:
        """Zero the gradients that the running backward cannot reach, in the units that it has left."""
        if (order := self.orders.get(virtual_stage)) is None or not self.is_in_pass():
            return
        graph = self._graph(virtual_stage)
        for gradients, indices in graph.unused.items():
            if gradients.bucket.layout.unit in graph.visited:
                for index in indices:  # which have not arrived in this pass
                    if gradients.counts[index] == order.passes:
                        gradients.count(index, order.passes + 1)
        graph.visited.add(unit)  # a nested backward may still give its gradients, until the next unit's turn
        self.reduce_due(order)

    def _graph(self, virtual_stage: int) -> _Graph:
        key = virtual_stage, torch._C._current_graph_task_id()  # a nested backward has its own graph
        if key not in self._graphs:
            unused: dict[ChunkGradients, list[int]] = {}
            order = self.orders[virtual_stage]
            own = [parameter for parameter in self.parameters if self.chunks_of[id(parameter)][0][0] is order]
            reach = self._reach.setdefault(virtual_stage, Reach(own))
            for parameter in reach.missing():
                for _, gradients, index in self.chunks_of[id(parameter)]:
                    unused.setdefault(gradients, []).append(index)
            self._graphs[key] = _Graph(unused)
        return self._graphs[key]

    def close_pass(self, virtual_stage: int) -> None:
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != virtual_stage}
        self._mark_end_of_pass()
        super().close_pass(virtual_stage)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate micro-batches without communication in a `with` block.  Stages 2 and 3 then use unsharded buffers."""
        self._accumulate(Accumulation.BUFFER)
        try:
            yield
        finally:
            self._accumulate(Accumulation.SHARDS)

    def _accumulate(self, accumulation: Accumulation) -> None:
        self.accumulates = accumulation is Accumulation.BUFFER
        for gradients in self._by_round:
            gradients.accumulation = accumulation


class ModuleReducer(ScriptReducer):
    """The reducer of a module: each gradient arrives once in a pass, and a pass ends before the next one begins.

    In the first step, buckets are reduced in the reverse order of parameter registration; later, in the order in which the
    first rank's first pass produced their gradients (`learn_order`).
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._served: Callable[[], Any] = lambda: None
        # The chunks in the order of their last gradients in the first pass; None once the order is learned.
        self._arrived: dict[ChunkGradients, None] | None = {}

    def serve(self, engine: Any) -> None:
        """Accept only gradients that a `ModuleEngine` admits.  The engine is not kept alive."""
        self._served = ref(engine)

    def take(self, parameter: Tensor) -> None:
        engine = self._served()
        if engine is not None and parameter.grad is not None and engine.admits(parameter.grad):
            super().take(parameter)
        else:
            parameter.grad = None

    def is_in_pass(self) -> bool:
        engine = self._served()
        return engine is not None and engine.is_in_pass()

    def count(self, gradients: ChunkGradients, index: int) -> None:
        passes = self.orders[0].passes
        gradients.count(index, passes + 1)
        if self._arrived is not None and passes == 0:
            self._arrived.pop(gradients, None)
            self._arrived[gradients] = None

    def learn_order(self, axis: Axis) -> None:
        """Adopt the order of the gradients in the last step's first pass on the first rank.  Collective, between steps."""
        if self._arrived is None:
            return
        order = self.orders[0]
        number_of = {gradients: number for number, gradients in enumerate(order.chunks)}
        arrived = from_first([number_of[gradients] for gradients in self._arrived], axis)
        if arrived:  # otherwise the next step's order is learned
            _follow(order, arrived)
            self._arrived = None


def _follow(order: LaunchOrder, arrived: Sequence[int]) -> None:
    """Reduce chunks in the order `arrived` of their numbers.  A chunk that is not listed follows its old neighbour."""
    turn = {number: at for at, number in enumerate(arrived)}
    turns, beside = [], turn[min(arrived)]
    for number in range(len(order.chunks)):
        beside = turn.get(number, beside)
        turns.append((beside, number))
    order.chunks = [order.chunks[number] for _, number in sorted(turns)]


class Reach:
    """Finds which of some trained parameters the running backward reaches.

    loss <- f(w1) <- g(w0)                      reaches w1 and w0; w2, which this forward has not used, gets no gradient
    loss <- CheckpointFunction <- g(w0)         as far as its graph shows, only w0: the function runs a nested
                                                backward of its own graph, which reaches w1
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._nodes: list[Node] = []  # that add to their gradients: twenty times slower to find than to ask for

    def missing(self) -> Sequence[nn.Parameter]:
        """Return the parameters that the running backward does not reach.  Empty under `torch.autograd.grad`, which adds to
        no gradient.
        """
        try:
            if not self._nodes:
                self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
            will_run = torch._C._will_engine_execute_node
            pairs = zip(self.parameters, self._nodes, strict=True)
            found = [parameter for parameter, node in pairs if not will_run(node)]
        except RuntimeError:  # torch.autograd.grad of parameters
            return []
        return found if len(found) < len(self.parameters) else []  # torch.autograd.grad
