"""Flat buckets that hold a model's parameters: how values get there, and how modules and ranks see them.

modules --describe--> buckets --bind--> every module's parameter is a view of its bucket
init_weights          new values, into the shards that this rank owns
sync_from_master      master weights -> weight shards, and then
all_gather_weights    weight shards -> full weights, unless they stay sharded; after a step, behind the next forward
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megazero.comm.agreement import agree
from megazero.comm.memory import StorageError
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.bucket import Bucket, Landing
from megazero.zero.bucket_plan import ShardingPlan
from megazero.zero.gather import UnitGatherer, plan_gathers
from megazero.zero.sharding import intersect
from megazero.zero.storage import Location
from megazero.zero.units import RankModel, UnitModule
from megazero.zero.weight_gathers import WeightGathers

SECONDARY_SHARD = "secondary_shard"  # the key in `memory_bytes`


class ShardedParameters:
    """Moves a model's parameters into buckets and holds the buckets.

    Args:
        model: its parameters on the meta device are initialised shard by shard.
        gatherer: class that gathers the units of stage 3.
        state: this rank's groups and device.  If one rank of the world cannot allocate, all ranks fail together.

    Attributes:
        sizes: sizes of buckets and of the working buffers of gradients.
        memory: allocates what this rank holds.
        gathers: brings updated weights to every rank.
        hides_gathers: gathers overlap the next forward, because the model allows it and the network sends without this
            rank's help.
    """

    def __init__(
        self, model: RankModel, plan: ShardingPlan, state: ParallelState, gatherer: type[UnitGatherer]
    ) -> None:
        self.policy, self.sizes, self.memory = plan.policy, plan.sizes, plan.memory
        self.hides_gathers, world = plan.hides_gathers, state.world
        agree(partial(plan.memory.open, state.rank), world, StorageError)
        self.buckets: list[Bucket] = []
        agree(partial(self._make_buckets, plan, model.ties), world, StorageError)
        self.by_name: dict[str, nn.Parameter] = {}
        self._bind({param.name: param.parameter for param in model.params}, model.units)
        slots = [(bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots]
        places = {id(self.by_name[slot.info.name]): (bucket, slot) for bucket, slot in slots}
        self.gathers = WeightGathers(
            {bucket: [self.by_name[slot.info.name] for slot in bucket.layout.slots] for bucket in self.buckets}
        )
        if self.hides_gathers:
            self.gathers.attach(model.units, places)
        self.gatherer: UnitGatherer | None = None
        if plan.buffers is not None:
            self.gatherer = gatherer(plan_gathers(model.units, places, plan.prefetch_bytes), self.policy)
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
                # Keep the module's parameter object, unless its memory cannot be replaced by the view.
                in_place = not original.is_meta and original.device == view.device
                if in_place:
                    original.data = view
                new = original if in_place else nn.Parameter(view, requires_grad=original.requires_grad)
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
                owned = intersect(slot.interval, bucket.owned)
                if owned is not None:
                    values, axis = torch.empty(owned.size, device=self.policy.device), slot.info.spec.axis(state)
                    slot.info.spec.init_weights(values, owned.start - slot.start, axis.index, axis.size, seed)
                    bucket.write(bucket.master, owned, values)
        self.sync_from_master()

    def sync_from_master(self) -> None:
        """Copy initialised or loaded master weights to the modules' weights, and gather them."""
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
                sizes[memory_key("parameters", bucket.weight_shard.location)] += bucket.weight_shard.nbytes
            if bucket.master is not bucket.weight_shard:
                sizes[memory_key("parameters", bucket.master.location)] += bucket.master.nbytes
            sizes["gradients"] += bucket.full_gradient_bytes
            if bucket.landing is not Landing.IN_PLACE:
                on_device = bucket.residency.state_on == "device"
                sizes[memory_key("gradients", "device" if on_device else "host")] += bucket.gradient.nbytes
        return dict(sizes)


def memory_key(name: str, location: Location) -> str:
    """Return the key of an entry in `memory_bytes`: `optimizer` on the device, `optimizer on host` elsewhere."""
    return name if location == "device" else f"{name} on {location}"
