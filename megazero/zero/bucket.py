"""Flat storage for the parameters of one bucket.

    parameters   | w0      | w1   | b1 |pad|
    flat buffer  [---------+------+----+---]
    shards       [  rank 0   |   rank 1    ]      borders fall anywhere, so memory is even

Parameters are sorted by their traits, so that each optimizer group, the gradient norm and the sums over tp act on a few
contiguous runs of a bucket instead of on parameters, and one collective serves the whole bucket.

[Note: parts]  A parameter that is larger than a bucket should be is reduced in parts, so that no buffer is as large as it.
A part has the same rows of every shard, and so each rank owns as much of it:

    flat buffer  [ a b c | a b c | a b c ]      three shards, parts a, b and c
    part b       [b|b|b]                        reduced into elements b of each rank's shard

All buffers for gradients have the size of the largest part.  Under stage 3 that is a block, which is not cut, or between
hosts of CPUs the largest bucket of one: so an embedding goes in parts as large, however small buckets should be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import groupby
from math import inf, lcm
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from megazero.comm.memory import Arena, Copier
from megazero.layers.spec import ParamSpec, numel
from megazero.parallel_state import Axis
from megazero.zero.storage import FlatArray, InMemory, Location, in_host_memory

K = TypeVar("K", bound=Hashable)

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ALIGN_ELEMENTS = 16  # a shard begins on a 64-byte border in fp32
BLOCK = 256  # elements that travel with one scale where they are quantized: see `quantized`, [Note: blocks]
_SMALL_PARTS = 16  # beside a parameter that is larger than a bucket should be, others have 1/16 of a bucket in all
_ROWS_OF_PADDING = 32  # a bucket is cut into parts only if padding to whole rows adds at most 1/32 to it: see shapes.md


@dataclass(frozen=True)
class Placement:
    """The ranks that share a parameter, as this rank sees them."""

    shard: Axis  # ranks that hold different shards
    replica: Axis  # ranks that hold the same shard; `shard` and `replica` together sum the gradients
    gather: Axis | None = (
        None  # `shard` over a communicator of its own, for stage 3's gathers; None takes that of `shard`
    )
    secondary: Axis | None = None  # neighbours on `shard` with a second copy of stage 3's weights; None: there is none
    levels: tuple[Axis, Axis] | None = (
        None  # `shard` within a host and between hosts: only between them are gradients quantized
    )

    @property
    def gathers_over(self) -> Axis:
        """The axis of stage 3's gathers."""
        return self.gather or self.shard

    @property
    def sends(self) -> bool:
        """Whether gradients go to other ranks."""
        return self.shard.size > 1 or self.replica.size > 1


ALONE = Placement(Axis("shard"), Axis("replica"))


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of this rank's model."""

    name: str  # qualified name of the module's parameter
    shape: tuple[int, ...]  # local shape, after TP
    spec: ParamSpec  # what the parameter is, globally
    unit: int  # index of the first unit that uses it, in forward order
    chunk: int = 0  # the model chunk of this rank that holds it
    group: int = 0  # the optimizer group that steps it
    trains: bool = True  # it has a gradient; a frozen parameter is only sharded and saved
    persistent: bool = False  # stage 3 keeps it whole on every rank
    alone: bool = False  # under stage 3 it has a bucket of its own
    matrix: bool = False  # the optimizer steps it whole; its bucket holds nothing else
    placement: Placement = ALONE  # the ranks that share it


@dataclass(frozen=True)
class Interval:
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


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
    def interval(self) -> Interval:
        """The slot's elements."""
        return Interval(self.start, self.stop)


@dataclass(frozen=True)
class Pieces:
    """Elements of a parameter: `count` runs of `length`, each of which begins `stride` after the one before."""

    start: int
    length: int
    count: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        """All elements."""
        return self.length * self.count

    def of(self, x: Tensor) -> Tensor:
        """[..., count, length]: these of the last dimension of x; a view."""
        step = x.stride(-1)
        strides = (*x.stride()[:-1], self.stride * step, step)
        return x.as_strided((*x.shape[:-1], self.count, self.length), strides, x.storage_offset() + self.start * step)


