"""QK-clip: after a step, projections of queries and keys shrink where an attention score has exceeded a threshold.

    largest score s of a key head, over the global batch      factor = sqrt(threshold / s) where s exceeds it, else 1
    rows of q of its query heads, and its rows of k           times the factor, right after their update by Muon

Source: Kimi Team 2025, "Kimi K2", algorithm 1; query heads that share a key head share its factor, as in Megatron-LM.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.layers.attention import AttentionCore
from megazero.layers.attention_kernels import WatchedAttention
from megazero.layers.heads import Heads
from megazero.models.gpt import GPTStage
from megazero.parallel_state import Axis


class QKClip:
    """Watches the largest attention scores of this rank's stages, and computes factors that clip them.

    `config/rules.py` lists the attention variants that can be watched.

    Args:
        stages: the stages of this rank.
        threshold: scores above it are clipped.
        dp: the data-parallel axis.
    """

    def __init__(self, stages: Sequence[GPTStage], threshold: float, dp: Axis) -> None:
        self._threshold, self._dp, self._watched = threshold, dp, dict[str, tuple[Heads, WatchedAttention]]()
        for chunk, stage in enumerate(stages):
            for name, core in stage.named_modules():
                if isinstance(core, AttentionCore):
                    core.kernel = watched = WatchedAttention()
                    self._watched[f"{chunk}.{name.removesuffix('core')}qkv.weight"] = core.heads, watched

    def begin_step(self) -> None:
        """Discard the maxima of the last step."""
        for _, watched in self._watched.values():
            watched.largest = None

    def row_factors(self) -> dict[str, Tensor]:
        """Return for each fused weight, by name, the factors that scale its rows, q | k | v of this rank.  A collective
        call over dp.
        """
        found = {}
        for name, (heads, watched) in self._watched.items():
            assert watched.largest is not None
            all_reduce(watched.largest, self._dp, op="max").wait()
            factors = (self._threshold / watched.largest.clamp(min=self._threshold)).sqrt()
            keys = factors.repeat_interleave(heads.size)
            queries = factors.repeat_interleave(heads.queries // heads.keys * heads.size)
            found[name] = torch.cat([queries, keys, torch.ones_like(keys)])
        return found
