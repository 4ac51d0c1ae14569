"""megazero's attention under context parallelism, as its layers call it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.attention_work import AttentionRank, AttentionWork
from megazero.cpu.processor import schedule_as_batch_job
from megazero.layers.context_attention import ContextAttention
from megazero.layers.sequence_shard import sequence_shard
from megazero.parallel_state import Links, ParallelState, RankGrid


class Ours(AttentionRank):
    """Ulysses, a ring, or both; gradients of keys and values travel in fp32, as a run has it by default.

    Args:
        ulysses: degree of Ulysses; 0: all ranks.
        shares_memory: the all-to-all goes through memory that the ranks of a host share; False takes gloo, as the peers do.
    """

    def __init__(self, work: AttentionWork, rank: int, *, ulysses: int, shares_memory: bool = True) -> None:
        schedule_as_batch_job()  # as a run does
        self._state = ParallelState(
            RankGrid(cp=work.world, cp_ulysses=ulysses or work.world),
            rank,
            Links(timeout_seconds=120, shares_memory=shares_memory),
        )
        axes = self._state.cp_ulysses, self._state.cp_ring
        shard = sequence_shard(None, work.length, *axes, torch.device("cpu"))
        if shard is None:
            raise ValueError("context parallelism needs two ranks at least")
        super().__init__(work, rank, shard.rows[:, 0])
        self._shard, self._attention = shard, ContextAttention(axes, None, torch.float32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.attend(q, k, v, self._shard)

    def meter(self) -> int:
        """Bytes that this rank has sent, as ring volume."""
        return sum(self._state.traffic.sent_bytes.values())


ring, ulysses, hybrid = (partial(Ours, ulysses=degree) for degree in (1, 0, 2))
ulysses_over_gloo = partial(Ours, ulysses=0, shares_memory=False)
