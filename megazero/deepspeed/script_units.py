"""Stage 3 for a script's own modules, about which nothing is known before they run.

    a run's unit                               a script's unit
    its order comes from the schedule          its order is recorded as the model runs (`VisitHistory`), and compared: ranks
                                               that gather different buckets raise an OrderError
    placeholders hide its weights              proxies that gather a whole copy hide them (`UngatheredParameter`)
    runs within no other unit                  may run within another unit, which then gathers its weights again
    computes its results itself                may return results of another unit, its weights, or objects

If a unit returns a result that another unit has computed, this result gets a new autograd node: a hook on the old node would
gather this unit's weights, and perhaps the next unit's, just before the other unit's backward.  If an in-place change or a
result in an attribute bypasses the hook, the unit is gathered when autograd needs its weights (`zero/gather.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megazero.comm.backend import address_of, storage_of
from megazero.comm.collectives import Pending, all_gather, check_order, gather_objects
from megazero.deepspeed.script_reducer import ModuleReducer, ScriptReducer
from megazero.deepspeed.script_values import copies_of_buckets
from megazero.deepspeed.ungathered_parameter import UngatheredParameter, real
from megazero.parallel_state import Axis, ParallelState
from megazero.registry import closest, did_you_mean
from megazero.zero.bucket import Bucket
from megazero.zero.bucket_plan import ShardingPlan, plan_sharding
from megazero.zero.gather import SavedWeight, SavingForward, ScheduleOrder, Unit, UnitGatherer, in_backward
from megazero.zero.gather_buffers import GatherBuffers
from megazero.zero.secondary_shard import SecondarySource
from megazero.zero.sharded_model import ShardedModel
from megazero.zero.sharding import ShardingPolicy, ShardingSettings, Slot
from megazero.zero.storage import free_memory_bytes
from megazero.zero.units import RankModel, UnitModule, parameter_attributes, units_of

_ONLY_WITHIN = "under stage 3 weights are whole only within their module's forward; keep a copy (weight.clone())"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_Visit: TypeAlias = tuple[str, int]  # ("forward", "evaluation", "recomputation" or "backward", unit)


def script_units_of(stages: Sequence[nn.Module]) -> list[UnitModule]:
    """Return the units of a script's modules, in the order of their attributes, which is usually the forward order.

        Model                       units
          embedding                 embedding
          blocks: ModuleList        blocks.0   blocks.1         an element of a container is a unit as a whole
          head                      head
          scale: Parameter          Model, with `scale` alone   in use while the others run, so it never shares a buffer

    A module may list its units in a method `units`.
    """
    found = []
    for stage, model in enumerate(stages):
        if callable(getattr(model, "units", None)):
            found += [UnitModule(unit.module, unit.attributes, stage) for unit in units_of([model])]
        else:
            by_module = {unit.module: unit for unit in _find(model, stage, False)}  # one may stand in two containers
            found += by_module.values()
    return found


def _find(module: nn.Module, stage: int, is_element: bool) -> Iterator[UnitModule]:
    holding = [submodule for submodule in module.modules() if next(submodule.parameters(), None) is not None]
    if not holding:
        return
    direct = parameter_attributes([module])
    if (is_element or direct) and not any(isinstance(submodule, _CONTAINERS) for submodule in holding):
        yield UnitModule(module, parameter_attributes(holding), stage)
        return
    if direct:
        yield UnitModule(module, direct, stage, spans_others=True)
    for child in module.children():
        yield from _find(child, stage, isinstance(module, _CONTAINERS))


class VisitHistory(ScheduleOrder):
    """Records which unit follows two others as the model runs, and predicts the next unit from the second pass on.

    All ranks predict the same, since they run the same code.  At the end of a virtual stage, the schedule decides.
    """

    def __init__(self, stage_of: Sequence[int]) -> None:
        super().__init__(stage_of)
        self._visits: tuple[_Visit | None, _Visit | None] = (None, None)
        self._successor: dict[tuple[_Visit | None, _Visit | None], _Visit] = {}
        self._is_scheduled = False

    def expect(self, stage: int, is_forward: bool) -> None:
        super().expect(stage, is_forward)
        self._is_scheduled = True

    def record(self, unit: int, is_forward: bool) -> None:
        if is_forward and in_backward():
            direction = "recomputation"  # which its backward follows: it ends no pass over the virtual stage
            self._following = self._announced
        else:
            direction = "backward" if not is_forward else "forward" if torch.is_grad_enabled() else "evaluation"
            super().record(unit, is_forward)
        self._successor[self._visits] = direction, unit
        self._visits = self._visits[1], (direction, unit)

    def is_in_backward_of(self, unit: int) -> bool:
        return self._visits[1] == ("backward", unit)

    def upcoming(self) -> Iterator[int]:
        return islice(self._recorded(), len(self._span_of))

    def _recorded(self) -> Iterator[int]:
        (before, visit), following = self._visits, self._following
        while visit is not None:
            direction, unit = visit
            after = self._successor.get((before, visit))
            is_in_order = self._is_scheduled and direction != "recomputation"
            if is_in_order and not self.rest_of_stage(unit, direction != "backward"):
                forward = "evaluation" if direction == "evaluation" else "forward"
                after = None if following is None else (forward if following.is_forward else "backward", following.unit)
                following = None
            if after is not None:
                yield after[1]
            before, visit = visit, after


class ScriptBuffers(GatherBuffers):
    """Gather buffers that send a label with each gather: if ranks gather different buckets, they raise an OrderError."""

    def __init__(self, buckets: Sequence[Bucket], policy: ShardingPolicy) -> None:
        super().__init__(buckets, policy)
        self._device, self._marks = policy.device, list[Pending]()
        self._axes = list(dict.fromkeys(bucket.gather_axis for bucket in buckets))
        # The number comes first, since a long label is cut.
        self._labels = {bucket: f"weights {at}, {bucket.layout.name}" for at, bucket in enumerate(buckets)}

    def start(self, bucket: Bucket) -> Pending:
        source, label = self.source, self._labels[bucket]
        if isinstance(source, SecondarySource) and bucket in source.fresh:
            # Ranks of other hosts may be about to gather another bucket over the whole axis: the label goes to them too.
            sent = self._send(label, bucket.gather_axis)
            return Pending(sent.wait, source.start(bucket, label).wait)
        return source.start(bucket, label)

    def _send(self, label: str, axis: Axis) -> Pending:
        """Compare a label over an axis without any weights."""
        nothing = torch.empty(0, device=self._device)
        return all_gather(nothing, nothing.clone(), axis, label)

    def compare_labels(self) -> None:
        """Compare the labels of all gathers so far.  Raises: OrderError: ranks have gathered different buckets."""
        secondary = self.source.axes.values() if isinstance(self.source, SecondarySource) else ()
        for axis in dict.fromkeys([*self._axes, *secondary]):
            check_order(axis)

    def mark_end_of_pass(self) -> None:
        """Send a label for the end of the pass, so that a rank that gathers more than this one gets an error, not a hang."""
        self._wait_for_marks()
        self._marks = [self._send("nothing, at the end of a backward", axis) for axis in self._axes if axis.size > 1]

    def _wait_for_marks(self) -> None:
        for mark in self._marks:
            mark.wait()
        self.compare_labels()

    def forget(self) -> None:
        self._wait_for_marks()
        super().forget()

    def whole_copy(self, bucket: Bucket, slot: Slot) -> Tensor:
        """Return an unsharded copy of a parameter: from the gather buffer if it holds exact weights, else by an all-gather
        (collective).
        """
        if self.source.is_exact and self.holds(bucket):
            self.wait(bucket)
            flat = bucket.weights
        else:
            flat = self.whole_bucket(bucket, slot.info.name)
        return flat[slot.start : slot.stop].view(slot.info.shape).clone()

    def whole_bucket(self, bucket: Bucket, name: str) -> Tensor:
        """Gather a copy [padded] of a bucket's weights in its own memory.  It is never quantized."""
        flat = torch.empty_like(bucket.weights)
        shard = bucket.read(bucket.weight_shard, bucket.owned).to(self._device)
        all_gather(flat, shard, bucket.gather_axis, f"a copy of {name}").wait()
        self.compare_labels()  # a copy may go anywhere
        return flat


