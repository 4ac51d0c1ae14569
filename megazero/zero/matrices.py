"""The step of optimizers that update whole matrices, such as Muon, on sharded buckets.

    rank 0   [== A ==|= B     momentum        A whole  -> update of A      [== A ==|= B     weights
    rank 1    B =|== C ==]    of shards  -->  B, C     -> of B, of C  -->   B =|== C ==]    of shards

Momentum is sharded like all state: every rank updates its own elements.  Each matrix is then assembled on one rank, its
owner, which computes the update and sends every rank the elements of its shard.  Fused matrices (q | k | v) are updated
separately, and their tensor-parallel shards are joined.  Owners have equal FLOPs, as far as possible, and hold
much of their matrices.  They are all ranks of a stage, or those with the same experts.  If groups of ranks hold copies
of the state (`zero.shard_group_size`), blocks of up to 8 groups share the work, and each block iterates for itself: the
owner's group sends it the momentum, and it sends the update to every group of its block.

Invariant: nothing here depends on where shards begin, so equal gradients give bit-equal weights on every number of
ranks. Matrices are not stacked: torch does not promise that a product rounds in a stack as it does alone, and the number
of an owner's matrices depends on the number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, exchange, gather_objects, wait_all
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.bucket import Bucket, in_order_of_use
from megazero.zero.optimizer import MOMENTUM, MatrixUpdate, ShardedOptimizer
from megazero.zero.sharding import BucketLayout, Interval, ShardingPolicy, Slot, intersect

MOST_COPIES = 8  # of the state in a block: an owner sends each update to all of them


class Fragment(NamedTuple):
    """Elements of a matrix in a rank's bucket.  In the buffer of the whole matrix they begin at `start`."""

    rank: int
    elements: Interval
    start: int


