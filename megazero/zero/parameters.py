"""A model's parameters in flat buckets: how they get there, how modules see them, what of them a rank holds.

    modules --describe--> buckets --bind--> every module's parameter is a view of its bucket
    draw / adopt          initial values, into the shards that this rank owns
    publish               master weights -> weights, gathered where every rank keeps them whole

A policy is which units of stage 3 share a gather buffer, and with it how long a gathered unit stays:
    action    two buffers for all units: every forward and backward gathers anew; least memory
    chunk     units at the same place of different chunks: a chunk stays until another chunk runs
    step      each unit its own: gathered once per step; the memory of whole weights
A parameter that several units use, or that is in use while others run, has a buffer of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from megazero.comm.collectives import agree, all_gather, broadcast
from megazero.layers.spec import numel
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, BucketLayout, ParamInfo, ShardingPolicy, intersect, plan_buckets
from megazero.zero.gather import UnitGatherer
from megazero.zero.gradients import tie_of
from megazero.zero.meta_init import MetaParameter
from megazero.zero.offload import OffloadPlan
from megazero.zero.storage import StorageError
from megazero.zero.units import Described, Unit

GatherPolicy: TypeAlias = Literal["action", "chunk", "step"]

# Gradients up to this size find room where the backward has freed activations; a larger block the C library maps anew.
_UNSENT_BYTES = 4 * 2**20


class ShardedParameters:
    """Moves a model's parameters into buckets and keeps the buckets.

    Args:
        units: the modules that stage 3 gathers one at a time, in forward order; together they hold every parameter.
        described: every parameter once, in forward order.  Parameters may be on the meta device: their values are drawn,
            adopted or loaded shard by shard.
        policy: stage, dtypes and axes.
        bucket_bytes: size of a bucket, in bytes of fp32 gradients; on a CPU less where nothing is sent.
        ties: by logical name of a tied parameter, the ranks that hold a copy.
        gather_policy: how long ZeRO-3 keeps a gathered unit.
        resident_elements: ZeRO-3 keeps parameters of at most so many elements whole.
        offload: what leaves the device; nothing when None.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        described: Sequence[Described],
        policy: ShardingPolicy,
        *,
        bucket_bytes: int,
        ties: Mapping[str, Axis],
        gather_policy: GatherPolicy = "action",
        resident_elements: int = 0,
        offload: OffloadPlan | None = None,
    ) -> None:
        self.policy, offload = policy, offload or OffloadPlan()
        wants_units = policy.zero_stage == 3
        infos, alone = _assign(units, described, resident_elements if wants_units else 0)
        by_unit = wants_units and (policy.shard.size > 1 or offload.moves_weights)
        if policy.device.type == "cpu" and not policy.sends:
            bucket_bytes = min(bucket_bytes, _UNSENT_BYTES)
        layouts = plan_buckets(infos, by_unit=by_unit, bucket_elements=bucket_bytes // 4, shards=policy.shard.size)
        self.offload = offload.place(layouts, policy)
        chunk_of = [unit.chunk for unit in units]
        starts = [chunk_of.index(chunk) for chunk in chunk_of]  # the first unit of each unit's chunk
        keys = {
            layout.name: _buffer_key(layout, gather_policy, starts, alone)
            for layout in layouts
            if by_unit and not layout.persistent
        }
        self.gather_buffers = _make_gather_buffers(layouts, keys, policy)
        self.buckets: list[Bucket] = []
        agree(partial(self._make_buckets, layouts, keys, ties), offload.world, StorageError)
        self._originals = {one.name: one.parameter.data for one in described if not one.parameter.is_meta}
        self._deferred = {one.name: one.parameter for one in described if isinstance(one.parameter, MetaParameter)}
        self.by_name: dict[str, nn.Parameter] = {}
        self._bind({one.name: one.parameter for one in described}, units)
        self.gatherer = UnitGatherer(units, self._home(), self.by_name, policy.shard) if by_unit else None

    def _make_buckets(self, layouts: Sequence[BucketLayout], keys: Mapping[str, str], ties: Mapping[str, Axis]) -> None:
        for layout in layouts:
            buffer = self.gather_buffers.get(keys.get(layout.name, ""))
            self.buckets.append(
                Bucket(
                    layout,
                    self.policy,
                    None if buffer is None else buffer[: layout.padded_numel],
                    self.offload.master(layout),
                    self.offload.weights() if buffer is not None else None,
                    buffer is not None and self.offload.shares_weights(layout),
                    layout.tied and self._is_second(layout, ties),
                )
            )

    def _is_second(self, layout: BucketLayout, ties: Mapping[str, Axis]) -> bool:
        name = layout.slots[0].info.spec.sections[0].name
        return (name in ties and ties[name].index > 0) or any(
            bucket.layout.tied and tie_of(bucket) == name for bucket in self.buckets
        )

    def _home(self) -> dict[str, Bucket]:
        return {slot.info.name: bucket for bucket in self.buckets for slot in bucket.layout.slots}

    def _bind(self, originals: dict[str, nn.Parameter], units: Sequence[Unit]) -> None:
        """Make every module's parameter a view of its bucket; a shared parameter stays shared."""
        bound: dict[int, nn.Parameter] = {}
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                original, view = originals[slot.info.name], bucket.module_view(slot)
                # The user's own object stays the module's parameter, unless it has no memory that could be exchanged.
                same_kind = not original.is_meta and original.device == view.device
                if same_kind:
                    original.data = view
                new = original if same_kind else nn.Parameter(view, requires_grad=original.requires_grad)
                bound[id(original)] = self.by_name[slot.info.name] = new
        for unit in units:
            for part, key in unit.places:
                parameter = part._parameters[key]
                part._parameters[key] = bound.get(id(parameter), parameter)

    def init_weights(self, seed: int, tp: Axis) -> None:
        """Give every parameter its initial value, a function of (seed, canonical name, element) alone."""
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                run = intersect(slot.run, bucket.owned)
                if run is not None:
                    part = torch.empty(run.stop - run.start, device=self.policy.device)
                    slot.info.spec.init_weights(part, run.start - slot.start, tp.index, tp.size, seed)
                    bucket.write(bucket.master, run, part)
        self.sync_from_master()

    def load_from_module(self, seed: int, dp: Axis, tp: Axis, ties: Mapping[str, Axis]) -> None:
        """Take over the values that the model was built with; those of the first data-parallel rank count.

        Args:
            seed: of the random values of a model that was built under `zero.Init`.
            dp, tp: ranks that must start equal: all of dp, and of tp for what each of its ranks holds whole.
            ties: by logical name of a tied parameter, the ranks that hold a copy.

        Raises:
            ValueError: a parameter has no values.
        """
        shared: dict[str, Tensor] = {}
        # Holders of tied parameters meet them in different orders of their own; names are one order for all.
        for bucket in sorted(self.buckets, key=lambda bucket: tie_of(bucket) if bucket.layout.tied else ""):
            layout = bucket.layout
            flat = torch.zeros(layout.padded_numel, device=self.policy.device)
            for slot in layout.slots:
                values = self._initial(slot.info.name, seed, is_source=dp.index == 0)
                if values is not None:
                    flat[slot.start : slot.stop].copy_(values.detach().reshape(-1))
            broadcast(flat, dp).wait()
            for whole, run in layout.runs(lambda info: info.spec.split is None):
                if whole:
                    broadcast(flat[run.start : run.stop], tp).wait()
            if layout.tied and tie_of(bucket) in shared:
                flat = shared[tie_of(bucket)]  # another copy on this rank
            elif layout.tied:
                shared[tie_of(bucket)] = flat
                if tie_of(bucket) in ties:
                    broadcast(flat, ties[tie_of(bucket)]).wait()
            self.overwrite(bucket, flat)
        self.all_gather_weights()

    def _initial(self, name: str, seed: int, *, is_source: bool) -> Tensor | None:
        """A parameter's values, and its memory back; None on a rank whose values do not count."""
        value, deferred = self._originals.pop(name, None), self._deferred.pop(name, None)
        if not is_source:
            return None
        if deferred is not None:
            return deferred.replay(seed, name)
        if value is None:
            raise ValueError(
                f"parameter {name} is on the meta device, without values; build the model under zero.Init()"
            )
        return value

    def overwrite(self, bucket: Bucket, flat: Tensor) -> None:
        """Replace a bucket's master weights, and the weights that this rank owns, by whole values, [padded]."""
        mine = flat[bucket.owned.start : bucket.owned.stop]
        bucket.write(bucket.master, bucket.owned, mine)
        if bucket.master is not bucket.weight_shard:
            bucket.write(bucket.weight_shard, bucket.owned, mine)

    def sync_from_master(self, *, gathers: bool = True) -> None:
        """Let modules see master weights that were drawn or loaded.

        Args:
            gathers: take the weights that other ranks own from them; False where they are there already.
        """
        self._originals.clear()
        self._deferred.clear()
        for bucket in self.buckets:
            if bucket.master is not bucket.weight_shard:
                bucket.write(bucket.weight_shard, bucket.owned, bucket.read(bucket.master, bucket.owned))
        self.all_gather_weights(gathers=gathers)

    def all_gather_weights(self, *, gathers: bool = True) -> None:
        """Let modules see the weights that this rank and others own, after they have changed; see `sync_from_master`."""
        pendings = [
            all_gather(bucket.weights, bucket.weights[bucket.owned.start : bucket.owned.stop], self.policy.shard)
            for bucket in self.buckets
            if gathers and bucket.keeps_weights and bucket.owned != bucket.layout.whole
        ]
        for pending in pendings:
            pending.wait()
        if self.gatherer is not None:
            self.gatherer.forget()

    def absent_gradient_bytes(self) -> int:
        """Of the bytes in `memory_bytes`, those of gradients of which none has come yet in this step."""
        return sum(bucket.full_gradient_bytes for bucket in self.buckets if bucket.full_gradient is None)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state at the end of a step, by kind and, but for the device, place."""
        sizes: Counter[str] = Counter(parameters=0, gradients=0, gather_buffers=0)
        for bucket in self.buckets:
            if bucket.keeps_weights:
                sizes["parameters"] += bucket.weights.nbytes
            else:
                sizes[_at("parameters", bucket.weight_shard.place)] += bucket.weight_shard.nbytes
            if bucket.master is not bucket.weight_shard:
                sizes[_at("parameters", bucket.master.place)] += bucket.master.nbytes
            sizes["gradients"] += bucket.full_gradient_bytes
            if not bucket.reduces_in_place:
                place = "device" if bucket.master.place == "device" else "host"
                sizes[_at("gradients", place)] += bucket.gradient.nbytes
        sizes["gather_buffers"] += sum(buffer.nbytes for buffer in self.gather_buffers.values())
        if self.gatherer is not None:
            sizes["gather_buffers"] += self.gatherer.staging_bytes()
        return dict(sizes)


def _at(kind: str, place: str) -> str:
    """Key of a kind of memory at a place: `optimizer` on the device, `optimizer on host` elsewhere."""
    return kind if place == "device" else f"{kind} on {place}"


def _assign(
    units: Sequence[Unit], described: Sequence[Described], resident_elements: int
) -> tuple[list[ParamInfo], set[str]]:
    """What each parameter is to its bucket, and the names of those that need a gather buffer of their own."""
    users: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        for part, key in unit.places:
            uses = users.setdefault(id(part._parameters[key]), [])
            if index not in uses:
                uses.append(index)
    infos, alone = [], set()
    for one in described:
        used_by = users.get(id(one.parameter))
        if not used_by:
            raise ValueError(f"parameter {one.name} belongs to no unit; every parameter must lie in one of the units")
        if not one.parameter.is_floating_point():
            raise ValueError(f"parameter {one.name} is {one.parameter.dtype}; only floating-point parameters can train")
        shape = tuple(one.parameter.shape)
        persistent = numel(shape) <= resident_elements
        if not persistent and (len(used_by) > 1 or units[used_by[0]].spans_others):
            alone.add(one.name)
        first = used_by[0]
        infos.append(
            ParamInfo(
                one.name, shape, one.spec, first, units[first].chunk, one.group, one.parameter.requires_grad, persistent,
                one.name in alone,
            )
        )  # fmt: skip
    return infos, alone


def _buffer_key(layout: BucketLayout, policy: GatherPolicy, starts: Sequence[int], alone: set[str]) -> str:
    """Which gather buffer a bucket comes to."""
    kind = "" if layout.trains else " frozen"
    if layout.tied or policy == "step" or layout.slots[0].info.name in alone:
        return layout.name
    place = layout.unit - starts[layout.unit]
    return (f"unit {place} of any chunk" if policy == "chunk" else f"unit {place % 2} of two") + kind


def _make_gather_buffers(
    layouts: Sequence[BucketLayout], keys: Mapping[str, str], policy: ShardingPolicy
) -> dict[str, Tensor]:
    sizes: dict[str, int] = {}
    for layout in layouts:
        if layout.name in keys:
            key = keys[layout.name]
            sizes[key] = max(sizes.get(key, 0), layout.padded_numel)
    return {key: torch.zeros(size, dtype=policy.dtype, device=policy.device) for key, size in sizes.items()}