class _ScriptForward(SavingForward):
    """Refuses views of weights that were created in the forward of another unit.

    Attributes:
        versions: autograd versions of the unit's parameters at the start of the forward.
    """

    unit: ScriptUnit

    def __init__(self, unit: ScriptUnit) -> None:
        super().__init__(unit)
        self.versions = [attribute.parameter._version for attribute in unit.attributes]

    def pack_weight(self, tensor: Tensor) -> SavedWeight | None:
        weight = super().pack_weight(tensor)
        place = self.unit.gatherer.places.get(id(tensor if tensor._base is None else tensor._base))
        if weight is not None and place is not None and place[0] is not weight.bucket:
            raise RuntimeError(f"a view of weights in {place[0].layout.name} outlives their forward: {_ONLY_WITHIN}")
        return weight


class ScriptUnit(Unit):
    """A unit that is a module of a script, with an arbitrary forward."""

    gatherer: ScriptGatherer

    def saving(self) -> SavingForward:
        return _ScriptForward(self)

    def post_forward(self, output: Any) -> Any:
        running = self.gatherer.running
        ended = running[-1][1] if running and running[-1][0] is self else None
        result = super().post_forward(output)
        if isinstance(ended, _ScriptForward):
            if running:
                running[-1][0].wait()  # an outer unit
            self._refuse_changes(ended.versions)
        return result

    def pre_backward(self) -> None:
        was_sharded = self.is_sharded
        if was_sharded:  # before a wait for ranks that may wait for its reductions
            self.gatherer.on_backward(self.unit_module.virtual_stage, self.index)
        super().pre_backward()
        if not was_sharded:
            self.gatherer.on_backward(self.unit_module.virtual_stage, self.index)

    def watch(self, result: Any) -> Any:
        if not isinstance(result, Tensor):
            held = [value for value in getattr(result, "__dict__", {}).values() if isinstance(value, Tensor)]
            if any(self.buffers.bucket_at(value) is not None for value in held):
                raise TypeError(f"{type(self.module).__name__} returns weights in an object: {_ONLY_WITHIN}")
            return result
        if self.buffers.bucket_at(result) is not None:
            result = result.clone()  # the next unit will use the buffer
        if result.requires_grad and torch.is_grad_enabled():
            key = id(self.gatherer)
            if result.grad_fn is None or result.grad_fn.metadata.setdefault(key, self.index) != self.index:
                result = result.view_as(result)
                result.grad_fn.metadata[key] = self.index
        return super().watch(result)

    def _refuse_changes(self, versions: Sequence[int]) -> None:
        """Raises: RuntimeError, a forward has changed a weight in place: only its copy in the gather buffer."""
        for attribute, version in zip(self.attributes, versions, strict=True):
            if attribute.parameter._version != version:
                self.gatherer.forget()  # what the buffers hold
                name = self.gatherer.name_of(attribute.parameter)
                raise RuntimeError(f"{name} was changed in place within a forward: use GatheredParameters")


