"""Causal grouped-query attention with heads cut over TP, with rotary positions.

Where tp exceeds the number of key and value heads, tp / kv_heads ranks share a head, and each computes a part of it:

    4 query heads, 2 kv heads, tp = 4         rank 0     rank 1     rank 2     rank 3
    weights, and what they compute            q0 | k0.   q1 | k0"   q2 | k1.   q3 | k1"     and v likewise
    what attention reads                      q0 | k0    q1 | k0    q2 | k1    q3 | k1      gathered over tp

So no weight is held or multiplied twice, and storage, norms and checkpoints see the usual cut by rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.autograd import gather_sequence
from megazero.layers.attention_kernels import attention
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.qk_norm import HeadNorm, WidthNorm
from megazero.layers.recompute import KeptResults
from megazero.parallel_state import Axis


class FrequencyScaling(Protocol):
    """Stretches rotary frequencies for more positions; `amplitude` multiplies what is rotated."""

    @property
    def amplitude(self) -> float: ...

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """[head size / 2], unchanged in shape."""


class RotaryEmbedding:
    """cos and sin tables for positions 0 ... seq_len - 1, shared by the layers of a stage (Su et al. 2021).

    In the half-rotation form that Hugging Face's Llama uses; `head_size` is even, `theta` the base of the wavelengths.
    """

    def __init__(
        self,
        head_size: int,
        seq_len: int,
        theta: float,
        device: torch.device,
        scaling: FrequencyScaling | None = None,
    ) -> None:
        at = "meta" if device.type == "meta" else "cpu"  # the same bits for every device
        even = torch.arange(0, head_size, 2, dtype=torch.float64, device=at)
        position = torch.arange(seq_len, dtype=torch.float64, device=at)
        frequency = theta ** -(even / head_size)
        if scaling is not None:
            frequency = scaling.scaled(frequency, theta)
        angle = torch.outer(position, frequency)
        angle = torch.cat([angle, angle], dim=-1)
        amplitude = 1.0 if scaling is None else scaling.amplitude
        self.cos = (amplitude * angle.cos()).to(device, torch.float32)
        self.sin = (amplitude * angle.sin()).to(device, torch.float32)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys by their position, in fp32.  [batch, heads, seq, head_size], unchanged in shape."""
        low, high = x.chunk(2, dim=-1)
        rotated = torch.cat([-high, low], dim=-1)
        seq = x.shape[-2]
        cos, sin = (self.cos, self.sin) if seq == len(self.cos) else (self.cos[:seq], self.sin[:seq])
        return (x * cos + rotated * sin).to(x.dtype)


