"""Reductions of gradients over the ranks that share a bucket, while the backward runs.

full [n * chunk] --reduce_dtype--> `AllReduce` or `ReduceScatter` over the bucket's shard axis -----> result
full [n * chunk] --quantized-----> `QuantizedScatter`: an all-to-all over the axis, summed in fp32 -> result
result --copy or add--> bucket.gradient, on the device, or on the host if the optimizer state is offloaded
last result of a step -> summed over the ranks that hold the same shard (`replica_sums`)

`reduction_plan` decides which bucket is reduced how, and with which buffers; here the plan is carried out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_reduce, arriving_elements, reduce_scatter
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, Landing
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.sharding import Interval, ShardingPolicy

if TYPE_CHECKING:
    from megazero.zero.quantized import InTwo
    from megazero.zero.replica_sums import ReplicaSums

_NORM_BLOCK = 256  # as fast as longer blocks, and 30 times more exact


@dataclass
class Chunk:
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
    """A way to reduce buckets.

    Args:
        axis: the axis of the ranks that share the buckets.
        accumulate_dtype: dtype in which gradients are accumulated.
        dtype: dtype in which gradients are sent.
    """

    def __init__(self, axis: Axis, accumulate_dtype: torch.dtype, dtype: torch.dtype = torch.float32) -> None:
        self.axis, self.dtype = axis, dtype
        self._narrows = dtype != accumulate_dtype and axis.size > 1

    @abstractmethod
    def start(self, chunk: Chunk, queue: ReductionQueue) -> None:
        """Start to reduce a chunk: set its pending collective, its result, and the buffers that it holds until it is
        finished.
        """

    def working_bytes(self, numel: int) -> int:
        """Bytes of extra buffers that a reduction of `numel` elements needs."""
        return numel * self._narrows * self.dtype.itemsize

    def narrowed(self, chunk: Chunk, queue: ReductionQueue) -> Tensor:
        """Return the chunk's gradients in the dtype in which they are sent.

        A conversion copies them to a buffer of the pool and releases the buffers that held them.
        """
        if not self._narrows:
            return chunk.full
        filled, chunk.buffers = chunk.buffers, []
        sent = self.lend_whole(chunk, queue).copy_(chunk.full)
        queue.pool.release(*filled)  # later work on this device is ordered after the copy
        return sent

    def lend_whole(self, chunk: Chunk, queue: ReductionQueue) -> Tensor:
        """Return a working buffer as large as the chunk's gradients; the chunk holds it until it is finished."""
        chunk.buffers.append(queue.acquire(max(chunk.full.numel(), queue.plan.smallest_buffer), self.dtype))
        return chunk.buffers[-1][: chunk.full.numel()]

    def scatter(self, chunk: Chunk, out: Tensor, full: Tensor, axis: Axis, queue: ReductionQueue) -> Pending:
        """Start a reduce-scatter.  The shards from other ranks arrive in a working buffer and are summed there."""
        arrives = self.lend_whole(chunk, queue) if arriving_elements(full.numel(), axis) else None
        return reduce_scatter(out, full, axis, arrives)


class AllReduce(Reduction):
    """A reduction after which every rank has the whole sum."""

    def start(self, chunk: Chunk, queue: ReductionQueue) -> None:
        sent = self.narrowed(chunk, queue)
        chunk.pending = all_reduce(sent, self.axis)
        if sent is not chunk.full or chunk.bucket.landing is not Landing.IN_PLACE:
            chunk.result = sent


class ReduceScatter(Reduction):
    """A reduction after which every rank has the sum of its shard."""

    def working_bytes(self, numel: int) -> int:
        return super().working_bytes(numel) + arriving_elements(numel, self.axis) * self.dtype.itemsize

    def start(self, chunk: Chunk, queue: ReductionQueue) -> None:
        sent, gradient = self.narrowed(chunk, queue), chunk.gradient
        if chunk.reduced or gradient.dtype != sent.dtype or chunk.bucket.landing is Landing.HOST:
            chunk.result = sent.view(self.axis.size, -1)[self.axis.index]  # no other rank needs this shard any more
        out = gradient if chunk.result is None else chunk.result
        chunk.pending = self.scatter(chunk, out, sent, self.axis, queue)


@dataclass(frozen=True)
class ReductionPlan:
    """How a rank reduces its buckets.

    Args:
        ways: how each bucket is reduced.
        most_in_flight: most reductions that run at once.
        smallest_buffer: smallest size of a buffer, in elements; most buffers have this size, so that they can be
            reused.  If gradients are accumulated in buffers, any part of any bucket fits into a buffer of this size.
        most_bytes: limit of the bytes of all working buffers.  Several parts that fill at the same time may exceed it;
            the excess is freed at the end of the step.
    """

    ways: Mapping[Bucket, Reduction]
    most_in_flight: int
    smallest_buffer: int
    most_bytes: int