class ScriptGatherer(UnitGatherer):
    """Gathers the units of a script's modules.

    Attributes:
        on_backward: called with the virtual stage and the index of a unit, before the unit's backward.
    """

    unit_type, buffers_type, order_type = ScriptUnit, ScriptBuffers, VisitHistory
    buffers: ScriptBuffers

    def __init__(self, *arguments: Any) -> None:
        self.on_backward: Callable[[int, int], None] = lambda *_: None
        self._proxies: dict[int, UngatheredParameter] = {}  # by identity of a parameter
        super().__init__(*arguments)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the qualified name of a parameter."""
        return self.places[id(parameter)][1].info.name

    def placeholder(self, parameter: nn.Parameter) -> UngatheredParameter:
        if id(parameter) not in self._proxies:
            bucket, slot = self.places[id(parameter)]
            copy = partial(self.buffers.whole_copy, bucket, slot)
            self._proxies[id(parameter)] = UngatheredParameter.of(slot.info.name, parameter, copy)
        return self._proxies[id(parameter)]

    def restore(self) -> None:
        """Give the modules their parameters back, with whole weights in their own memory.  Collective."""
        attributes = [attribute for unit in self.units for attribute in unit.attributes]
        whole = {bucket: self.buffers.whole_bucket(bucket, bucket.layout.name) for bucket in self.buckets}
        for module, key, parameter, placeholder in attributes:
            bucket, slot = self.places[id(parameter)]
            parameter.data = whole[bucket][slot.start : slot.stop].view(slot.info.shape)
            self._proxies[id(parameter)].whole = parameter
            if module._parameters[key] is placeholder:
                module._parameters[key] = parameter


class ScriptModel(ShardedModel):
    """A script's modules under ZeRO.  No gather overlaps with a forward, since the script may read parameters at any time.

    Attributes:
        names: qualified names of the modules' parameters, by id.
    """

    gatherer_type = ScriptGatherer
    reducer_type = ScriptReducer
    reducer: ScriptReducer

    def __init__(self, model: RankModel, state: ParallelState, settings: ShardingSettings) -> None:
        super().__init__(model, state, settings)
        self.names = {id(parameter): name for name, parameter in self.parameters.by_name.items()}
        self.gatherer = self.parameters.gatherer
        if isinstance(self.gatherer, ScriptGatherer):
            self.reducer.follow_units(self.gatherer)

    def plan(self, model: RankModel, settings: ShardingSettings) -> ShardingPlan:
        return plan_sharding(model, self.state, settings, hides_gathers=False)

    def restore(self) -> bool:
        """Turn the module back into a plain one with whole weights, if they fit on every rank.  Collective."""
        self.detach()
        self.begin_step(1)  # waits for the reductions under way
        if not isinstance(self.gatherer, ScriptGatherer):
            return True
        self.gatherer.forget()  # waits for the gathers under way
        device = self.state.device
        free = free_memory_bytes(device) // (1 if device.type == "cuda" else self.state.local_world_size)
        if device.type == "cuda":
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        whole_bytes = sum(bucket.weights.nbytes for bucket in self.gatherer.buckets)
        fits = all(gather_objects(whole_bytes < free, self.state.world))
        if fits:
            self.gatherer.restore()
        return fits


class ScriptModule(ScriptModel):
    """A module of a script under ZeRO.  The script may call its backward."""

    reducer_type = ModuleReducer


class BoundParameters:
    """The parameters of a module at the time when it was sharded, and a check that the module still computes with them.

    A script may freeze, replace or add a parameter at any time.  Without the check, training would silently ignore that.

    Args:
        model: the sharded module.

    Attributes:
        home: bucket and slot of each parameter, by name.
        copies: all copies of each bucket on this rank, in an order that is the same on all ranks.
        modifiers: the `modifier_rank` of the open GatheredParameters block of a parameter, by name.
    """

    def __init__(self, module: nn.Module, model: ScriptModel) -> None:
        self._module, self._names, self._parameters = module, model.names, model.parameters
        self._held = dict(_held_in(module))
        self.home = {
            slot.info.name: (bucket, index)
            for bucket in model.parameters.buckets
            for index, slot in enumerate(bucket.layout.slots)
        }
        self.copies = {bucket: copies for copies in copies_of_buckets(model.parameters.buckets) for bucket in copies}
        self.modifiers: dict[str, int | None] = {}

    def find(self, names: Iterable[str]) -> dict[str, tuple[Bucket, int]]:
        """Return the bucket and slot of each parameter, by any of its names.  Raises: KeyError: a name is unknown."""
        tied = {name: self._names[id(held)] for name, held in self._held.items() if id(held) in self._names}
        found = {name: self.home.get(tied.get(name, name)) for name in names}
        if missing := [name for name, home in found.items() if home is None]:
            near = did_you_mean(closest(missing[0], self.home))
            raise KeyError(f"{missing[0]} is no parameter of this rank's model; {near}")
        return {name: home for name, home in found.items() if home is not None}

    def check(self) -> None:
        """Check the module.  Raises: RuntimeError: a parameter was frozen, unfrozen, replaced, tied or added since."""
        now = dict(_held_in(self._module))
        changed = [name for name, parameter in self._held.items() if now.get(name) is not parameter]
        changed += [name for name in now.keys() - self._held.keys() if now[name].requires_grad]
        for bucket in self._parameters.buckets:
            memory, itemsize = storage_of(bucket.weights), bucket.weights.itemsize
            for slot in bucket.layout.slots:
                parameter = self._parameters.by_name[slot.info.name]
                is_here = address_of(parameter) == (memory, slot.start * itemsize)
                if not is_here or parameter.requires_grad != slot.info.trains:
                    changed.append(slot.info.name)
        if changed:
            raise RuntimeError(f"parameter {changed[0]} was frozen, unfrozen, tied, added, replaced: initialize anew")


def _held_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name of every attribute of a module's submodules that holds a parameter, and the parameter."""
    for prefix, submodule in module.named_modules():
        for key, parameter in submodule._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, real(parameter)
