"""Sums of reduced gradients over ranks that hold the same elements.

Hybrid sharding: a shard is held by one rank of every group (Zhao et al. 2023, PyTorch FSDP, section 3.2.2).

    group 0    rank 0: shard a    rank 1: shard b       each group reduces the gradients of its own ranks
    group 1    rank 2: shard a    rank 3: shard b
               replica axis: 0, 2 | 1, 3                the sums over this axis add up all groups

A bucket chunk is summed once per step: after its last reduction within the group, while the backward goes on.  It
is sent in `reduce_dtype`.  A gradient on the host is copied to the device for its sum, at the end of the step.

After all reductions, parameters that every tp rank holds are summed over tp where each rank has a partial gradient,
and tied parameters over their copies.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_reduce
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, Landing
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.sharding import ShardingPolicy, intersect

_IN_FLIGHT = 2


class ReplicaSums:
    """Starts the sums of reduced gradients over the replica axis, and finishes them in the order in which they started.

    Attributes:
        pool: buffers for gradients that are on the host or are sent in another format.
        most_bytes: limit of these buffers.
    """

    def __init__(self, policy: ShardingPolicy, buckets: Sequence[Bucket]) -> None:
        self._device, self._dtype = policy.device, policy.reduce_dtype
        self.pool = BufferPool(policy.device, policy.arena)
        # pending, gradient, the buffer that is sent
        self._in_flight: deque[tuple[Pending, Tensor, Tensor | None]] = deque()
        self._on_host: list[tuple[Tensor, Axis]] = []  # summed at the end of the step
        moves, narrows = policy.device.type != "cpu", self._dtype != torch.float32
        copied = [bucket for bucket in buckets if narrows or (moves and bucket.residency.state_on != "device")]
        chunks = [chunk for bucket in copied if bucket.placement.replica.size > 1 for chunk in bucket.gradient_chunks]
        self._largest = max((chunk.size for chunk in chunks), default=0)
        self.most_bytes = _IN_FLIGHT * self._largest * self._dtype.itemsize

    def start(self, bucket: Bucket, gradient: Tensor) -> None:
        """Start to sum a gradient of this rank's shard over the replicas.  It is already reduced within the group."""
        axis = bucket.placement.replica
        if bucket.landing is Landing.HOST and axis.size > 1:
            self._on_host.append((gradient, axis))
        elif axis.size > 1:
            self._start(gradient, axis)

    def finish(self) -> None:
        """Finish every sum.  Copies of gradients to the host must have ended."""
        for gradient, axis in self._on_host:
            self._start(gradient, axis)
        self._on_host.clear()
        self._finish_all_but(0)

    def begin_step(self) -> None:
        """Finish the sums of a failed step, and release their buffers."""
        self.finish()
        self.pool.begin_step()

    def _start(self, gradient: Tensor, axis: Axis) -> None:
        self._finish_all_but(_IN_FLIGHT - 1)
        buffer = None
        if gradient.dtype != self._dtype or gradient.device != self._device:
            buffer = self.pool.acquire(self._largest, self._dtype)
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
                self.pool.release(buffer)


def sum_partial_over_tp(buckets: Sequence[Bucket], tp: Axis, device: torch.device) -> None:
    """Sum over tp the gradients of parameters for which each tp rank computes only a partial gradient.

    Args:
        device: where the sum runs; the same kind on all ranks.
    """
    gradients = [
        bucket.owned_slice(bucket.gradient, owned)
        for bucket in buckets
        for is_partial, interval in bucket.layout.intervals(lambda info: info.spec.sum_over_tp)
        if is_partial and (owned := intersect(interval, bucket.owned)) is not None
    ]
    if not gradients or tp.size == 1:
        return
    flat = torch.cat([gradient.to(device) for gradient in gradients])  # offloaded gradients are on the host
    all_reduce(flat, tp).wait()
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed)


def sum_tied(buckets: Sequence[Bucket], ties: Mapping[str, Axis], device: torch.device) -> None:
    """Sum the gradients of all copies of each tied parameter: those on this rank, and those on other ranks.

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
