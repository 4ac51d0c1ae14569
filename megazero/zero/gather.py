"""Stage 3: gather each unit's weights before its forward and its backward, and the next units' weights meanwhile.

    forward      unshard(0) wait(0) unshard(1) | wait(1) unshard(2) | ...      backward: the same, in reverse
    buffers      A: 0                B: 1        A: 2                          a few buffers serve all (`gather_buffers`)

               unshard              wait            another unit takes the buffer, or the weights change
    SHARDED ------------> GATHERING ----> READY --------------------------------------------------------> SHARDED

A unit with several buckets starts all of their gathers.  In a forward, each of its layers waits only for its own bucket
(`UnitModule.readers`).

[Note: gathers ahead]  When a unit starts, the units after it are gathered in the order of their use: always the next
one, and as many more as fit `prefetch_bytes` and have buffers that no earlier unit needs.  So the network stays
busy even if a unit computes for a longer or shorter time than the next weights take to arrive.  All ranks predict the
same order (`ScheduleOrder`); a wrong prediction costs one gather.

[Note: a unit's own results]  A unit's backward begins when the gradient of one of its results arrives.  A hook on each
result therefore gathers the unit in time, and the next one.

[Note: saved weights]  Other weights overwrite a unit's before its backward, so autograd saves references to them:

    forward     op(x, w)        saves x unchanged, and w as a reference to its bucket
    backward    op needs w      the bucket is gathered again if necessary: to the same address, so w has its values

What a backward with `create_graph` computes is saved outside any unit's forward, so it saves copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from megazero.comm.backend import storage_of
from megazero.layers.saved_tensors import SavedTensorHooks
from megazero.zero.bucket import Bucket
from megazero.zero.gather_buffers import GatherBuffers
from megazero.zero.sharding import ShardingPolicy, Slot
from megazero.zero.units import UnitModule
from megazero.zero.weight_gathers import is_hooked, reading_no_weights

_NO_TASK = -1  # torch's task number outside any backward

#: Bucket and slot of each parameter, by id() of the parameter.
Places: TypeAlias = Mapping[int, tuple[Bucket, Slot]]


class _Attribute(NamedTuple):
    """A module's attribute that holds a gathered parameter."""

    module: nn.Module
    key: str
    parameter: nn.Parameter
    placeholder: nn.Parameter  # the attribute's value while the weights are not gathered


