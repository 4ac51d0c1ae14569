"""Stage 3: each unit's weights are gathered before its forward and before its backward, those of the next units meanwhile.

    forward      unshard(0) wait(0) unshard(1) | wait(1) unshard(2) | ...      backward: the same, downward
    buffers      A: 0                B: 1        A: 2                          few buffers serve all units (`gather_buffers`)

               unshard              wait            another unit takes the buffer, or the weights change
    SHARDED ------------> GATHERING ----> READY --------------------------------------------------------> SHARDED

A unit of several buckets starts all of them, and in a forward each of its layers waits for its own (`UnitModule.readers`).

[Note: gathers ahead]  When a unit is to run, those that follow are gathered, in the order of their use: the next one
always, and as many more as `prefetch_bytes` hold and have buffers that no unit before them needs.  So the network always has
a gather to carry, also where a unit computes for longer than its neighbours' weights travel, or shorter.  What follows is a
guess, the same on all ranks (`ScheduleOrder`); a wrong one costs a gather.

[Note: a unit's own results]  A unit's backward begins when the gradient of one of its results arrives, so a hook on the
result gathers the unit in time, and the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from itertools import compress
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from megazero.comm.memory import storage_of
from megazero.zero.bucket import Bucket, ShardingPolicy, Slot
from megazero.zero.gather_buffers import GatherBuffers
from megazero.zero.saved_weights import SavingForward
from megazero.zero.units import UnitModule, in_backward, is_hooked, reading_no_weights

Places: TypeAlias = Mapping[int, tuple[Bucket, Slot]]
"""Where each parameter lies, by the identity of the parameter."""


class UnitState(Enum):
    """Where the weights of a unit are."""

    SHARDED = auto()  # at least one of its buckets is not in its buffer
    GATHERING = auto()  # they are on their way
    READY = auto()  # in their buffers


class _Attribute(NamedTuple):
    """An attribute of a module that is a gathered parameter."""

    module: nn.Module
    key: str
    parameter: nn.Parameter
    placeholder: nn.Parameter  # what the module has while the weights are not there


class Unit:
    """A module whose weights are gathered together.

    Attributes:
        index: of the unit, in forward order.
        buckets: of its weights; frozen and trained weights have different buckets.
    """

    def __init__(self, index: int, described: UnitModule, gatherer: UnitGatherer) -> None:
        self.index, self.described, self.module = index, described, described.module
        self.gatherer, self.buffers = gatherer, gatherer.buffers
        self._hooks: list[RemovableHandle] = []
        places, self.attributes = gatherer.places, list[_Attribute]()
        for module, key in described.attributes:
            parameter = module._parameters[key]
            assert parameter is not None
            if not places[id(parameter)][0].holds_weights:
                self.attributes.append(_Attribute(module, key, parameter, gatherer.placeholder(parameter)))
        self.buckets = list(dict.fromkeys(places[id(attribute.parameter)][0] for attribute in self.attributes))
        self.nbytes = sum(bucket.weights.nbytes for bucket in self.buckets)
        self._waits_by_layer = len(self.buckets) > 1 and bool(described.readers)
        if self.buckets:
            self._attach()
        self.reshard()

    def _attach(self) -> None:
        # Functions instead of methods: a deep copy of the module must not copy this object.  A compiled module breaks its
        # graph here: what gathers is not traced.
        before = torch.compiler.disable(lambda *_: self.pre_forward())
        after = torch.compiler.disable(lambda _, __, output: self.post_forward(output))
        self._hooks.append(self.module.register_forward_pre_hook(reading_no_weights(before)))
        self._hooks.append(self.module.register_forward_hook(after, always_call=True))
        for layer, parameters in self.described.reads() if self._waits_by_layer else ():
            own = {self.gatherer.places[id(parameter)][0]: None for parameter in parameters}
            waited = [bucket for bucket in own if not bucket.holds_weights]
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, waited=waited: self._wait_for(waited)))

    def detach(self) -> None:
        """Take the hooks off the module: its forwards gather no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def state(self) -> UnitState:
        """Where the weights are."""
        if not all(map(self.buffers.holds, self.buckets)):
            return UnitState.SHARDED
        return UnitState.GATHERING if any(map(self.buffers.is_arriving, self.buckets)) else UnitState.READY

    def unshard(self) -> None:
        """Start to gather the weights, unless they are there or on their way."""
        for bucket in self.buckets:
            self.buffers.unshard(bucket)

    def wait(self) -> None:
        """Have the weights in their buffers."""
        self.unshard()
        self._wait_for(self.buckets)

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self.buffers.wait(bucket)

    def pre_forward(self) -> None:
        """Have the weights, or on their way where each layer waits for its own, and start on what follows."""
        if in_backward() and self.gatherer.order.is_in_backward_of(self.index):
            self.wait()  # a recomputation: what follows has been started
        else:
            by_layer = self._waits_by_layer and not in_backward() and not is_hooked(self.module)
            (self.unshard if by_layer else self.wait)()
            self.gatherer.run(self, is_forward=True)
        self._show()
        saving = self.saving()
        saving.enter()
        self.gatherer.running.append((self, saving))

    def post_forward(self, output: Any) -> Any:
        """Hide the weights, and have the gradient of each result call `pre_backward`; see [Note: a unit's own results]."""
        self.reshard()
        running = self.gatherer.running
        if running and running[-1][0] is self:  # else it has not begun
            running.pop()[1].leave()
        return tree_map(self.watch, output)

    def pre_backward(self) -> None:
        """Have the weights, and start on what follows."""
        self.wait()
        self.gatherer.run(self, is_forward=False)

    def watch(self, result: Any) -> Any:
        """Call `pre_backward` when the gradient of this result arrives."""
        if isinstance(result, Tensor) and result.requires_grad and torch.is_grad_enabled():
            result.register_hook(lambda _: self.pre_backward())
        return result

    def saving(self) -> SavingForward:
        """The hooks through which what autograd saves in a forward passes."""
        return SavingForward(self)

    def reshard(self) -> None:
        """Hide the weights from the module: another unit may take their buffers."""
        for module, key, parameter, placeholder in self.attributes:
            if module._parameters[key] is parameter:
                module._parameters[key] = placeholder

    def _show(self) -> list[_Attribute]:
        """Give the module its weights; the attributes that had hidden them."""
        # another tensor is the caller's own (functional_call)
        hidden = [one for one in self.attributes if one.module._parameters[one.key] is one.placeholder]
        for module, key, parameter, _ in hidden:
            module._parameters[key] = parameter
        return hidden

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A context in which a part of the forward runs again, for the backward."""
        if self.state is UnitState.SHARDED:
            self.pre_backward()
        self.wait()
        hidden = self._show()
        try:
            yield
        finally:
            for module, key, _, placeholder in hidden:
                module._parameters[key] = placeholder


class _Visit(NamedTuple):
    unit: int
    is_forward: bool


class ScheduleOrder:
    """Which units run next: the others of a chunk, up in a forward and down in a backward, and then those of the chunk that
    the schedule runs next.  `chunk_of`: the model chunk of each unit."""

    def __init__(self, chunk_of: Sequence[int]) -> None:
        first = {chunk: chunk_of.index(chunk) for chunk in chunk_of}
        spans = {chunk: range(start, start + chunk_of.count(chunk)) for chunk, start in first.items()}
        self._spans, self._span_of = spans, [spans[chunk] for chunk in chunk_of]
        self._last: _Visit | None = None
        self._announced: _Visit | None = None  # the first unit of the chunk that runs after this one
        self._following: _Visit | None = None  # the same, until the next unit runs

    def expect(self, chunk: int, is_forward: bool) -> None:
        """Note the chunk that the schedule runs after the current one."""
        span = self._spans.get(chunk)  # None for a chunk without parameters
        self._announced = None if span is None else _Visit(span[0 if is_forward else -1], is_forward)

    def forget(self) -> None:
        """Drop what the schedule has announced."""
        self._announced = self._following = None

    def visit(self, unit: int, is_forward: bool) -> None:
        """Note that a unit runs now."""
        self._last, self._following = _Visit(unit, is_forward), self._announced
        if not self.rest_of_chunk(*self._last):
            self._announced = None  # it holds once

    def is_in_backward_of(self, unit: int) -> bool:
        """Whether the last unit to run was this one, in a backward."""
        return self._last == (unit, False)

    def upcoming(self) -> Iterator[int]:
        """The units that will probably run after the last one, in order, as far as that is known."""
        if self._last is not None:
            yield from self.rest_of_chunk(*self._last)
        if self._following is not None:
            yield self._following.unit
            yield from self.rest_of_chunk(*self._following)

    def rest_of_chunk(self, unit: int, is_forward: bool) -> range:
        """The units of a chunk that run after this one in the same pass."""
        span = self._span_of[unit]
        return range(unit + 1, span.stop) if is_forward else range(unit - 1, span.start - 1, -1)


class UnitGatherer:
    """The units of a model under stage 3, and what they share.

    Args:
        modules: what is gathered together, in forward order, chunk after chunk.
        places: where each parameter lies.
        policy: of the buckets.
        prefetch_bytes: of the units that are gathered ahead of the one in use; the next one always is.

    Attributes:
        running: the forwards under way, outermost first.
        unit_type, buffers_type, order_type: of what it makes.
    """

    unit_type: ClassVar[type[Unit]] = Unit
    buffers_type: ClassVar[type[GatherBuffers]] = GatherBuffers
    order_type: ClassVar[type[ScheduleOrder]] = ScheduleOrder

    def __init__(
        self, modules: Sequence[UnitModule], places: Places, policy: ShardingPolicy, prefetch_bytes: int
    ) -> None:
        self.places, self._prefetch_bytes = places, prefetch_bytes
        self.buckets = list(dict.fromkeys(bucket for bucket, _ in places.values() if not bucket.holds_weights))
        self._chunk_of = [module.chunk for module in modules]
        self.buffers, self.order = self.buffers_type(self.buckets, policy), self.order_type(self._chunk_of)
        self.running: list[tuple[Unit, SavingForward]] = []
        self.units = [self.unit_type(index, module, self) for index, module in enumerate(modules)]
        users = Counter(storage_of(bucket.weights) for bucket in self.buckets)
        self._takes_turns = any(count > 1 for count in users.values())
        self._first = frozenset(self._first_of_a_forward())

    def placeholder(self, parameter: nn.Parameter) -> nn.Parameter:
        """What a module has in place of a parameter that is not gathered: it has a shape and no values, so no operation
        computes with another unit's weights."""
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    def forget(self) -> None:
        """Drop all that was gathered: the shards have changed."""
        self.buffers.forget()
        self.order.forget()

    def begin_step(self) -> None:
        """Forget the forwards that an interrupt has left, for torch calls no hook after one, and end the gathers that a
        failed step has left under way: beside those of a step their staging buffers would be more than are planned."""
        while self.running:
            self.running.pop()[1].leave()
        for bucket in self.buckets:
            if bucket not in self._first and self.buffers.holds(
                bucket
            ):  # the update has begun those of the first units
                self.buffers.wait(bucket)

    def detach(self) -> None:
        """Gather for no more forwards."""
        for unit in self.units:
            unit.detach()

    def run(self, unit: Unit, *, is_forward: bool) -> None:
        """Note that a unit runs, and start gathering those that will probably follow; see [Note: gathers ahead]."""
        self.order.visit(unit.index, is_forward)
        if self.buffers.is_full and not self._takes_turns:
            return
        running = [*(one for one, _ in self.running), unit]  # where they share a buffer, `unit` has it
        needed = {storage_of(bucket.weights): bucket for one in running for bucket in one.buckets}
        ahead, waiting = self._fitting(needed, self.order.upcoming())
        for bucket in ahead:
            self.buffers.unshard(bucket)
        for bucket in waiting:
            if not self.buffers.holds(bucket):
                self.buffers.source.read_ahead(bucket)

    def _fitting(self, needed: dict[int, Bucket], following: Iterable[int]) -> tuple[list[Bucket], list[Bucket]]:
        """The buckets to gather ahead for the units that follow, and those of the first unit that has to wait.

        `needed`: by address the buckets whose buffers no other may have; those to gather are added.
        """
        fitting, nbytes = list[Bucket](), 0
        for index in following:
            unit = self.units[index]
            if nbytes and nbytes + unit.nbytes > self._prefetch_bytes:
                return fitting, unit.buckets
            nbytes += unit.nbytes
            fits = [needed.setdefault(storage_of(bucket.weights), bucket) is bucket for bucket in unit.buckets]
            fitting += compress(unit.buckets, fits)
            if not all(fits):
                return fitting, unit.buckets
        return fitting, []

    def _first_of_a_forward(self) -> list[Bucket]:
        """As many of the buckets that a forward uses first as it has under way at once: staging buffers hold no more."""
        chunk = [index for index, owner in enumerate(self._chunk_of) if owner == self._chunk_of[0]]
        own = self.units[chunk[0]].buckets if chunk else []
        ahead, _ = self._fitting({storage_of(bucket.weights): bucket for bucket in own}, chunk[1:])
        return [*own, *ahead][: max(len(own), len(ahead))]

    def unshard_stepped(self, bucket: Bucket) -> None:
        """Start gathering a bucket that has been stepped, if it is one of the first that a forward uses."""
        if bucket in self._first:
            self.buffers.unshard(bucket)
