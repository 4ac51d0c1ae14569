"""Hybrid sharding: sums of a shard's gradients over the ranks that hold the same shard.

    group 0    rank 0: shard a    rank 1: shard b       each group reduces the gradients of its own ranks
    group 1    rank 2: shard a    rank 3: shard b
               replica axis: 0, 2 | 1, 3                the sums over this axis add up all groups

A part of a bucket is summed once per step: after its last reduction within the group, while the backward goes on.  It
is sent in `reduce_dtype`.  A gradient on the host is copied to the device for its sum, at the end of the step.

Source: Zhao et al. 2023 (PyTorch FSDP), section 3.2.2.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_reduce
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.sharding import ShardingPolicy

_IN_FLIGHT = 2


class ReplicaSums:
    """Starts the sums of reduced gradients over the replica axis, and finishes them in the order in which they started.

    Attributes:
        most_bytes: limit of the buffers for gradients that are on the host or are sent in another format.
    """

    def __init__(self, policy: ShardingPolicy, buckets: Sequence[Bucket]) -> None:
        self._device, self._dtype = policy.device, policy.reduce_dtype
        self._pool = BufferPool(policy.device, policy.arena)
        # pending, gradient, the buffer that is sent
        self._in_flight: deque[tuple[Pending, Tensor, Tensor | None]] = deque()
        self._on_host: list[tuple[Tensor, Axis]] = []  # summed at the end of the step
        self._summed: list[tuple[Tensor, Axis]] = []
        summed = [bucket for bucket in buckets if bucket.placement.replica.size > 1]
        moves = policy.device.type != "cpu"
        copied = [
            one for one in summed if self._dtype != torch.float32 or (moves and one.residency.state_on != "device")
        ]
        self._largest = max((part.size for bucket in copied for part in bucket.gradient_parts), default=0)
        self.most_bytes = _IN_FLIGHT * self._largest * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._pool.nbytes

    def start(self, bucket: Bucket, gradient: Tensor) -> None:
        """Start to sum this rank's part of a bucket's gradient, which is already reduced within the group."""
        axis = bucket.placement.replica
        if axis.size == 1:
            return
        self._summed.append((gradient, axis))
        if bucket.gradient_leaves:
            self._on_host.append((gradient, axis))
        else:
            self._start(gradient, axis)

    def finish(self) -> None:
        """Finish every sum.  Gradients on the host must have arrived there."""
        for gradient, axis in self._on_host:
            self._start(gradient, axis)
        self._on_host.clear()
        self._finish_all_but(0)

    def begin_step(self) -> None:
        """Finish the last step's sums and forget which gradients were summed."""
        self.finish()
        self._pool.begin_step()
        self._summed.clear()

    def reopen(self) -> None:
        """Allow more gradients after the sums.  Only the first replica keeps the sums, so that they count once."""
        self.finish()
        for gradient, axis in self._summed:
            if axis.index > 0:
                gradient.zero_()
        self._summed.clear()

    def _start(self, gradient: Tensor, axis: Axis) -> None:
        self._finish_all_but(_IN_FLIGHT - 1)
        buffer = None
        if gradient.dtype != self._dtype or gradient.device != self._device:
            buffer = self._pool.acquire(self._largest, self._dtype)
            buffer[: gradient.numel()].copy_(gradient)
        sent = gradient if buffer is None else buffer[: gradient.numel()]
        self._in_flight.append((all_reduce(sent, axis), gradient, buffer))

    def _finish_all_but(self, count: int) -> None:
        while len(self._in_flight) > count:
            pending, gradient, buffer = self._in_flight[0]
            pending.wait()
            self._in_flight.popleft()
            if buffer is not None:
                gradient.copy_(buffer[: gradient.numel()])
                self._pool.release(buffer)
