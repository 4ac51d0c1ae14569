"""Flat buckets that hold a model's parameters: how values get there, and how modules and ranks see them.

modules --describe--> buckets --bind--> every module's parameter is a view of its bucket
init_weights          new values, or
load_from_module      the module's own values, into the shards that this rank owns
sync_from_master      master weights -> weight shards, and then
all_gather_weights    weight shards -> full weights, unless they stay sharded; after a step, behind the next forward
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megazero.comm.agreement import agree
from megazero.comm.collectives import broadcast, largest, runs_by_itself
from megazero.comm.memory import StorageError
from megazero.config.schema import ZeroConfig
from megazero.parallel_state import Axis, ParallelState
from megazero.registry import added
from megazero.zero.bucket import Bucket, BucketLayout, ParamInfo, ShardingPolicy, intersect, plan_buckets
from megazero.zero.bucket_sizes import BucketSizes, bucket_sizes
from megazero.zero.gather import UnitGatherer
from megazero.zero.gather_buffers import BufferPlan, UnitPlace, plan_buffers
from megazero.zero.offload import Offload
from megazero.zero.storage import Location
from megazero.zero.units import ModelParam, UnitModule
from megazero.zero.weight_gathers import WeightGathers

_ALONE = Axis("world")
_MORE_FOR_BUCKETS = 1 / 32  # gather buffers may grow by this fraction so that units have several buckets
SECONDARY_SHARD = "secondary_shard"  # the key in `memory_bytes`

# Returns the initial values of a parameter that has no memory yet, by its name; None if they are not known.  It is
# called once for each.
DeferredValues: TypeAlias = Callable[[str], Tensor | None]


class ShardedParameters:
    """Moves a model's parameters into buckets and holds the buckets.

    Args:
        units: modules that stage 3 gathers one at a time, in forward order; together they hold every parameter.
        described: every parameter once, in forward order; those on the meta device get their values shard by shard.
        zero: sizes and policies; no key of `zero.offload` is "auto".
        ties: the ranks that hold a copy of each tied parameter, by logical name.
        moments: arrays of optimizer state per element; a file reserves space for them.
        rank: part of the file's name.
        world: all ranks.  Their buckets have one size, and if one rank cannot allocate, all fail together.
        gatherer_type: gathers the units of stage 3.
        hides_gathers: gathers may run behind the next forward: nothing reads weights after an update without `wait`,
            except a unit's own forward.

    Attributes:
        sizes: sizes of buckets and of the working buffers of gradients.
        gathers: brings updated weights to every rank.
        hides_gathers: the request above, and the network sends without this rank's help.
        gather_plan: the buckets that share a gather buffer.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        described: Sequence[ModelParam],
        policy: ShardingPolicy,
        zero: ZeroConfig,
        ties: Mapping[str, Axis],
        moments: int = 0,
        rank: int = 0,
        world: Axis = _ALONE,
        *,
        gatherer_type: type[UnitGatherer] = UnitGatherer,
        hides_gathers: bool = False,
    ) -> None:
        self.policy = policy
        placements = [one.placement or policy.placement for one in described]
        shards = max(placement.shard.size for placement in placements)
        by_unit = policy.zero_stage == 3 and (shards > 1 or zero.offload.parameters != "none")
        infos = _describe_parameters(units, described, policy, zero)
        cuts = policy.zero_stage >= 2 and (shards > 1 or zero.offload.optimizer != "none")
        self.sizes = self._sizes(zero, sum(prod(info.shape) for info in infos), world, cuts=cuts)
        chunks = [UnitPlace(unit.chunk, unit.beside) for unit in units]
        ahead = zero.prefetch_bytes // policy.dtype.itemsize

        def planned(*, cuts_units: bool) -> tuple[tuple[BucketLayout, ...], BufferPlan]:
            layouts = plan_buckets(
                infos,
                by_unit=by_unit,
                bucket_elements=self.sizes.elements,
                cuts=cuts,
                part_elements=self.sizes.part_elements,
                cuts_units=cuts_units,
                align=policy.align,
            )
            return layouts, plan_buffers(layouts, chunks, zero.gather_policy, ahead) if by_unit else BufferPlan(())

        layouts, self.gather_plan = planned(cuts_units=False)
        if self.sizes.cuts_units and by_unit:
            finer = planned(cuts_units=True)
            if finer[1].elements <= (1 + _MORE_FOR_BUCKETS) * self.gather_plan.elements:
                layouts, self.gather_plan = finer
        self.offload = agree(partial(Offload, zero.offload, policy, layouts, moments, rank), world, StorageError)
        buffers = self.gather_plan.allocate(policy.dtype, policy.device)
        self.buckets: list[Bucket] = []
        agree(partial(self._make_buckets, layouts, buffers, ties), world, StorageError)
        self._originals = {one.name: one.parameter.data for one in described if not one.parameter.is_meta}
        self.by_name: dict[str, nn.Parameter] = {}
        self._bind({one.name: one.parameter for one in described}, units)
        slots = [(bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots]
        places = {id(self.by_name[slot.info.name]): (bucket, slot) for bucket, slot in slots}
        self.gathers: WeightGathers = added("weight gathers").get("cpu" if policy.on_cpu else "cuda", WeightGathers)()
        # Ask every axis, without short-circuiting: all of its ranks must take part, and the axes may disagree.
        by_themselves = [runs_by_itself(axis) for axis in dict.fromkeys(placement.shard for placement in placements)]
        self.hides_gathers = hides_gathers and all(by_themselves)
        if hides_gathers:
            self.gathers.defer_steps(self.buckets, self.sizes.elements, world, can=self.hides_gathers)
        if self.hides_gathers:
            self.gathers.attach(units, places)
        self.gatherer: UnitGatherer | None = None
        if by_unit:
            self.gatherer = gatherer_type(units, places, policy, zero.prefetch_bytes)

    def _sizes(self, zero: ZeroConfig, elements: int, world: Axis, *, cuts: bool) -> BucketSizes:
        """Return the bucket sizes, the same on all ranks, even if only some ranks share their host's memory:
        collectives over dp, replicas, tp and ties sum over whole buckets.
        """
        policy, placement, hides = self.policy, self.policy.placement, False
        if zero.bucket_bytes == "auto":
            # Call both, without short-circuiting: every rank of an axis must take part, and the axes may disagree.
            by_themselves = any([runs_by_itself(placement.shard), runs_by_itself(placement.replica)])
            most, some_wait = largest([elements, not by_themselves], world)
            elements, hides = int(most), not some_wait
        return bucket_sizes(zero.bucket_bytes, policy, elements, cuts=cuts, hides=hides)

    def _make_buckets(
        self, layouts: Sequence[BucketLayout], buffers: Mapping[str, Tensor], ties: Mapping[str, Axis]
    ) -> None:
        seen = set[str]()
        for layout in layouts:
            bucket = Bucket(layout, self.policy, buffers.get(layout.name), self.offload)
            if layout.tie is not None:
                bucket.is_duplicate = layout.tie in seen or (layout.tie in ties and ties[layout.tie].index > 0)
                seen.add(layout.tie)
            self.buckets.append(bucket)

    def _bind(self, originals: dict[str, nn.Parameter], units: Sequence[UnitModule]) -> None:
        """Make every module's parameter a view of its bucket.  A shared parameter stays shared."""
        bound: dict[int, nn.Parameter] = {}
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                # `.data` gives the view its own version counter.  When weights are gathered into the buffer again, autograd
                # must not see that as a change of the weights it saved: only an update is one.
                view = bucket.weights.data[slot.start : slot.stop].view(slot.info.shape)
                original = originals[slot.info.name]
                # Keep the user's parameter object, unless its memory cannot be replaced by the view.
                same_kind = not original.is_meta and original.device == view.device
                if same_kind:
                    original.data = view
                new = original if same_kind else nn.Parameter(view, requires_grad=original.requires_grad)
                bound[id(original)] = self.by_name[slot.info.name] = new
        for unit in units:
            for part, key in unit.attributes:
                parameter = part._parameters[key]
                part._parameters[key] = bound.get(id(parameter), parameter)

    def init_weights(self, seed: int, state: ParallelState) -> None:
        """Give every parameter its initial value, a function of (seed, canonical name, element) only."""
        self.gathers.wait()
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                run = intersect(slot.interval, bucket.owned)
                if run is not None:
                    part, axis = torch.empty(run.size, device=self.policy.device), slot.info.spec.axis(state)
                    slot.info.spec.init_weights(part, run.start - slot.start, axis.index, axis.size, seed)
                    bucket.write(bucket.master, run, part)
        self.sync_from_master()

    def load_from_module(
        self, dp: Axis, tp: Axis, ties: Mapping[str, Axis], deferred: DeferredValues = lambda _: None
    ) -> None:
        """Copy the values that the model was built with to the buckets.  All ranks get those of the first data-parallel
        rank.

        Args:
            dp, tp, ties: see `overwrite`.
            deferred: returns the values of a parameter on the meta device.

        Raises:
            ValueError: a parameter has no values.
        """
        for copies in self.distinct_buckets():
            flats = [self._whole_values(bucket, deferred, is_source=dp.index == 0) for bucket in copies]
            self.overwrite(copies, flats[0], dp, tp, ties)
        self.all_gather_weights()

    def _whole_values(self, bucket: Bucket, deferred: DeferredValues, *, is_source: bool) -> Tensor:
        """Return the values that a bucket's parameters were built with, fp32 [padded]; zeros unless this rank is the
        source.
        """
        flat = torch.zeros(bucket.layout.padded_numel, device=self.policy.device)
        for slot in bucket.layout.slots:
            name = slot.info.name
            values = self._originals.pop(name, None)
            if is_source:
                values = deferred(name) if values is None else values
                if values is None:
                    hint = "build the model under zero.Init()"
                    raise ValueError(f"parameter {name} is on the meta device, without values; {hint}")
                flat[slot.start : slot.stop].copy_(values.detach().reshape(-1))
        return flat

    def distinct_buckets(self) -> list[list[Bucket]]:
        """Return the buckets that hold different values, each with all its copies on this rank, in an order that all
        ranks share.
        """
        found: dict[str, list[Bucket]] = {}
        # Ranks have tied parameters at different places; sorted by name, the order is the same on all.
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.layout.tie or ""):
            key = bucket.layout.name if bucket.layout.tie is None else f"tied {bucket.layout.tie}"
            found.setdefault(key, []).append(bucket)
        return list(found.values())

    def overwrite(
        self, copies: Sequence[Bucket], flat: Tensor, dp: Axis, tp: Axis, ties: Mapping[str, Axis], source: int = 0
    ) -> None:
        """Make one data-parallel rank's values the master weights and weight shards of every rank.  A collective call.

        Args:
            copies: one list of `distinct_buckets`.
            flat: full values of the bucket, fp32 [padded].
            tp: ranks that become equal in the parameters that tp does not split.
            ties: ranks that become equal in a tied parameter, by logical name.
            source: index of the rank in `dp` that sends its values.
        """
        self.gathers.wait()
        layout = copies[0].layout
        broadcast(flat, dp, source).wait()
        for whole, run in layout.intervals(lambda info: info.spec.split is None):
            if whole:
                broadcast(flat[run.start : run.stop], tp).wait()
        if layout.tie is not None and layout.tie in ties:
            broadcast(flat, ties[layout.tie]).wait()
        for bucket in copies:
            mine = flat[bucket.owned.start : bucket.owned.stop]
            bucket.write(bucket.master, bucket.owned, mine)
            if bucket.master is not bucket.weight_shard:
                bucket.write(bucket.weight_shard, bucket.owned, mine)

    def sync_from_master(self) -> None:
        """Copy initialised or loaded master weights to the modules' weights, and gather them."""
        self._originals.clear()
        self.gathers.wait()
        for bucket in self.buckets:
            if bucket.master is not bucket.weight_shard:
                bucket.write(bucket.weight_shard, bucket.owned, bucket.read(bucket.master, bucket.owned))
        self.all_gather_weights()

    def all_gather_weights(self, *, changed: Sequence[Bucket] | None = None) -> None:
        """Make the changed weights of all ranks visible to modules.

        Args:
            changed: the changed buckets; None: all.
        """
        buckets = self.buckets if changed is None else changed
        self.note_change(buckets)
        self.gathers.gather(buckets)

    def start_gather(self, bucket: Bucket, step: Callable[[], object] | None = None) -> None:
        """Start to gather an updated bucket for the next forward.  For `step` see `WeightGathers.start`."""
        self.gathers.start(bucket, step)
        if self.gatherer is not None:
            self.gatherer.buffers.source.prepare(bucket)
            if bucket in self.gatherer.first:  # it is one of the first that a forward uses
                self.gatherer.buffers.unshard(bucket)

    def note_change(self, buckets: Sequence[Bucket]) -> None:
        """Forget the gathered weights of these buckets: they have changed, or will change before the next forward of
        their units.
        """
        parameters = [self.by_name[slot.info.name] for bucket in buckets for slot in bucket.layout.slots]
        increment_version(parameters)  # so that autograd refuses the backward of an earlier forward
        if self.gatherer is not None:
            self.gatherer.forget()

    def absent_gradient_bytes(self) -> int:
        """Bytes in `memory_bytes` of gradients that are not allocated yet in this step."""
        return sum(bucket.full_gradient_bytes for bucket in self.buckets if bucket.full_gradient is None)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state at the end of a step, by kind, and by location unless it is the device."""
        sizes = Counter(parameters=0, gradients=0, gather_buffers=self.gatherer.buffers.nbytes if self.gatherer else 0)
        if self.policy.placement.secondary is not None and self.gatherer is not None:
            sizes[SECONDARY_SHARD] = self.gatherer.buffers.source.secondary_bytes
        for bucket in self.buckets:
            if bucket.holds_weights:
                sizes["parameters"] += bucket.weights.nbytes
            else:
                sizes[memory_kind("parameters", bucket.weight_shard.location)] += bucket.weight_shard.nbytes
            if bucket.master is not bucket.weight_shard:
                sizes[memory_kind("parameters", bucket.master.location)] += bucket.master.nbytes
            sizes["gradients"] += bucket.full_gradient_bytes
            if not bucket.reduces_in_place:
                on_device = bucket.residency.state_on == "device"
                sizes[memory_kind("gradients", "device" if on_device else "host")] += bucket.gradient.nbytes
        return dict(sizes)


def memory_kind(kind: str, location: Location) -> str:
    """Return the key of a kind of memory: `optimizer` on the device, `optimizer on host` elsewhere."""
    return kind if location == "device" else f"{kind} on {location}"


def _describe_parameters(
    units: Sequence[UnitModule], described: Sequence[ModelParam], policy: ShardingPolicy, zero: ZeroConfig
) -> list[ParamInfo]:
    """Return what the bucket planner must know of each parameter."""
    users: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        for part, key in unit.attributes:
            users.setdefault(id(part._parameters[key]), set()).add(index)
    # Vectors stay whole beside matrices that travel in fp8, in buckets of their own: they would need more messages.
    in_fp8 = {min(users.get(id(one.parameter), [-1])) for one in described if one.spec.in_fp8_squares}
    infos = []
    for one in described:
        used_by = users.get(id(one.parameter))
        if not used_by:
            raise ValueError(f"parameter {one.name} belongs to no unit; every parameter must lie in one of the units")
        if not one.parameter.is_floating_point():
            raise ValueError(f"parameter {one.name} is {one.parameter.dtype}; only floating-point parameters can train")
        shape, index, trains = tuple(one.parameter.shape), min(used_by), one.parameter.requires_grad
        placement = one.placement or policy.placement
        is_alone = one.spec.buffer or (placement.shard.size == 1 and zero.offload.parameters == "none")
        is_small = prod(shape) <= zero.persistent_elements or (len(shape) == 1 and index in in_fp8)
        persistent = policy.zero_stage == 3 and (is_alone or is_small)
        alone = not persistent and (len(used_by) > 1 or units[index].spans_others)
        chunk = units[index].chunk
        infos.append(
            ParamInfo(
                one.name, shape, one.spec, index, chunk, one.group, trains, persistent, alone, one.matrix, placement
            )
        )
    return infos
