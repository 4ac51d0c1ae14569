"""Torch's kernels for attention, called by name where scaled_dot_product_attention is not enough.

    without a `tape`   torch's scaled_dot_product_attention chooses the kernel and provides the backward (attention.py)
    with a `tape`      the kernel that torch would choose is called by name.  It returns `out` and, for each query,
                       `lse`, the log of the sum of exponentials

The backward needs q, k, v, out and lse, however they were computed.  So a recomputed layer can save `out` and `lse` of
its first forward, and the second forward runs no kernel.

    one `Tile`         attention to a subset of the keys.  `TileKernel.forward` returns out and lse over this subset
                       alone, to be merged with those of other subsets; `TileKernel.backward` takes out and lse over
                       all keys and returns this subset's contribution to the gradients
    many tiles         `varlen_forward` and `varlen_backward` call the operators as torch.nn.attention.varlen does
"""

from functools import lru_cache
from typing import Any, NamedTuple
from warnings import warn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, current_flash_attention_impl

from megazero.layers.attention import CausalAttention, causal_attention, repeat_kv, torchs_choice, uncompiled
from megazero.layers.recompute import Tape
from megazero.layers.saved_tensors import refuse_second_derivative
from megazero.layers.token_layout import EVERY_HEAD, HeadGroup, Tile
from megazero.registry import added

_aten = torch.ops.aten


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, tape: Tape | None = None) -> Tensor:
    """Compute `causal_attention`, and record the kernel's outputs on a tape.

    Args:
        tape: records or replays the kernel's outputs.  If every kernel for these tensors would store a [seq, seq]
            matrix, torch's formula is used and nothing is recorded.
    """
    if tape is not None and (out := uncompiled(_through)(q, k, v, mask, tape)) is not None:
        return out
    return causal_attention(q, k, v, mask)


class TapedAttention(CausalAttention):
    """A `CausalAttention` that records its results on the tape, if there is one."""

    def whole(self, q: Tensor, k: Tensor, v: Tensor, tape: Tape | None) -> Tensor:
        return attention(q, k, v, tape=tape)


_SHARPNESS = 64.0  # of queries and of keys; fp16 holds both


class WatchedAttention(TapedAttention):
    """A `TapedAttention` that tracks the largest score s of each key head, by a second kernel call in training.

    No kernel returns the maximum, but all return log(sum(exp(s))), and log(sum(exp(4096 s))) / 4096 exceeds the largest
    s by at most log(keys) / 4096.  No [seq, seq] matrix is stored.

    Attributes:
        largest: fp32 [key heads], over all calls since it was last set to None.
    """

    largest: Tensor | None = None

    def whole(self, q: Tensor, k: Tensor, v: Tensor, tape: Tape | None) -> Tensor:
        if torch.is_grad_enabled():
            uncompiled(self._watch)(q.detach() * _SHARPNESS, k.detach() * _SHARPNESS)
        return super().whole(q, k, v, tape)

    def _watch(self, q: Tensor, k: Tensor) -> None:
        each, _ = repeat_kv(q, k, k)
        lse = _forward(_kernel_of_tiles(q, each, each, None, True), q, each, each, None, True)[1]
        found = lse.flatten(2)[..., : q.shape[2]].amax((0, 2)).unflatten(0, (k.shape[1], -1)).amax(1) / _SHARPNESS**2
        self.largest = found if self.largest is None else torch.maximum(self.largest, found)


