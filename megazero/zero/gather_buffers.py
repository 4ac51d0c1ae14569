"""All-gathers of weights into buffers that units share.

[Note: fixed addresses]  A bucket is always gathered to the same address.  A storage of its own, freed between uses with
`resize_(0)`, would need as many bytes.  But a CPU maps blocks of more than 32 MiB anew each time, page by page: with
such an embedding, a step took 3.5 times as long.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megazero.comm.backend import storage_of
from megazero.comm.collectives import Pending, all_gather, wait_all
from megazero.zero.bucket import Bucket
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.sharding import ShardingPolicy

if TYPE_CHECKING:
    from megazero.zero.fp8_gather import Fp8Gather


class ShardSource:
    """Gathers a bucket from the shards of its ranks.  An offloaded shard is first copied to a staging buffer on the
    device.

    Attributes:
        staging: the buffers on the device for offloaded shards and for 8-bit weights.
        secondary_bytes: bytes of this rank's secondary shards.
    """

    secondary_bytes = 0

    def __init__(self, buckets: Sequence[Bucket], policy: ShardingPolicy) -> None:
        self.staging, self._copier, self._on_cpu = BufferPool(policy.device), policy.copier, policy.on_cpu
        self._largest = max((bucket.weight_shard.numel for bucket in buckets), default=0)
        self._reading: dict[Bucket, tuple[Any, Tensor]] = {}  # the copier's mark and the staging buffer
        self._all_gather: Callable[..., Pending] = all_gather
        self.is_exact = not policy.quantizes_weights or all(bucket.layout.shards == 1 for bucket in buckets)
        if not self.is_exact:
            from megazero.zero.quantized import WEIGHT_BITS, BlockFormat, QuantizedGather  # few runs need it

            largest = max(bucket.weights.numel() for bucket in buckets)
            self._all_gather = QuantizedGather(BlockFormat.on(policy, WEIGHT_BITS), self.staging, largest).start
        self._in_fp8: dict[Bucket, Fp8Gather] = {}
        if any(bucket.layout.first.spec.in_fp8_squares for bucket in buckets) and self.is_exact:
            from megazero.zero.fp8_gather import fp8_gathers  # few runs need it

            self._in_fp8 = fp8_gathers(buckets, self.staging)

    def start(self, bucket: Bucket, label: str) -> Pending:
        """Start the all-gather of a bucket into its buffer.  `label`: see `all_gather`."""
        tensor, axis = bucket.weight_shard.tensor, bucket.gather_axis
        all_gather = self._in_fp8[bucket].start if bucket in self._in_fp8 else self._all_gather
        if tensor is not None and self._is_on_device(bucket):
            return all_gather(bucket.weights, tensor, axis, label)
        self.read_ahead(bucket)
        read, staging = self._reading[bucket]

        def gather() -> Pending:  # waits for the copy to the device, not for the compute stream
            self._copier.wait(read).wait()
            return all_gather(bucket.weights, staging[: bucket.weight_shard.numel], axis, label)

        gathered = self._copier.run(gather, to_host=False)
        del self._reading[bucket]
        return Pending(lambda: self._copier.wait(gathered).wait(), partial(self.staging.release, staging))

    def prepare(self, bucket: Bucket) -> None:
        """Start the work that must precede the first gather of an updated shard, such as finding its scales."""
        tensor = bucket.weight_shard.tensor
        if bucket in self._in_fp8 and tensor is not None and self._is_on_device(bucket):
            self._in_fp8[bucket].reduce_maxima(tensor)

    def read_ahead(self, bucket: Bucket) -> None:
        """Start to copy an offloaded shard to the device."""
        if bucket not in self._reading and not self._is_on_device(bucket):
            staging = self.staging.acquire(self._largest, bucket.weight_shard.dtype)
            read = partial(bucket.weight_shard.start_read, staging[: bucket.weight_shard.numel], 0)
            self._reading[bucket] = self._copier.run(read, to_host=False), staging

    def forget(self) -> None:
        """Discard running copies and known scales, since the shards have changed."""
        for gather in self._in_fp8.values():
            gather.is_fresh = False
        reading, self._reading = self._reading, {}
        for read, staging in reading.values():
            self._copier.wait(read).wait()
            self.staging.release(staging)

    def _is_on_device(self, bucket: Bucket) -> bool:
        location = bucket.weight_shard.location
        return location == "device" or (location == "host" and self._on_cpu)


class GatherBuffers:
    """Tracks which bucket each buffer holds, and the running all-gathers."""

    def __init__(self, buckets: Sequence[Bucket], policy: ShardingPolicy) -> None:
        source_type = ShardSource
        if any(bucket.placement.secondary is not None for bucket in buckets):
            from megazero.zero.secondary_shard import SecondarySource  # few runs need it

            source_type = SecondarySource
        self.source = source_type(buckets, policy)
        # By address of a buffer: its bytes, the bucket that it holds or is being filled with, and the running gather.
        self._bytes = {storage_of(bucket.weights): bucket.weights.untyped_storage().nbytes() for bucket in buckets}
        self._holder: dict[int, Bucket] = {}
        self._arriving: dict[int, Pending] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the gather buffers and of the staging buffers."""
        return sum(self._bytes.values()) + self.source.staging.nbytes

    @property
    def is_full(self) -> bool:
        """Whether every buffer holds weights or is being filled."""
        return len(self._holder) == len(self._bytes)

    def bucket_at(self, tensor: Tensor) -> Bucket | None:
        """Return the bucket in whose buffer a tensor lies, or None."""
        # the zeros of forward-mode differentiation have no memory
        if tensor.layout is not torch.strided or tensor._is_zerotensor() or not torch._C._has_storage(tensor):
            return None
        return self._holder.get(storage_of(tensor))

    def holds(self, bucket: Bucket) -> bool:
        """Whether a bucket's buffer holds its weights or is being filled with them."""
        return self._holder.get(storage_of(bucket.weights)) is bucket

    def unshard(self, bucket: Bucket) -> None:
        """Start the all-gather of a bucket, unless its buffer already holds it."""
        if self.holds(bucket):
            return
        address = storage_of(bucket.weights)
        self.wait(bucket)
        self._holder.pop(address, None)  # until the gather has started: a failed one leaves nothing in the buffer
        self._arriving[address] = self.start(bucket)
        self._holder[address] = bucket

    def start(self, bucket: Bucket) -> Pending:
        """Start the all-gather of a bucket into its buffer."""
        return self.source.start(bucket, "")

    def wait(self, bucket: Bucket) -> None:
        """Wait for the running gather into a bucket's buffer, if there is one."""
        address = storage_of(bucket.weights)
        if address in self._arriving:
            holder = self._holder.pop(address)  # a failed wait leaves nothing in the buffer
            self._arriving.pop(address).wait()
            self._holder[address] = holder

    def forget(self) -> None:
        """Discard everything that was gathered or read ahead, since the shards have changed.

        Also called if a signal interrupts a wait in this class.
        """
        arriving, self._arriving = self._arriving, {}
        self._holder.clear()
        wait_all(arriving.values())
        self.source.forget()
