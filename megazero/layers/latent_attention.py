"""Multi-head latent attention: queries, keys and values computed from small latents (DeepSeek-AI 2024).

    x --down--> q latent | kv latent | key of positions      every tp rank, under sequence parallelism of its own tokens
                   |           |             |
                 norm, up    norm, up        |               by heads over tp
                   |           |             |
                   q      keys | values      |               of each head: elements without and with positions
                   '-----[rope, kernel]------'--> out        all heads share the key of positions

Kernels take values as wide as keys, so values are padded with zeros, and the surplus of the result is dropped.
"""

from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.autograd import gather_sequence
from megazero.layers.attention import AttentionCore, AttentionKernel, RotaryEmbedding
from megazero.layers.heads import Heads
from megazero.layers.linear import ColumnParallelLinear
from megazero.layers.norm import RMSNorm
from megazero.layers.sequence_shard import TokenLayout
from megazero.parallel_state import Axis

#: Queries [seq, batch, heads * (nope + rope)], keys | values of each head [seq, batch, heads * (nope + v)], and the key of
#: positions [seq, batch, rope].
Projected: TypeAlias = tuple[Tensor, Tensor, Tensor]


class NormedLinear(nn.Module):
    """linear(norm(x)): the projection from a latent to heads."""

    def __init__(self, norm: RMSNorm, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, latent: Tensor) -> Tensor:
        return self.linear(self.norm(latent))


class LatentProjection(nn.Module):
    """Project to queries, keys and values.  x: [seq or seq / tp, batch, hidden] -> `Projected`.

    Args:
        down: projection to the latents and to the rotary key.
        sizes: number of elements of each of them; 0 for the q latent if there is none.
        up: projections to the queries (from the q latent or, without one, from x), and to keys and values (from the kv
            latent).
        sequence: the tp axis if x arrives as [seq / tp, batch, hidden]; else an axis of one rank.
    """

    compiles = False  # it communicates

    def __init__(
        self, down: ColumnParallelLinear, sizes: tuple[int, int, int], up: tuple[nn.Module, nn.Module], sequence: Axis
    ) -> None:
        super().__init__()
        self.down, self.sizes, self.sequence = down, sizes, sequence
        self.q, self.kv = up

    def forward(self, x: Tensor) -> Projected:
        q_latent, kv_latent, k_rope = self.down(x).split(self.sizes, dim=-1)
        q = self.q(q_latent if self.sizes[0] else x)
        return q, self.kv(kv_latent), gather_sequence(k_rope.contiguous(), self.sequence)


class LatentHead(NamedTuple):
    """The sizes of a head of latent attention.

    Args:
        nope, rope, value: numbers of elements of a key without and with rotation, and of a value.
        scale: factor on the products of queries and keys, in addition to 1 / sqrt(size of a key).
    """

    nope: int
    rope: int
    value: int
    scale: float = 1.0


class LatentCore(AttentionCore):
    """Attention between its projections: `Projected` -> [seq, batch, heads * v size] of this rank.

    Args:
        heads: see `Heads`; its `size` is the size of a whole key.
        head: the sizes of a head.
        kernel, rope: see `AttentionCore`.
    """

    def __init__(self, heads: Heads, head: LatentHead, kernel: AttentionKernel, rope: RotaryEmbedding) -> None:
        super().__init__(heads, kernel, rope)
        self.head = head

    def forward(self, projected: Any, layout: TokenLayout) -> Tensor:
        nope, rope, size, scale = self.head
        q, kv = (rearrange(x, "s b (h d) -> b h s d", h=self.heads.queries) for x in projected[:2])
        k_rope = self.rope.rotate(rearrange(projected[2], "s b d -> b 1 s d"), layout.shard)
        q_nope, q_rope = q.split([nope, rope], dim=-1)
        k_nope, v = kv.split([nope, size], dim=-1)
        q = torch.cat([q_nope, self.rope.rotate(q_rope, layout.shard)], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, self.heads.queries, -1, -1)], dim=-1)
        v = F.pad(v, (0, nope + rope - size))
        q = q if scale == 1.0 else q * scale
        out = self.kernel.attend(q, k, v, layout.shard, tape=self.tape)
        return rearrange(out[..., :size], "b h s d -> s b (h d)")
