r"""Attention within tiles on a CPU: causal tiles as triangles and squares, and large backwards in bf16.

Causal attention of many rows, without most of the work that a mask throws away:


    keys    0        n
    rows  [ \ .  .  . ]     The CPU's kernel takes keys in blocks of 512, so a causal call computes about 256 keys per row
          [ 1 \  .  . ]     that the mask then discards.  Here the rows are cut into triangles of 64 to 127 rows, and into
          [ 2  2 \  . ]     squares, in which every row sees every key.  All triangles are the batch of one call, and so
          [ 2  2 1  \ ]     are all squares of one size.

A forward and a backward of 512 rows take 0.65 of the time of one causal call, of 1,024 rows 0.8, of 4,096 rows 0.94 (8 heads
of 64, one core).

On a CPU that multiplies in bf16:


    keys   0   n/2   n
    rows [ \   |      ]    Causal tiles are halved until 512 to 1,023 rows are left.  These are computed in fp32, as
         [   \ |      ]    triangles and squares.  Every forward is computed in fp32 too.  The backward of full tiles
         [-----+------]    (1 in the picture) is computed in bf16.  Each call takes only some of the heads, so that its
         [  1  |\     ]    fp32 buffers stay small.
         [     |   \  ]

The bf16 kernel is faster than the fp32 kernel from 768 rows per head on, because it then takes 256 rows at a time instead of
64.  So query heads that read the same key head enter it as rows of one head.  Its forward is no faster.  Milliseconds of a
backward on one core, with 8 query heads and 2 key heads of size 64:

                            fp32   bf16   bf16 with query heads as rows
    512 rows x 1,024 keys   33.6   31.0   24.2
    256 x 256                4.0    4.7    3.3
    64 x 64, 8 of them       2.2    8.3    4.9
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megazero.layers.attention_kernels import TileKernel, merge, widened
from megazero.layers.token_layout import EVERY_HEAD, HeadGroup, Tile, head_groups

_LEAST_ROWS, _LEAST_SIDE = 256, 64  # with fewer rows or smaller triangles, more calls cost more than they save
_EVERY_KEY, _CAUSAL = (0.0, False), (0.0, True)  # dropout, is_causal

_RowBlocks: TypeAlias = list[Tensor]  # the result of one sample in blocks of rows, in order

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_LEAST_BF16_ROWS, _LEAST_BF16_KEYS = 768, 256  # per head, for a backward in bf16
_LEAST_HALF, _MOST_HEAD_GROUPS = 512, 4


class CpuTiles(TileKernel):
    """The kernel for attention tiles that this annex registers at the seam "kernel"."""

    def cut(self, tile: Tile, window: int | None, q: Tensor, k: Tensor) -> list[tuple[Tile, HeadGroup]]:
        in_bf16 = multiplies_bf16(q)
        return [*kernel_calls(tile, window, q.shape[1], k.shape[1])] if in_bf16 else super().cut(tile, window, q, k)

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
    """How the rows of a causal tile are cut into triangles.

    Args:
        side: number of rows of a triangle.
        triangles: number of triangles, a power of two.  Fewer than `triangles` rows remain at the end.
    """

    side: int
    triangles: int

    @property
    def covered(self) -> int:
        """The number of rows in triangles and squares."""
        return self.side * self.triangles

    def squares(self) -> Iterator[int]:
        """Yield the sides of the squares, in ascending order."""
        for level in range(self.triangles.bit_length() - 1):
            yield self.side << level


def cut_of(rows: int) -> Cut:
    """Return how to cut this many rows.  Up to 255 rows are a single triangle."""
    side, triangles = rows, 1
    while rows >= _LEAST_ROWS and side >= 2 * _LEAST_SIDE:
        side, triangles = side // 2, 2 * triangles
    return Cut(side, triangles)


def causal_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from each row to the keys up to its own.

    Args:
        q: [batch, heads, seq, size].
        k, v: [batch, kv heads, seq, size].

    Returns:
        out, with the shape and the memory order of q, and lse, [batch, heads, seq].
    """
    outs, lses = zip(*(_forward_of_sample(*sample) for sample in zip(q, k, v, strict=True)), strict=True)
    return _stack(outs, q), _stack(lses, lses[0][0].new_empty(q.shape[:3]))


def causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this tile's contribution to the gradients of q, k and v.

    Args:
        grad, q, k, v: as in `causal_forward`; `grad` has the shape of q.
        out, lse: results over all keys that the rows see, in this tile and in others.
    """
    samples = zip(grad, q, k, v, out, lse, strict=True)
    dq, dk, dv = zip(*(_backward_of_sample(*sample) for sample in samples), strict=True)
    return _stack(dq, q), _stack(dk, k), _stack(dv, v)


def _stack(samples: Sequence[_RowBlocks], like: Tensor) -> Tensor:
    """Stack the results of all samples into a tensor with the memory order of `like`.  A single block is not copied."""
    if len(samples) == len(samples[0]) == 1:
        return samples[0][0].unsqueeze(0)
    whole = torch.empty_like(like)
    for sample, blocks in zip(whole, samples, strict=True):
        sample.copy_(torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0])
    return whole


# One sample.  q, grad, out: [heads, seq, size]; k, v: [kv heads, seq, size]; lse: [heads, seq].


def _forward_of_sample(*given: Tensor) -> tuple[_RowBlocks, _RowBlocks]:
    """Compute out and lse from q, k and v."""
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
    out, lse = map(_join_rows, _forward(*(_cut_rows(x, cut.side) for x in (q, k, v)), *_CAUSAL))
    for side in cut.squares():
        square = _forward(_odd_blocks(q, side), _even_blocks(k, side), _even_blocks(v, side), *_EVERY_KEY)
        merge(_odd_blocks(out, side), _odd_blocks(lse, side), *square)
    return out, lse


def _backward_of_sample(*given: Tensor) -> tuple[_RowBlocks, _RowBlocks, _RowBlocks]:
    """Compute the gradients of q, k and v from grad, q, k, v, out and lse."""
    cut = cut_of(given[0].shape[1])
    before = [x[:, : cut.covered] for x in given]
    dq, dk, dv = _backward_in_squares(cut, *before)
    if cut.covered == given[0].shape[1]:
        return [dq], [dk], [dv]
    grad, q, k, v, out, lse = (x[None, :, cut.covered :] for x in given)
    last_dq, last_dk, last_dv = _backward(grad, q, k, v, out, lse, *_CAUSAL)
    more = _backward(grad, q, before[2][None], before[3][None], out, lse, *_EVERY_KEY)
    for total, grad_of_square in zip((last_dq[0], dk, dv), more, strict=True):
        total.add_(grad_of_square[0])
    return [dq, last_dq[0]], [dk, last_dk[0]], [dv, last_dv[0]]


def _backward_in_squares(
    cut: Cut, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = (_cut_rows(x, cut.side) for x in (grad, q, k, v, out, lse))
    dq, dk, dv = map(_join_rows, _backward(*rows, *_CAUSAL))
    for side in cut.squares():
        its_grad, its_q, its_out, its_lse = (_odd_blocks(x, side) for x in (grad, q, out, lse))
        grads = _backward(its_grad, its_q, _even_blocks(k, side), _even_blocks(v, side), its_out, its_lse, *_EVERY_KEY)
        totals = _odd_blocks(dq, side), _even_blocks(dk, side), _even_blocks(dv, side)
        for total, grad_of_square in zip(totals, grads, strict=True):
            total.add_(grad_of_square)
    return dq, dk, dv


def _cut_rows(x: Tensor, side: int) -> Tensor:
    """Return a view in blocks of `side` rows: [heads, seq, ...] -> [blocks, heads, side, ...]."""
    return x.unflatten(1, (-1, side)).transpose(0, 1)


def _join_rows(blocks: Tensor) -> Tensor:
    """Undo `_cut_rows`: [blocks, heads, side, ...] -> [heads, seq, ...].  Results of the kernel are not copied."""
    return blocks.transpose(0, 1).flatten(1, 2)


def _even_blocks(x: Tensor, side: int) -> Tensor:
    """Return blocks 0, 2, 4, ...: the keys of the squares."""
    return _cut_rows(x, 2 * side)[:, :, :side]


def _odd_blocks(x: Tensor, side: int) -> Tensor:
    """Return blocks 1, 3, 5, ...: the rows of the squares."""
    return _cut_rows(x, 2 * side)[:, :, side:]


# Backward in bf16.


def multiplies_bf16(q: Tensor) -> bool:
    """Whether the queries are in bf16, on a CPU that multiplies in bf16."""
    return q.is_cpu and q.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def kernel_calls(tile: Tile, window: int | None, heads: int, kv_heads: int) -> Iterator[tuple[Tile, HeadGroup]]:
    """Cut a causal tile into causal tiles of at most 1,023 rows and full tiles.  A large tile takes several calls, each for
    a group of heads.
    """
    causal = tile.is_causal(window)
    if not causal and tile.offset is not None:  # every call would make a mask of its own
        yield tile, EVERY_HEAD
        return
    # The kernel gives each thread some heads.
    most = max(1, min(_MOST_HEAD_GROUPS, kv_heads // torch.get_num_threads()))
    for sub_tile in _halved(tile) if causal else (tile,):
        is_large = (sub_tile.q_stop - sub_tile.q_start) * (sub_tile.k_stop - sub_tile.k_start) > _LEAST_HALF**2
        for group in head_groups(heads, kv_heads, most if is_large else 1, shares_keys=False):
            yield sub_tile, group


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
    """Whether `full_backward` takes less time than the backward in fp32."""
    return q.shape[2] * _sharing(q, k) >= _LEAST_BF16_ROWS and k.shape[2] >= _LEAST_BF16_KEYS


def full_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in bf16.  Every row sees every key.  Arguments as in `TileKernel.backward`."""
    each = _sharing(q, k)
    rows = [x.unflatten(1, (-1, each)).flatten(2, 3) for x in (grad, q, out, lse)]
    dq, dk, dv = _backward(*rows[:2], k, v, *rows[2:], 0.0, False)
    return dq.unflatten(2, (each, -1)).flatten(1, 2), dk, dv


def _sharing(q: Tensor, k: Tensor) -> int:
    """Return how many query heads become rows of one head: all that read the same key head, or 1 if threads would idle."""
    return q.shape[1] // k.shape[1] if len(k) * k.shape[1] >= torch.get_num_threads() else 1
