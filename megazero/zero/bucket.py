"""Flat storage for the parameters of one bucket.

    parameters   | w0      | w1   | b1 |pad|
    flat buffer  [---------+------+----+---]
    shards       [  rank 0   |   rank 1    ]      a border may fall within a parameter, so all shards are equal

Parameters are sorted by their properties, so that each optimizer group, the gradient norm and the sums over tp work on
a few contiguous intervals of a bucket instead of on single parameters, and one collective serves the whole bucket.

[Note: parts]  A parameter larger than the bucket size is reduced in parts, so that no buffer must hold all of it.  A
part covers the same rows of every shard, so every rank owns an equal amount of it:

    flat buffer  [ a b c | a b c | a b c ]      three shards, parts a, b and c
    part b       [b|b|b]                        reduced into elements b of each rank's shard

All gradient buffers have the size of the largest part.  Under stage 3 that is at least a transformer block, which is
not cut (between CPU hosts: the largest bucket of a block).  An embedding is cut into parts of that size, even if
buckets are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import groupby
from math import inf, lcm, prod
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from megazero.comm.memory import Arena, Copier
from megazero.layers.spec import ParamSpec
from megazero.parallel_state import Axis
from megazero.zero.storage import FlatArray, InMemory, Location, in_host_memory

K = TypeVar("K", bound=Hashable)

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ALIGN_ELEMENTS = 16  # a shard begins at a multiple of 64 bytes in fp32
BLOCK = 256  # elements that share one scale when they are quantized: see `quantized`, [Note: blocks]
_SMALL_PARTS = 16  # together with an oversized parameter, others may fill 1/16 of a bucket in all
_ROWS_OF_PADDING = 32  # cut a bucket only if padding to whole rows adds at most 1/32 to it: see shapes.md


@dataclass(frozen=True)
class Placement:
    """The ranks that share a parameter, seen from this rank."""

    shard: Axis  # ranks that hold different shards
    replica: Axis  # ranks that hold the same shard; gradients are summed over `shard` and `replica`
    gather: Axis | None = None  # `shard` with a communicator of its own for stage 3's gathers; None: use `shard`
    # ranks of `shard` that share a secondary shard of stage 3's weights; None: no such shard
    secondary: Axis | None = None
    # `shard` within a host and between hosts: gradients are quantized only between hosts
    levels: tuple[Axis, Axis] | None = None

    @property
    def gathers_over(self) -> Axis:
        """The axis over which stage 3 gathers."""
        return self.gather or self.shard

    @property
    def sends(self) -> bool:
        """Whether gradients are sent to other ranks."""
        return self.shard.size > 1 or self.replica.size > 1


ALONE = Placement(Axis("shard"), Axis("replica"))


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of this rank's model."""

    name: str  # qualified name in the module
    shape: tuple[int, ...]  # local shape, after TP
    spec: ParamSpec  # the parameter as a whole, over all ranks
    unit: int  # index of the first unit that uses it, in forward order
    chunk: int = 0  # the model chunk of this rank that holds it
    group: int = 0  # index of its optimizer group
    trains: bool = True  # has a gradient; a frozen parameter is only sharded and saved
    persistent: bool = False  # stage 3 keeps it whole on every rank
    alone: bool = False  # stage 3 gives it a bucket of its own
    matrix: bool = False  # the optimizer updates it as a whole matrix; its bucket holds only such parameters
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
    """The elements [start, stop) of a bucket that belong to one parameter."""

    info: ParamInfo
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + prod(self.info.shape)

    @property
    def interval(self) -> Interval:
        """The slot as an interval."""
        return Interval(self.start, self.stop)


@dataclass(frozen=True)
class Pieces:
    """A strided set of elements: `count` blocks of `length`, which start `stride` elements apart."""

    start: int
    length: int
    count: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        """Number of elements in all blocks."""
        return self.length * self.count

    def of(self, x: Tensor) -> Tensor:
        """Return these elements of the last dimension of x as a view [..., count, length]."""
        step = x.stride(-1)
        strides = (*x.stride()[:-1], self.stride * step, step)
        return x.as_strided((*x.shape[:-1], self.count, self.length), strides, x.storage_offset() + self.start * step)