class Unit:
    """A module whose weights are gathered together.

    Attributes:
        index: position in forward order.
        buckets: hold its weights; frozen and trainable weights are in different buckets.
    """

    def __init__(self, index: int, unit_module: UnitModule, gatherer: UnitGatherer) -> None:
        self.index, self.unit_module, self.module = index, unit_module, unit_module.module
        self.gatherer, self.buffers = gatherer, gatherer.buffers
        self._hooks: list[RemovableHandle] = []
        places, self.attributes = gatherer.places, list[_Attribute]()
        for module, key in unit_module.attributes:
            parameter = module._parameters[key]
            assert parameter is not None
            if not places[id(parameter)][0].holds_weights:
                self.attributes.append(_Attribute(module, key, parameter, gatherer.placeholder(parameter)))
        self.buckets = gatherer.plan.buckets_of[index]
        self._waits_by_layer = len(self.buckets) > 1 and bool(unit_module.readers)
        if self.buckets:
            # Functions, not methods: a deep copy of the module must not copy this object.  A compiled module breaks its
            # graph here: gathers are not traced.
            before = torch.compiler.disable(lambda *_: self.pre_forward())
            after = torch.compiler.disable(lambda _, __, output: self.post_forward(output))
            self._hooks.append(self.module.register_forward_pre_hook(reading_no_weights(before)))
            self._hooks.append(self.module.register_forward_hook(after, always_call=True))
        for layer, parameters in self.unit_module.reads() if self._waits_by_layer else ():
            own = {self.gatherer.places[id(parameter)][0]: None for parameter in parameters}
            waited = [bucket for bucket in own if not bucket.holds_weights]
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, waited=waited: self._wait_for(waited)))
        self.reshard()

    def detach(self) -> None:
        """Remove the hooks from the module, so that its forwards no longer gather."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def is_sharded(self) -> bool:
        """Whether one of the buckets is not in its buffer, and no gather into the buffer is running."""
        return not all(map(self.buffers.holds, self.buckets))

    def unshard(self) -> None:
        """Start to gather the weights, unless they are already in their buffers or on the way."""
        for bucket in self.buckets:
            self.buffers.unshard(bucket)

    def wait(self) -> None:
        """Gather the weights and wait for them."""
        self.unshard()
        self._wait_for(self.buckets)

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self.buffers.wait(bucket)

    def pre_forward(self) -> None:
        """Gather the weights, and wait for them unless each layer waits for its own.  Start the gathers of the next
        units.
        """
        if in_backward() and self.gatherer.order.is_in_backward_of(self.index):
            self.wait()  # a recomputation: the next units' gathers have been started
        else:
            by_layer = self._waits_by_layer and not in_backward() and not is_hooked(self.module)
            (self.unshard if by_layer else self.wait)()
            self.gatherer.run(self, is_forward=True)
        self._show()
        saving = self.saving()
        saving.enter()
        self.gatherer.running.append((self, saving))

    def post_forward(self, output: Any) -> Any:
        """Replace the weights by placeholders.  The gradient of each result will call `pre_backward`; see [Note: a unit's
        own results].
        """
        self.reshard()
        running = self.gatherer.running
        if running and running[-1][0] is self:  # otherwise its forward has not begun
            running.pop()[1].leave()
        return tree_map(self.watch, output)

    def pre_backward(self) -> None:
        """Gather the weights, wait for them, and start the gathers of the next units."""
        self.wait()
        self.gatherer.run(self, is_forward=False)

    def watch(self, result: Any) -> Any:
        """Register a hook on a result of the forward that calls `pre_backward` when its gradient arrives.  Returns the
        result.
        """
        if isinstance(result, Tensor) and result.requires_grad and torch.is_grad_enabled():
            result.register_hook(lambda _: self.pre_backward())
        return result

    def saving(self) -> SavingForward:
        """Return the saved-tensor hooks for a forward of the unit."""
        return SavingForward(self)

    def reshard(self) -> None:
        """Replace the module's weights by placeholders, since another unit may take over their buffers."""
        for module, key, parameter, placeholder in self.attributes:
            if module._parameters[key] is parameter:
                module._parameters[key] = placeholder

    def _show(self) -> list[_Attribute]:
        """Replace the module's placeholders by its weights.  Returns the attributes that had placeholders."""
        # any other tensor was put there by the caller (functional_call)
        hidden = [attr for attr in self.attributes if attr.module._parameters[attr.key] is attr.placeholder]
        for module, key, parameter, _ in hidden:
            module._parameters[key] = parameter
        return hidden

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Return a context in which the module has its weights, for the recomputation of a part of its forward."""
        if self.is_sharded:
            self.pre_backward()
        self.wait()
        hidden = self._show()
        try:
            yield
        finally:
            for module, key, _, placeholder in hidden:
                module._parameters[key] = placeholder


@dataclass(frozen=True)
class SavedWeight:
    """A saved weight, or a view of it, described by its place in its bucket's buffer.

    Two saved weights are equal if they describe the same elements in the same layout.
    """

    bucket: Bucket
    version: int  # every change of the weights increases it
    shape: torch.Size
    offset: int
    tensor: Tensor = field(compare=False)


class SavingForward(SavedTensorHooks):
    """The saved-tensor hooks for one forward of a unit; see [Note: saved weights]."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit

    def pack(self, tensor: Tensor) -> Any:
        weight = self.pack_weight(tensor)
        if weight is None:
            return self.beneath.pack(tensor)
        self.beneath.note_weight(weight)
        return weight

    def pack_weight(self, tensor: Tensor) -> SavedWeight | None:
        bucket = self.unit.buffers.bucket_at(tensor)
        if bucket is None:
            return None
        return SavedWeight(bucket, tensor._version, tensor.shape, int(tensor.storage_offset()), tensor.detach())

    def unpack(self, saved: Any) -> Tensor:
        return self._weight_of(saved) if isinstance(saved, SavedWeight) else self.beneath.unpack(saved)

    @contextmanager
    def again(self, hooks: SavedTensorHooks) -> Iterator[None]:
        with self.beneath.again(hooks), self.unit.shown(), type(self)(self.unit):
            yield

    def _weight_of(self, saved: SavedWeight) -> Tensor:
        """Return the saved weight, after gathering it again if necessary.  Raises: RuntimeError: it was updated in
        between.
        """
        bucket, buffers = saved.bucket, self.unit.buffers
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"weights in {bucket.layout.name} have changed since the forward that this backward belongs to; run the "
                "forward again"
            )
        if not buffers.holds(bucket):
            self.unit.pre_backward()
            buffers.unshard(bucket)  # it belongs to a unit around this one
        buffers.wait(bucket)
        return saved.tensor.clone() if torch.is_grad_enabled() else saved.tensor  # autograd may save it once more


