"""Flat storage for the parameters of one bucket, and what of it a rank keeps at each ZeRO stage.

    parameters   | w0      | w1   | b1 |pad|
    flat buffer  [---------+------+----+---]
    shards       [  rank 0   |   rank 1    ]      borders fall anywhere, so memory is even

    zero_stage      weights     gradients    master weights and moments      (Rajbhandari et al. 2020, figure 1)
        0           whole       whole        whole
        1           whole       whole        shard
        2           whole       shard        shard
        3           shard       shard        shard

Parameters are sorted by their traits, so that each optimizer group, the gradient norm and the sums over TP act on a few
contiguous runs of a bucket instead of on parameters, and one collective serves the whole bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from megazero.layers.spec import ParamSpec, numel
from megazero.parallel_state import Axis
from megazero.zero.storage import FlatArray, InMemory, in_host_memory

K = TypeVar("K", bound=Hashable)

ALIGN_ELEMENTS = 16  # a shard begins on a 64-byte border in fp32


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of this rank's model.

    Args:
        name: qualified name of the module's parameter.
        shape: local shape, after TP.
        spec: what the parameter is, globally.
        unit: index of the unit that uses it first, in forward order.
        chunk: the model chunk of this rank that holds it.
        group: the optimizer group that steps it.
        trains: it has a gradient; a frozen parameter is only sharded and saved.
        persistent: stage 3 keeps it whole.
        alone: under stage 3 it has a bucket of its own.
    """

    name: str
    shape: tuple[int, ...]
    spec: ParamSpec
    unit: int
    chunk: int = 0
    group: int = 0
    trains: bool = True
    persistent: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of a bucket that are one parameter."""

    info: ParamInfo
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + numel(self.info.shape)

    @property
    def run(self) -> Run:
        """The slot's elements."""
        return Run(self.start, self.stop)


