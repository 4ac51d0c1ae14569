"""The work of the context-parallel comparison: attention of one layer, forward and backward, of a sequence cut over ranks.

sequence        [ 0 | 1 | 2 | 3 ]         2 ranks: 4 chunks
zigzag          rank 0: 0, 3   rank 1: 1, 2         each rank has the same number of visible pairs
contiguous      rank 0: 0, 1   rank 1: 2, 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.setting import DTYPES, SEED
from benchmarks.worlds import Given


@dataclass(frozen=True)
class AttentionWork(Given):
    """Causal attention of one layer.

    Args:
        length: tokens of a sample.
        world: ranks among which each sample is cut.
        dtype: "fp32" or "bf16".
        heads, kv_heads, head_size: of the layer.
        samples: of the batch.
    """

    length: int
    world: int
    dtype: str = "bf16"
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    samples: int = 1

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, of the whole sequence.  [samples, heads, length, head size]"""
        generator = torch.Generator().manual_seed(SEED)

        def draw(heads: int) -> Tensor:
            shape = (self.samples, heads, self.length, self.head_size)
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads), draw(self.heads)

    def expected(self) -> tuple[Tensor, ...]:
        """out, dq, dk and dv of the whole sequence: torch's attention on one rank, in fp32."""
        *leaves, slope = (tensor.float() for tensor in self.inputs())
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), slope)


def zigzag(work: AttentionWork, rank: int) -> Tensor:
    """Places of a rank's tokens in the sequence: chunks `rank` and `2 * world - 1 - rank`."""
    chunks = torch.arange(work.length).chunk(2 * work.world)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def contiguous(work: AttentionWork, rank: int) -> Tensor:
    """Places of a rank's tokens in the sequence: a stretch."""
    return torch.arange(work.length).chunk(work.world)[rank]


class Part(NamedTuple):
    """What one rank computed: places of its tokens in the sequence; out, dq, dk and dv, [samples, heads, s, head size]."""

    rows: np.ndarray
    arrays: tuple[np.ndarray, ...]


class AttentionRank:
    """One rank of a way to compute attention: it has its tokens' q, k and v, and steps forward and backward.

    Args:
        work: the whole.
        rank: this one.
        rows: places of its tokens in the sequence.
        is_sequence_first: tensors are [b, s, heads, d] instead of [b, heads, s, d].
    """

    dp_index = 0

    def __init__(self, work: AttentionWork, rank: int, rows: Tensor, *, is_sequence_first: bool = False) -> None:
        self.work, self.rank, self._rows, self._is_sequence_first = work, rank, rows, is_sequence_first
        q, k, v, self._slope = (self._turned(tensor[:, :, rows]).contiguous() for tensor in work.inputs())
        self._leaves = [leaf.requires_grad_() for leaf in (q, k, v)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output of this rank's tokens, shaped as `q`."""
        raise NotImplementedError

    def step(self) -> None:
        """Forward and backward."""
        self._run()

    def part(self) -> Part:
        """What a step computes."""
        tensors = (self._run().detach(), *(leaf.grad for leaf in self._leaves))
        return Part(self._rows.numpy(), tuple(self._turned(tensor).float().numpy() for tensor in tensors))

    def _run(self) -> Tensor:
        for leaf in self._leaves:
            leaf.grad = None
        out = self.attend(*self._leaves)
        out.backward(self._slope)
        return out

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if self._is_sequence_first else tensor


def worst_error(parts: Sequence[Part], expected: Sequence[Tensor]) -> float:
    """Largest difference from the expected tensors, in parts of their largest elements; infinite where one is missing."""
    worst = 0.0
    for number, whole in enumerate(expected):
        found = torch.full_like(whole, torch.nan)
        for part in parts:
            found[:, :, part.rows] = torch.from_numpy(part.arrays[number])
        worst = max(worst, float((found - whole).abs().max().nan_to_num(torch.inf) / whole.abs().max()))
    return worst
