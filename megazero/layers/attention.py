"""Causal grouped-query attention with heads cut over TP, on torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.rope import RotaryEmbedding


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v per head.  [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        qkv: fused projection whose sections are q | k | v.
        out: projection back to the hidden size.
        num_heads, num_kv_heads: of the whole model; both divide by tp (Ainslie et al. 2023 for fewer kv heads).
        head_size: size of one head.
        rope: rotary tables, or None where positions are learned.
    """

    def __init__(
        self,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rope: RotaryEmbedding | None,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.rope, self.head_size = qkv, out, rope, head_size
        self.heads = num_heads // qkv.tp.size
        self.kv_heads = num_kv_heads // qkv.tp.size

    def forward(self, x: Tensor) -> Tensor:
        """Mix every position with those before it."""
        heads = rearrange(self.qkv(x), "s b (h d) -> b h s d", d=self.head_size)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rope is not None:
            q, k = self.rope.rotate(q), self.rope.rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(rearrange(mixed, "b h s d -> s b (h d)"))
