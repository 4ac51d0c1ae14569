r"""Attention to tiles on a CPU: causal tiles in triangles and squares, and large backwards in bf16.

Causal attention of many rows, without most of the work that a mask throws away:


    keys    0        n
    rows  [ \ .  .  . ]     The CPU's kernel takes keys in blocks of 512, so a causal call computes about 256 keys a row that
          [ 1 \  .  . ]     the mask then discards.  Here rows are cut into triangles of 64 to 127, and squares, whose rows
          [ 2  2 \  . ]     see every key.  All triangles are the batch of one call, and so are all squares of a size.
          [ 2  2 1  \ ]

A forward and a backward of 512 rows take 0.65 of the time of one causal call, of 1,024 rows 0.8, of 4,096 rows 0.94 (8 heads
of 64, one core).

On a CPU that multiplies in bf16:


    keys   0   n/2   n
    rows [ \   |      ]    Causal tiles are halved until 512 to 1,023 rows are left, which triangles and squares compute in
         [   \ |      ]    fp32, as all forwards.  The backward of full tiles, 1 here, is computed in bf16.  A call has some
         [-----+------]    of the heads: what it holds in fp32 is small.
         [  1  |\     ]
         [     |   \  ]

The bf16 kernel is faster than fp32's from 768 rows of a head on: it then takes 256 of them at a time, and not 64.  So the
queries that share a head of keys go into it as rows of one head.  Its forward is no faster.  8 heads of queries and 2 of
keys, of 64, one core, milliseconds of a backward in fp32 | in bf16 | in bf16 with shared heads as rows:

    512 rows x 1,024 keys   33.6 | 31.0 | 24.2
    256 x 256                4.0 |  4.7 |  3.3
    64 x 64, 8 of them       2.2 |  8.3 |  4.9
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megazero.layers.attention_kernels import TileKernel, merge, widened
from megazero.layers.token_layout import EVERY_HEAD, HeadGroup, Tile, head_groups

_LEAST_ROWS, _LEAST_SIDE = 256, 64  # below, more calls cost more than they save; a triangle has this to twice this
_EVERY_KEY, _CAUSAL = (0.0, False), (0.0, True)  # nothing is dropped out

_Parts: TypeAlias = list[Tensor]  # of a sample's result, in the order of rows

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_LEAST_BF16_ROWS, _LEAST_KEYS = 768, 256  # of a head in a backward
_LEAST_HALF, _MOST_PIECES = 512, 4


class CpuTiles(TileKernel):
    """What the seam "kernel" adds for tiles."""

    def cut(self, tile: Tile, window: int | None, q: Tensor, k: Tensor) -> list[tuple[Tile, HeadGroup]]:
        in_bf16 = multiplies_bf16(q)
        return [*parts_of(tile, window, q.shape[1], k.shape[1])] if in_bf16 else super().cut(tile, window, q, k)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, window: int | None) -> tuple[Tensor, Tensor]:
        if q.is_cpu and tile.is_causal(window):
            return causal_forward(*widened(q, k, v))
        return super().forward(q, k, v, tile, window)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if tile.offset is None and multiplies_bf16(q) and is_faster(q, k):
            return full_backward(grad, q, k, v, out, lse)
        if q.is_cpu and tile.is_causal(window):
            grad, q, k, v, out = widened(grad, q, k, v, out)
            return causal_backward(grad, q, k, v, out, lse)
        return super().backward(grad, q, k, v, out, lse, tile, window)


class Cut(NamedTuple):
    """How rows are cut.

    Args:
        side: rows of a triangle.
        triangles: a power of two.  The rows that are in no triangle, at the end, are fewer than there are triangles.
    """

    side: int
    triangles: int

    @property
    def covered(self) -> int:
        """Rows in triangles and squares."""
        return self.side * self.triangles

    def squares(self) -> Iterator[int]:
        """The sides of squares, ascending."""
        for level in range(self.triangles.bit_length() - 1):
            yield self.side << level


def cut_of(rows: int) -> Cut:
    """The cut of so many rows; up to 255 are a single triangle."""
    side, triangles = rows, 1
    while rows >= _LEAST_ROWS and side >= 2 * _LEAST_SIDE:
        side, triangles = side // 2, 2 * triangles
    return Cut(side, triangles)


def causal_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out, with q's order in memory, and lse [batch, heads, seq] of rows that each see the keys up to their own.

    Args:
        q: [batch, heads, seq, size].
        k, v: [batch, kv heads, seq, size].
    """
    outs, lses = zip(*(_forward_of_sample(*sample) for sample in zip(q, k, v, strict=True)), strict=True)
    return _together(outs, q), _together(lses, lses[0][0].new_empty(q.shape[:3]))


def causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """This part of the gradients of q, k and v.

    Args:
        grad, q, k, v: as in `causal_forward`, `grad` as q.
        out, lse: of all keys that the rows see, here and elsewhere.
    """
    samples = zip(grad, q, k, v, out, lse, strict=True)
    dq, dk, dv = zip(*(_backward_of_sample(*sample) for sample in samples), strict=True)
    return _together(dq, q), _together(dk, k), _together(dv, v)


