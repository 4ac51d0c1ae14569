"""Secondary shards within each host, so that only the first all-gather after an update crosses between hosts.

    shard axis        | rank 0 | rank 1 || rank 2 | rank 3 |     1/4 each: what the optimizer updates
    secondary axis    | rank 0   rank 1 |  one host
                                         | rank 2   rank 3 |  another
    secondary shard   | half a | half b || half a | half b |     complete within each host

    first gather of a bucket after an update    over the shard axis; each rank then saves its secondary shard
    every later gather                          over the secondary axis

Both give the same bits.  Each rank needs the bytes of the weights divided by the size of the secondary axis.

Source: Wang et al. 2023 (ZeRO++), section 3.2: hierarchical weight partition, hpZ.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.gather_buffers import ShardSource
from megazero.zero.sharding import ShardingPolicy


class SecondarySource(ShardSource):
    """Gathers a bucket from this rank's secondary shard, once that holds the current weights.

    Attributes:
        fresh: the buckets whose secondary shard holds the current weights; the same on every rank, since all gather in
            one order.
    """

    def __init__(self, buckets: Sequence[Bucket], policy: ShardingPolicy) -> None:
        super().__init__(buckets, policy)
        self.axes = {bucket: axis for bucket in buckets if (axis := bucket.placement.secondary) is not None}
        self._shards = {bucket: torch.zeros_like(_shard_on(axis, bucket.weights)) for bucket, axis in self.axes.items()}
        self.secondary_bytes = sum(shard.nbytes for shard in self._shards.values())
        self.fresh: set[Bucket] = set()

    def start(self, bucket: Bucket, label: str) -> Pending:
        if bucket in self.fresh:
            return all_gather(bucket.weights, self._shards[bucket], self.axes[bucket], label)
        if bucket not in self._shards:
            return super().start(bucket, label)
        return Pending(super().start(bucket, label).wait, partial(self._keep, bucket))

    def _keep(self, bucket: Bucket) -> None:
        self._shards[bucket].copy_(_shard_on(self.axes[bucket], bucket.weights))
        self.fresh.add(bucket)

    def read_ahead(self, bucket: Bucket) -> None:
        if bucket not in self.fresh:
            super().read_ahead(bucket)

    def forget(self) -> None:
        self.fresh.clear()
        super().forget()


def _shard_on(axis: Axis, weights: Tensor) -> Tensor:
    """Return this rank's shard of full weights on the secondary axis; the shard axis has a multiple of its ranks."""
    return weights.view(axis.size, -1)[axis.index]