@dataclass(frozen=True)
class BucketLayout:
    """Where each parameter lies in a bucket.

    Args:
        name: for messages.
        slots: the parameters, contiguous from element 0.
        shards: number of equal parts the padded bucket divides into.
        tied: the bucket is a copy of a parameter that several stages share.
        unit: the first unit that uses it.
    """

    name: str
    slots: tuple[Slot, ...]
    shards: int
    tied: bool
    unit: int

    @property
    def numel(self) -> int:
        """Elements that are parameters."""
        return self.slots[-1].stop

    @property
    def whole(self) -> Run:
        """All elements, padding included."""
        return Run(0, self.padded_numel)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        step = ALIGN_ELEMENTS if self.shards > 1 else 1
        return -(-max(self.numel, 1) // (self.shards * step)) * step

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.shard_numel * self.shards

    @property
    def chunk(self) -> int:
        """The model chunk of this rank whose parameters it holds."""
        return self.slots[0].info.chunk

    @property
    def trains(self) -> bool:
        """Whether its parameters have gradients."""
        return self.slots[0].info.trains

    @property
    def persistent(self) -> bool:
        """Whether stage 3 keeps its parameters whole."""
        return self.slots[0].info.persistent

    def shard(self, index: int) -> Run:
        """Elements that shard `index` holds."""
        return Run(index * self.shard_numel, (index + 1) * self.shard_numel)

    def runs(self, key: Callable[[ParamInfo], K]) -> Iterator[tuple[K, Run]]:
        """Maximal contiguous runs of parameters with an equal key; padding belongs to none."""
        for value, slots in groupby(self.slots, key=lambda slot: key(slot.info)):
            members = list(slots)
            yield value, Run(members[0].start, members[-1].stop)


def intersect(a: Run, b: Run) -> Run | None:
    """Common elements, or None."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Run(start, stop) if start < stop else None


def _traits(info: ParamInfo) -> tuple[int, bool, bool]:
    return info.group, info.spec.split is not None, not info.spec.sum_over_tp


def _layout(members: Sequence[ParamInfo], shards: int) -> BucketLayout:
    slots, start = [], 0
    for info in sorted(members, key=_traits):
        slots.append(Slot(info, start))
        start = slots[-1].stop
    first = min(members, key=lambda info: info.unit)
    return BucketLayout(f"bucket of {first.name}", tuple(slots), shards, members[0].spec.tied, first.unit)


def plan_buckets(
    parameters: Sequence[ParamInfo], *, by_unit: bool, bucket_elements: int, shards: int
) -> tuple[BucketLayout, ...]:
    """Assign every parameter to one bucket.

    Args:
        parameters: in forward order.
        by_unit: one bucket per unit, in forward order (what ZeRO-3 gathers at once); otherwise, and for resident
            parameters, buckets are filled up to `bucket_elements` in the order in which the backward completes gradients.
        bucket_elements: a bucket takes parameters until it holds as many, and so exceeds it by less than one parameter.
        shards: equal parts a bucket must divide into.

    No bucket spans two chunks, or holds both frozen and trained parameters.  A tied parameter has its own bucket, equal on
    all stages that hold it.
    """
    single = [[info] for info in parameters if info.spec.tied or (by_unit and info.alone)]
    free = [info for info in parameters if [info] not in single]
    units = sorted(
        (info for info in free if by_unit and not info.persistent), key=lambda info: (info.unit, info.trains)
    )
    groups = [list(members) for _, members in groupby(units, key=lambda info: (info.unit, info.trains))]
    filling: dict[bool, list[ParamInfo]] = {}
    for info in reversed([info for info in free if not by_unit or info.persistent]):
        last = filling.get(info.trains, [])
        is_full = sum(numel(member.shape) for member in last) >= bucket_elements
        if not last or is_full or last[0].chunk != info.chunk:
            filling[info.trains] = last = []
            groups.append(last)
        last.append(info)
    return tuple(_layout(members, shards) for members in [*groups, *single])


@dataclass(frozen=True)
class ShardingPolicy:
    """How the ranks keep their buckets.

    Args:
        zero_stage: 0 ... 3.
        dtype: of the weights that modules compute with.
        shard: the axis over which buckets are sharded.
        replica: the axis of ranks that keep the same shard, where sharding stays within a part of dp.
        device: where modules compute.
        accumulate_dtype: of gradients on their way to the shards.
        pins_memory: page-lock the host memory of offloaded state.
    """

    zero_stage: int
    dtype: torch.dtype
    shard: Axis
    replica: Axis
    device: torch.device
    accumulate_dtype: torch.dtype = torch.float32
    pins_memory: bool = True

    @property
    def sends(self) -> bool:
        """Whether gradients go to other ranks."""
        return self.shard.size > 1 or self.replica.size > 1


class Bucket:
    """The tensors of one bucket on one rank.

    Args:
        layout: where each parameter lies.
        policy: stage, dtypes, axes.
        weights: flat buffer for the whole weights, [padded]; made here unless ZeRO-3 lends a gather buffer.
        new_master: makes the array of master weights, and thereby says where they, their moments and the gradient that
            steps them lie; None keeps them on the device, where fp32 weights are their own masters.
        new_shard: makes the array of ZeRO-3's shard of the weights; None keeps it on the device.
        shares_weights: fp32 weights off the device are their own masters, too.
        is_second_copy: of a tied parameter whose first copy is elsewhere: not counted in the norm, not written.

    Attributes:
        owned: elements whose master weights and moments this rank keeps.
        counted: elements that this rank counts in the gradient norm and writes to a checkpoint; the ranks' are disjoint.
        weights: [padded] in the weights' dtype; with ZeRO-3 valid only while gathered.
        weight_shard: [owned] in the weights' dtype.
        master: fp32 [owned]; may be the same array as `weight_shard` when the weights are fp32, and always is for
            frozen parameters.
        full_gradient: [padded] in the accumulation dtype, from the first gradient of a step on; None where a rank keeps only
            its shard.
        gradient: fp32 [owned], the reduced gradient, beside the master weights; where it is part of `full_gradient` as
            long as that is there.  Empty for frozen parameters.
        keeps_gradients: a step's gradients add up whole.
        reduces_in_place: `gradient` is part of `full_gradient`.
        lends_gradient: its memory can be given back between steps.
    """

    def __init__(
        self,
        layout: BucketLayout,
        policy: ShardingPolicy,
        weights: Tensor | None = None,
        new_master: Callable[[int], FlatArray] | None = None,
        new_shard: Callable[[int], FlatArray] | None = None,
        shares_weights: bool = False,
        is_second_copy: bool = False,
    ) -> None:
        self.layout, self.policy, self.is_second_copy = layout, policy, is_second_copy
        stage, dtype, device, axis = policy.zero_stage, policy.dtype, policy.device, policy.shard
        sharded = axis.size > 1
        self.counted = layout.shard(axis.index) if policy.replica.index == 0 else Run(0, 0)
        self.owned = layout.shard(axis.index) if stage >= 1 and sharded else layout.whole
        owned_numel = self.owned.stop - self.owned.start
        gathers = stage == 3 and (sharded or new_shard is not None) and not layout.persistent
        self.keeps_weights = not gathers
        self.weights = torch.zeros(layout.padded_numel, dtype=dtype, device=device) if weights is None else weights
        self.weight_shard: FlatArray
        if self.keeps_weights:
            self.weight_shard = InMemory(self.weights[self.owned.start : self.owned.stop], "device")
        elif new_shard is not None:
            self.weight_shard = new_shard(owned_numel)
        else:
            self.weight_shard = InMemory(torch.zeros(owned_numel, dtype=dtype, device=device), "device")
        self.master: FlatArray
        if not layout.trains:
            self.master = self.weight_shard
        elif new_master is not None:
            self.master = new_master(owned_numel)
        elif dtype == torch.float32 and (self.weight_shard.place == "device" or shares_weights):
            self.master = self.weight_shard
        else:
            self.master = InMemory(torch.zeros(owned_numel, device=device), "device")
        # Offloaded state has its gradient on the host: a single device, too, need not keep the whole of it.
        on_device = self.master.place == "device"
        self.keeps_gradients = layout.trains and (stage < 2 or (not sharded and on_device))
        self.reduces_in_place = self.keeps_gradients and on_device and policy.accumulate_dtype == torch.float32
        # A CPU has large blocks mapped page by page every time; what is not sent need not be large (`ShardedParameters`).
        self.lends_gradient = self.reduces_in_place and (device.type != "cpu" or not policy.sends)
        self.full_gradient: Tensor | None = None
        self.gradient = torch.zeros(0)
        if not self.reduces_in_place:
            self.gradient = self._new_gradient(owned_numel)

    def _new_gradient(self, owned_numel: int) -> Tensor:
        if not self.layout.trains:
            return torch.zeros(0)
        if self.master.place != "device":
            return in_host_memory(owned_numel, torch.float32, pin=self.policy.pins_memory).tensor
        return torch.zeros(owned_numel, device=self.policy.device)

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of `full_gradient` while it is there."""
        return self.layout.padded_numel * self.policy.accumulate_dtype.itemsize if self.keeps_gradients else 0

    def take_gradient(self) -> Tensor:
        """Memory for the whole gradients of a step, [padded]; what is in it is undefined."""
        full = torch.empty(self.layout.padded_numel, dtype=self.policy.accumulate_dtype, device=self.policy.device)
        self.full_gradient = full
        if self.reduces_in_place:
            self.gradient = full[self.owned.start : self.owned.stop]
        return full

    def drop_gradient(self) -> None:
        """Give that memory back, where it is worth it: a forward needs it for its activations."""
        if not self.lends_gradient:
            return
        self.full_gradient, self.gradient = None, torch.zeros(0)

    def owned_part(self, flat: Tensor, run: Run) -> Tensor:
        """Elements `run` of a tensor that covers the owned elements."""
        return flat[run.start - self.owned.start : run.stop - self.owned.start]

    def read(self, array: FlatArray, run: Run) -> Tensor:
        """Elements `run` of an array that covers the owned elements; a copy where the array is a file."""
        return array.read(run.start - self.owned.start, run.stop - self.owned.start)

    def write(self, array: FlatArray, run: Run, values: Tensor) -> None:
        """Overwrite elements `run` of an array that covers the owned elements."""
        array.write(run.start - self.owned.start, values)

    def module_view(self, slot: Slot) -> Tensor:
        """The slot's part of the whole weights, in the parameter's shape, for a module to compute with.

        `.data` gives the view a version counter of its own: gathering into the buffer again must not look to autograd like
        a change of the weights it has saved, which come back to the same address with the same values.
        """
        return self.weights.data[slot.start : slot.stop].view(slot.info.shape)
