"""Multi-head latent attention: queries, keys and values that are made of small latents (DeepSeek-AI 2024).

    x --down--> q latent | kv latent | key of positions      every tp rank, under sequence parallelism of its own tokens
                   |           |             |
                 norm, up    norm, up        |               by heads over tp
                   |           |             |
                   q      keys | values      |               of each head: elements without and with positions
                   '-----[rope, kernel]------'--> out        all heads share the key of positions

Kernels take values as wide as keys, so values are padded with zeros, and the surplus of the result is dropped.
"""

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.autograd import gather_sequence
from megazero.layers.attention import AttentionCore, AttentionKernel, RotaryEmbedding
from megazero.layers.heads import Heads
from megazero.layers.linear import ColumnParallelLinear
from megazero.layers.norm import RMSNorm
from megazero.layers.sample_part import TokenLayout
from megazero.parallel_state import Axis

#: Queries [seq, batch, heads * (nope + rope)], keys | values of each head [seq, batch, heads * (nope + v)], and the key of
#: positions [seq, batch, rope].
Projected: TypeAlias = tuple[Tensor, Tensor, Tensor]


class LatentProjection(nn.Module):
    """Project to queries, keys and values.  x: [seq or seq / tp, batch, hidden] -> `Projected`.

    Args:
        down: to the latents and the key of positions.
        sizes: their elements; 0 without a q latent.
        q: of the q latent, or without one of x.
        kv_norm, kv: of the kv latent.
        sequence: the tp axis if x arrives as [seq / tp, batch, hidden]; else an axis of one rank.
        q_norm: of the q latent; None: there is none.
    """

    compiles = False  # it communicates

    def __init__(
        self,
        down: ColumnParallelLinear,
        sizes: tuple[int, int, int],
        q: ColumnParallelLinear,
        kv_norm: RMSNorm,
        kv: ColumnParallelLinear,
        sequence: Axis,
        q_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.down, self.q, self.kv, self.q_norm, self.kv_norm = down, q, kv, q_norm, kv_norm
        self.sizes, self.sequence = sizes, sequence

    def forward(self, x: Tensor) -> Projected:
        q_latent, kv_latent, k_rope = self.down(x).split(self.sizes, dim=-1)
        q = self.q(x if self.q_norm is None else self.q_norm(q_latent))
        return q, self.kv(self.kv_norm(kv_latent)), gather_sequence(k_rope.contiguous(), self.sequence)


class LatentCore(AttentionCore):
    """Attention between its projections: `Projected` -> [seq, batch, heads * v size] of this rank.

    Args:
        heads: see `Heads`; the size is that of a whole key.
        sizes: elements of a key without and with positions, and of a value.
        kernel, rope: see `AttentionCore`.
        scale: factor on the products of queries and keys, beside 1 / sqrt(size of a key).
    """

    def __init__(
        self, heads: Heads, sizes: tuple[int, int, int], kernel: AttentionKernel, rope: RotaryEmbedding, scale: float
    ) -> None:
        super().__init__(heads, kernel, rope)
        self.sizes, self.scale = sizes, scale

    def forward(self, projected: Any, layout: TokenLayout) -> Tensor:
        nope, rope, size = self.sizes
        q, kv = (rearrange(x, "s b (h d) -> b h s d", h=self.heads.queries) for x in projected[:2])
        k_rope = self.rope.rotate(rearrange(projected[2], "s b d -> b 1 s d"), layout.part)
        q_nope, q_rope = q.split([nope, rope], dim=-1)
        k_nope, v = kv.split([nope, size], dim=-1)
        q = torch.cat([q_nope, self.rope.rotate(q_rope, layout.part)], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, self.heads.queries, -1, -1)], dim=-1)
        v = F.pad(v, (0, nope + rope - size))
        q = q if self.scale == 1.0 else q * self.scale
        out = self.kernel.attend(q, k, v, layout.part, tape=self.tape)
        return rearrange(out[..., :size], "b h s d -> s b (h d)")
