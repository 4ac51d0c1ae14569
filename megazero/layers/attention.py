"""Causal grouped-query attention: projection, norm of queries and keys, rotary positions, kernel, output projection.

    x --qkv--> q | k | v --[norm, rope, kernel]--> heads --out--> x        [...] is the core; heads are split over TP

If tp exceeds the number of kv heads, tp / kv_heads ranks share a head, and each rank computes a part of it:

    4 query heads, 2 kv heads, tp = 4         rank 0     rank 1     rank 2     rank 3
    weights, and what they compute            q0 | k0.   q1 | k0"   q2 | k1.   q3 | k1"     and v likewise
    what attention reads                      q0 | k0    q1 | k0    q2 | k1    q3 | k1      gathered over tp

So no weight is stored or multiplied twice, and storage, norms and checkpoints see the usual split by rows.
"""

from math import sqrt
from typing import Protocol
from weakref import WeakKeyDictionary, finalize

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.autograd import gather_sequence
from megazero.comm.backend import storage_of
from megazero.layers.attention_kernels import AttentionKernel, CausalAttention, uncompiled
from megazero.layers.context_attention import ContextAttention
from megazero.layers.linear import RowParallelLinear
from megazero.layers.norm import HeadNorm, Heads, WidthNorm
from megazero.layers.recompute import Tape
from megazero.layers.sample_part import SamplePart, TokenLayout


