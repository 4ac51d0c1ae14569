"""What of a model's state each rank holds at each ZeRO stage.

zero_stage      weights     gradients    master weights and moments      (Rajbhandari et al. 2020, figure 1)
    0           whole       whole        whole
    1           whole       whole        shard
    2           whole       shard        shard
    3           shard       shard        shard
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from megazero.parallel_state import Axis

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ShardingPolicy:
    """How buckets are spread over the ranks."""

    zero_stage: int
    dtype: torch.dtype  # of the weights that modules compute with
    shard: Axis  # the axis over which buckets are sharded
    replica: Axis  # the ranks that hold the same shard, where sharding stays within a part of dp
    device: torch.device  # where modules compute
    accumulate_dtype: torch.dtype = torch.float32  # in which a step's gradients add up
    pins_memory: bool = True  # page-lock the host memory of offloaded state

    @property
    def shards_master(self) -> bool:
        """Whether a rank holds only its shard of master weights and moments."""
        return self.zero_stage >= 1 and self.shard.size > 1

    @property
    def sends_gradients(self) -> bool:
        """Whether gradients go to other ranks."""
        return self.shard.size > 1 or self.replica.size > 1
