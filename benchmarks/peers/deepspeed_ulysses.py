"""DeepSpeed's Ulysses attention around torch's own attention.  It needs a head of keys for each rank: fewer are repeated."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # asked for, it does not warn that it found no other

import deepspeed.comm
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from benchmarks.attention_work import AttentionRank, AttentionWork, contiguous


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, s, heads, d], as DeepSpeed has it."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class DeepSpeedUlysses(AttentionRank):
    """DistributedAttention of [b, s, heads, d]."""

    def __init__(self, work: AttentionWork, rank: int) -> None:
        super().__init__(work, rank, contiguous(work, rank), is_sequence_first=True)
        # Its all-reduce in shared memory, which Ulysses does not call, would be compiled first, for minutes.
        get_accelerator().get_op_builder("ShareMemCommBuilder").is_compatible = lambda *_, **__: False
        deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False, dist_init_required=False)
        self._repeats = max(work.world // work.kv_heads, 1)
        self._ulysses = DistributedAttention(_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._repeats > 1:
            k, v = (tensor.repeat_interleave(self._repeats, dim=2) for tensor in (k, v))
        result: Tensor = self._ulysses(q, k, v, 0)
        return result