class FrequencyScaling(Protocol):
    """Scales rotary frequencies for longer samples.  `amplitude` multiplies rotated queries and keys."""

    @property
    def amplitude(self) -> float: ...

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale the frequencies, [head size / 2], unchanged in shape."""


class RotaryEmbedding:
    """cos and sin of positions, in fp32, shared by the layers of a stage (Su et al. 2021).

    Uses the half-rotation form of Hugging Face's Llama.  If a rank holds a shard of each sample, tables are made only
    for its own tokens, because the tables of a million positions take a gigabyte.

    Args:
        head_size: even.
        seq_len: of whole samples, in tokens.
        theta: the base of the wavelengths.
        device: of the tables.
        scaling: see `FrequencyScaling`.
        rotated: number of elements of a head that are rotated; None for all.
        score_scale: a factor on all products of queries and keys.
        by_parts: every micro-batch has a `SamplePart`; tables of positions 0 ... seq_len - 1 are then made only when a
            micro-batch without one arrives.

    Attributes:
        held: the storages of the tables of parts, which live as long as their parts.
    """

    def __init__(
        self,
        head_size: int,
        seq_len: int,
        theta: float,
        device: torch.device,
        scaling: FrequencyScaling | None = None,
        *,
        rotated: int | None = None,
        score_scale: float = 1.0,
        by_parts: bool = False,
    ) -> None:
        rotated = head_size if rotated is None else rotated
        # computed on the host, so that every device gets the same bits
        even = torch.arange(0, rotated, 2, dtype=torch.float64, device="meta" if device.type == "meta" else "cpu")
        frequency = theta ** -(even / rotated)
        frequency = frequency if scaling is None else scaling.scaled(frequency, theta)
        self._frequency = F.pad(frequency, (0, head_size // 2 - len(even)))  # frequency 0 means no rotation
        self._amplitude = (1.0 if scaling is None else scaling.amplitude) * sqrt(score_scale)  # on queries and on keys
        self._seq_len, self._device, self._on_device = seq_len, device, self._frequency.to(device)
        # The part must not own its tables: the part of whole samples outlives the model.
        self._of_parts: WeakKeyDictionary[SamplePart, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        self.held: set[int] = set()
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        if not by_parts:
            self._hold_all()

    def rotate(self, x: Tensor, part: SamplePart | None = None) -> Tensor:
        """Rotate queries or keys by their positions, in fp32.  [batch, heads, seq, head_size], unchanged in shape.

        `part`: gives the positions; None for 0, 1, 2, ...
        """
        low, high = x.chunk(2, dim=-1)
        rotated = torch.cat([-high, low], dim=-1)
        if part is not None:
            cos, sin = uncompiled(self.tables_of)(part)
            return (x * cos + rotated * sin).to(x.dtype)
        held = self.cos, self.sin
        cos, sin = uncompiled(self._hold_all)() if held[0] is None or held[1] is None else (held[0], held[1])
        if (seq := x.shape[-2]) != len(cos):
            cos, sin = cos[:seq], sin[:seq]
        return (x * cos + rotated * sin).to(x.dtype)

    def tables_of(self, part: SamplePart) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a part's positions, [1 or batch, 1, seq, head_size].  Computed once for all layers."""
        if part not in self._of_parts:
            with torch.inference_mode(False):  # an evaluation may be the first caller
                self._of_parts[part] = tables = self._tables(part.positions.t().unsqueeze(1), self._on_device)
            storages = set(map(storage_of, tables))
            self.held |= storages
            finalize(part, self.held.difference_update, storages)
        return self._of_parts[part]

    def _hold_all(self) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self._seq_len, device=self._frequency.device)
        self.cos, self.sin = (table.to(self._device) for table in self._tables(positions, self._frequency))
        return self.cos, self.sin

    def _tables(self, positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin, fp32 [..., head_size], of positions [...].

        Angles are in fp64, because those of late positions are many turns.
        """
        angle = positions.unsqueeze(-1) * frequency
        cos, sin = ((self._amplitude * values).float() for values in (angle.cos(), angle.sin()))
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


class NeighbourRotary(RotaryEmbedding):
    """Rotates neighbouring elements of a head together.

    It returns the heads of queries and keys with even elements before odd ones, which leaves their products unchanged.
    """

    def rotate(self, x: Tensor, part: SamplePart | None = None) -> Tensor:
        return super().rotate(rearrange(x, "... (pairs two) -> ... (two pairs)", two=2), part)


class NoRotation:
    """Used in place of a `RotaryEmbedding` if positions are learned."""

    def rotate(self, x: Tensor, _: SamplePart | None = None) -> Tensor:
        """Return x unchanged."""
        return x


class SharedKVHead(nn.Module):
    """Gather the key and value head that several TP ranks share.  [seq, batch, q | part of k], part of v -> q | k, v.

    The backward sums the gradients of the ranks that share the head (as Megatron-LM does for fewer query groups than
    tp).
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads, self.tp = heads, heads.tp

    def forward(self, qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k = qk.split([qk.shape[-1] - v.shape[-1], v.shape[-1]], dim=-1)
        every = gather_sequence(torch.cat([k, v], dim=-1), self.tp).unflatten(0, (self.tp.size, -1))
        first = self.tp.index // self.heads.sharing * self.heads.sharing
        sharing = every[first : first + self.heads.sharing]
        k, v = rearrange(sharing, "parts s b (kv d) -> s b (kv parts d)", kv=2).chunk(2, dim=-1)
        return torch.cat([q, k], dim=-1), v


def _owned(qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return both unchanged, for key and value heads that a TP rank does not share."""
    return qk, v


class AttentionCore(nn.Module):
    """Attention between its projections: [seq, batch, q | k | v] -> [seq, batch, heads * head_size] of this rank.

    Args:
        heads: see `Heads`.
        kernel: see `AttentionKernel`.
        rope: rotary tables; None if positions are learned.
        qk_norm: norm of queries and keys before their rotation; None for no norm.

    Attributes:
        tape: records the kernel's results if the core is recomputed; None to run the kernel again.
    """

    def __init__(
        self,
        heads: Heads,
        kernel: AttentionKernel,
        rope: RotaryEmbedding | None = None,
        qk_norm: HeadNorm | WidthNorm | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kernel, self.rope = heads, kernel, rope or NoRotation()
        self.tape: Tape | None = None
        self.width_norm = qk_norm if isinstance(qk_norm, WidthNorm) else nn.Identity()
        self.head_norm = qk_norm if isinstance(qk_norm, HeadNorm) else nn.Identity()
        self.complete = SharedKVHead(heads) if heads.sharing > 1 else _owned
        # A view of v would save all of q | k | v for the backward.  If something else saves it anyway, v stays a view.
        self.copies_v = rope is not None and (qk_norm is None or heads.sharing > 1)

    def forward(self, qkv: Tensor, layout: TokenLayout) -> Tensor:
        qk, v = qkv.split([qkv.shape[-1] - self.heads.v_features, self.heads.v_features], dim=-1)
        qk, v = self.complete(self.width_norm(qk), v)
        qk, v = (rearrange(x, "s b (h d) -> s b h d", d=self.heads.size) for x in (qk, v))
        qk = self.head_norm(qk)  # before the transpose: attention's output has the memory layout of q
        qk, v = (rearrange(x, "s b h d -> b h s d") for x in (qk, v))
        q, k = self.rope.rotate(qk, layout.part).split([self.heads.queries, self.heads.keys], dim=1)
        out = self.kernel.attend(q, k, v.contiguous() if self.copies_v else v, layout.part, tape=self.tape)
        return rearrange(out, "b h s d -> s b (h d)")


class Attention(nn.Module):
    """Compute softmax(q k^T / sqrt(d)) v per head.  x: [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        qkv: fused projection to q | k | v, or what else `core` takes.
        core: the computation between the projections.
        out: projection of all heads back to the hidden size.
    """

    def __init__(self, qkv: nn.Module, core: AttentionCore, out: RowParallelLinear) -> None:
        super().__init__()
        self.qkv, self.out, self.core = qkv, out, core

    @property
    def knows_parts(self) -> bool:
        """Whether the kernel handles, or rejects, parts of samples and documents.  A script's own kernel may do
        neither.
        """
        return isinstance(self.core.kernel, CausalAttention | ContextAttention)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return self.out(self.core(self.qkv(x), layout))

    def parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before the last projection, and the last projection."""
        return [self.qkv, self.core], [self.out]