def _together(samples: Sequence[_Parts], like: Tensor) -> Tensor:
    """The parts of all samples, with the order in memory of a tensor of their shape; a single part is not copied."""
    if len(samples) == len(samples[0]) == 1:
        return samples[0][0].unsqueeze(0)
    whole = torch.empty_like(like)
    for sample, parts in zip(whole, samples, strict=True):
        sample.copy_(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
    return whole


# Of one sample.  q, grad, out: [heads, seq, size], k and v: [kv heads, seq, size], lse: [heads, seq].


def _forward_of_sample(*given: Tensor) -> tuple[_Parts, _Parts]:
    """out and lse; given: q, k, v."""
    cut = cut_of(given[0].shape[1])
    before = [x[:, : cut.covered] for x in given]
    out, lse = _forward_in_squares(cut, *before)
    if cut.covered == given[0].shape[1]:
        return [out], [lse]
    last = [x[None, :, cut.covered :] for x in given]
    last_out, last_lse = _forward(*last, *_CAUSAL)
    merge(last_out, last_lse, *_forward(last[0], before[1][None], before[2][None], *_EVERY_KEY))
    return [out, last_out[0]], [lse, last_lse[0]]


def _forward_in_squares(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = map(_in_order, _forward(*(_pieces(x, cut.side) for x in (q, k, v)), *_CAUSAL))
    for side in cut.squares():
        found = _forward(_second(q, side), _first(k, side), _first(v, side), *_EVERY_KEY)
        merge(_second(out, side), _second(lse, side), *found)
    return out, lse


def _backward_of_sample(*given: Tensor) -> tuple[_Parts, _Parts, _Parts]:
    """Gradients of q, k and v; given: grad, q, k, v, out, lse."""
    cut = cut_of(given[0].shape[1])
    before = [x[:, : cut.covered] for x in given]
    dq, dk, dv = _backward_in_squares(cut, *before)
    if cut.covered == given[0].shape[1]:
        return [dq], [dk], [dv]
    grad, q, k, v, out, lse = (x[None, :, cut.covered :] for x in given)
    last_dq, last_dk, last_dv = _backward(grad, q, k, v, out, lse, *_CAUSAL)
    more = _backward(grad, q, before[2][None], before[3][None], out, lse, *_EVERY_KEY)
    for sums, part in zip((last_dq[0], dk, dv), more, strict=True):
        sums.add_(part[0])
    return [dq, last_dq[0]], [dk, last_dk[0]], [dv, last_dv[0]]


def _backward_in_squares(
    cut: Cut, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    triangles = _backward(*(_pieces(x, cut.side) for x in (grad, q, k, v, out, lse)), *_CAUSAL)
    dq, dk, dv = map(_in_order, triangles)
    for side in cut.squares():
        its_grad, its_q, its_out, its_lse = (_second(x, side) for x in (grad, q, out, lse))
        found = _backward(its_grad, its_q, _first(k, side), _first(v, side), its_out, its_lse, *_EVERY_KEY)
        for sums, part in zip((_second(dq, side), _first(dk, side), _first(dv, side)), found, strict=True):
            sums.add_(part)
    return dq, dk, dv


def _pieces(x: Tensor, side: int) -> Tensor:
    """[heads, seq, ...] -> [pieces, heads, side, ...], a view."""
    return x.unflatten(1, (-1, side)).transpose(0, 1)


def _in_order(pieces: Tensor) -> Tensor:
    """[pieces, heads, side, ...] -> [heads, seq, ...], without a copy where x is a result of the kernel."""
    return pieces.transpose(0, 1).flatten(1, 2)


def _first(x: Tensor, side: int) -> Tensor:
    """The pieces 0, 2, 4, ...: the keys of squares."""
    return _pieces(x, 2 * side)[:, :, :side]


def _second(x: Tensor, side: int) -> Tensor:
    """The pieces 1, 3, 5, ...: the rows of squares."""
    return _pieces(x, 2 * side)[:, :, side:]


# In bf16.


def multiplies_bf16(q: Tensor) -> bool:
    """Whether these are in bf16, on a CPU that multiplies in it."""
    return q.is_cpu and q.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def parts_of(tile: Tile, window: int | None, heads: int, kv_heads: int) -> Iterator[tuple[Tile, HeadGroup]]:
    """A tile as causal ones of at most 1,023 rows and full ones, each with a part of the heads where it is large."""
    causal = tile.is_causal(window)
    if not causal and tile.offset is not None:  # a mask would be made for each part
        yield tile, EVERY_HEAD
        return
    pieces = max(1, min(_MOST_PIECES, kv_heads // torch.get_num_threads()))  # the kernel gives each thread some heads
    for part in _halved(tile) if causal else (tile,):
        is_large = (part.q_stop - part.q_start) * (part.k_stop - part.k_start) > _LEAST_HALF**2
        for heads_of_part in head_groups(heads, kv_heads, pieces if is_large else 1, shares_keys=False):
            yield part, heads_of_part


def _halved(tile: Tile) -> Iterator[Tile]:
    half = (tile.q_stop - tile.q_start) // 2
    if half < _LEAST_HALF:
        yield tile
        return
    row, key = tile.q_start + half, tile.k_start + half
    yield from _halved(Tile(tile.q_start, row, tile.k_start, key, 0))
    yield Tile(row, tile.q_stop, tile.k_start, key)
    yield from _halved(Tile(row, tile.q_stop, key, tile.k_stop, 0))


def is_faster(q: Tensor, k: Tensor) -> bool:
    """Whether `full_backward` of these takes less time than in fp32."""
    return q.shape[2] * _sharing(q, k) >= _LEAST_BF16_ROWS and k.shape[2] >= _LEAST_KEYS


def full_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in bf16, where every row sees every key; arguments as in `tile_backward`."""
    each = _sharing(q, k)
    rows = [x.unflatten(1, (-1, each)).flatten(2, 3) for x in (grad, q, out, lse)]
    dq, dk, dv = _backward(*rows[:2], k, v, *rows[2:], 0.0, False)
    return dq.unflatten(2, (each, -1)).flatten(1, 2), dk, dv


def _sharing(q: Tensor, k: Tensor) -> int:
    """How many heads of queries become rows of one: those that share keys, where heads are left for all threads."""
    return q.shape[1] // k.shape[1] if len(k) * k.shape[1] >= torch.get_num_threads() else 1
