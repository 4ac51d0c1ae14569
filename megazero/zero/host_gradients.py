"""Gradients of offloaded buckets: each result is copied to the host as soon as it is reduced.

device   reduce 2 | reduce 1 | reduce 0
copies            | copy 2   | copy 1   | copy 0       while the backward goes on
host              | add 2    | add 1    | add 0        from the second micro-batch on, in a thread: the main thread keeps
                                                       queueing work
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megazero.zero.bucket import Landing
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.reductions import ReductionPlan, ReductionQueue, ReductionTask
from megazero.zero.replica_sums import ReplicaSums
from megazero.zero.sharding import ShardingPolicy

_ADDING = 2  # results that wait on the host to be added


class OffloadedReductions(ReductionQueue):
    """A `ReductionQueue` that keeps the gradients of some buckets on the host."""

    def __init__(self, plan: ReductionPlan, policy: ShardingPolicy, replicas: ReplicaSums | None) -> None:
        super().__init__(plan, policy, replicas)
        self._copier = policy.copier
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()  # the copy's mark, and its buffers
        self._newest: Any | None = None  # mark of the last copy; copies end in order
        # The wait for an addition, and its staging buffer.
        self._adding: deque[tuple[Callable[[], object], Tensor]] = deque()
        self._staging = BufferPool(torch.device("cpu"), pinned=policy.device.type == "cuda")

    def hold(self, task: ReductionTask) -> None:
        """Copy reduced gradients to the host, or add them there, if the bucket's gradients are on the host."""
        if task.bucket.landing is not Landing.HOST:
            super().hold(task)
            return
        result, target = task.result, task.gradient
        assert result is not None
        if task.reduced:
            self._add_all_but(_ADDING)
            staging = self._staging.acquire(result.numel(), result.dtype, or_larger=True)
            target = staging[: result.numel()]

        def copy() -> None:  # waits for the reduction on the copy stream, not on the compute stream
            task.pending.wait()
            target.copy_(result, non_blocking=True)

        mark = self._newest = self._copier.run(copy, to_host=True)
        self._leaving.append((mark, task.buffers))
        if task.reduced:
            self._adding.append((self._copier.follow(mark, lambda: task.gradient.add_(target)), staging))
        self.sum_over_replicas(task)

    def free_oldest(self) -> bool:
        return self._free_oldest_copy() or super().free_oldest()

    def _free_oldest_copy(self) -> bool:
        """Make the compute stream wait for the oldest copy and release its buffers.  Returns False if there is none."""
        if not self._leaving:
            return False
        mark, buffers = self._leaving[0]
        self._copier.wait(mark)
        self._leaving.popleft()
        self.pool.release(*buffers)
        return True

    def finish(self) -> None:
        self.finish_all_but(0)
        if self._newest is not None:
            self._copier.finish(self._newest)
        while self._free_oldest_copy():
            pass
        self._add_all_but(0)
        super().finish()

    def _add_all_but(self, count: int) -> None:
        while len(self._adding) > count:
            wait, staging = self._adding[0]
            wait()
            self._adding.popleft()
            self._staging.release(staging)
