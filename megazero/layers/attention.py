"""Causal grouped-query attention with heads cut over TP, on torch's scaled_dot_product_attention; rotary positions."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.qk_norm import HeadNorm, WidthNorm


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


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v per head.  [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        qkv: fused projection whose sections are q | k | v.
        out: projection of num_heads * head_size back to the hidden size.
        num_heads, num_kv_heads: of the whole model; both divisible by tp (Ainslie et al. 2023 for fewer kv heads).
        head_size: size of one head.
        rope: rotary tables, or None where positions are learned.
        qk_norm: norm of queries and keys before they are rotated, or None; see `HeadNorm`.
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
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.rope, self.head_size, self.qk_norm = qkv, out, rope, head_size, qk_norm
        self.heads = num_heads // qkv.tp.size
        self.kv_heads = num_kv_heads // qkv.tp.size

    def forward(self, x: Tensor) -> Tensor:
        heads = rearrange(self.qkv(x), "s b (h d) -> b h s d", d=self.head_size)
        rotated, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated, self.heads)
        if self.rope is not None:
            rotated = self.rope.rotate(rotated)
            v = v.contiguous()  # a copy: a view would keep all of q | k | v in memory for the backward
        q, k = rotated.split([self.heads, self.kv_heads], dim=1)
        return self.out(rearrange(causal_attention(q, k, v), "b h s d -> s b (h d)"))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention.  q: [batch, heads, seq, size], k and v: [batch, kv heads, seq, size] -> as q.

    On CUDA torch uses flash attention (or cuDNN's, where that is faster) in bf16 and fp16; it needs only the last dimension
    contiguous, and takes fewer kv heads than heads.  In fp32 the one kernel that stores no [seq, seq] matrix needs as many.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.device.type == "cuda" and q.dtype == torch.float32:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
