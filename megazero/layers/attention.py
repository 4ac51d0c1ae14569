"""Causal grouped-query attention: projection, norm of queries and keys, rotary positions, kernel, output projection.

    x --qkv--> q | k | v --[norm, rope, kernel]--> heads --out--> x        [...] is the core; heads are split over TP

The kernel is chosen when the model is built: torch's choice for whole samples is here, the others are in
attention_kernels.py, context_attention.py and capped_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from megazero.comm.backend import storage_of
from megazero.layers.heads import HeadNorm, Heads, SharedKVHead, WidthNorm
from megazero.layers.linear import RowParallelLinear
from megazero.layers.sequence_shard import SequenceShard, TokenLayout

if TYPE_CHECKING:
    from megazero.layers.recompute import Tape
    from megazero.layers.rotary_frequencies import RotaryFrequencies

T = TypeVar("T")


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """Exclude a function from compilation, if a compiler is tracing the caller."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """On CUDA, repeat keys and values so that each query head has its own.  On other devices every kernel accepts fewer."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or q.device.type != "cuda":
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(size)) v with the kernel that torch chooses.

    On CUDA, in bf16 and fp16, torch uses flash attention (or cuDNN's kernel, where that is faster).  Both need only the
    last dimension to be contiguous, and accept fewer kv heads than query heads.  In fp32 or with a mask, the only
    kernel that does not store a [seq, seq] matrix needs as many kv heads as query heads, so they are repeated.

    Args:
        q: [batch, heads, seq, size].
        k, v: [batch, kv heads, seq, size].
        mask: added to the scores in place of the causal mask, [seq of q, seq of k].

    Returns:
        [batch, heads, seq, size], with the memory layout of q.
    """
    if mask is not None or q.dtype == torch.float32:
        k, v = repeat_kv(q, k, v)
    fewer = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=fewer)


def torchs_choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> SDPBackend:
    """Return the kernel that torch uses for training.

    On Hopper and Blackwell this is cuDNN's, if its version is new enough and supports the shape.
    """
    with torch.enable_grad():
        like, fewer = q.detach().requires_grad_(), q.shape[1] != k.shape[1]
        return SDPBackend(torch._fused_sdp_choice(like, k, v, mask, 0.0, causal, enable_gqa=fewer))


class AttentionKernel(Protocol):
    """Causal attention for the heads of one rank.  The implementation is chosen when the model is built."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None = None, *, tape: Tape | None = None
    ) -> Tensor:
        """Attend from each query to the earlier tokens of its document.

        Args:
            q: [batch, heads, seq, size].
            k, v: [batch, kv heads, seq, size].
            shard: the position of each token in its sample and document; None if each sample is whole and a single
                document.
            tape: records or replays the kernel's results.

        Returns:
            The same shape as q.
        """


class CausalAttention:
    """An `AttentionKernel` for whole samples, each of which is a single document."""

    supports_shards = True  # it rejects them

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None = None, *, tape: Tape | None = None
    ) -> Tensor:
        """Attend from each token to the earlier tokens of its sample.

        Raises: ValueError: the micro-batch has sequence shards or several documents per sample.
        """
        if shard is not None:
            hint = "it supports neither documents nor sequence shards"
            raise ValueError(f"this attention was built without `context`: {hint}")
        return self.whole(q, k, v, tape)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, tape: Tape | None) -> Tensor:  # noqa: ARG002
        """Attend within whole samples.  This kernel does not use the tape."""
        return causal_attention(q, k, v)


