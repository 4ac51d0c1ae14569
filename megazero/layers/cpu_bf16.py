r"""Attention in bf16 on a CPU that multiplies in bf16: how tiles are cut, and the backward of full ones.

    keys   0   n/2   n
    rows [ \   |      ]    Causal tiles are halved until 512 to 1,023 rows are left, which causal_squares.py computes in
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

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megazero.layers.token_layout import EVERY_HEAD, HeadPiece, Tile, head_pieces

_LEAST_ROWS, _LEAST_KEYS = 768, 256  # of a head in a backward
_LEAST_HALF, _MOST_PIECES = 512, 4

_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def multiplies_bf16(q: Tensor) -> bool:
    """Whether these are in bf16, on a CPU that multiplies in it."""
    return q.is_cpu and q.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def cut(tile: Tile, window: int | None, heads: int, kv_heads: int) -> Iterator[tuple[Tile, HeadPiece]]:
    """A tile as causal ones of at most 1,023 rows and full ones, each with a part of the heads where it is large."""
    causal = tile.is_causal(window)
    if not causal and tile.offset is not None:  # a mask would be made for each part
        yield tile, EVERY_HEAD
        return
    pieces = max(1, min(_MOST_PIECES, kv_heads // torch.get_num_threads()))  # the kernel gives each thread some heads
    for part in _halved(tile) if causal else (tile,):
        is_large = (part.q_stop - part.q_start) * (part.k_stop - part.k_start) > _LEAST_HALF**2
        for heads_of_part in head_pieces(heads, kv_heads, pieces if is_large else 1, shares_keys=False):
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
    return q.shape[2] * _sharing(q, k) >= _LEAST_ROWS and k.shape[2] >= _LEAST_KEYS


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