class ReductionQueue:
    """Starts the reductions of buckets, and finishes them in the order in which they started.

    Args:
        replicas: sums reduced gradients over the ranks that hold the same shards; None: no other rank holds them.

    Attributes:
        pool: the buffers that gradients are collected in and sent from.  At the plan's limit, the oldest reductions are
            finished first, which frees their buffers.
        most_buffer_bytes: upper limit of `buffer_bytes`.
        step: number of optimizer updates so far; seeds the random rounding of quantized gradients.
    """

    def __init__(self, plan: ReductionPlan, policy: ShardingPolicy, replicas: ReplicaSums | None) -> None:
        self.plan, self.replicas, self.step = plan, replicas, 0
        self.pool = BufferPool(policy.device, policy.arena)
        self.most_buffer_bytes = plan.most_bytes + (0 if replicas is None else replicas.most_bytes)
        self._in_flight = deque[Chunk]()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that gradients pass through before they reach the shards."""
        return self.pool.nbytes + (0 if self.replicas is None else self.replicas.pool.nbytes)

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a working buffer of exactly `numel` elements."""
        most = self.plan.most_bytes
        while self.pool.bytes_after(numel, dtype) > most and self.free_oldest():
            pass
        if self.pool.bytes_after(numel, dtype) > most:  # free buffers have another size
            self.pool.free_above(most - numel * dtype.itemsize)
        return self.pool.acquire(numel, dtype)

    def start(self, chunk: Chunk) -> None:
        """Start the reduction of a part of a bucket.  Its result replaces `chunk.gradient`, or is added to it."""
        self.finish_all_but(self.plan.most_in_flight - 1)
        self.plan.ways[chunk.bucket].start(chunk, self)
        self.hold(chunk)

    def hold(self, chunk: Chunk) -> None:
        """Hold a chunk until its reduction has ended."""
        self._in_flight.append(chunk)

    def finish(self) -> None:
        """Wait for all reductions."""
        self.finish_all_but(0)
        if self.replicas is not None:
            self.replicas.finish()
        self.pool.free_above(self.plan.most_bytes)

    def begin_step(self, step: int) -> None:
        """Finish the reductions of the last step, so that those of an aborted step are not added to the new one, and
        release all buffers.
        """
        self.finish()
        self.step = step
        if self.replicas is not None:
            self.replicas.begin_step()
        self.pool.begin_step()

    def free_oldest(self) -> bool:
        """Finish the oldest work that holds buffers.  Returns False if there is none."""
        if not self._in_flight:
            return False
        self.finish_all_but(len(self._in_flight) - 1)
        return True

    def finish_all_but(self, count: int) -> None:
        """Finish the oldest reductions until at most `count` are running."""
        while len(self._in_flight) > count:
            chunk = self._in_flight[0]
            chunk.pending.wait()  # if a signal interrupts this, the chunk is still first and is waited for again
            self._in_flight.popleft()
            if chunk.result is not None:
                (chunk.gradient.add_ if chunk.reduced else chunk.gradient.copy_)(chunk.result)
            self.pool.release(*chunk.buffers)
            self.sum_over_replicas(chunk)

    def sum_over_replicas(self, chunk: Chunk) -> None:
        """Start to sum the result of a part's last reduction over the replicas, which hold the same shard."""
        if self.replicas is not None and chunk.is_last:
            self.replicas.start(chunk.bucket, chunk.gradient)


def square_sum(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of flat fp32 tensors, an fp64 scalar on `device`.

    Squares are summed in blocks, since one long fp32 sum would lose digits.  Two kernels per tensor and a few in all:
    with more, a GPU would wait for launches.
    """
    norms: dict[torch.device, list[Tensor]] = {device: []}
    for tensor in parts:
        blocks = tensor.numel() // _NORM_BLOCK
        whole, rest = tensor.split([blocks * _NORM_BLOCK, tensor.numel() - blocks * _NORM_BLOCK])
        here = norms.setdefault(tensor.device, [])
        here += [torch.linalg.vector_norm(whole.view(blocks, _NORM_BLOCK), dim=1)] if blocks else []
        here += [torch.linalg.vector_norm(rest, dim=0, keepdim=True)] if rest.numel() else []
    sums = [torch.cat(here).double().square().sum().to(device) for here in norms.values() if here]
    return sum(sums, torch.zeros((), dtype=torch.float64, device=device))
