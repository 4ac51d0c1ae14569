"""Flat storage for the parameters of one bucket, and what of it a rank keeps at each ZeRO stage.

    parameters   | w0      | w1   | b1 |pad|
    flat buffer  [---------+------+----+---]
    dp shards    [  rank 0   |   rank 1    ]      borders fall anywhere, so memory is even

    zero_stage      weights     gradients    master weights and moments      (Rajbhandari et al. 2020, figure 1)
        0           whole       whole        whole
        1           whole       whole        shard
        2           whole       shard        shard
        3           shard       shard        shard

Parameters are sorted by their traits, so that weight decay, the gradient norm and the sums over TP each act on a few
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
    """

    name: str
    shape: tuple[int, ...]
    spec: ParamSpec
    unit: int
    chunk: int = 0


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
        tied: the bucket is a copy of the embedding that first and last stage share.
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
        return -(-self.numel // (self.shards * step)) * step

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.shard_numel * self.shards

    def shard(self, index: int) -> Run:
        """Elements that shard `index` holds."""
        return Run(index * self.shard_numel, (index + 1) * self.shard_numel)

    def runs(self, key: Callable[[ParamSpec], K]) -> Iterator[tuple[K, Run]]:
        """Maximal contiguous runs of parameters with an equal key; padding belongs to none."""
        for value, slots in groupby(self.slots, key=lambda slot: key(slot.info.spec)):
            members = list(slots)
            yield value, Run(members[0].start, members[-1].stop)


def intersect(a: Run, b: Run) -> Run | None:
    """Common elements, or None."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Run(start, stop) if start < stop else None


def _traits(spec: ParamSpec) -> tuple[bool, bool, bool]:
    return spec.decay, spec.split is None, spec.sum_over_tp


def _layout(members: Sequence[ParamInfo], shards: int) -> BucketLayout:
    slots, start = [], 0
    for info in sorted(members, key=lambda info: _traits(info.spec), reverse=True):
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
        by_unit: one bucket per unit, in forward order (what ZeRO-3 gathers at once); otherwise buckets are filled up to
            `bucket_elements` in the order in which the backward completes gradients.
        bucket_elements: a bucket takes parameters until it holds as many, and so exceeds it by less than one parameter.
        shards: equal parts a bucket must divide into.

    No bucket spans two chunks.  A tied embedding has its own bucket, equal on both stages that hold it.
    """
    tied = [[info] for info in parameters if info.spec.tied]
    free = [info for info in parameters if not info.spec.tied]
    if by_unit:
        groups = [list(members) for _, members in groupby(free, key=lambda info: info.unit)]
    else:
        groups = []
        for info in reversed(free):
            last = groups[-1] if groups else []
            is_full = sum(numel(member.shape) for member in last) >= bucket_elements
            if not last or is_full or last[0].chunk != info.chunk:
                groups.append([])
            groups[-1].append(info)
    return tuple(_layout(members, shards) for members in [*groups, *tied] if members)


class Bucket:
    """The tensors of one bucket on one rank.

    Args:
        layout: where each parameter lies.
        zero_stage: 0 ... 3.
        dtype: of the weights that modules compute with.
        dp: the axis over which the bucket is sharded.
        weights: flat buffer for the whole weights, [padded]; made here unless ZeRO-3 lends a gather buffer.
        device: where the tensors lie.
        is_second_copy: of a tied embedding whose first copy is elsewhere: not counted in the norm, not written.

    Attributes:
        owned: elements whose master weights and moments this rank keeps.
        counted: elements that this rank counts in the gradient norm and writes to a checkpoint: its 1/dp at every stage.
        weights: [padded] in `dtype`; with ZeRO-3 valid only while gathered.
        weight_shard: [owned] in `dtype`.
        master: fp32 [owned]; the same memory as `weight_shard` when `dtype` is fp32.
        full_gradient: fp32 [padded], or None where a rank keeps only its shard.
        gradient: fp32 [owned], the reduced gradient.
    """

    def __init__(
        self,
        layout: BucketLayout,
        zero_stage: int,
        dtype: torch.dtype,
        dp: Axis,
        weights: Tensor | None,
        device: torch.device,
        is_second_copy: bool = False,
    ) -> None:
        self.layout, self.dp, self.is_second_copy = layout, dp, is_second_copy
        sharded = dp.size > 1
        self.counted = layout.shard(dp.index)
        self.owned = self.counted if zero_stage >= 1 and sharded else layout.whole
        self.keeps_weights = zero_stage < 3 or not sharded
        self.keeps_gradients = zero_stage < 2 or not sharded
        self.weights = torch.zeros(layout.padded_numel, dtype=dtype, device=device) if weights is None else weights
        owned_numel = self.owned.stop - self.owned.start
        if self.keeps_weights:
            self.weight_shard = self.weights[self.owned.start : self.owned.stop]
        else:
            self.weight_shard = torch.zeros(owned_numel, dtype=dtype, device=device)
        self.master = self.weight_shard if dtype == torch.float32 else torch.zeros(owned_numel, device=device)
        self.full_gradient: Tensor | None = None
        if self.keeps_gradients:
            self.full_gradient = torch.zeros(layout.padded_numel, device=device)
            self.gradient = self.full_gradient[self.owned.start : self.owned.stop]
        else:
            self.gradient = torch.zeros(owned_numel, device=device)

    def owned_part(self, flat: Tensor, run: Run) -> Tensor:
        """Elements `run` of a tensor that covers the owned elements."""
        return flat[run.start - self.owned.start : run.stop - self.owned.start]

    def module_view(self, slot: Slot) -> Tensor:
        """The slot's part of the whole weights, in the parameter's shape, for a module to compute with.

        `.data` gives the view a version counter of its own: gathering into the buffer again must not look to autograd like
        a change of the weights it has saved, which come back to the same address with the same values.
        """
        return self.weights.data[slot.start : slot.stop].view(slot.info.shape)