class SlidingWindow(CausalAttention):
    """Causal attention to the last `size` positions, including the token's own (Beltagy et al. 2020, section 3.1).

        queries of block i      a block has `size` positions
        keys    [ block i - 1   |   block i     ]
        row 0   [ . x x x x x x | x . . . . . . ]      row p sees keys p + 1 ... p + size of the two blocks
        row p   [ . . . . x x x | x x x x . . . ]

    All blocks share one mask, so the time grows with seq * size instead of seq * seq.  Half of each block is masked but
    still computed, so for sequences of up to 3 * size positions this is no faster than causal attention
    (docs/shapes.md).

    Args:
        size: size of the window, in tokens.
        dtype: dtype of queries and keys.
        device: device of the mask, [size, 2 * size].
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        row, key = torch.arange(size, device=device)[:, None], torch.arange(2 * size, device=device)
        unseen = (key <= row) | (key > row + size)
        self.size, self.mask = size, torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, -torch.inf)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, tape: Tape | None) -> Tensor:
        seq, size, batch = q.shape[2], self.size, q.shape[0]
        if seq <= size:
            return attention(q, k, v, tape=tape)
        # The first block has no block before it.  Copy it: a view would keep all of q, k and v in memory until the
        # backward.
        own = (x[:, :, :size].clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        first = attention(*own, tape=tape)
        missing = -seq % size  # zeros that no query sees
        q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, size)) for x in (q, k, v))
        k, v = (torch.cat([x[:, :, :-1], x[:, :, 1:]], dim=3) for x in (k, v))
        q, k, v = (rearrange(x, "b h n s d -> (b n) h s d") for x in (q[:, :, 1:], k, v))
        rest = rearrange(attention(q, k, v, mask=self.mask, tape=tape), "(b n) h s d -> b h (n s) d", b=batch)
        return torch.cat([first, rest[:, :, : seq - size]], dim=2)


def _through(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tape: Tape) -> Tensor | None:
    """Attend with the kernel that torch chooses for training, so that the first run and the recomputation use the same
    one.

    Returns None if torch's formula must be used instead.
    """
    if mask is not None or q.dtype == torch.float32:
        k, v = repeat_kv(q, k, v)
    kernel = torchs_choice(q, k, v, mask, causal=mask is None)
    odd = kernel == SDPBackend.FLASH_ATTENTION and q.is_cuda and q.shape[-1] % 8  # torch pads such heads
    if odd or kernel not in _KERNELS:
        return None
    result: Tensor = _TapedAttention.apply(q, k, v, mask, kernel, tape)
    return result


class _TapedAttention(torch.autograd.Function):
    """Attention that records its kernel's outputs on a tape, or replays them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: SDPBackend, tape: Tape
    ) -> Tensor:
        outputs = tape.through(lambda: _forward(kernel, q, k, v, mask, mask is None))
        ctx.save_for_backward(q, k, v, mask, *outputs)
        ctx.kernel = kernel
        return outputs[0].detach()  # autograd attaches the graph to this tensor; the tape's tensor has no graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention whose results are recorded")
        q, k, v, mask, *outputs = ctx.saved_tensors
        return *_backward(ctx.kernel, grad, q, k, v, mask, mask is None, *outputs), None, None, None


