"""Sums of gradients over ranks: each bucket while the backward runs, and the few sums that end a step.

full [n * chunk] --reduce_dtype--> `AllReduce` or `ReduceScatter` over the bucket's shard axis -----> result
full [n * chunk] --quantized-----> `QuantizedScatter`: an all-to-all over the axis, summed in fp32 -> result
result --copy or add--> bucket.gradient, on the device, or on the host if the optimizer state is offloaded
last result of a step -> summed over the ranks that hold the same shard (`replica_sums`)
reduced shards -> partial gradients over tp -> copies of tied parameters -> square_sum
"""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_reduce, all_to_all, arriving_elements, reduce_scatter, runs_by_itself
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.layout import Interval, intersect
from megazero.zero.quantized import BlockFormat, InTwo, noise_of
from megazero.zero.replica_sums import ReplicaSums
from megazero.zero.sharding import Placement, ShardingPolicy

_NORM_BLOCK = 256  # as fast as longer blocks, and 30 times more exact
_IN_FLIGHT = 2  # if the host adds results, or this rank takes part itself: more in flight would hide no more


class WorkingBuffers:
    """Lends the buffers that gradients are collected in and sent from, up to a limit of bytes.

    All buffers for unreduced gradients have one size, so that each can hold any part of any bucket.  At the limit, the
    oldest reductions are finished first, which frees their buffers.

    Args:
        finish_oldest: finish the oldest running reduction; returns False if there is none.

    Attributes:
        pool: all buffers.
        most_bytes: the limit.  Several parts that fill at once may exceed it; the excess is freed at the end of the
            step.
        largest: elements of the largest part of a bucket.
    """

    def __init__(self, policy: ShardingPolicy, buckets: Sequence[Bucket], finish_oldest: Callable[[], bool]) -> None:
        self.pool, self.most_bytes = BufferPool(policy.device, policy.arena), 0
        self._finish_oldest = finish_oldest
        sizes = {bucket: max(part.size for part in bucket.gradient_parts) * bucket.layout.shards for bucket in buckets}
        self.largest = max(sizes.values(), default=0)
        self._usual = max((sizes[bucket] for bucket in buckets if len(bucket.layout.slots) > 1), default=self.largest)
        self.fills = not all(bucket.sums_whole for bucket in buckets)

    def size_for(self, numel: int) -> int:
        """Return the size of a buffer for `numel` gradients: the largest part's, unless gradients add up elsewhere."""
        return self.largest if self.fills else max(numel, self._usual)

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer of exactly `numel` elements."""
        while self.pool.bytes_after(numel, dtype) > self.most_bytes and self._finish_oldest():
            pass
        if self.pool.bytes_after(numel, dtype) > self.most_bytes:  # free buffers have another size
            self.pool.free_above(self.most_bytes - numel * dtype.itemsize)
        return self.pool.acquire(numel, dtype)


@dataclass
class _Chunk:
    """The gradients of one part of a bucket, and the state of their reduction."""

    bucket: Bucket
    elements: Interval  # of every shard
    full: Tensor  # [shards * elements]: this rank's gradients
    gradient: Tensor  # of the bucket: the result is copied or added to it
    reduced: int  # micro-batches of this step that `gradient` already contains
    is_last: bool  # no other reduction of these elements follows in this step
    buffers: list[Tensor] = field(default_factory=list)  # to release afterwards
    pending: Pending | InTwo = field(default_factory=Pending)
    result: Tensor | None = None  # still to be copied to `gradient`; None if the collective writes there


class Reduction(ABC):
    """How buckets of one placement are reduced.

    Attributes:
        dtype: format in which gradients travel.
        step: number of optimizer updates so far.
    """

    def __init__(self, placement: Placement, policy: ShardingPolicy, working: WorkingBuffers) -> None:
        self.axis, self.policy, self.working = placement.shard, policy, working
        self.dtype, self.step = policy.reduce_dtype, 0

    @abstractmethod
    def start(self, chunk: _Chunk) -> None:
        """Start reducing a chunk: set its pending collective, its result, and the buffers to hold until it is finished."""

    def working_bytes(self, numel: int) -> int:
        """Bytes of extra buffers that a reduction of `numel` elements needs."""
        casts = self.dtype != self.policy.accumulate_dtype and self.axis.size > 1
        return numel * casts * self.dtype.itemsize

    def _narrowed(self, chunk: _Chunk) -> Tensor:
        """Return the gradients in the format in which they travel."""
        if self.dtype == chunk.full.dtype or self.axis.size == 1:
            return chunk.full
        filled, chunk.buffers = chunk.buffers, []
        sent = self._lend_whole(chunk).copy_(chunk.full)
        for buffer in filled:  # later work on this device is ordered after the copy
            self.working.pool.release(buffer)
        return sent

    def _lend_whole(self, chunk: _Chunk) -> Tensor:
        """Return a working buffer as large as the chunk's gradients; the chunk holds it until it is finished."""
        chunk.buffers.append(self.working.acquire(self.working.size_for(chunk.full.numel()), self.dtype))
        return chunk.buffers[-1][: chunk.full.numel()]

    def _scatter(self, chunk: _Chunk, out: Tensor, full: Tensor, axis: Axis) -> Pending:
        """Start a reduce-scatter.  What other ranks send arrives in a working buffer and is summed there."""
        arrives = self._lend_whole(chunk) if arriving_elements(full.numel(), axis) else None
        return reduce_scatter(out, full, axis, arrives)


