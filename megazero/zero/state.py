"""The model state of one rank by kind, as flat parts of buckets: what a checkpoint reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.zero.bucket import Bucket, Run
from megazero.zero.optimizer import MOMENTS, ShardedAdamW

MODEL, MASTER, GRADIENT = "model", "master", "gradient"


class ShardedState:
    """Views of everything a rank keeps for its parameters.

    Args:
        buckets: this rank's buckets.
        optimizer: holds the moments.
    """

    def __init__(self, buckets: Sequence[Bucket], optimizer: ShardedAdamW) -> None:
        self.buckets, self.optimizer = buckets, optimizer

    @property
    def kinds(self) -> tuple[str, ...]:
        """What must be saved: the weights, fp32 masters where they differ from the weights, and the moments."""
        masters = (MASTER,) if any(bucket.master is not bucket.weight_shard for bucket in self.buckets) else ()
        return (MODEL, *masters, *MOMENTS)

    def dtype(self, kind: str) -> torch.dtype:
        """Dtype in which a kind is kept."""
        return self.buckets[0].weight_shard.dtype if kind == MODEL else torch.float32

    def view(self, kind: str, bucket: Bucket, run: Run) -> Tensor:
        """The elements themselves, 1-D, to read or to overwrite.

        Args:
            kind: "model", "master", "gradient", or the name of a moment.
            bucket: one of this rank's buckets.
            run: elements of one parameter that this rank owns.
        """
        if kind in MOMENTS:
            return self.optimizer.moment(kind, bucket, run)
        tensor = {MODEL: bucket.weight_shard, MASTER: bucket.master, GRADIENT: bucket.gradient}[kind]
        return bucket.owned_part(tensor, run)
