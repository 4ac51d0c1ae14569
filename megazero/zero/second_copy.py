"""A second copy of stage 3's weights within each host, so that only the first gather of a step crosses between hosts.

    shard axis        | rank 0 | rank 1 || rank 2 | rank 3 |     1/4 each: what the optimizer steps
    secondary axis    | rank 0   rank 1 |  one host
                                         | rank 2   rank 3 |  another
    second copy       | half a | half b || half a | half b |     whole within each host

    first gather of a bucket after an update    over the shard axis; each rank then keeps its part of the second copy
    every later one                             over the secondary axis, from the second copy

Both give the same bits.  An update of the weights makes the copy stale.  It takes the bytes of the weights, divided by the
ranks of the secondary axis, on every rank.

Source: Wang et al. 2023 (ZeRO++), section 3.2: hierarchical weight partition, hpZ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather, check_order
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket


class SecondCopy:
    """This rank's parts of the second copy; none without a secondary axis."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._axes = {bucket: axis for bucket in buckets if (axis := bucket.placement.secondary) is not None}
        self._parts = {bucket: torch.zeros_like(_part(bucket.weights, axis)) for bucket, axis in self._axes.items()}
        self._fresh: set[Bucket] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self._parts.values())

    def is_fresh(self, bucket: Bucket) -> bool:
        """Whether the copy holds a bucket's weights; the same on every rank, since all gather the same buckets."""
        return bucket in self._fresh

    def keep(self, bucket: Bucket) -> None:
        """Take this rank's part from the bucket's whole weights, which have just arrived."""
        if bucket in self._parts and bucket not in self._fresh:
            self._parts[bucket].copy_(_part(bucket.weights, self._axes[bucket]))
            self._fresh.add(bucket)

    def gather(self, bucket: Bucket, out: Tensor, label: str) -> Pending:
        """Gather a bucket's weights into `out`, [padded], from the copy, which is fresh.  `label`: as in `all_gather`."""
        return all_gather(out, self._parts[bucket], self._axes[bucket], label)

    def check_order(self) -> None:
        """Compare the labels of gathers that their waits have not compared.  Raises: OrderError."""
        for axis in dict.fromkeys(self._axes.values()):
            check_order(axis)

    def forget(self) -> None:
        """The weights have changed."""
        self._fresh.clear()


def _part(weights: Tensor, axis: Axis) -> Tensor:
    """A rank's part of whole weights.  They are padded to the ranks of the shard axis, which the secondary axis divides."""
    return weights.view(axis.size, -1)[axis.index]
