"""The buffers that stage 3 gathers weights into: which buckets share one, and whose weights it holds now.

A gather policy says which units share a buffer, and with it how long a gathered unit stays:
    action    two buffers for all units: every forward and backward gathers anew; least memory
    chunk     units at the same position of different chunks: a chunk stays until another chunk runs
    step      each unit its own: gathered once per step; the memory of whole weights
A parameter that several units use, or that is in use while other units run, has a buffer of its own.

An offloaded shard comes to the device first, into a staging buffer: `read_ahead`, then `unshard`, then `wait_for_unshard`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather
from megazero.zero.bucket import Bucket, BucketLayout, Slot
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.policy import ShardingPolicy
from megazero.zero.storage import PendingCopy


def make_gather_buffers(
    layouts: Sequence[BucketLayout], chunk_of_unit: Sequence[int], gather_policy: str, policy: ShardingPolicy
) -> dict[str, Tensor]:
    """By name of each bucket that is gathered, its buffer, [padded]; buckets share one as large as the largest of them.

    `chunk_of_unit`: the model chunk of each unit, in forward order.
    """
    sharing: dict[str, list[BucketLayout]] = {}
    for layout in layouts:
        if layout.persistent:
            continue
        position = layout.unit - chunk_of_unit.index(chunk_of_unit[layout.unit])
        kind = "" if layout.trains else " frozen"
        key = f"unit {position % 2} of two{kind}"
        if layout.tied or gather_policy == "step" or layout.slots[0].info.alone:
            key = layout.name
        elif gather_policy == "chunk":
            key = f"unit {position} of any chunk{kind}"
        sharing.setdefault(key, []).append(layout)
    buffers = {}
    for members in sharing.values():
        largest = max(layout.padded_numel for layout in members)
        buffer = torch.zeros(largest, dtype=policy.dtype, device=policy.device)
        buffers.update({layout.name: buffer[: layout.padded_numel] for layout in members})
    return buffers


class BucketGatherer:
    """Gathers whole buckets, over the axis of `policy`, into their buffers."""

    def __init__(self, buckets: Sequence[Bucket], policy: ShardingPolicy) -> None:
        self._axis = policy.shard
        storages = [bucket.weights.untyped_storage() for bucket in buckets]
        self._buffer_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}  # by address
        self._gathered: dict[int, Bucket] = {}  # by address of a buffer: the bucket whose weights it holds or gets
        self._gathering: dict[int, tuple[Pending, Tensor | None]] = {}  # by address, with the staging it reads from
        self._reading: dict[Bucket, tuple[PendingCopy, Tensor]] = {}
        self._staging = BufferPool(policy.device)
        self._largest_shard = max((bucket.weight_shard.numel for bucket in buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the gather buffers, and of those through which offloaded shards pass on their way there."""
        return sum(self._buffer_bytes.values()) + self._staging.nbytes

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a gather buffer."""
        return tensor.untyped_storage().data_ptr() in self._buffer_bytes

    def is_unsharded(self, bucket: Bucket) -> bool:
        """Whether a bucket's buffer holds its weights, or a gather that brings them is under way."""
        return self._gathered.get(bucket.weights.data_ptr()) is bucket

    def read_ahead(self, bucket: Bucket) -> None:
        """Start copying an offloaded shard to the device."""
        shard = bucket.weight_shard
        if bucket not in self._reading and not _is_on_device(bucket):
            staging = self._staging.acquire(self._largest_shard, shard.dtype)
            self._reading[bucket] = (shard.start_read(staging[: shard.numel], 0), staging)

    def unshard(self, bucket: Bucket) -> None:
        """Start gathering a bucket's weights, unless its buffer holds them."""
        if self.is_unsharded(bucket):
            return
        address = bucket.weights.data_ptr()
        self._wait_for(address)
        self._gathered[address] = bucket
        shard, staging = self._shard_of(bucket)
        self._gathering[address] = (all_gather(bucket.weights, shard, self._axis), staging)

    def wait_for_unshard(self, bucket: Bucket) -> None:
        """Wait for the gather into the bucket's buffer, if one is under way."""
        self._wait_for(bucket.weights.data_ptr())

    def _wait_for(self, address: int) -> None:
        if address in self._gathering:
            pending, staging = self._gathering.pop(address)
            pending.wait()
            if staging is not None:
                self._staging.release(staging)

    def whole_copy(self, bucket: Bucket, slot: Slot) -> Tensor:
        """A whole copy of one parameter, in memory of its own."""
        flat = torch.empty_like(bucket.weights)
        shard, staging = self._shard_of(bucket)
        all_gather(flat, shard, self._axis).wait()
        if staging is not None:
            self._staging.release(staging)
        return flat[slot.start : slot.stop].view(slot.info.shape).clone()

    def forget(self) -> None:
        """The shards have changed: nothing that was gathered or read is valid any more."""
        for address in list(self._gathering):
            self._wait_for(address)
        for copy, staging in self._reading.values():
            copy.wait()
            self._staging.release(staging)
        self._reading.clear()
        self._gathered.clear()

    def _shard_of(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """This rank's shard on the device, and the staging buffer that holds it where it is offloaded."""
        tensor = bucket.weight_shard.tensor
        if tensor is not None and _is_on_device(bucket):
            return tensor, None
        self.read_ahead(bucket)
        copy, staging = self._reading.pop(bucket)
        copy.wait()
        return staging[: bucket.weight_shard.numel], staging


def _is_on_device(bucket: Bucket) -> bool:
    tensor = bucket.weight_shard.tensor
    return tensor is not None and tensor.device == bucket.weights.device