@dataclass(frozen=True)
class Share:
    """The elements of one parameter that lie in one part of a bucket, in the order in which they lie in the part's
    buffer.

    There are at most three `pieces`: of the shard in which the parameter begins, of the shards that it fills (one piece
    with equal distances), and of the shard in which it ends.
    """

    slot: Slot
    pieces: tuple[Pieces, ...]
    start: int  # of the first piece in the buffer
    part: Interval  # elements of every shard
    shard_numel: int

    @cached_property
    def stop(self) -> int:
        """One past the last element in the buffer."""
        return self.start + sum(piece.numel for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether the part holds the whole parameter."""
        return self.stop - self.start == prod(self.slot.info.shape)

    @cached_property
    def rows(self) -> tuple[Pieces, ...] | None:
        """The pieces in units of the parameter's rows; None if a piece begins or ends within a row."""
        width = prod(self.slot.info.shape[1:])
        every = [(piece.start, piece.length, piece.stride) for piece in self.pieces]
        if any(number % width for numbers in every for number in numbers):
            return None
        return tuple(
            Pieces(piece.start // width, piece.length // width, piece.count, piece.stride // width)
            for piece in self.pieces
        )

    def row_in_buffer(self, rows: Tensor) -> tuple[Tensor, int]:
        """Map rows of the parameter to rows of this share.

        Args:
            rows: int64, indices of rows of the parameter.

        Returns:
            The index of each row within the share, and the number of rows of the share.  A row that lies outside gets
            that number.
        """
        width, held = prod(self.slot.info.shape[1:]), self.part.stop - self.part.start
        element, count = rows * width + self.slot.start, (self.stop - self.start) // width
        within = element % self.shard_numel - self.part.start
        found = (element // self.shard_numel * held + within - self.start) // width
        return found.where((within >= 0) & (within < held), count), count


@dataclass(frozen=True)
class BucketLayout:
    """Where each parameter lies in a bucket.  All its parameters have the same placement and chunk, and all train or
    none does.
    """

    name: str  # for messages
    slots: tuple[Slot, ...]  # in order, from element 0; padding may precede a slot that begins a quantization block
    step: int = 1  # shards are a multiple of this; in a bucket that is cut into parts it is a multiple of whole rows
    part_count: int = 1

    @property
    def first(self) -> ParamInfo:
        """The first parameter.  All agree with it in placement, chunk, and whether they train, persist or are matrices."""
        return self.slots[0].info

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.first.placement.shard.size

    @property
    def trains(self) -> bool:
        """Whether the parameters have gradients."""
        return self.first.trains

    @property
    def tie(self) -> str | None:
        """The logical name of a parameter that several stages or chunks hold.  Such a parameter has a bucket of its
        own.
        """
        return self.first.spec.name if self.first.spec.tied else None

    @cached_property
    def unit(self) -> int:
        """Index of the first unit that uses one of the parameters."""
        return min(slot.info.unit for slot in self.slots)

    @property
    def numel(self) -> int:
        """Number of elements up to the end of the last parameter."""
        return self.slots[-1].stop

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one shard, with padding."""
        return -(-max(self.numel, 1) // (self.shards * self.step)) * self.step

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer, with padding."""
        return self.shard_numel * self.shards

    @property
    def interval(self) -> Interval:
        """All elements, with padding."""
        return Interval(0, self.padded_numel)

    def shard(self, index: int) -> Interval:
        """Return the elements of shard `index`."""
        return Interval(index * self.shard_numel, (index + 1) * self.shard_numel)

    def in_parts_of(self, limit: int) -> BucketLayout:
        """Return the layout cut into the fewest parts of at most `limit` elements.  A part has at least one row of each
        shard.
        """
        smallest = self.shards * self.step
        return replace(self, part_count=-(-self.padded_numel // max(limit // smallest * smallest, smallest)))

    @property
    def parts(self) -> tuple[Interval, ...]:
        """For each part, the elements of every shard that are reduced at once; see [Note: parts]."""
        each = -(-self.shard_numel // (self.part_count * self.step)) * self.step
        return tuple(Interval(at, min(at + each, self.shard_numel)) for at in range(0, self.shard_numel, each))

    def shares(self, part: Interval) -> Iterator[Share]:
        """Yield the share of each parameter that has elements in a part.  A bucket of one part yields empty parameters,
        too.
        """
        each, held = self.shard_numel, part.stop - part.start
        for slot in self.slots:
            if held == each:
                yield Share(slot, (Pieces(0, slot.stop - slot.start),), slot.start, part, each)
                continue
            first, last = slot.start // each, -(-slot.stop // each) - 1  # indices of shards
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
        """Yield the longest intervals of parameters with an equal key.  Padding at the end belongs to none."""
        for value, slots in groupby(self.slots, key=lambda slot: key(slot.info)):
            members = list(slots)
            yield value, Interval(members[0].start, members[-1].stop)


def intersect(a: Interval, b: Interval) -> Interval | None:
    """Return the common elements, or None."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Interval(start, stop) if start < stop else None


def _over_tp(info: ParamInfo) -> tuple[bool, bool]:
    """Whether the parameter is split over tp, and whether its gradient is to be summed over tp."""
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
        width = prod(largest.info.shape[1:])
        padding = -start % (shards * lcm(step, width))
        if largest.start % width == 0 and padding * _ROWS_OF_PADDING <= start:
            step, is_cut = lcm(step, width), True
    layout = BucketLayout(f"bucket of {first.name}", tuple(slots), step)
    return layout.in_parts_of(limit) if is_cut else layout


def _fits(members: Sequence[ParamInfo], limit: int) -> bool:
    """Whether parameters may share a bucket: all fit, or all but the largest are small and lie in one of its parts.

    If more parameters shared it, they would wait for the largest, and it for them.
    """
    sizes, shards = [prod(info.shape) for info in members], members[0].placement.shard.size
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
    """Assign every parameter to one bucket.

    No bucket spans two chunks or placements, or holds both frozen and trainable parameters.  A tied parameter has its
    own bucket, with an equal layout on all stages that hold it.

    Args:
        parameters: in forward order.
        by_unit: one bucket per unit, in forward order: what ZeRO-3 gathers at once.  Otherwise, and for persistent
            parameters, buckets are filled in the order in which the backward completes gradients.  A parameter larger
            than a bucket shares one only with small ones (`_fits`).
        bucket_elements: most elements of a bucket, all shards together.
        cuts: reduce an oversized bucket that is nearly all one parameter in parts.
        part_elements: most elements of a part, all shards together, but at least one row of each shard, or the largest
            bucket that cannot be cut; None: `bucket_elements`.
        cuts_units: `by_unit` gives a unit several buckets of at most `bucket_elements`, in the order of its backward.
        align: shards are a multiple of this.  With `BLOCK`, parameters that tp splits begin at a multiple, too.
    """
    single = [[info] for info in parameters if info.spec.tied or (by_unit and info.alone)]
    free = [info for info in parameters if [info] not in single]
    most = bucket_elements if part_elements is None else part_elements

    def is_cut(members: Sequence[ParamInfo]) -> bool:
        is_large = cuts and sum(prod(member.shape) for member in members) > most
        return is_large and _layout(members, most, cuts=cuts, align=align).part_count > 1

    def may_share(last: list[ParamInfo], info: ParamInfo) -> bool:
        together = [*last, info]
        loses_cut = (is_cut(last) or is_cut([info])) and not is_cut(together)
        return last[0].chunk == info.chunk and _fits(together, bucket_elements) and not loses_cut

    placements = list(dict.fromkeys(info.placement for info in parameters))

    def scope(info: ParamInfo) -> tuple[float, int, bool, bool, bool, bool]:
        """Return what all parameters of a bucket have in common."""
        unit, spec = info.unit if by_unit and not info.persistent else inf, info.spec
        return (
            unit,
            placements.index(info.placement),
            unit == inf or not spec.in_fp8_squares,  # large buckets first: they share large gather buffers
            spec.of_experts,
            info.trains,
            info.matrix or spec.buffer,
        )

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
    """Settings that all buckets of a model share.

    Attributes:
        placement: of every parameter that has none of its own.
        dtype: of the weights that modules compute with.
        device: where modules compute.
        accumulate_dtype: in which a step's gradients add up.
        reduce_dtype: in which gradients are sent.
        on_cpu: whether the run's modules compute on a CPU.
        pins_memory: whether the host memory of offloaded state is page-locked.
        copier: moves offloaded state between host and device.
        arena: holds the working buffers of gradients; None: each buffer has its own memory.
        quantizes_weights: stage 3 gathers weights in blocks of 8 bits.
        gradient_bits: bits per gradient when they are reduced over the shard axis in blocks; 0: not quantized.
        compiles: whether quantization is compiled.
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
        """Shards are a multiple of this."""
        return BLOCK if self.quantizes_weights or self.gradient_bits else ALIGN_ELEMENTS


class Extent(Enum):
    """How much of a bucket's weights, gradients or optimizer state a rank holds between uses."""

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

    Full weights are on the device.  The reduced gradient is on the host, unless the state is on the device.
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
        """Return the table's row for a stage.  On one rank a shard is the whole bucket, unless it is offloaded.

        Args:
            weights_on: location of stage 3's shards of the weights.
            state_on: location of the optimizer state.
        """
        weights, gradients, state = _EXTENTS[zero_stage]
        if layout.first.persistent or (layout.shards == 1 and weights_on == "device"):
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
    """Creates the arrays of buckets that are not on the device, and names their locations; see `Offload`."""

    def residency(self, layout: BucketLayout, /) -> Residency: ...

    def allocate(self, location: Location, numel: int, dtype: torch.dtype, /) -> FlatArray: ...


class Bucket:
    """The tensors of one bucket on one rank.

    Args:
        weights: buffer for the full weights, [padded]; stage 3 passes a gather buffer.  None: allocate one.
        arrays: creates the arrays in host memory or in a file; None: everything is on the device.

    Attributes:
        is_duplicate: holds a tied parameter whose first copy is elsewhere; not counted in the norm and not saved.
        placement: the ranks that share the bucket.
        residency: what this rank holds of it.
        owned: the elements whose master weights and moments this rank holds.
        dtype: of the weights.
        counted: the elements that this rank counts in the gradient norm and writes to a checkpoint; ranks do not
            overlap.
        weights: [padded]; if weights are sharded, valid only while they are gathered.
        weight_shard: [owned], in the weights' dtype.
        master: fp32 [owned]; the same memory as `weight_shard` for fp32 or frozen weights.
        full_gradient: [padded] in the accumulation dtype, if gradients are not sharded; exists from a step's first
            gradient on.
        gradient: fp32 [owned], the reduced gradient for the optimizer, in the same location as the master weights.
        gradient_leaves: reduced gradients are copied from the device to the host.
        reduces_in_place: `gradient` is a view of `full_gradient` and exists only together with it.
        summed: the elements whose gradients are complete on this rank when reductions end: all owned ones, or fewer if
            the bucket is updated later; see `WeightGathers.defer_steps`.
    """

    def __init__(
        self, layout: BucketLayout, policy: ShardingPolicy, weights: Tensor | None = None, arrays: Arrays | None = None
    ) -> None:
        self.layout, self.policy, self.placement = layout, policy, layout.first.placement
        self.dtype = torch.float32 if layout.first.spec.buffer else policy.dtype
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
            weights = torch.zeros(layout.padded_numel, dtype=self.dtype, device=policy.device)
        self.weights = weights
        self.weight_shard: FlatArray
        if self.residency.weights is Extent.WHOLE:
            self.weight_shard = InMemory(weights[self.owned.start : self.owned.stop], "device")
        else:
            self.weight_shard = new(self.residency.weights_on, policy.dtype)
        self.master = self.weight_shard
        state_on = self.residency.state_on  # fp32 weights in the same memory are their own master weights
        if layout.trains and not (policy.dtype == torch.float32 and self.residency.weights_on == state_on != "file"):
            self.master = new(state_on, torch.float32)
        on_device = state_on == "device"
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
        """Whether this rank always holds the full weights."""
        return self.residency.weights is Extent.WHOLE

    @property
    def sums_whole(self) -> bool:
        """Whether a step's gradients add up unsharded and are reduced at its end."""
        return self.layout.trains and self.residency.gradients is Extent.WHOLE

    @property
    def gathers_weights(self) -> bool:
        """Whether this rank updates a shard but holds the full weights, which are then gathered after every step."""
        return self.holds_weights and self.owned != self.layout.interval

    @property
    def gradient_parts(self) -> tuple[Interval, ...]:
        """For each part, the elements of every shard that are reduced at once."""
        return (self.layout.shard(0),) if self.sums_whole else self.layout.parts

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of `full_gradient` while it exists."""
        return self.layout.padded_numel * self.policy.accumulate_dtype.itemsize if self.sums_whole else 0

    def allocate_gradient(self) -> Tensor:
        """Return memory for a step's full gradients, [padded], with undefined content."""
        full = torch.empty(self.layout.padded_numel, dtype=self.policy.accumulate_dtype, device=self.policy.device)
        self.full_gradient = full
        if self.reduces_in_place:
            self.gradient = full[self.owned.start : self.owned.stop]
        return full

    def free_gradient(self) -> None:
        """Free the gradients' memory for the activations of a forward, if no sum is stored there.

        On a CPU it stays, since large blocks would be mapped page by page every time.  So do blocks that are not sent:
        they are small.
        """
        if self.reduces_in_place and not (self.policy.on_cpu and self.placement.sends):
            self.full_gradient, self.gradient = None, torch.zeros(0)

    def owned_part(self, flat: Tensor, interval: Interval) -> Tensor:
        """Return elements `interval` of a tensor that covers the owned elements."""
        return flat[interval.start - self.owned.start : interval.stop - self.owned.start]

    def read(self, array: FlatArray, interval: Interval) -> Tensor:
        """Return elements `interval` of an array that covers the owned elements; from a file, a copy."""
        return array.read(interval.start - self.owned.start, interval.stop - self.owned.start)

    def write(self, array: FlatArray, interval: Interval, values: Tensor) -> None:
        """Overwrite elements `interval` of an array that covers the owned elements."""
        array.write(interval.start - self.owned.start, values)


def in_order_of_use(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Sort buckets in the order in which a forward uses them.  Buckets of one unit are given in the order of its
    backward.
    """
    forward = buckets[::-1]
    return sorted(forward, key=lambda bucket: bucket.layout.unit)