class SharedKVHead(nn.Module):
    """Completes the key and value head that a rank shares.  [seq, batch, q | part of k | part of v] -> q | k and v.

    The backward sums the gradients of the ranks that share the head (as Megatron-LM does for fewer query groups than tp).

    Args:
        parts: ranks that share a head, tp / kv_heads.
        part_features: size of a part, head_size / parts.
        tp: the tensor-parallel axis.
    """

    def __init__(self, parts: int, part_features: int, tp: Axis) -> None:
        super().__init__()
        self.parts, self.part_features, self.tp = parts, part_features, tp

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        q, mine = qkv.split([qkv.shape[-1] - 2 * self.part_features, 2 * self.part_features], dim=-1)
        every = gather_sequence(mine, self.tp).unflatten(0, (self.tp.size, -1))
        first = self.tp.index // self.parts * self.parts
        kv = rearrange(every[first : first + self.parts], "parts s b (kv d) -> s b (kv parts d)", kv=2)
        k, v = kv.chunk(2, dim=-1)
        return torch.cat([q, k], dim=-1), v


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v per head.  [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        qkv: fused projection whose sections are q | k | v.
        out: projection of num_heads * head_size back to the hidden size.
        num_heads, num_kv_heads: of the whole model (Ainslie et al. 2023 for fewer kv heads).  Heads are divisible by tp; kv
            heads are, or divide it.
        head_size: size of one head.
        rope: rotary tables, or None where positions are learned.
        qk_norm: norm of queries and keys before they are rotated, or None; see `HeadNorm`.
        window: how far a position sees; None where it sees all before it.
    """

    def __init__(
        self,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rope: RotaryEmbedding | None,
        qk_norm: HeadNorm | WidthNorm | None = None,
        window: SlidingWindow | None = None,
    ) -> None:
        super().__init__()
        self.attend = attention if window is None else window.attend
        self.kept: KeptResults | None = None  # gives attention's output where a block is computed again
        self.qkv, self.out, self.rope, self.head_size = qkv, out, rope, head_size
        self.width_norm = qk_norm if isinstance(qk_norm, WidthNorm) else None
        self.head_norm = qk_norm if isinstance(qk_norm, HeadNorm) else None
        tp, self.shared_head = qkv.tp, None
        if tp.size > num_kv_heads:
            self.shared_head = SharedKVHead(tp.size // num_kv_heads, num_kv_heads * head_size // tp.size, tp)
        # A view of v keeps all of q | k | v in memory for the backward.  So does a norm's input, where no head is shared.
        self.copies_v = rope is not None and (qk_norm is None or self.shared_head is not None)
        self.v_features = num_kv_heads * head_size // tp.size
        self.num_heads = num_heads // tp.size
        self.num_kv_heads = max(num_kv_heads // tp.size, 1)

    def heads(self, x: Tensor) -> Tensor:
        """What the output projection reads: [seq, batch, this rank's heads * head_size]."""
        qkv = self.qkv(x)
        if self.width_norm is not None:
            rotated, v = self.width_norm(qkv)
            if self.shared_head is not None:
                rotated, v = self.shared_head(torch.cat([rotated, v], dim=-1))
        elif self.shared_head is not None:
            rotated, v = self.shared_head(qkv)
        else:
            rotated, v = qkv.split([qkv.shape[-1] - self.v_features, self.v_features], dim=-1)
        rotated, v = (rearrange(x, "s b (h d) -> s b h d", d=self.head_size) for x in (rotated, v))
        if self.head_norm is not None:
            # before dimensions change places: attention's output takes the order of q in memory
            rotated = self.head_norm(rotated, self.num_heads)
        rotated, v = (rearrange(x, "s b h d -> b h s d") for x in (rotated, v))
        if self.rope is not None:
            rotated = self.rope.rotate(rotated)
        if self.copies_v:
            v = v.contiguous()
        q, k = rotated.split([self.num_heads, self.num_kv_heads], dim=1)
        return rearrange(self.attend(q, k, v, kept=self.kept), "b h s d -> s b (h d)")

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.heads(x))


class SlidingWindow:
    """Causal attention to the last `size` positions, the token's own among them (Beltagy et al. 2020, section 3.1).

        queries of block i      blocks are of `size` positions
        keys    [ block i - 1   |   block i     ]
        row 0   [ . x x x x x x | x . . . . . . ]      row p sees keys p + 1 ... p + size of the two blocks
        row p   [ . . . . x x x | x x x x . . . ]

    All blocks share one mask, so time grows with seq * size, not with seq * seq. Half of each block is masked but
    computed, so up to 3 * size positions it takes no less than causal attention does (docs/shapes.md).

    Args:
        size: of the window, in tokens.
        dtype: of queries and keys.
        device: of the mask, [size, 2 * size].
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        row, key = torch.arange(size, device=device)[:, None], torch.arange(2 * size, device=device)
        unseen = (key <= row) | (key > row + size)
        self.size, self.mask = size, torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, -torch.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, kept: KeptResults | None = None) -> Tensor:
        """As `attention`; any number of positions."""
        seq, size, batch = q.shape[2], self.size, q.shape[0]
        if seq <= size:
            return attention(q, k, v, kept=kept)
        # The first block has none before it.  It is copied: a view would keep all of q, k and v in memory for the backward.
        first = attention(*(x[:, :, :size].contiguous() for x in (q, k, v)), kept=kept)
        missing = -seq % size  # zeros that no query sees
        q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, size)) for x in (q, k, v))
        k, v = (torch.cat([x[:, :, :-1], x[:, :, 1:]], dim=3) for x in (k, v))
        q, k, v = (rearrange(x, "b h n s d -> (b n) h s d") for x in (q[:, :, 1:], k, v))
        rest = rearrange(attention(q, k, v, mask=self.mask, kept=kept), "(b n) h s d -> b h (n s) d", b=batch)
        return torch.cat([first, rest[:, :, : seq - size]], dim=2)