class AllReduce(Reduction):
    """Every rank gets the whole sum."""

    def start(self, chunk: _Chunk) -> None:
        sent = self._narrowed(chunk)
        chunk.pending = all_reduce(sent, self.axis)
        if sent is not chunk.full or not chunk.bucket.reduces_in_place:
            chunk.result = sent


class ReduceScatter(Reduction):
    """Every rank gets the sum of its shard."""

    def working_bytes(self, numel: int) -> int:
        return super().working_bytes(numel) + arriving_elements(numel, self.axis) * self.dtype.itemsize

    def start(self, chunk: _Chunk) -> None:
        sent, gradient = self._narrowed(chunk), chunk.gradient
        if chunk.reduced or gradient.dtype != sent.dtype or chunk.bucket.gradient_leaves:
            chunk.result = sent.view(self.axis.size, -1)[self.axis.index]  # no other rank needs this shard any more
        out = gradient if chunk.result is None else chunk.result
        chunk.pending = self._scatter(chunk, out, sent, self.axis)


class QuantizedScatter(Reduction):
    """Like `ReduceScatter`, but gradients travel in blocks of a few bits; see `quantized`, [Note: one sum].

    Attributes:
        sender: index of this rank among the ranks that send gradients of its shards.
    """

    def __init__(self, placement: Placement, policy: ShardingPolicy, working: WorkingBuffers) -> None:
        super().__init__(placement, policy, working)
        self.dtype = torch.float32
        self._blocks = BlockFormat.on(policy, policy.gradient_bits)
        self._host, self._hosts = placement.levels or (Axis("host"), placement.shard)
        self.sender = placement.replica.index * self._hosts.size + self._hosts.index  # each group rounds independently
        self._newest: InTwo | None = None

    def working_bytes(self, numel: int) -> int:
        whole = numel if self._host.size > 1 else 0
        within = whole + arriving_elements(numel, self._host) + numel // self.axis.size
        return within * self.dtype.itemsize + 2 * self._blocks.nbytes(numel // self._host.size)

    def start(self, chunk: _Chunk) -> None:
        if self._newest is not None:
            self._newest.advance()
        blocks, host, hosts, full = self._blocks, self._host, self._hosts, chunk.full
        usual, filled = self.working.size_for(full.numel()), chunk.buffers
        chunk.buffers = [self.working.acquire(blocks.nbytes(usual // host.size) // 4, self.dtype) for _ in range(2)]
        nbytes = blocks.nbytes(full.numel() // host.size)
        sent, arrived = (buffer.view(torch.uint8)[:nbytes].view(hosts.size, -1) for buffer in chunk.buffers)
        if chunk.reduced or chunk.bucket.gradient_leaves:
            chunk.buffers.append(self.working.acquire(usual // self.axis.size, self.dtype))
            chunk.result = chunk.buffers[-1][: chunk.gradient.numel()]
        out, shard = chunk.gradient if chunk.result is None else chunk.result, chunk.bucket.layout.shard_numel
        first = chunk.elements.start + host.index * shard
        noise = noise_of(self.step, chunk.reduced, self.sender, chunk.bucket.layout.name, first, host.size * shard)

        def send(mine: Tensor) -> Pending:
            blocks.quantize(mine.view(hosts.size, -1), sent, noise)
            return Pending(all_to_all(arrived, sent, hosts).wait, partial(blocks.sum, arrived, out))

        if host.size == 1:
            chunk.pending = send(full)
        else:
            of_hosts = full.view(hosts.size, host.size, -1).transpose(0, 1)
            whole = self._lend_whole(chunk).view(host.size, -1)
            whole.view(of_hosts.shape).copy_(of_hosts)
            mine = whole[host.index]
            summed = self._scatter(chunk, mine, whole.view(-1), host)
            chunk.pending = self._newest = InTwo(summed, partial(send, mine))
        for buffer in filled:  # later work on this device is ordered after this
            self.working.pool.release(buffer)


class ReductionQueue:
    """Starts the reductions of buckets, and finishes them in the order in which they started.

    As many run at once as there are buffers for: on a slow network, a backward that waited for the first would stand
    still.  If sums over replicas follow, two run at once, so that each of these sums begins while the backward is
    running.

    Attributes:
        working: the buffers that gradients pass through.  Their limit is twice `bucket_bytes`, or twice the largest
            part.
        replicas: sums reduced gradients over the ranks that hold the same shards.
        ways: how each bucket is reduced.
    """

    def __init__(self, policy: ShardingPolicy, buckets: Sequence[Bucket], bucket_bytes: int = 0) -> None:
        self._kept_dtype, self._in_flight = policy.accumulate_dtype, deque[_Chunk]()
        self.working = WorkingBuffers(policy, buckets, lambda: self._host_copies.free_oldest() or self._finish_oldest())
        self._host_copies, self.replicas = HostGradientCopies(policy, self.working.pool), ReplicaSums(policy, buckets)
        made: dict[tuple[Placement, type[Reduction]], Reduction] = {}
        self.ways: dict[Bucket, Reduction] = {}
        for bucket in buckets:
            scatters = QuantizedScatter if policy.gradient_bits else ReduceScatter
            key = bucket.placement, AllReduce if bucket.summed == bucket.layout.interval else scatters
            if key not in made:
                made[key] = key[1](bucket.placement, policy, self.working)
            self.ways[bucket] = made[key]
        self._made = list(made.values())
        # A sum over replicas starts when a reduction has ended.
        stays = all(bucket.master.location == "device" and bucket.placement.replica.size == 1 for bucket in buckets)
        axes = dict.fromkeys(way.axis for way in self._made) if stays else ()
        by_themselves = [
            runs_by_itself(axis) for axis in axes
        ]  # no short-circuit: every rank of an axis must take part
        self._most_in_flight = sys.maxsize if stays and all(by_themselves) else _IN_FLIGHT
        self.working.most_bytes = self._limit(policy, bucket_bytes)

    def _limit(self, policy: ShardingPolicy, bucket_bytes: int) -> int:
        """Return the limit of the working buffers, in bytes."""
        largest, kept = self.working.largest, policy.accumulate_dtype.itemsize
        sent = max((way.working_bytes(largest) for way in self._made), default=0)
        if self.working.fills:
            itemsize = max(policy.reduce_dtype.itemsize, kept)
            return max(2 * max(bucket_bytes, largest * itemsize), largest * kept + sent)
        return max(_IN_FLIGHT * sent, 2 * bucket_bytes if sent and self._most_in_flight > _IN_FLIGHT else 0)

    def buffer(self, numel: int | None = None) -> Tensor:
        """Return memory for the gradients of a part.

        Args:
            numel: exact size, for gradients that stay until the end of the step; None: the size that fits any part.
        """
        if numel is not None:
            return self.working.pool.acquire(numel, self._kept_dtype, reusable=False)
        return self.working.acquire(self.working.largest, self._kept_dtype)

    def start(self, bucket: Bucket, part: Interval, buffer: Tensor, *, reduced: int, is_last: bool) -> None:
        """Start the reduction of a part of a bucket.  Its result replaces `bucket.gradient`, or is added to it.

        Args:
            buffer: begins with the part's unreduced gradients; released afterwards unless the bucket owns it.
            reduced: micro-batches of this step whose sum `bucket.gradient` already contains; 0: the result replaces it.
            is_last: no other reduction of the part follows in this step.
        """
        self._finish_all_but(self._most_in_flight - 1)
        full = buffer[: part.size * bucket.layout.shards]
        is_all = full.numel() == bucket.layout.padded_numel
        gradient = bucket.owned_part(bucket.gradient, bucket.summed)
        gradient = gradient if is_all else gradient[part.start : part.stop]
        chunk = _Chunk(bucket, part, full, gradient, reduced, is_last, [] if bucket.sums_whole else [buffer])
        self.ways[bucket].start(chunk)
        if bucket.gradient_leaves:
            self._host_copies.start(chunk)
            self._sum_over_replicas(chunk)
        else:
            self._in_flight.append(chunk)

    def finish(self) -> None:
        """Wait for all reductions, and for their results on the host."""
        self._finish_all_but(0)
        self._host_copies.finish()
        self.replicas.finish()
        self.working.pool.free_above(self.working.most_bytes)

    def begin_step(self, step: int) -> None:
        """Finish the reductions of the last step, so that those of an aborted step are not added to the new one.

        Args:
            step: number of optimizer updates so far; seeds the random rounding of quantized gradients.
        """
        self.finish()
        for way in self._made:
            way.step = step
        self.replicas.begin_step()

    def reopen(self) -> None:
        """Allow more reductions after those that were marked as the last."""
        self.finish()
        self.replicas.reopen()

    def _finish_all_but(self, count: int) -> None:
        while len(self._in_flight) > count:
            self._finish_oldest()

    def _finish_oldest(self) -> bool:
        if not self._in_flight:
            return False
        chunk = self._in_flight[0]
        chunk.pending.wait()  # if a signal interrupts this, the chunk is still first and is waited for again
        self._in_flight.popleft()
        if chunk.result is not None:
            (chunk.gradient.add_ if chunk.reduced else chunk.gradient.copy_)(chunk.result)
        for buffer in chunk.buffers:
            self.working.pool.release(buffer)
        self._sum_over_replicas(chunk)
        return True

    def _sum_over_replicas(self, chunk: _Chunk) -> None:
        if chunk.is_last:
            self.replicas.start(chunk.bucket, chunk.gradient)


class HostGradientCopies:
    """Copies each result to the host as soon as it is reduced, while the backward goes on.

    If a result must be added, it is copied to page-locked memory and a thread adds it: the main thread keeps queueing
    work.

    Args:
        pool: the pool of the buffers that hold the results.
    """

    def __init__(self, policy: ShardingPolicy, pool: BufferPool) -> None:
        self._copier, self._pool = policy.copier, pool
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()  # the copy's mark, and its buffers
        self._newest: Any | None = None  # mark of the last copy; copies end in order
        # The wait for an addition, and its staging buffer.
        self._adding: deque[tuple[Callable[[], object], Tensor]] = deque()
        self._staging = BufferPool(torch.device("cpu"), pinned=policy.device.type == "cuda")

    def start(self, chunk: _Chunk) -> None:
        """Copy the chunk's result to its gradient, or add it.  The chunk's buffers are released afterwards."""
        result, target = chunk.result, chunk.gradient
        assert result is not None
        if chunk.reduced:
            self._add_all_but(_IN_FLIGHT)
            staging = self._staging.acquire(result.numel(), result.dtype, or_larger=True)
            target = staging[: result.numel()]

        def copy() -> None:  # waits for the reduction on the copy stream, not on the compute stream
            chunk.pending.wait()
            target.copy_(result, non_blocking=True)

        mark = self._newest = self._copier.run(copy, to_host=True)
        self._leaving.append((mark, chunk.buffers))
        if chunk.reduced:
            self._adding.append((self._copier.follow(mark, lambda: chunk.gradient.add_(target)), staging))

    def free_oldest(self) -> bool:
        """Make the compute stream wait for the oldest copy and release its buffers.  Returns False if there is none."""
        if not self._leaving:
            return False
        mark, buffers = self._leaving[0]
        self._copier.wait(mark)
        self._leaving.popleft()
        for buffer in buffers:
            self._pool.release(buffer)
        return True

    def finish(self) -> None:
        """Wait until every gradient on the host is complete."""
        if self._newest is not None:
            self._copier.finish(self._newest)
        while self.free_oldest():
            pass
        self._add_all_but(0)

    def _add_all_but(self, count: int) -> None:
        while len(self._adding) > count:
            wait, staging = self._adding[0]
            wait()
            self._adding.popleft()
            self._staging.release(staging)


def sum_partial_over_tp(buckets: Sequence[Bucket], tp: Axis, device: torch.device) -> None:
    """Sum the gradients of which each tp rank has computed only a part.

    Args:
        device: where the sum runs; the same kind on all ranks.
    """
    parts = [
        bucket.owned_part(bucket.gradient, run)
        for bucket in buckets
        for partial, whole in bucket.layout.intervals(lambda info: info.spec.sum_over_tp)
        if partial and (run := intersect(whole, bucket.owned)) is not None
    ]
    if not parts or tp.size == 1:
        return
    flat = torch.cat([part.to(device) for part in parts])  # offloaded gradients are on the host
    all_reduce(flat, tp).wait()
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed)


def sum_tied(buckets: Sequence[Bucket], ties: Mapping[str, Axis], device: torch.device) -> None:
    """Sum the gradients of all copies of each tied parameter, over this rank's copies and over the ranks that hold
    others.

    Args:
        ties: the ranks that hold a tied parameter, by its logical name.
        device: where the sum runs; the same kind on all ranks.
    """
    copies: dict[str, list[Tensor]] = {}
    for bucket in buckets:
        if (tie := bucket.layout.tie) is not None:
            copies.setdefault(tie, []).append(bucket.gradient)
    for name in sorted(copies):
        # On the device, wherever each rank's own copies are: all ranks must use the same backend.
        total = copies[name][0].to(device)  # no copy if it is already there
        for other in copies[name][1:]:
            total.add_(other.to(total.device))
        if name in ties:
            all_reduce(total, ties[name]).wait()
        for copy in copies[name]:
            if copy is not total:
                copy.copy_(total)


def gradient_square_sum(buckets: Sequence[Bucket], tp: Axis, device: torch.device) -> Tensor:
    """Return this rank's contribution to the squared gradient norm, an fp64 scalar.

    Summed over all ranks, every logical element counts once: each rank counts its own shards, only the first tp rank
    counts parameters that all tp ranks hold, and only the first copy of a tied parameter counts.
    """
    parts = [
        bucket.owned_part(bucket.gradient, run)
        for bucket in buckets
        if not bucket.is_duplicate
        for replicated, whole in bucket.layout.intervals(lambda info: info.spec.split is None)
        if (run := intersect(whole, bucket.counted)) is not None and not (replicated and tp.index > 0)
    ]
    return square_sum(parts, device)


def square_sum(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of flat fp32 tensors, an fp64 scalar on `device`.

    Squares are summed in blocks, since one long fp32 sum would lose digits.  Two kernels per tensor and a few in all:
    with more, a GPU would wait for launches.
    """
    norms: dict[torch.device, list[Tensor]] = {device: []}
    for part in parts:
        blocks = part.numel() // _NORM_BLOCK
        whole, rest = part.split([blocks * _NORM_BLOCK, part.numel() - blocks * _NORM_BLOCK])
        here = norms.setdefault(part.device, [])
        here += [torch.linalg.vector_norm(whole.view(blocks, _NORM_BLOCK), dim=1)] if blocks else []
        here += [torch.linalg.vector_norm(rest, dim=0, keepdim=True)] if rest.numel() else []
    sums = [torch.cat(here).double().square().sum().to(device) for here in norms.values() if here]
    return sum(sums, torch.zeros((), dtype=torch.float64, device=device))