class TileKernel:
    """Attention within one tile, with torch's kernels."""

    def cut(self, tile: Tile, window: int | None, q: Tensor, k: Tensor) -> list[tuple[Tile, HeadGroup]]:  # noqa: ARG002
        """Split a tile into kernel calls.  Return the sub-tile and the heads of each call."""
        return [(tile, EVERY_HEAD)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, window: int | None) -> tuple[Tensor, Tensor]:
        """Attend from the queries of a tile to its keys.  Each query must see at least one key.

        Args:
            q: [batch, heads, seq, size], the tile's queries.
            k, v: [batch, kv heads, seq of k, size], the tile's keys and values.
            tile: which queries see which keys.
            window: how many positions a query sees, including its own; None for no window.

        Returns:
            out with the shape of q, and lse in fp32, [batch, heads, seq of q].
        """
        q, k, v = widened(q, k, v)
        mask, causal = _seen_in(tile, window, q)
        if mask is not None or q.dtype == torch.float32:
            k, v = repeat_kv(q, k, v)
        out, lse, *_ = _forward(_kernel_of_tiles(q, k, v, mask, causal), q, k, v, mask, causal)
        return out, lse.flatten(2)[..., : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute this tile's contribution to the gradients of its queries, keys and values.

        Args:
            grad, out: with the shape of q, for attention over all keys that the queries see.
            q, k, v, tile, window: as in `forward`.
            lse: over all keys that the queries see, [batch, heads, seq of q].
        """
        grad, q, k, v, out = widened(grad, q, k, v, out)
        mask, causal = _seen_in(tile, window, q)
        heads = k.shape[1]
        if mask is not None or q.dtype == torch.float32:
            k, v = repeat_kv(q, k, v)
        kernel = _kernel_of_tiles(q, k, v, mask, causal)
        if kernel == SDPBackend.EFFICIENT_ATTENTION:
            lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # the kernel expects lse padded to this length
        if kernel == SDPBackend.CUDNN_ATTENTION:
            grad = _laid_out(grad, q)  # for whole samples torch's own calls already give `grad` this layout
        unused = [q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ())]
        random = [] if q.is_cpu else unused  # random-number state, unused because nothing is dropped out
        dq, dk, dv = _backward(kernel, grad, q, k, v, mask, causal, out, lse.contiguous(), *random)[:3]
        if k.shape[1] != heads:
            dk, dv = (rearrange(x, "b (kv g) s d -> b kv g s d", kv=heads).sum(2) for x in (dk, dv))
        return dq, dk, dv


def tile_kernel(*, on_cpu: bool) -> TileKernel:
    """Return the kernel for tiles.  On the CPU, an annex may provide a faster one."""
    made: TileKernel = added("kernel").get("attention tiles", TileKernel)() if on_cpu else TileKernel()
    return made


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the result of attention over further keys into `out` and `lse`, in place.

    Computed as out - s (out - more) with s = sigmoid(more_lse - lse), which avoids the exponential of a large number.
    """
    out.lerp_(more.to(out.dtype), torch.sigmoid(more_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, more_lse))


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert 16-bit tensors on the CPU to fp32.

    The CPU kernel returns a tile's result in the type of its input.  In 16 bits each tile's result would be rounded,
    and these errors would add to the error of a single call over all keys.
    """
    return tuple(x.float() if x.is_cpu and x.dtype in (torch.bfloat16, torch.float16) else x for x in tensors)


def packs_tiles(q: Tensor) -> bool:
    """Whether `varlen_forward` accepts these queries.  Raises: ValueError: no kernel for tiles accepts them."""
    if not q.is_cuda or q.dtype == torch.float32:
        return False
    if q.shape[-1] % 8:
        raise ValueError(
            f"attention to sequence shards or documents needs a head size that is a multiple of 8 on CUDA: got "
            f"{q.shape[-1]}; set model.head_dim to {q.shape[-1] + -q.shape[-1] % 8}, or run with whole samples and cp = 1"
        )
    return True


def windowed(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Attend causally to the last `size` positions with flash attention, on CUDA in 16 bits.  Arguments as in
    `attention`.
    """
    heads_last = (x.transpose(1, 2) for x in (q, k, v))
    lengths = None, None, q.shape[2], k.shape[2], 0.0, False, False
    out, *_ = _aten._flash_attention_forward(*heads_last, *lengths, window_size_left=size - 1, window_size_right=0)
    return out.transpose(1, 2)


class Sight(NamedTuple):
    """Which keys each row of a segment sees, in flash attention's convention: the last query row is aligned with the last
    key.

    Args:
        before, after: how many keys before and after its aligned key a row sees; -1 for all.
    """

    before: int
    after: int


EVERY_KEY, CAUSAL = Sight(-1, -1), Sight(-1, 0)


class Segments(NamedTuple):
    """Segments of queries, packed one after the other, each with its own keys.  No segment is empty.

    Args:
        q_ends, k_ends: int32 [segments + 1], cumulative lengths of the segments, beginning with 0.
        most_queries, most_keys: length of the longest segment.
        sight: which of its keys each row of a segment sees.
    """

    q_ends: Tensor
    k_ends: Tensor
    most_queries: int
    most_keys: int
    sight: Sight


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Attend within segments that lie one after the other in memory.

    Args:
        q: [rows, heads, size], in 16 bits.
        k, v: [rows of keys, kv heads, size].
        segments: which rows form a segment, and which keys its queries see.

    Returns:
        out with the shape of q, and lse in fp32, [heads, rows of q].
    """
    if q.is_cuda:
        activate_newest_flash_attention(q.device)
    lengths, window = _given(segments)
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *lengths, False, **window)
    return out, lse


def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute these segments' contribution to the gradients of q, k and v.

    Args:
        grad, out, lse: for attention over all keys that the queries see.
        q, k, v, segments: as in `varlen_forward`.
    """
    lengths, window = _given(segments)
    random = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # not used
    dq, dk, dv = _aten._flash_attention_backward(grad, q, k, v, out, lse, *lengths, *random, **window)
    return dq, dk, dv


def _given(segments: Segments) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Build the arguments of flash attention's operators: lengths, dropout, is causal; and the window, if there is one."""
    *lengths, sight = segments
    window = {"window_size_left": sight.before, "window_size_right": sight.after}
    return (*lengths, 0.0, sight == CAUSAL), {} if sight in (EVERY_KEY, CAUSAL) else window


@lru_cache
def activate_newest_flash_attention(device: torch.device) -> None:
    """Let torch's operators run FlashAttention 3 on Hopper and 4 on Blackwell.  Warn if it cannot be loaded."""
    takes_windows = torch.__version__ >= "2.13"  # in torch's wrapper of FlashAttention 4
    name = {9: "FA3", 10: "FA4" if takes_windows else None}.get(torch.cuda.get_device_capability(device)[0])
    if name and current_flash_attention_impl() is None:
        try:
            activate_flash_attention_impl(name)
        except Exception as error:
            if dist.is_initialized() and dist.get_rank() > 0:
                return
            warn(
                f"short documents and windows run in FlashAttention 2: torch cannot load {name}: {error}", stacklevel=2
            )


def _kernel_of_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> SDPBackend:
    """Choose a kernel that returns the log-sum-exp and whose backward accepts a log-sum-exp over more keys."""
    if q.is_cpu:
        return SDPBackend.FLASH_ATTENTION
    if mask is not None or q.dtype == torch.float32:
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.CUDNN_ATTENTION if takes_cudnn(q, k, causal=causal) else SDPBackend.FLASH_ATTENTION


def takes_cudnn(q: Tensor, k: Tensor, *, causal: bool = True) -> bool:
    """Whether torch chooses cuDNN's kernel.

    For segments of equal length on an H100 it is nearly twice as fast as FlashAttention 2.
    """
    return q.is_cuda and torchs_choice(q, k, k, None, causal=causal) == SDPBackend.CUDNN_ATTENTION


def _laid_out(x: Tensor, q: Tensor) -> Tensor:
    """Copy x to the memory layout of q, which is also the layout of cuDNN's `out`, unless x has this layout already.

    Torch caches what cuDNN compiled under the strides of q, k and v alone, so every later backward reads `grad` and
    `out` with the strides of the first backward (MHA.cpp, MHACacheKeyWrapper).
    """
    strides = zip(x.shape, x.stride(), torch.empty_like(q, device="meta").stride(), strict=True)
    return x if all(size == 1 or its == wanted for size, its, wanted in strides) else torch.empty_like(q).copy_(x)


def _seen_in(tile: Tile, window: int | None, q: Tensor) -> tuple[Tensor | None, bool]:
    """Return the mask that is added to a tile's scores, and whether the tile is causal.

    (None, False) if every query sees every key.
    """
    if tile.offset is None or tile.is_causal(window):
        return None, tile.offset is not None
    queries, keys = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
    row, key = torch.arange(queries, device=q.device)[:, None], torch.arange(keys, device=q.device)
    distance = tile.offset + row - key
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros_like(unseen, dtype=q.dtype).masked_fill_(unseen, -torch.inf), False


# Call the operators as torch's attention.cpp and derivatives.yaml do.  Nothing is dropped out, so the random-number
# state is unused.  All samples have one length, so no cumulative lengths are given.
_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def _forward(
    kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, ...]:
    """Return out, lse, and on CUDA the random-number state."""
    if kernel == SDPBackend.CUDNN_ATTENTION:
        out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, causal)
        return out, lse, seed, offset
    if q.is_cpu:
        return tuple(_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask))
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        mask = _of_each_head(mask, q)
        return tuple(_aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal))
    out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse, seed, offset


