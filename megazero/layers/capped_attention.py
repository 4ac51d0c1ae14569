"""Causal attention with a soft cap on its scores s = q k^T / sqrt(size): softmax(cap tanh(s / cap)) v.

    on CUDA      FlexAttention, compiled: stores no scores, and skips blocks of keys that no query sees
    elsewhere    the plain formula, which stores the scores of all pairs

Neither returns a log-sum-exp that a ring could merge or a recomputation could save.

Source: Gemma Team 2024, "Gemma 2", section 2; Dong et al. 2024 (FlexAttention).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megazero.layers.attention import CausalAttention, uncompiled
from megazero.layers.attention_kernels import widened
from megazero.layers.recompute import Tape
from megazero.layers.sequence_shard import SequenceShard, whole_samples


class CappedAttention(CausalAttention):
    """Attention with soft-capped scores to the last `window` positions of a document.

    Args:
        cap: limit of the scores.
        window: how many positions a query sees, including its own.
        device: device of the run.
    """

    def __init__(self, cap: float, window: int, device: torch.device) -> None:
        self.cap, self.window = cap, window
        self._kernel = self._flex if device.type == "cuda" else self._plain

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None = None, *, tape: Tape | None = None
    ) -> Tensor:
        """Attend; see `AttentionKernel.attend`."""
        del tape  # nothing is recorded: a recomputation attends again
        return uncompiled(self._kernel)(q, k, v, shard)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None) -> Tensor:
        dtype, groups, position = q.dtype, q.shape[1] // k.shape[1], torch.arange(q.shape[2], device=q.device)
        sample = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
        seen = self._seen(shard)(sample, sample, position[:, None], position)
        q, k, v = widened(q, k, v)
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = self.cap * torch.tanh(q @ k.mT * (q.shape[-1] ** -0.5 / self.cap))
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).to(dtype)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None) -> Tensor:
        cap, seq = self.cap, q.shape[2]

        def capped(score: Tensor, _: Tensor, __: Tensor, ___: Tensor, ____: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        shard = shard or whole_samples(seq, 1, 0, 1, 0, q.device)
        attend, mask = _flex_attention()
        made = partial(mask, self._seen(shard), shard.rows.shape[1], None, seq, seq, q.device)
        with torch.inference_mode(False):  # an evaluation may be the first caller
            blocks = shard.derived((CappedAttention, self.window), made)
        out: Tensor = attend(q, k, v, score_mod=capped, block_mask=blocks, enable_gqa=True)
        return out

    def _seen(self, shard: SequenceShard | None) -> Callable[..., Tensor]:
        """Return FlexAttention's mask function, which says which keys a query sees."""
        window, begins = self.window, None if shard is None or shard.fits_any else (shard.rows - shard.positions).t()

        def seen(sample: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            near = (query >= key) & (query - key < window)
            return near if begins is None else near & (begins[sample, query] == begins[sample, key])

        return seen


@lru_cache
def _flex_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # load the compiler

    return torch.compile(flex_attention, dynamic=False), create_block_mask
