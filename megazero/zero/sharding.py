"""How a model is sharded: over which ranks, in which formats, and where each parameter lies in its bucket.

    parameters   | w0      | w1   | b1 |pad|
    flat buffer  [---------+------+----+---]
    shards       [  rank 0   |   rank 1    ]      a border may fall within a parameter, so all shards are equal

Parameters are sorted by their properties, so that each optimizer group, the gradient norm and the sums over tp work on
a few contiguous intervals of a bucket instead of on single parameters, and one collective serves the whole bucket.

[Note: bucket chunks]  A parameter larger than the bucket size is reduced chunk by chunk, so that no buffer must hold all
of it.  A bucket chunk covers the same rows of every shard, so every rank owns an equal amount of it:

    flat buffer  [ a b c | a b c | a b c ]      three shards, chunks a, b and c
    chunk b      [b|b|b]                        reduced into elements b of each rank's shard

All gradient buffers have the size of the largest chunk.  Under stage 3 that is at least a transformer block, which is
not cut (between CPU hosts: the largest bucket of a block).  An embedding is cut into chunks of that size, even if
buckets are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor

from megazero.comm.collectives import gather_objects
from megazero.comm.memory import Arena, Copier, copier_on
from megazero.config.schema import PrecisionConfig, ZeroConfig
from megazero.layers.spec import ParamSpec
from megazero.parallel_state import Axis, ParallelState
from megazero.parallel_state.grid import hosts_of
from megazero.settings import divisors

if TYPE_CHECKING:
    from megazero.zero.optimizer import OptimizerFactory

K = TypeVar("K", bound=Hashable)

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ALIGN_ELEMENTS = 16  # a shard begins at a multiple of 64 bytes in fp32
BLOCK = 256  # elements that share one scale when they are quantized: see `quantized`, [Note: blocks]


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
    def sends(self) -> bool:
        """Whether gradients are sent to other ranks."""
        return self.shard.size > 1 or self.replica.size > 1


ALONE = Placement(Axis("shard"), Axis("replica"))

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
        copier: moves offloaded state between host and device.
        arena: holds the working buffers of gradients; None: each buffer has its own memory.
        quantizes_weights: stage 3 gathers weights in 8 bits, in blocks that share a scale.
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
    copier: Copier = _AT_ONCE
    arena: Arena | None = None
    quantizes_weights: bool = False
    gradient_bits: int = 0
    compiles: bool = False

    @property
    def align(self) -> int:
        """Shards are a multiple of this."""
        return BLOCK if self.quantizes_weights or self.gradient_bits else ALIGN_ELEMENTS


@dataclass(frozen=True)
class ShardingSettings:
    """How a model is sharded and updated.  `arena`, `compiles`: see `ShardingPolicy`; `averages`: keep a `WeightAverage`."""

    zero: ZeroConfig
    precision: PrecisionConfig
    factory: OptimizerFactory
    arena: Arena | None = None
    compiles: bool = False
    averages: bool = False

    def policy(self, state: ParallelState) -> ShardingPolicy:
        """Return the settings that all buckets share.  A collective call.  Raises: ValueError."""
        zero, precision = self.zero, self.precision
        return ShardingPolicy(
            zero.stage,
            DTYPES[precision.dtype],
            placement_of(state, zero),
            state.device,
            DTYPES[precision.accumulate_dtype],
            DTYPES[precision.reduce_dtype],
            on_cpu=state.device_type == "cpu",
            copier=copier_on(state.device),
            arena=self.arena,
            quantizes_weights=zero.quantized_weights,
            gradient_bits=zero.quantized_gradients,
            compiles=self.compiles,
        )


def placement_of(state: ParallelState, zero: ZeroConfig) -> Placement:
    """Return the placement of a model's parameters.  A collective call.

    Raises:
        ValueError: the size of the secondary axis does not divide the number of ranks that share the state.
    """
    levels = _levels(state) if zero.quantized_gradients else None
    if zero.stage < 3:
        return Placement(state.shard, state.replica, levels=levels)
    size, shards = zero.secondary_shard_size, state.shard.size
    if size and (size in (1, shards) or shards % size):
        raise ValueError(
            f"zero.secondary_shard_size={size} must divide the {shards} ranks that share the state into two groups or more, "
            f"of 2 or more: choose among {', '.join(map(str, [0, *divisors(shards)[1:-1]]))}"
        )
    # NCCL runs operations of one communicator in order: without its own, a gather would wait for earlier reductions.
    gather = state.with_own_group(state.shard, "gathers") if state.device.type == "cuda" else None
    secondary = state.block_on(state.shard, size, "secondary", "gathers") if size else None
    return Placement(state.shard, state.replica, gather, secondary, levels)


def expert_placement_of(state: ParallelState, zero: ZeroConfig) -> Placement | None:
    """Return the placement of experts: the ranks that hold the same experts share their state.  A collective call.

    Returns:
        None if these are the ranks that share all other parameters.
    """
    if state.grid.ep == state.grid.tp == 1:
        return None
    gather = state.with_own_group(state.edp, "gathers") if zero.stage == 3 and state.device.type == "cuda" else None
    return Placement(state.edp, Axis("replica", (state.rank,), traffic=state.traffic), gather)


def _levels(state: ParallelState) -> tuple[Axis, Axis] | None:
    """Return `shard` within a host and between hosts if several hosts have equally many of its ranks, otherwise None."""
    hosts = hosts_of([str(rank // state.local_world_size) for rank in state.shard.ranks], state.shard.index)
    size = hosts.size if hosts is not None and hosts.count > 1 else 1
    if set(gather_objects(size, state.world)) != {size} or size == 1:
        return None
    return state.cut(state.shard, size, "host", "hosts", "reductions")


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of this rank's model."""

    name: str  # qualified name in the module
    shape: tuple[int, ...]  # local shape, after TP
    spec: ParamSpec  # the parameter as a whole, over all ranks
    unit: int  # index of the first unit that uses it, in forward order
    virtual_stage: int = 0  # index of the virtual stage of this rank that holds it
    group: int = 0  # index of its optimizer group
    trains: bool = True  # has a gradient; a frozen parameter is only sharded and saved
    persistent: bool = False  # stage 3 keeps all of it on every rank
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
class StridedBlocks:
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
class ChunkSlot:
    """The elements of one parameter that lie in one bucket chunk, in the order in which the chunk's buffer holds them.

    `blocks` has at most three entries: the elements in the shard in which the parameter begins, those in the shards that
    it fills (at equal distances), and those in the shard in which it ends.
    """

    slot: Slot
    blocks: tuple[StridedBlocks, ...]
    start: int  # index of the first element in the chunk's buffer
    chunk: Interval  # elements of every shard
    shard_numel: int

    @cached_property
    def stop(self) -> int:
        """One past the last element in the buffer."""
        return self.start + sum(blocks.numel for blocks in self.blocks)

    @cached_property
    def is_whole(self) -> bool:
        """Whether the chunk holds the whole parameter."""
        return self.stop - self.start == prod(self.slot.info.shape)

    @cached_property
    def rows(self) -> tuple[StridedBlocks, ...] | None:
        """The blocks in units of the parameter's rows; None if a block begins or ends within a row."""
        width = prod(self.slot.info.shape[1:])
        every = [(blocks.start, blocks.length, blocks.stride) for blocks in self.blocks]
        if any(number % width for numbers in every for number in numbers):
            return None
        return tuple(
            StridedBlocks(blocks.start // width, blocks.length // width, blocks.count, blocks.stride // width)
            for blocks in self.blocks
        )

    def row_in_buffer(self, rows: Tensor) -> tuple[Tensor, int]:
        """Map rows of the parameter to rows of this chunk.

        Args:
            rows: int64, indices of rows of the parameter.

        Returns:
            The index of each row among those in this chunk, and their number.  A row that lies outside gets that number.
        """
        width, held = prod(self.slot.info.shape[1:]), self.chunk.size
        element, count = rows * width + self.slot.start, (self.stop - self.start) // width
        within = element % self.shard_numel - self.chunk.start
        found = (element // self.shard_numel * held + within - self.start) // width
        return found.where((within >= 0) & (within < held), count), count


@dataclass(frozen=True)
class BucketLayout:
    """Where each parameter lies in a bucket.  All parameters of a bucket have the same placement and belong to the same
    virtual stage; either all of them train or none does.
    """

    name: str  # for messages
    slots: tuple[Slot, ...]  # in order, from element 0; padding may precede a slot that begins a quantization block
    step: int = 1  # shards are a multiple of this; in a bucket that is cut into chunks it is a multiple of whole rows
    chunk_count: int = 1

    @property
    def first(self) -> ParamInfo:
        """The first parameter.  All agree with it in placement, virtual stage, and whether they train, persist or are
        matrices.
        """
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
        """The logical name of a parameter that several stages hold.  Such a parameter has a bucket of its own."""
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

    def in_chunks_of(self, limit: int) -> BucketLayout:
        """Return the layout cut into the fewest chunks of at most `limit` elements.  A chunk has at least one row of each
        shard.
        """
        smallest = self.shards * self.step
        return replace(self, chunk_count=-(-self.padded_numel // max(limit // smallest * smallest, smallest)))

    @property
    def chunks(self) -> tuple[Interval, ...]:
        """For each bucket chunk, the elements of every shard that it covers; see [Note: bucket chunks]."""
        each = -(-self.shard_numel // (self.chunk_count * self.step)) * self.step
        return tuple(Interval(at, min(at + each, self.shard_numel)) for at in range(0, self.shard_numel, each))

    def chunk_slots(self, chunk: Interval) -> Iterator[ChunkSlot]:
        """Yield the elements in a chunk of each parameter that has any.  A bucket of one chunk yields empty parameters,
        too.
        """
        each, held = self.shard_numel, chunk.size
        for slot in self.slots:
            if held == each:
                yield ChunkSlot(slot, (StridedBlocks(0, slot.stop - slot.start),), slot.start, chunk, each)
                continue
            first, last = slot.start // each, -(-slot.stop // each) - 1  # indices of shards
            ends = [
                intersect(slot.interval, Interval(at * each + chunk.start, at * each + chunk.stop))
                for at in (first, last)
            ]
            blocks = [StridedBlocks(end.start, end.size) for end in ends[: last - first + 1] if end is not None]
            if last - first > 1:
                blocks.append(StridedBlocks((first + 1) * each + chunk.start, held, last - first - 1, each))
            if blocks:
                blocks.sort(key=lambda block: block.start)
                at = blocks[0].start
                inside = tuple(replace(block, start=block.start - slot.start) for block in blocks)
                yield ChunkSlot(slot, inside, at // each * held + at % each - chunk.start, chunk, each)

    def intervals(self, key: Callable[[ParamInfo], K]) -> Iterator[tuple[K, Interval]]:
        """Yield the longest intervals of parameters with an equal key.  Padding at the end belongs to none."""
        for value, slots in groupby(self.slots, key=lambda slot: key(slot.info)):
            members = list(slots)
            yield value, Interval(members[0].start, members[-1].stop)


def intersect(a: Interval, b: Interval) -> Interval | None:
    """Return the common elements, or None."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Interval(start, stop) if start < stop else None