def _backward(
    kernel: SDPBackend,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    *outputs: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    tensors, out_lse, random = (grad, q, k, v), outputs[:2], outputs[2:]
    lengths = None, None, q.shape[2], k.shape[2], 0.0, causal
    if kernel == SDPBackend.CUDNN_ATTENTION:
        backward, (out, lse) = _aten._scaled_dot_product_cudnn_attention_backward, out_lse
        given = grad, q, k, v, _laid_out(out, q), lse.reshape(*q.shape[:3], 1)
        return tuple(backward(*given, *random, mask, *lengths))
    if q.is_cpu:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(*tensors, *out_lse, 0.0, causal, attn_mask=mask))
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        backward, wanted = _aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
        return tuple(backward(*tensors, _of_each_head(mask, q), *out_lse, *random, 0.0, wanted, causal))[:3]
    return tuple(_aten._scaled_dot_product_flash_attention_backward(*tensors, *out_lse, *lengths, *random))


def _of_each_head(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand a mask: [seq, seq of k] -> [batch, heads, seq, seq of k].

    The result is a view whose rows begin at multiples of 16 elements.
    """
    size = 0 if mask is None else mask.shape[-1]
    return None if mask is None else F.pad(mask, (0, -size % 16))[..., :size].expand(*q.shape[:3], size)
