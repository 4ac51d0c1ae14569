"""Reductions of gradients over the ranks that share a bucket, while the backward runs.

local [n * elements] --reduce_dtype--> `AllReduce` or `ReduceScatter` over the bucket's shard axis -----> result
local [n * elements] --quantized-----> `QuantizedScatter`: an all-to-all over the axis, summed in fp32 -> result
result --copy or add--> bucket.gradient, on the device, or on the host if the optimizer state is offloaded
last result of a step -> summed over the ranks that hold the same shard (`replica_sums`)

`reduction_plan` decides how each bucket is reduced and with which buffers; this module carries out the plan.
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
class ReductionTask:
    """One reduction of a bucket chunk, from its start until its result has arrived."""

    bucket: Bucket
    elements: Interval  # the reduced elements of every shard
    local: Tensor  # [shards * elements]: the gradients that this rank has computed
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
    def start(self, task: ReductionTask, queue: ReductionQueue) -> None:
        """Start a task: set its pending collective, its result, and the buffers that it holds until it has finished."""

    def working_bytes(self, numel: int) -> int:
        """Bytes of extra buffers that a reduction of `numel` elements needs."""
        return numel * self._narrows * self.dtype.itemsize

    def narrowed(self, task: ReductionTask, queue: ReductionQueue) -> Tensor:
        """Return this rank's gradients in the dtype in which they are sent.

        A conversion copies them to a buffer of the pool and releases the buffers that held them.
        """
        if not self._narrows:
            return task.local
        filled, task.buffers = task.buffers, []
        sent = self.lend_buffer(task, queue).copy_(task.local)
        queue.pool.release(*filled)  # later work on this device is ordered after the copy
        return sent

    def lend_buffer(self, task: ReductionTask, queue: ReductionQueue) -> Tensor:
        """Return a working buffer as large as this rank's gradients.  The task holds it until it has finished."""
        task.buffers.append(queue.acquire(max(task.local.numel(), queue.plan.smallest_buffer), self.dtype))
        return task.buffers[-1][: task.local.numel()]

    def scatter(self, task: ReductionTask, out: Tensor, full: Tensor, axis: Axis, queue: ReductionQueue) -> Pending:
        """Start a reduce-scatter.  The shards from other ranks arrive in a working buffer and are summed there."""
        arrives = self.lend_buffer(task, queue) if arriving_elements(full.numel(), axis) else None
        return reduce_scatter(out, full, axis, arrives)


class AllReduce(Reduction):
    """A reduction after which every rank has the whole sum."""

    def start(self, task: ReductionTask, queue: ReductionQueue) -> None:
        sent = self.narrowed(task, queue)
        task.pending = all_reduce(sent, self.axis)
        if sent is not task.local or task.bucket.landing is not Landing.IN_PLACE:
            task.result = sent


class ReduceScatter(Reduction):
    """A reduction after which every rank has the sum of its shard."""

    def working_bytes(self, numel: int) -> int:
        return super().working_bytes(numel) + arriving_elements(numel, self.axis) * self.dtype.itemsize

    def start(self, task: ReductionTask, queue: ReductionQueue) -> None:
        sent, gradient = self.narrowed(task, queue), task.gradient
        if task.reduced or gradient.dtype != sent.dtype or task.bucket.landing is Landing.HOST:
            task.result = sent.view(self.axis.size, -1)[self.axis.index]  # no other rank needs this shard any more
        out = gradient if task.result is None else task.result
        task.pending = self.scatter(task, out, sent, self.axis, queue)


@dataclass(frozen=True)
class ReductionPlan:
    """How a rank reduces its buckets.

    Args:
        ways: how each bucket is reduced.
        most_in_flight: most reductions that run at once.
        smallest_buffer: smallest size of a buffer, in elements; most buffers have this size, so that they can be
            reused.  If gradients are accumulated in buffers, any bucket chunk fits into a buffer of this size.
        most_bytes: limit of the bytes of all working buffers.  Chunks that are filled at the same time may exceed it
            together; the excess is freed at the end of the step.
    """

    ways: Mapping[Bucket, Reduction]
    most_in_flight: int
    smallest_buffer: int
    most_bytes: int


class ReductionQueue:
    """Starts the reductions of buckets, and finishes them in the order in which they started.

    Args:
        replicas: sums reduced gradients over the ranks that hold the same shards; None if no other rank does.

    Attributes:
        pool: the buffers in which gradients are collected and from which they are sent.  At the plan's limit, the
            queue finishes its oldest reductions, which frees their buffers.
        most_buffer_bytes: upper limit of `buffer_bytes`.
        step: number of optimizer updates so far; seeds the random rounding of quantized gradients.
    """

    def __init__(self, plan: ReductionPlan, policy: ShardingPolicy, replicas: ReplicaSums | None) -> None:
        self.plan, self.replicas, self.step = plan, replicas, 0
        self.pool = BufferPool(policy.device, policy.arena)
        self.most_buffer_bytes = plan.most_bytes + (0 if replicas is None else replicas.most_bytes)
        self._in_flight = deque[ReductionTask]()

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

    def start(self, task: ReductionTask) -> None:
        """Start a reduction.  Its result replaces `task.gradient`, or is added to it."""
        self.finish_all_but(self.plan.most_in_flight - 1)
        self.plan.ways[task.bucket].start(task, self)
        self.hold(task)

    def hold(self, task: ReductionTask) -> None:
        """Hold a task until its reduction has ended."""
        self._in_flight.append(task)

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
            task = self._in_flight[0]
            task.pending.wait()  # if a signal interrupts this, the task is still first and is waited for again
            self._in_flight.popleft()
            if task.result is not None:
                (task.gradient.add_ if task.reduced else task.gradient.copy_)(task.result)
            self.pool.release(*task.buffers)
            self.sum_over_replicas(task)

    def sum_over_replicas(self, task: ReductionTask) -> None:
        """Start to sum the result of a step's last reduction over the replicas, which hold the same shard."""
        if self.replicas is not None and task.is_last:
            self.replicas.start(task.bucket, task.gradient)


def square_sum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of flat fp32 tensors, an fp64 scalar on `device`.

    Squares are summed in blocks, since one long fp32 sum would lose digits.  Two kernels run per tensor, and a few for all:
    with more, a GPU would wait for launches.
    """
    norms: dict[torch.device, list[Tensor]] = {device: []}
    for tensor in tensors:
        blocks = tensor.numel() // _NORM_BLOCK
        in_blocks, rest = tensor.split([blocks * _NORM_BLOCK, tensor.numel() - blocks * _NORM_BLOCK])
        here = norms.setdefault(tensor.device, [])
        here += [torch.linalg.vector_norm(in_blocks.view(blocks, _NORM_BLOCK), dim=1)] if blocks else []
        here += [torch.linalg.vector_norm(rest, dim=0, keepdim=True)] if rest.numel() else []
    sums = [torch.cat(here).double().square().sum().to(device) for here in norms.values() if here]
    return sum(sums, torch.zeros((), dtype=torch.float64, device=device))
