"""Flat buckets that hold a model's parameters: how values get there, and how modules and ranks see them.

modules --describe--> buckets --bind--> every module's parameter is a view of its bucket
init_weights          new values, or
load_from_module      the module's own values, into the shards that this rank owns
sync_from_master      master weights -> weight shards, and then
all_gather_weights    weight shards -> full weights, unless they stay sharded; after a step, behind the next forward
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from megazero.comm.agreement import agree
from megazero.comm.collectives import broadcast
from megazero.comm.memory import StorageError
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.bucket import Bucket, Landing
from megazero.zero.bucket_plan import ShardingPlan
from megazero.zero.gather import UnitGatherer, plan_gathers
from megazero.zero.sharding import intersect
from megazero.zero.storage import Location
from megazero.zero.units import ModelParts, UnitModule
from megazero.zero.weight_gathers import WeightGathers

SECONDARY_SHARD = "secondary_shard"  # the key in `memory_bytes`

# Returns the initial values of a parameter that has no memory yet, by its name; None if they are not known.  It is
# called once for each.
DeferredValues: TypeAlias = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class Gathering:
    """How the updated weights are gathered for the modules.

    Args:
        hides: gathers may overlap the next forward: only a unit's own forward reads weights after an update without
            calling `wait`.
        gatherer_type: gathers the units of stage 3.
    """

    hides: bool = True
    gatherer_type: type[UnitGatherer] = UnitGatherer


class ShardedParameters:
    """Moves a model's parameters into buckets and holds the buckets.

    Args:
        parts: the model; its parameters on the meta device are initialised shard by shard.
        state: this rank's groups and device.  If one rank of the world cannot allocate, all ranks fail together.

    Attributes:
        sizes: sizes of buckets and of the working buffers of gradients.
        memory: allocates what this rank holds.
        gathers: brings updated weights to every rank.
        hides_gathers: gathers overlap the next forward, because the model allows it and the network sends without this
            rank's help.
    """

    def __init__(self, parts: ModelParts, plan: ShardingPlan, state: ParallelState, gathering: Gathering) -> None:
        self.policy, self.sizes, self.memory = plan.policy, plan.sizes, plan.memory
        self.hides_gathers, world = plan.hides_gathers, state.world
        agree(partial(plan.memory.open, state.rank), world, StorageError)
        self.buckets: list[Bucket] = []
        agree(partial(self._make_buckets, plan, parts.ties), world, StorageError)
        self._originals = {param.name: param.parameter.data for param in parts.described if not param.parameter.is_meta}
        self.by_name: dict[str, nn.Parameter] = {}
        self._bind({param.name: param.parameter for param in parts.described}, parts.units)
        slots = [(bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots]
        places = {id(self.by_name[slot.info.name]): (bucket, slot) for bucket, slot in slots}
        self.gathers = WeightGathers(
            {bucket: [self.by_name[slot.info.name] for slot in bucket.layout.slots] for bucket in self.buckets}
        )
        if self.hides_gathers:
            self.gathers.attach(parts.units, places)
        self.gatherer: UnitGatherer | None = None
        if plan.buffers is not None:
            self.gatherer = gathering.gatherer_type(plan_gathers(parts.units, places, plan.prefetch_bytes), self.policy)
            self.gathers.gatherer = self.gatherer

    def _make_buckets(self, plan: ShardingPlan, ties: Mapping[str, Axis]) -> None:
        seen, buffers = set[str](), dict[str, Tensor]()
        if plan.buffers is not None:
            buffers = plan.buffers.allocate(self.policy.dtype, self.policy.device)
        for layout in plan.layouts:
            bucket = Bucket(layout, self.memory, buffers.get(layout.name))
            if layout.tie is not None:
                bucket.is_duplicate = layout.tie in seen or (layout.tie in ties and ties[layout.tie].index > 0)
                seen.add(layout.tie)
            self.buckets.append(bucket)

    def _bind(self, originals: dict[str, nn.Parameter], units: Sequence[UnitModule]) -> None:
        """Make every module's parameter a view of its bucket.  Modules that share a parameter keep sharing it."""
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
            for module, key in unit.attributes:
                parameter = module._parameters[key]
                module._parameters[key] = bound.get(id(parameter), parameter)

    def init_weights(self, seed: int, state: ParallelState) -> None:
        """Initialise every parameter.  An initial value depends only on the seed, the canonical name and the element's
        index.
        """
        self.gathers.wait()
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                run = intersect(slot.interval, bucket.owned)
                if run is not None:
                    values, axis = torch.empty(run.size, device=self.policy.device), slot.info.spec.axis(state)
                    slot.info.spec.init_weights(values, run.start - slot.start, axis.index, axis.size, seed)
                    bucket.write(bucket.master, run, values)
        self.sync_from_master()

    def load_from_module(
        self, dp: Axis, tp: Axis, ties: Mapping[str, Axis], deferred: DeferredValues = lambda _: None
    ) -> None:
        """Copy the values that the model was built with into the buckets.  All ranks get the values of the first
        data-parallel rank.

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
        """Return the values that a bucket's parameters were built with, fp32 [padded]; zeros if this rank is not the
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
        """Group the buckets of this rank by value: each list holds all copies of one bucket.  The order is the same on
        all ranks.
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
        """Broadcast one data-parallel rank's values to the master weights and weight shards of every rank.  A collective
        call.

        Args:
            copies: all copies of one bucket on this rank, as `distinct_buckets` lists them.
            flat: full values of the bucket, fp32 [padded].
            tp: the axis over which parameters that tp does not split are made equal.
            ties: the axis over which a tied parameter is made equal, by logical name.
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
        """All-gather changed weights, so that the modules of every rank see them.

        Args:
            changed: the changed buckets; None: all.
        """
        buckets = self.buckets if changed is None else changed
        self.gathers.invalidate(buckets)
        self.gathers.gather(buckets)

    def absent_gradient_bytes(self) -> int:
        """Bytes of gradients that `memory_bytes` counts although they are not allocated yet in this step."""
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
            if bucket.landing is not Landing.IN_PLACE:
                on_device = bucket.residency.state_on == "device"
                sizes[memory_kind("gradients", "device" if on_device else "host")] += bucket.gradient.nbytes
        return dict(sizes)


def memory_kind(kind: str, location: Location) -> str:
    """Return the key of a kind of memory: `optimizer` on the device, `optimizer on host` elsewhere."""
    return kind if location == "device" else f"{kind} on {location}"