class RotaryEmbedding:
    """cos and sin of positions, in fp32, shared by the layers of a stage (Su et al. 2021).

    Uses the half-rotation form of Hugging Face's Llama.  If a rank holds a shard of each sample, tables are made only
    for its own tokens, because the tables of a million positions take a gigabyte.

    Args:
        frequencies: the rotary frequencies of a head, one per pair of elements.
        seq_len: number of tokens of a whole sample.
        device: the device of the tables.
        has_shards: every micro-batch has a `SequenceShard`; tables of positions 0 ... seq_len - 1 are then made only when a
            micro-batch without one arrives.

    Attributes:
        held: the storages of the tables of `SequenceShard`s; each lives as long as its shard.
    """

    def __init__(
        self, frequencies: RotaryFrequencies, seq_len: int, device: torch.device, *, has_shards: bool = False
    ) -> None:
        self._amplitude, self._on_device = frequencies.amplitude, frequencies.radians.to(device)
        # The tables of whole samples are computed on the host, so that every device gets the same bits.
        self._frequency = self._on_device if device.type == "meta" else frequencies.radians
        self._seq_len, self._device = seq_len, device
        # The shard must not own its tables: the shard of whole samples outlives the model.
        self._of_shards: WeakKeyDictionary[SequenceShard, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        self.held: set[int] = set()
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        if not has_shards:
            self._hold_all()

    def rotate(self, x: Tensor, shard: SequenceShard | None = None) -> Tensor:
        """Rotate queries or keys by their positions, in fp32.  [batch, heads, seq, head_size], unchanged in shape.

        `shard`: gives the positions; None for 0, 1, 2, ...
        """
        low, high = x.chunk(2, dim=-1)
        rotated = torch.cat([-high, low], dim=-1)
        if shard is not None:
            cos, sin = uncompiled(self.tables_of)(shard)
            return (x * cos + rotated * sin).to(x.dtype)
        held = self.cos, self.sin
        cos, sin = uncompiled(self._hold_all)() if held[0] is None or held[1] is None else (held[0], held[1])
        if (seq := x.shape[-2]) != len(cos):
            cos, sin = cos[:seq], sin[:seq]
        return (x * cos + rotated * sin).to(x.dtype)

    def tables_of(self, shard: SequenceShard) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a shard's positions, [1 or batch, 1, seq, head_size].  Computed once for all layers."""
        if shard not in self._of_shards:
            with torch.inference_mode(False):  # an evaluation may be the first caller
                self._of_shards[shard] = tables = self._tables(shard.positions.t().unsqueeze(1), self._on_device)
            storages = set(map(storage_of, tables))
            self.held |= storages
            finalize(shard, self.held.difference_update, storages)
        return self._of_shards[shard]

    def _hold_all(self) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self._seq_len, device=self._frequency.device)
        self.cos, self.sin = (table.to(self._device) for table in self._tables(positions, self._frequency))
        return self.cos, self.sin

    def _tables(self, positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin of positions.  [...] -> fp32 [..., head_size].

        Angles are computed in fp64, because late positions have turned many times.
        """
        angle = positions.unsqueeze(-1) * frequency
        cos, sin = ((self._amplitude * values).float() for values in (angle.cos(), angle.sin()))
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


class NeighbourRotary(RotaryEmbedding):
    """A rotary embedding in the interleaved form: it rotates neighbouring elements of a head as a pair.

    It returns queries and keys with the even elements of each head before the odd ones.  Their products do not change.
    """

    def rotate(self, x: Tensor, shard: SequenceShard | None = None) -> Tensor:
        return super().rotate(rearrange(x, "... (pairs two) -> ... (two pairs)", two=2), shard)


class NoRotation:
    """Used in place of a `RotaryEmbedding` if positions are learned."""

    def rotate(self, x: Tensor, _: SequenceShard | None = None) -> Tensor:
        """Return x unchanged."""
        return x


def _owned(qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return both unchanged: the TP rank owns its key and value heads alone."""
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
        self._v_features, self._q_and_k = heads.v_features, [heads.queries, heads.keys]
        self.width_norm = qk_norm if isinstance(qk_norm, WidthNorm) else nn.Identity()
        self.head_norm = qk_norm if isinstance(qk_norm, HeadNorm) else nn.Identity()
        self.complete = SharedKVHead(heads) if heads.sharing > 1 else _owned
        # A view of v would save all of q | k | v for the backward.  If something else saves it anyway, v stays a view.
        self.copies_v = rope is not None and (qk_norm is None or heads.sharing > 1)

    def forward(self, qkv: Tensor, layout: TokenLayout) -> Tensor:
        qk, v = qkv.split([qkv.shape[-1] - self._v_features, self._v_features], dim=-1)
        qk, v = self.complete(self.width_norm(qk), v)
        qk, v = (rearrange(x, "s b (h d) -> s b h d", d=self.heads.size) for x in (qk, v))
        qk = self.head_norm(qk)  # before the transpose: attention's output has the memory layout of q
        qk, v = (rearrange(x, "s b h d -> b h s d") for x in (qk, v))
        q, k = self.rope.rotate(qk, layout.shard).split(self._q_and_k, dim=1)
        out = self.kernel.attend(q, k, v.contiguous() if self.copies_v else v, layout.shard, tape=self.tape)
        return rearrange(out, "b h s d -> s b (h d)")


class Attention(nn.Module):
    """Compute softmax(q k^T / sqrt(d)) v per head.  x: [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        qkv: fused projection to q | k | v, or to another input that `core` takes.
        core: the computation between the projections.
        out: projection of all heads back to the hidden size.
    """

    def __init__(self, qkv: nn.Module, core: AttentionCore, out: RowParallelLinear) -> None:
        super().__init__()
        self.qkv, self.out, self.core = qkv, out, core

    @property
    def supports_shards(self) -> bool:
        """Whether the kernel either handles or rejects sequence shards and documents.  A script's own kernel may
        ignore them.
        """
        return bool(getattr(self.core.kernel, "supports_shards", False))

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return self.out(self.core(self.qkv(x), layout))

    def body_and_projection(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before the last projection, and the last projection."""
        return [self.qkv, self.core], [self.out]
