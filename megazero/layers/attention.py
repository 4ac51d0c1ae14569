"""Causal grouped-query attention with heads cut over TP, with rotary positions.

Where tp exceeds the number of key and value heads, tp / kv_heads ranks share a head, and each computes a part of it:

    4 query heads, 2 kv heads, tp = 4         rank 0     rank 1     rank 2     rank 3
    weights, and what they compute            q0 | k0.   q1 | k0"   q2 | k1.   q3 | k1"     and v likewise
    what attention reads                      q0 | k0    q1 | k0    q2 | k1    q3 | k1      gathered over tp

So no weight is held or multiplied twice, and storage, norms and checkpoints see the usual cut by rows.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary, finalize

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.autograd import gather_sequence
from megazero.comm.memory import storage_of
from megazero.layers.attention_kernels import attention, uncompiled
from megazero.layers.context_attention import ContextAttention
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.norm import HeadNorm, WidthNorm
from megazero.layers.recompute import KeptResults
from megazero.layers.sample_part import SamplePart, TokenLayout
from megazero.parallel_state import Axis

_UNKNOWN_PART = "this attention was built without `context`: it knows neither documents nor parts of samples"
_MISSING_PART = (
    "a micro-batch without `part` in a run whose samples are cut over parallel.cp, or hold documents (data.document_mask); "
    "make it with BatchShare.part_of, and give it the tokens and labels that `part.cut` leaves"
)


class FrequencyScaling(Protocol):
    """Stretches rotary frequencies for more positions; `amplitude` multiplies what is rotated."""

    @property
    def amplitude(self) -> float: ...

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """[head size / 2], unchanged in shape."""


class RotaryEmbedding:
    """cos and sin of positions, fp32, shared by the layers of a stage (Su et al. 2021).

    In the half-rotation form that Hugging Face's Llama uses.  Where ranks have parts of samples, those of their own tokens
    alone: all of a million positions take a gigabyte on every rank.

    Args:
        head_size: even.
        seq_len: of whole samples.
        theta: the base of the wavelengths.
        by_parts: every micro-batch has a `SamplePart`, so tables of positions 0 ... seq_len - 1 wait for one without.

    Attributes:
        held: the storages of tables of parts, which live as long as their parts.
    """

    def __init__(
        self,
        head_size: int,
        seq_len: int,
        theta: float,
        device: torch.device,
        scaling: FrequencyScaling | None = None,
        *,
        by_parts: bool = False,
    ) -> None:
        # on the host: the same bits for every device
        even = torch.arange(0, head_size, 2, dtype=torch.float64, device="meta" if device.type == "meta" else "cpu")
        frequency = theta ** -(even / head_size)
        self._frequency = frequency if scaling is None else scaling.scaled(frequency, theta)
        self._amplitude = 1.0 if scaling is None else scaling.amplitude
        self._seq_len, self._device, self._on_device = seq_len, device, self._frequency.to(device)
        # Not the part has its tables: that of whole samples outlives the model.
        self._of_parts: WeakKeyDictionary[SamplePart, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        self.held: set[int] = set()
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        if not by_parts:
            self._hold_all()

    def rotate(self, x: Tensor, part: SamplePart | None = None) -> Tensor:
        """Rotate queries or keys by their position, in fp32.  [batch, heads, seq, head_size], unchanged in shape.

        `part`: says the positions; None for 0, 1, 2, ...
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
        """cos and sin of a part's positions, [1 or batch, 1, seq, head_size]: once for all layers."""
        if part not in self._of_parts:
            with torch.inference_mode(False):  # whoever is the first to ask
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
        """cos and sin, [..., head_size], of positions [...]; fp64 until then, for a late position turns far."""
        angle = positions.unsqueeze(-1) * frequency
        cos, sin = ((self._amplitude * one).float() for one in (angle.cos(), angle.sin()))
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


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
    """softmax(q k^T / sqrt(d)) v per head.  [seq or seq / tp, batch, hidden], unchanged in shape, with its `TokenLayout`.

    Args:
        qkv: fused projection whose sections are q | k | v.
        out: projection of num_heads * head_size back to the hidden size.
        num_heads, num_kv_heads: of the whole model (Ainslie et al. 2023 for fewer kv heads).  Heads are divisible by tp; kv
            heads are, or divide it.
        head_size: size of one head.
        rope: rotary tables, or None where positions are learned.
        qk_norm: norm of queries and keys before they are rotated, or None; see `HeadNorm`.
        window: how far a position sees; None where it sees all before it.
        context: attends where samples are cut over ranks, or hold several documents; None where they are whole, and one
            document each.
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
        context: ContextAttention | None = None,
    ) -> None:
        super().__init__()
        self.attend = attention if window is None else window.attend
        self.context = context
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

    @property
    def knows_parts(self) -> bool:
        """Whether parts of samples and documents are attended to as whole samples are: not where `attend` was replaced."""
        return self.attend is attention or isinstance(getattr(self.attend, "__self__", None), SlidingWindow)

    def heads(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """What the output projection reads: [seq, batch, this rank's heads * head_size]."""
        part = layout.part
        if (part is None) != (self.context is None):
            raise ValueError(_UNKNOWN_PART if self.context is None else _MISSING_PART)
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
            rotated = self.rope.rotate(rotated, part)
        if self.copies_v:
            v = v.contiguous()
        q, k = rotated.split([self.num_heads, self.num_kv_heads], dim=1)
        if part is None or self.context is None:
            out = self.attend(q, k, v, kept=self.kept)
        else:
            out = self.context.attend(q, k, v, part, kept=self.kept)
        return rearrange(out, "b h s d -> s b (h d)")

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return self.out(self.heads(x, layout))


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
        own = (x[:, :, :size].clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        first = attention(*own, kept=kept)
        missing = -seq % size  # zeros that no query sees
        q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, size)) for x in (q, k, v))
        k, v = (torch.cat([x[:, :, :-1], x[:, :, 1:]], dim=3) for x in (k, v))
        q, k, v = (rearrange(x, "b h n s d -> (b n) h s d") for x in (q[:, :, 1:], k, v))
        rest = rearrange(attention(q, k, v, mask=self.mask, kept=kept), "(b n) h s d -> b h (n s) d", b=batch)
        return torch.cat([first, rest[:, :, : seq - size]], dim=2)