@dataclass(frozen=True)
class Share:
    """What a part of a bucket holds of a parameter: `pieces` of its elements, one after another in the part's buffer.

    They are those of whole shards, at equal distances, and of one that the parameter begins or ends in: three at most.
    """

    slot: Slot
    pieces: tuple[Pieces, ...]
    start: int  # of the first piece in the buffer
    part: Interval  # of every shard
    shard_numel: int

    @cached_property
    def stop(self) -> int:
        """One past the last element in the buffer."""
        return self.start + sum(piece.numel for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether the part holds all of the parameter."""
        return self.stop - self.start == numel(self.slot.info.shape)

    @cached_property
    def rows(self) -> tuple[Pieces, ...] | None:
        """The rows of the parameter that the pieces are; None if a piece begins or ends within a row."""
        width = numel(self.slot.info.shape[1:])
        every = [(piece.start, piece.length, piece.stride) for piece in self.pieces]
        if any(number % width for numbers in every for number in numbers):
            return None
        return tuple(
            Pieces(piece.start // width, piece.length // width, piece.count, piece.stride // width)
            for piece in self.pieces
        )

    def row_in_buffer(self, rows: Tensor) -> tuple[Tensor, int]:
        """Where rows of the parameter, int64, lie among those of the share, and how many it has: that stands for no row."""
        width, held = numel(self.slot.info.shape[1:]), self.part.stop - self.part.start
        element, count = rows * width + self.slot.start, (self.stop - self.start) // width
        within = element % self.shard_numel - self.part.start
        found = (element // self.shard_numel * held + within - self.start) // width
        return found.where((within >= 0) & (within < held), count), count


@dataclass(frozen=True)
class BucketLayout:
    """Where each parameter lies in a bucket.  Its parameters have one placement and chunk; all are frozen or all train."""

    name: str  # for messages
    slots: tuple[Slot, ...]  # the parameters, contiguous from element 0; before a block there may be zeros
    step: int = 1  # a shard's elements are a multiple of it; in a bucket of several parts these are whole rows
    part_count: int = 1

    @property
    def matrices(self) -> bool:
        """Whether the optimizer steps the parameters as whole matrices."""
        return self.slots[0].info.matrix

    @property
    def of_experts(self) -> bool:
        """Whether EP splits the parameters."""
        return self.slots[0].info.spec.of_experts

    @property
    def placement(self) -> Placement:
        """The ranks that share the bucket."""
        return self.slots[0].info.placement

    @property
    def shards(self) -> int:
        """Number of equal parts of the padded bucket."""
        return self.placement.shard.size

    @property
    def chunk(self) -> int:
        """The model chunk of this rank that holds the parameters."""
        return self.slots[0].info.chunk

    @property
    def trains(self) -> bool:
        """Whether the parameters have gradients."""
        return self.slots[0].info.trains

    @property
    def persistent(self) -> bool:
        """Whether stage 3 keeps the parameters whole on every rank."""
        return self.slots[0].info.persistent

    @property
    def tie(self) -> str | None:
        """The logical name of a parameter that several stages or chunks hold; it has a bucket of its own."""
        spec = self.slots[0].info.spec
        return spec.name if spec.tied else None

    @cached_property
    def unit(self) -> int:
        """The first unit that uses one of the parameters."""
        return min(slot.info.unit for slot in self.slots)

    @property
    def numel(self) -> int:
        """Elements that are parameters."""
        return self.slots[-1].stop

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return -(-max(self.numel, 1) // (self.shards * self.step)) * self.step

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.shard_numel * self.shards

    @property
    def interval(self) -> Interval:
        """All elements, padding included."""
        return Interval(0, self.padded_numel)

    def shard(self, index: int) -> Interval:
        """Elements that shard `index` holds."""
        return Interval(index * self.shard_numel, (index + 1) * self.shard_numel)

    def in_parts_of(self, limit: int) -> BucketLayout:
        """The same elements, in as few parts as have at most `limit` elements, or a row of each shard."""
        smallest = self.shards * self.step
        return replace(self, part_count=-(-self.padded_numel // max(limit // smallest * smallest, smallest)))

    @property
    def parts(self) -> tuple[Interval, ...]:
        """The elements of every shard that are reduced at once; see [Note: parts]."""
        each = -(-self.shard_numel // (self.part_count * self.step)) * self.step
        return tuple(Interval(at, min(at + each, self.shard_numel)) for at in range(0, self.shard_numel, each))

    def shares(self, part: Interval) -> Iterator[Share]:
        """What a part holds of the parameters; one without elements is in the part of a bucket that has no other."""
        each, held = self.shard_numel, part.stop - part.start
        for slot in self.slots:
            if held == each:
                yield Share(slot, (Pieces(0, slot.stop - slot.start),), slot.start, part, each)
                continue
            first, last = slot.start // each, -(-slot.stop // each) - 1  # shards
            ends = [
                intersect(slot.interval, Interval(at * each + part.start, at * each + part.stop))
                for at in (first, last)
            ]
            pieces = [Pieces(end.start, end.stop - end.start) for end in ends[: last - first + 1] if end is not None]
            if last - first > 1:
                pieces.append(Pieces((first + 1) * each + part.start, held, last - first - 1, each))
            if pieces:
                pieces.sort(key=lambda piece: piece.start)
                at = pieces[0].start
                inside = tuple(replace(piece, start=piece.start - slot.start) for piece in pieces)
                yield Share(slot, inside, at // each * held + at % each - part.start, part, each)

    def intervals(self, key: Callable[[ParamInfo], K]) -> Iterator[tuple[K, Interval]]:
        """Maximal runs of parameters with an equal key; padding at the end belongs to none."""
        for value, slots in groupby(self.slots, key=lambda slot: key(slot.info)):
            members = list(slots)
            yield value, Interval(members[0].start, members[-1].stop)


def intersect(a: Interval, b: Interval) -> Interval | None:
    """Common elements, or None."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Interval(start, stop) if start < stop else None


def _over_tp(info: ParamInfo) -> tuple[bool, bool]:
    """Whether ranks of tp hold different parts of a parameter, or of the gradient of what each holds whole."""
    return info.spec.split is not None, info.spec.sum_over_tp


def _layout(members: Sequence[ParamInfo], limit: int, *, cuts: bool, align: int) -> BucketLayout:
    slots, start, shards = list[Slot](), 0, members[0].placement.shard.size
    for info in sorted(members, key=lambda info: (info.group, info.spec.split is not None, not info.spec.sum_over_tp)):
        if align == BLOCK and slots and _over_tp(slots[-1].info) != _over_tp(info):
            start += -start % BLOCK
        slots.append(Slot(info, start))
        start = slots[-1].stop
    first = min(members, key=lambda info: info.unit)
    step = align if shards > 1 else 1
    is_cut, largest = False, max(slots, key=lambda slot: slot.stop - slot.start)
    if cuts and first.trains and start > limit >= start - (largest.stop - largest.start):
        width = numel(largest.info.shape[1:])
        padding = -start % (shards * lcm(step, width))
        if largest.start % width == 0 and padding * _ROWS_OF_PADDING <= start:
            step, is_cut = lcm(step, width), True
    layout = BucketLayout(f"bucket of {first.name}", tuple(slots), step)
    return layout.in_parts_of(limit) if is_cut else layout


def _fits(members: Sequence[ParamInfo], limit: int) -> bool:
    """Whether parameters may share a bucket: all fit, or all but the largest are small, and lie in one part of it.

    More would wait for the largest, and it for them.
    """
    sizes, shards = [numel(info.shape) for info in members], members[0].placement.shard.size
    return sum(sizes) <= limit or (sum(sizes) - max(sizes)) * max(shards, _SMALL_PARTS) <= limit


def plan_buckets(
    parameters: Sequence[ParamInfo],
    *,
    by_unit: bool,
    bucket_elements: int,
    cuts: bool = False,
    part_elements: int | None = None,
    cuts_units: bool = False,
    align: int = ALIGN_ELEMENTS,
) -> tuple[BucketLayout, ...]:
    """Assign every parameter, given in forward order, to one bucket.

    `by_unit`: one bucket per unit, in forward order (what ZeRO-3 gathers at once), or with `cuts_units` as many as
    `bucket_elements` ask for, in the order of a unit's backward.  Otherwise, and for persistent parameters, buckets are
    filled in the order in which the backward completes gradients, with at most `bucket_elements`: a parameter that is larger
    has a bucket with others that are small beside one (`_fits`).

    `cuts`: buckets of more than `part_elements`, nearly all of one parameter, are reduced in parts of so many at most, or as
    large as the largest bucket that cannot be cut, but of a row of each shard at least.

    `align`: shards have a multiple of so many elements; with `BLOCK` what is split over tp begins at such a multiple, too.

    `bucket_elements`, `part_elements`: of whole buckets, all shards together; `part_elements` None: as `bucket_elements`.

    No bucket spans two chunks or placements, or holds both frozen and trained parameters.  A tied parameter has its own
    bucket, equal on all stages that hold it.
    """
    single = [[info] for info in parameters if info.spec.tied or (by_unit and info.alone)]
    free = [info for info in parameters if [info] not in single]
    most = bucket_elements if part_elements is None else part_elements

    def is_cut(members: Sequence[ParamInfo]) -> bool:
        is_large = cuts and sum(numel(member.shape) for member in members) > most
        return is_large and _layout(members, most, cuts=cuts, align=align).part_count > 1

    def may_share(last: list[ParamInfo], info: ParamInfo) -> bool:
        together = [*last, info]
        loses_cut = (is_cut(last) or is_cut([info])) and not is_cut(together)
        return last[0].chunk == info.chunk and _fits(together, bucket_elements) and not loses_cut

    placements = list(dict.fromkeys(info.placement for info in parameters))

    def scope(info: ParamInfo) -> tuple[float, int, bool, bool, bool]:
        """What a bucket does not leave."""
        unit = info.unit if by_unit and not info.persistent else inf
        return unit, placements.index(info.placement), info.spec.of_experts, info.trains, info.matrix

    groups, backward = list[list[ParamInfo]](), free[::-1]
    for (unit, *_), members in groupby(sorted(backward, key=scope), key=scope):
        last = list[ParamInfo]()
        if unit < inf and not cuts_units:
            groups.append(list(members)[::-1])
            continue
        for info in members:
            if not last or not may_share(last, info):
                groups.append(last := [])
            last.append(info)
    layouts = [_layout(members, most, cuts=cuts, align=align) for members in [*groups, *single]]
    largest = max((one.parts[0].stop * one.shards for one in layouts if one.trains), default=0)
    limit = max(most, largest)
    return tuple(one.in_parts_of(limit) if one.part_count > 1 else one for one in layouts)


_AT_ONCE: Final = Copier()


@dataclass(frozen=True)
class ShardingPolicy:
    """What is the same for all buckets of a model.

    Attributes:
        placement: of every parameter that names no other.
        dtype: of the weights that modules compute with.
        device: where modules compute.
        accumulate_dtype, reduce_dtype: in which a step's gradients add up, and travel.
        on_cpu: whether the run's modules compute on a CPU.
        pins_memory: whether the host memory of offloaded state is page-locked.
        copier: moves offloaded state between host and device.
        arena: holds the working buffers of gradients; None: each buffer has memory of its own.
        quantizes_weights: stage 3 gathers weights in blocks of 8 bits.
        gradient_bits: of the blocks in which gradients are reduced over the shard axis; 0: they are not quantized.
        compiles: what quantizes is compiled.
    """

    zero_stage: int
    dtype: torch.dtype
    placement: Placement
    device: torch.device
    accumulate_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    on_cpu: bool = True
    pins_memory: bool = True
    copier: Copier = _AT_ONCE
    arena: Arena | None = None
    quantizes_weights: bool = False
    gradient_bits: int = 0
    compiles: bool = False

    @property
    def align(self) -> int:
        """A shard has a multiple of so many elements."""
        return BLOCK if self.quantizes_weights or self.gradient_bits else ALIGN_ELEMENTS


class Extent(Enum):
    """How much of a bucket's weights, gradients or optimizer state a rank holds between their uses."""

    WHOLE = "whole"
    SHARD = "shard"


_EXTENTS: Final = {
    # stage: weights, gradients, master weights and moments (Rajbhandari et al. 2020, figure 1)
    0: (Extent.WHOLE, Extent.WHOLE, Extent.WHOLE),
    1: (Extent.WHOLE, Extent.WHOLE, Extent.SHARD),
    2: (Extent.WHOLE, Extent.SHARD, Extent.SHARD),
    3: (Extent.SHARD, Extent.SHARD, Extent.SHARD),
}


@dataclass(frozen=True)
class Residency:
    """What a rank holds of a bucket, and where: weights, gradients, and state (master weights and moments).

    Whole weights lie on the device.  The gradient that is stepped lies on the host unless the state is on the device.
    """

    weights: Extent
    gradients: Extent
    state: Extent
    weights_on: Location = "device"
    state_on: Location = "device"

    @classmethod
    def of(
        cls, layout: BucketLayout, zero_stage: int, weights_on: Location = "device", state_on: Location = "device"
    ) -> Residency:
        """The table's row for a stage.  Over one rank a shard is the whole, unless it is offloaded.

        Args:
            weights_on, state_on: where stage 3's shards and the optimizer's state are to lie.
        """
        weights, gradients, state = _EXTENTS[zero_stage]
        if layout.persistent or (layout.shards == 1 and weights_on == "device"):
            weights = Extent.WHOLE
        if layout.shards == 1 and state_on == "device":
            gradients = Extent.WHOLE
        return cls(
            weights,
            gradients,
            state,
            weights_on if weights is Extent.SHARD else "device",
            state_on if layout.trains else "device",
        )


class Arrays(Protocol):
    """Where the arrays of buckets lie, and what makes those that are not on the device; see `Offload`."""

    def residency(self, layout: BucketLayout, /) -> Residency: ...

    def allocate(self, location: Location, numel: int, dtype: torch.dtype, /) -> FlatArray: ...


class Bucket:
    """The tensors of one bucket on one rank.

    Args:
        weights: buffer of the whole weights, [padded]; stage 3 gives a gather buffer, None makes a new one.
        arrays: makes the arrays that lie in host memory or in a file; None keeps everything on the device.

    Attributes:
        is_duplicate: of a tied parameter whose first copy is elsewhere: not counted in the norm, not saved.
        placement, residency: the ranks that share the bucket, and what this one holds of it.
        owned: the elements whose master weights and moments this rank holds.
        counted: what this rank counts in the gradient norm and writes to a checkpoint; the ranks' are disjoint.
        weights: [padded]; where the residency has shards of them, valid only while gathered.
        weight_shard: [owned], in the weights' dtype.
        master: fp32 [owned]; of fp32 or frozen weights it may be `weight_shard`.
        full_gradient: [padded] in the accumulation dtype, from a step's first gradient on, where gradients are whole.
        gradient: fp32 [owned], the reduced gradient that the optimizer steps, beside the master weights.
        gradient_leaves: the device, when it is reduced, for the host.
        reduces_in_place: `gradient` is a view of `full_gradient`, and exists only together with it.
        summed: the elements whose gradients this rank has summed when the reductions end: those that it owns, or fewer of a
            bucket that is stepped when the others' sums have come; see `WeightGathers.defer_steps`.
    """

    def __init__(
        self, layout: BucketLayout, policy: ShardingPolicy, weights: Tensor | None = None, arrays: Arrays | None = None
    ) -> None:
        self.layout, self.policy, self.placement = layout, policy, layout.placement
        self.is_duplicate = False
        self.residency = Residency.of(layout, policy.zero_stage) if arrays is None else arrays.residency(layout)
        own = layout.shard(self.placement.shard.index)
        self.counted = own if self.placement.replica.index == 0 else Interval(0, 0)
        self.owned = self.summed = own if self.residency.state is Extent.SHARD else layout.interval

        def new(location: Location, dtype: torch.dtype) -> FlatArray:
            if location == "device":
                return InMemory(torch.zeros(self.owned.size, dtype=dtype, device=policy.device), location)
            assert arrays is not None
            return arrays.allocate(location, self.owned.size, dtype)

        if weights is None:
            weights = torch.zeros(layout.padded_numel, dtype=policy.dtype, device=policy.device)
        self.weights = weights
        self.weight_shard: FlatArray
        if self.residency.weights is Extent.WHOLE:
            self.weight_shard = InMemory(weights[self.owned.start : self.owned.stop], "device")
        else:
            self.weight_shard = new(self.residency.weights_on, policy.dtype)
        self.master = self.weight_shard
        if layout.trains and not shares_weights(self.residency, policy.dtype):
            self.master = new(self.residency.state_on, torch.float32)
        on_device = self.residency.state_on == "device"
        self.gradient_leaves = layout.trains and not on_device and not policy.on_cpu
        self.reduces_in_place = self.sums_whole and on_device and policy.accumulate_dtype == torch.float32
        self.full_gradient: Tensor | None = None
        self.gradient = torch.zeros(0)
        if layout.trains and not self.reduces_in_place:
            if on_device:
                self.gradient = torch.zeros(self.owned.size, device=policy.device)
            else:
                self.gradient = in_host_memory(self.owned.size, torch.float32, pin=policy.pins_memory).tensor

    @property
    def holds_weights(self) -> bool:
        """Whether the whole weights stay on this rank."""
        return self.residency.weights is Extent.WHOLE

    @property
    def sums_whole(self) -> bool:
        """Whether a step's gradients add up whole, and are reduced at its end."""
        return self.layout.trains and self.residency.gradients is Extent.WHOLE

    @property
    def gathers_weights(self) -> bool:
        """Whether this rank holds the whole weights and steps a shard of them: they are gathered after every step."""
        return self.holds_weights and self.owned != self.layout.interval

    @property
    def gradient_parts(self) -> tuple[Interval, ...]:
        """The elements of every shard that are reduced at once."""
        return (self.layout.shard(0),) if self.sums_whole else self.layout.parts

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of `full_gradient` while it exists."""
        return self.layout.padded_numel * self.policy.accumulate_dtype.itemsize if self.sums_whole else 0

    def allocate_gradient(self) -> Tensor:
        """Memory for the whole gradients of a step, [padded]; its content is undefined."""
        full = torch.empty(self.layout.padded_numel, dtype=self.policy.accumulate_dtype, device=self.policy.device)
        self.full_gradient = full
        if self.reduces_in_place:
            self.gradient = full[self.owned.start : self.owned.stop]
        return full

    def free_gradient(self) -> None:
        """Free that memory for the activations of a forward, if nothing else holds the sums.

        A CPU maps large blocks page by page every time, so there it stays; blocks that are not sent are small.
        """
        if self.reduces_in_place and not (self.policy.on_cpu and self.placement.sends):
            self.full_gradient, self.gradient = None, torch.zeros(0)

    def owned_part(self, flat: Tensor, interval: Interval) -> Tensor:
        """Elements `interval` of a tensor that covers the owned elements."""
        return flat[interval.start - self.owned.start : interval.stop - self.owned.start]

    def read(self, array: FlatArray, interval: Interval) -> Tensor:
        """Elements `interval` of an array that covers the owned elements; a copy where the array is a file."""
        return array.read(interval.start - self.owned.start, interval.stop - self.owned.start)

    def write(self, array: FlatArray, interval: Interval, values: Tensor) -> None:
        """Overwrite elements `interval` of an array that covers the owned elements."""
        array.write(interval.start - self.owned.start, values)

    def module_view(self, slot: Slot) -> Tensor:
        """The slot's part of the whole weights, in the parameter's shape, for a module to compute with.

        `.data` gives the view a version counter of its own.  Gathering into the buffer again must not look to autograd
        like a change of weights it has saved: only an update is one.
        """
        return self.weights.data[slot.start : slot.stop].view(slot.info.shape)


def shares_weights(residency: Residency, dtype: torch.dtype) -> bool:
    """Whether weights are their own masters: fp32, in the same memory."""
    return dtype == torch.float32 and residency.weights_on == residency.state_on != "file"


def in_order_of_use(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Buckets as a forward uses them; those of one unit are given in the order of its backward."""
    forward = buckets[::-1]
    return sorted(forward, key=lambda bucket: bucket.layout.unit)