@dataclass(frozen=True, eq=False)
class Matrix:
    """One logical matrix, and the elements that are sent to its owner and back.

    Args:
        bucket: index of its bucket.
        owner: the global rank that computes the update.
        shapes: of the tensor-parallel shards, which follow one another in the buffer.
        dim: dimension along which these shards are joined.
        sources: the fragments that ranks send to the owner; together they hold every element once.
        holders: the fragments that ranks update; they include every copy of an element.
    """

    bucket: int
    owner: int
    shapes: tuple[tuple[int, int], ...]
    dim: int
    sources: tuple[Fragment, ...]
    holders: tuple[Fragment, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole matrix."""
        return sum(rows * columns for rows, columns in self.shapes)

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensor-parallel shards of the matrix as 2-D views of the buffer."""
        flats = buffer.split([rows * columns for rows, columns in self.shapes])
        return [flat.view(shape) for flat, shape in zip(flats, self.shapes, strict=True)]


def copies_in_block(copies: int, ranks: int, matrices: int) -> int:
    """Return how many copies of the state form a block that shares the work on the matrices of a stage.

    The result divides `copies` and lets every rank own a matrix.

    Args:
        copies: number of copies of the state.
        ranks: number of ranks that hold one copy.
        matrices: number of matrices.
    """
    return max((n for n in range(1, MOST_COPIES + 1) if copies % n == 0 and n * ranks <= matrices), default=1)


def plan_matrices(
    layouts: Sequence[BucketLayout],
    ranks: Sequence[Sequence[int]],
    flops: Callable[[int, int], int],
    *,
    sharded: bool,
    ep: int | None = None,
) -> list[Matrix]:
    """Choose an owner for every matrix of these buckets, and list which elements each rank sends and updates.

    Args:
        ranks: global ranks by tensor-parallel index; then copy after copy of the state, by index of the shard.
        flops: the FLOPs of the update of a matrix, from its rows and columns.
        sharded: each rank updates only its shard; otherwise all elements.
        ep: number of ranks that buckets of experts are spread over; `ranks` then has one row, of ranks that hold the
            same experts.

    Returns: the matrices in the order of the buckets, the same on every rank.
    """
    logical = [
        matrix
        for index, layout in enumerate(layouts)
        for slot in layout.slots
        for matrix in _logical_matrices(index, slot, len(ranks), ep)
    ]

    def fragments(matrix: _LogicalMatrix, tp: int) -> Iterator[Fragment]:
        """Yield the elements on the ranks of one tensor-parallel index."""
        layout, tp_index = layouts[matrix.bucket], 0 if len(matrix.shapes) == 1 else tp
        elements, start = matrix.elements[tp_index], sum(interval.size for interval in matrix.elements[:tp_index])
        size, shards = (layout.shard_numel, layout.shards) if sharded else (layout.padded_numel, 1)
        for copy in range(0, len(ranks[tp]), shards):
            for shard in range(elements.start // size, -(-elements.stop // size)):
                held = intersect(elements, Interval(shard * size, (shard + 1) * size))
                if held is not None:  # there are none where tp has more ranks than the matrix has rows
                    yield Fragment(ranks[tp][copy + shard], held, start + held.start - elements.start)

    every = [tuple(found for tp in range(len(ranks)) for found in fragments(matrix, tp)) for matrix in logical]
    places = {rank: (tp, index) for tp, row in enumerate(ranks) for index, rank in enumerate(row)}
    owners = _owners([flops(*matrix.shape) for matrix in logical], every, list(places), near=sharded)
    matrices = []
    for matrix, holders, owner in zip(logical, every, owners, strict=True):
        tp, index = places[owner]
        shards = layouts[matrix.bucket].shards if sharded else 1
        senders = [tp] if len(matrix.shapes) == 1 else range(len(ranks))
        copy = {rank for sender in senders for rank in ranks[sender][index // shards * shards :][:shards]}
        sources = tuple(fragment for fragment in holders if fragment.rank in copy)
        matrices.append(Matrix(matrix.bucket, owner, matrix.shapes, matrix.dim, sources, holders))
    return matrices


def _owners(
    work: Sequence[int], holders: Sequence[Sequence[Fragment]], ranks: Sequence[int], *, near: bool
) -> list[int]:
    """Choose the owner of every matrix, the largest matrix first.

    With `near`, it is the rank that holds most of the matrix, unless that rank would get more than the mean work.  The
    remaining matrices go to the ranks with the least work.
    """
    loads, owners, total = dict.fromkeys(ranks, 0), dict[int, int](), sum(work)
    order = sorted(range(len(work)), key=lambda number: -work[number])
    for number in order if near else ():
        nearest = max(holders[number], key=lambda held: (held.elements.size, -loads[held.rank])).rank
        if (loads[nearest] + work[number]) * len(ranks) <= total:
            loads[nearest] += work[number]
            owners[number] = nearest
    least = [(load, rank) for rank, load in loads.items()]
    heapify(least)
    for number in order:
        if number not in owners:
            load, owners[number] = least[0]
            heapreplace(least, (load + work[number], owners[number]))
    return [owners[number] for number in range(len(work))]


class _LogicalMatrix(NamedTuple):
    """A matrix that has no owner yet: its shape, and the shape of each tensor-parallel shard and the shard's elements in
    the bucket of its rank.
    """

    bucket: int
    shape: tuple[int, int]
    shapes: tuple[tuple[int, int], ...]
    elements: tuple[Interval, ...]
    dim: int


def _logical_matrices(bucket: int, slot: Slot, tp_size: int, ep: int | None) -> Iterator[_LogicalMatrix]:
    """Yield the logical matrices of one parameter."""
    spec = slot.info.spec
    # experts have the same shapes on all ranks
    places = [(0, ep)] if ep else [(tp, tp_size) for tp in range(tp_size if spec.split is not None else 1)]
    width, local = spec.local_shape(places[0][1])[1], [spec.local_rows(*place) for place in places]
    for rows in zip(*local, strict=True):
        firsts = [slot.start + interval.first * width for interval in rows]
        shapes = tuple((interval.stop - interval.start, width) for interval in rows)
        elements = tuple(Interval(at, at + size[0] * width) for at, size in zip(firsts, shapes, strict=True))
        shape = rows[0].named.rows, spec.shape[1]
        yield _LogicalMatrix(bucket, shape, shapes, elements, 1 if spec.split == 1 else 0)


class MatrixStepper:
    """Updates the buckets of matrices: `begin` sends the momentum to the owners, `finish` brings the updates back.

    Args:
        plans: buckets in the order of their use; for each, its matrices (see `plan_matrices`) and all ranks of its
            plan.
        dtype: the dtype in which matrices are sent and updates are computed.
        optimizer: computes the updates.
    """

    def __init__(
        self,
        plans: Mapping[Bucket, tuple[Sequence[Matrix], Axis]],
        rank: int,
        dtype: torch.dtype,
        optimizer: MatrixUpdate,
    ) -> None:
        self.buckets, self._rank, self._dtype, self._optimizer = list(plans), rank, dtype, optimizer
        self._axes = {bucket: axis for bucket, (_, axis) in plans.items()}
        self._matrices: dict[Bucket, list[Matrix]] = {bucket: [] for bucket in plans}
        for bucket, (matrices, _) in plans.items():
            for matrix in matrices:
                sources, holders = (
                    tuple(fragment for fragment in fragments if rank in (fragment.rank, matrix.owner))
                    for fragments in (matrix.sources, matrix.holders)
                )
                if sources or holders:  # this rank takes part
                    self._matrices[bucket].append(replace(matrix, sources=sources, holders=holders))
        self._under_way: list[tuple[Tensor, dict[Matrix, Tensor], list[Pending]]] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the matrices that are assembled on this rank, and of buffers to send from unless it sends from the
        gradient's memory.
        """
        every = [matrix for of_bucket in self._matrices.values() for matrix in of_bucket if matrix.owner == self._rank]
        sends_gradient = self._dtype == torch.float32
        own = sum(matrix.numel for matrix in every if not self._is_here(matrix))
        sent = sum(
            bucket.gradient.numel()
            for bucket in self.buckets
            if not sends_gradient or bucket.master.location != "device"
        )
        return (own + sent) * self._dtype.itemsize

    @torch.no_grad()
    def begin(self, state: ShardedOptimizer, factor: float) -> None:
        """Update the momentum with `factor` times the gradients, and start to send it to the owners.  Overwrites the
        gradients.
        """
        self._under_way.clear()
        beta = self._optimizer.beta
        for bucket, matrices in self._matrices.items():
            for interval in [param.interval for param in state.flat_params[bucket]]:
                gradient = bucket.owned_slice(bucket.gradient, interval)
                momentum = state.read(MOMENTUM, bucket, interval)
                if factor != 1.0:
                    gradient.mul_(factor)
                momentum.lerp_(gradient, 1.0 - beta)
                gradient.lerp_(momentum, beta)
                if bucket.master.location == "file":
                    state.write(MOMENTUM, bucket, interval, momentum)
            flat = bucket.gradient.to(bucket.policy.device, self._dtype)
            own = {matrix: self._buffer(matrix, bucket, flat) for matrix in matrices if matrix.owner == self._rank}
            self._under_way.append((flat, own, self._exchange(bucket, flat, own, to_owner=True)))

    @torch.no_grad()
    def finish(self, state: ShardedOptimizer) -> Iterator[Bucket]:
        """Compute the updates of this rank's matrices, exchange them and update the weights.  Yields each bucket when
        its shard is updated.
        """
        group, row_factors, returning = state.groups[-1], state.row_factors, []
        for bucket, (flat, own, arriving) in zip(self.buckets, self._under_way, strict=True):
            wait_all(arriving)  # sends too: the updates overwrite the memory that they read
            for matrix, buffer in own.items():
                self._compute(matrix, buffer)
            returning.append(self._exchange(bucket, flat, own, to_owner=False))
        for bucket, (flat, _, _), pendings in zip(self.buckets, self._under_way, returning, strict=True):
            wait_all(pendings)
            for interval in [param.interval for param in state.flat_params[bucket]]:
                weights, update = bucket.read(bucket.master, interval), bucket.owned_slice(flat, interval)
                weights.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(
                    update.to(weights.device), alpha=-group["lr"]
                )
                for slot in bucket.layout.slots if row_factors else ():
                    rows, shared = row_factors.get(slot.info.name), intersect(slot.interval, interval)
                    if rows is not None and shared is not None:
                        width, first = prod(slot.info.shape) // len(rows), shared.start - slot.start
                        top, stop = first // width, -(-(first + shared.size) // width)  # rows that this shard touches
                        each = rows[top:stop].to(weights.device).repeat_interleave(width)[first - top * width :]
                        scaled = weights[shared.start - interval.start : shared.stop - interval.start]
                        scaled.mul_(each[: shared.size])
                if bucket.master.location == "file":
                    bucket.write(bucket.master, interval, weights)
                    if bucket.weight_shard is not bucket.master:
                        bucket.write(bucket.weight_shard, interval, weights)
            yield bucket
        self._under_way.clear()

    def _is_here(self, matrix: Matrix) -> bool:
        """Whether this rank holds all elements of a matrix that it owns."""
        return len(matrix.sources) == 1 and matrix.sources[0].rank == self._rank

    def _buffer(self, matrix: Matrix, bucket: Bucket, flat: Tensor) -> Tensor:
        """Return memory for a whole matrix; if this rank holds all its elements, they are that memory."""
        if self._is_here(matrix):
            return bucket.owned_slice(flat, matrix.sources[0].elements)
        return torch.empty(matrix.numel, dtype=flat.dtype, device=flat.device)

    def _exchange(self, bucket: Bucket, flat: Tensor, own: Mapping[Matrix, Tensor], *, to_owner: bool) -> list[Pending]:
        """Start to send the owned elements `flat` to the owners of their matrices, or the updates back to the holders.

        Args:
            own: the buffer of each matrix that this rank owns.
        """
        sends, receives = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
        for matrix in self._matrices[bucket]:
            for rank, elements, start in matrix.sources if to_owner else matrix.holders:
                is_owner, holds = matrix.owner == self._rank, rank == self._rank
                shard = bucket.owned_slice(flat, elements) if holds else None
                whole = own[matrix][start : start + elements.stop - elements.start] if is_owner else None
                if shard is not None and whole is not None:
                    if not self._is_here(matrix):  # otherwise they are the same memory
                        (whole if to_owner else shard).copy_(shard if to_owner else whole)
                elif shard is not None:
                    (sends if to_owner else receives).append((shard, matrix.owner))
                elif whole is not None:
                    (receives if to_owner else sends).append((whole, rank))
        return exchange(sends, receives, self._axes[bucket])

    def _compute(self, matrix: Matrix, buffer: Tensor) -> None:
        """Replace the momentum of a whole matrix by its update."""
        shards = matrix.split(buffer)
        whole = shards[0] if len(shards) == 1 else torch.cat(shards, matrix.dim)
        update = self._optimizer.update(whole)
        sizes = [shard.shape[matrix.dim] for shard in shards]
        for shard, new in zip(shards, update.split(sizes, matrix.dim), strict=True):
            shard.copy_(new)


def matrix_stepper(
    policy: ShardingPolicy, buckets: Sequence[Bucket], optimizer: MatrixUpdate, state: ParallelState
) -> MatrixStepper:
    """Return the stepper for the matrices among these buckets.  Every rank must call this, in the same order."""
    own = in_order_of_use([bucket for bucket in buckets if bucket.layout.trains and bucket.layout.first.matrix])
    dense = [bucket for bucket in own if bucket.placement is policy.placement]
    count = sum(len(slot.info.spec.names.rows) for bucket in dense for slot in bucket.layout.slots)
    most = max(gather_objects(count, state.pp))  # all stages make groups alike
    size = state.shard.size * copies_in_block(state.replica.size, state.shard.size * state.tp.size, most)
    joined, table = state.across_tp(state.dp_cp.ranks[state.dp_cp.index // size * size :][:size], "matrices")
    plans: dict[Bucket, tuple[list[Matrix], Axis]] = {}

    def plan(members: Sequence[Bucket], among: Axis, ranks: Sequence[Sequence[int]], ep: int | None = None) -> None:
        plans.update({bucket: ([], among) for bucket in members})
        layouts, sharded = [bucket.layout for bucket in members], policy.zero_stage >= 1
        for matrix in plan_matrices(layouts, ranks, optimizer.flops, sharded=sharded, ep=ep):
            plans[members[matrix.bucket]][0].append(matrix)

    plan(dense, joined, table)
    if experts := [bucket for bucket in own if bucket.placement is not policy.placement]:
        among = experts[0].placement.shard
        plan(experts, among, [among.ranks], state.ep.size)
    dtype = torch.float32 if policy.dtype == torch.float32 else torch.bfloat16
    return MatrixStepper({bucket: plans[bucket] for bucket in own}, state.rank, dtype, optimizer)