class _Visit(NamedTuple):
    unit: int
    is_forward: bool


class ScheduleOrder:
    """Predicts which units run next.

    These are the remaining units of the current virtual stage, in ascending order in a forward and descending in a
    backward, then the units of the virtual stage that the schedule runs next.

    Args:
        stage_of: the virtual stage of each unit.
    """

    def __init__(self, stage_of: Sequence[int]) -> None:
        first = {stage: stage_of.index(stage) for stage in stage_of}
        spans = {stage: range(start, start + stage_of.count(stage)) for stage, start in first.items()}
        self._spans, self._span_of = spans, [spans[stage] for stage in stage_of]
        self._last: _Visit | None = None
        self._announced: _Visit | None = None  # first unit of the stage that the schedule announced
        self._following: _Visit | None = None  # the same, until the next unit starts

    def expect(self, stage: int, is_forward: bool) -> None:
        """Record which virtual stage the schedule runs after the current one."""
        span = self._spans.get(stage)  # None for a stage without parameters
        self._announced = None if span is None else _Visit(span[0 if is_forward else -1], is_forward)

    def forget(self) -> None:
        """Discard the virtual stage that the schedule announced."""
        self._announced = self._following = None

    def record(self, unit: int, is_forward: bool) -> None:
        """Record that a unit's forward or backward starts now."""
        self._last, self._following = _Visit(unit, is_forward), self._announced
        if not self.rest_of_stage(*self._last):
            self._announced = None  # an announcement is valid once

    def is_in_backward_of(self, unit: int) -> bool:
        """Whether the unit that started last is this one, in a backward."""
        return self._last == (unit, False)

    def upcoming(self) -> Iterator[int]:
        """Yield, in order, the units that will probably run after the last one, as far as the schedule is known."""
        if self._last is not None:
            yield from self.rest_of_stage(*self._last)
        if self._following is not None:
            yield self._following.unit
            yield from self.rest_of_stage(*self._following)

    def rest_of_stage(self, unit: int, is_forward: bool) -> range:
        """Return the units of this unit's virtual stage that run after it in the same pass."""
        span = self._span_of[unit]
        return range(unit + 1, span.stop) if is_forward else range(unit - 1, span.start - 1, -1)


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """What each unit of stage 3 gathers, and how far ahead of its use.

    Args:
        units: in forward order, one virtual stage after the other.
        places: bucket and slot of each parameter.
        buckets_of: the buckets of each unit.
        prefetch_bytes: limit for the weights that are gathered ahead of the unit in use; one unit is always gathered
            ahead.
    """

    units: Sequence[UnitModule]
    places: Places
    buckets_of: Sequence[list[Bucket]]
    prefetch_bytes: int

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Every bucket that is gathered."""
        return list(dict.fromkeys(bucket for bucket, _ in self.places.values() if not bucket.holds_weights))

    @cached_property
    def shares_buffers(self) -> bool:
        """Whether buckets take turns in a buffer."""
        return len({storage_of(bucket.weights) for bucket in self.buckets}) < len(self.buckets)

    @cached_property
    def first_buckets(self) -> frozenset[Bucket]:
        """The buckets that a forward needs first: no more than it gathers at once, since the staging buffers hold no
        more.
        """
        if not self.units:
            return frozenset()
        own, count = self.buckets_of[0], [unit.virtual_stage for unit in self.units].count(self.units[0].virtual_stage)
        ahead, _ = self.ahead({storage_of(bucket.weights): bucket for bucket in own}, range(1, count))
        return frozenset([*own, *ahead][: max(len(own), len(ahead))])

    def ahead(self, needed: dict[int, Bucket], following: Iterable[int]) -> tuple[list[Bucket], list[Bucket]]:
        """Choose the buckets to gather ahead for the following units.

        Args:
            needed: buckets whose buffers must not be overwritten, by address; the chosen buckets are added.

        Returns:
            The chosen buckets, and the buckets of the first unit that has to wait.
        """
        fitting, nbytes = list[Bucket](), 0
        for index in following:
            buckets, more = self.buckets_of[index], self._bytes_of[index]
            if nbytes and nbytes + more > self.prefetch_bytes:
                return fitting, buckets
            nbytes += more
            fits = [needed.setdefault(storage_of(bucket.weights), bucket) is bucket for bucket in buckets]
            fitting += compress(buckets, fits)
            if not all(fits):
                return fitting, buckets
        return fitting, []

    @cached_property
    def _bytes_of(self) -> list[int]:
        return [sum(bucket.weights.nbytes for bucket in buckets) for buckets in self.buckets_of]


def plan_gathers(units: Sequence[UnitModule], places: Places, prefetch_bytes: int) -> GatherPlan:
    """Return the plan for these units; for the arguments see `GatherPlan`."""
    buckets_of = []
    for unit in units:
        parameters = (module._parameters[key] for module, key in unit.attributes)
        every = dict.fromkeys(places[id(parameter)][0] for parameter in parameters)
        buckets_of.append([bucket for bucket in every if not bucket.holds_weights])
    return GatherPlan(units, places, buckets_of, prefetch_bytes)


class UnitGatherer:
    """The units of a model under stage 3, and their shared buffers.

    Args:
        policy: the settings that all buckets share.

    Attributes:
        running: the units whose forward is running, outermost first.
        unit_type, buffers_type, order_type: classes of what it creates; subclasses replace them.
    """

    unit_type: ClassVar[type[Unit]] = Unit
    buffers_type: ClassVar[type[GatherBuffers]] = GatherBuffers
    order_type: ClassVar[type[ScheduleOrder]] = ScheduleOrder

    def __init__(self, plan: GatherPlan, policy: ShardingPolicy) -> None:
        self.plan, self.places, self.buckets = plan, plan.places, plan.buckets
        self.buffers = self.buffers_type(plan.buckets, policy)
        self.order = self.order_type([unit.virtual_stage for unit in plan.units])
        self.running: list[tuple[Unit, SavingForward]] = []
        self.units = [self.unit_type(index, unit, self) for index, unit in enumerate(plan.units)]

    def placeholder(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter on the meta device, which a module holds while its weights are not gathered.

        It has a shape but no values, so no operation can compute with another unit's weights by mistake.
        """
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    def forget(self) -> None:
        """Discard all gathered weights, since the shards have changed."""
        self.buffers.forget()
        self.order.forget()

    def begin_step(self) -> None:
        """Clean up after an interrupted or failed step.

        torch calls no hook after an interrupted forward.  Gathers of a failed step must end before new ones start: the
        staging buffers of both would exceed the plan.
        """
        while self.running:
            self.running.pop()[1].leave()
        for bucket in self.buckets:
            # the update has started the gathers of the first units
            if bucket not in self.plan.first_buckets and self.buffers.holds(bucket):
                self.buffers.wait(bucket)

    def start_first(self, bucket: Bucket) -> None:
        """Start the gather of an updated bucket if it is among the first that a forward needs."""
        self.buffers.source.prepare(bucket)
        if bucket in self.plan.first_buckets:
            self.buffers.unshard(bucket)

    def detach(self) -> None:
        """Remove the hooks of every unit, so that forwards no longer gather."""
        for unit in self.units:
            unit.detach()

    def run(self, unit: Unit, *, is_forward: bool) -> None:
        """Call when a unit's forward or backward starts: record it, and start the gathers of the units predicted next;
        see [Note: gathers ahead].
        """
        self.order.record(unit.index, is_forward)
        if self.buffers.is_full and not self.plan.shares_buffers:
            return
        running = [*(outer for outer, _ in self.running), unit]  # last, so that it wins a shared buffer
        needed = {storage_of(bucket.weights): bucket for user in running for bucket in user.buckets}
        ahead, waiting = self.plan.ahead(needed, self.order.upcoming())
        for bucket in ahead:
            self.buffers.unshard(bucket)
        for bucket in waiting:
            if not self.buffers.holds(bucket):
                self.buffers.source.read_ahead(bucket)


def in_backward() -> bool:
    """Whether a backward is running in this thread, which a hook can ask."""
    return torch._C._current_graph_task_id() != _NO_TASK
