"""Collectives of ranks that share memory, as rounds in it; see `SharedMemory`.

Sums are taken in rank order, so that every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megazero.comm.shared_memory import HALF_BYTES, Rounds, SharedMemory

_ONE_ROUND_BYTES = 1 << 16  # up to here every rank adds everything up, and saves a round

Combine = Callable[..., Tensor]


def all_reduce(room: SharedMemory, flat: Tensor, combine: Combine) -> Rounds:
    """Replace a 1-D tensor by its combination over all ranks."""
    longest = HALF_BYTES // flat.element_size()
    for piece in flat.split(longest):
        mine = slice(0, piece.numel())
        areas = [area[mine] for area in room.areas(flat.dtype)]
        areas[room.place].copy_(piece)
        yield
        if room.size == 2 or piece.nbytes <= _ONE_ROUND_BYTES:
            fold(piece, areas, combine)
            room.turn()
            continue
        parts = piece.tensor_split(room.size)
        fold(parts[room.place], [area.tensor_split(room.size)[room.place] for area in areas], combine)
        room.turn()
        sums = [area[mine].tensor_split(room.size)[place] for place, area in enumerate(room.areas(flat.dtype))]
        sums[room.place].copy_(parts[room.place])
        yield
        for place, part in enumerate(parts):
            if place != room.place:
                part.copy_(sums[place])
        room.turn()


def reduce_scatter(room: SharedMemory, out: Tensor, parts: Sequence[Tensor]) -> Rounds:
    """out = the sum of every rank's part for this one.

    Args:
        room: where the ranks meet.
        out: 1-D; may be this rank's own part.
        parts: by rank, 1-D, of one length.
    """
    me, others = room.place, room.size - 1
    longest = HALF_BYTES // out.element_size() // others

    def slot(area: Tensor, source: int, target: int, length: int) -> Tensor:
        at = (target - (target > source)) * longest
        return area[at : at + length]

    for start in range(0, out.numel(), longest):
        piece = slice(start, min(start + longest, out.numel()))
        length = piece.stop - piece.start
        areas = room.areas(out.dtype)
        for place, part in enumerate(parts):
            if place != me:
                slot(areas[me], me, place, length).copy_(part[piece])
        yield
        arrived = [
            slot(area, place, me, length) if place != me else parts[me][piece] for place, area in enumerate(areas)
        ]
        if me > 1:  # `out` is written before this rank's own turn comes, and may be the same memory
            arrived[me] = arrived[me].clone()
        fold(out[piece], arrived, torch.add)
        room.turn()


def all_gather(room: SharedMemory, places: Sequence[Tensor]) -> Rounds:
    """Fill every rank's place, of which this rank's is there; 1-D, of one length."""
    mine = places[room.place]
    longest = HALF_BYTES // mine.element_size()
    for start in range(0, mine.numel(), longest):
        piece = slice(start, min(start + longest, mine.numel()))
        areas = room.areas(mine.dtype)
        areas[room.place][: piece.stop - piece.start].copy_(mine[piece])
        yield
        for place, area in enumerate(areas):
            if place != room.place:
                places[place][piece].copy_(area[: piece.stop - piece.start])
        room.turn()


def fold(out: Tensor, parts: Sequence[Tensor], combine: Combine) -> None:
    """out = all parts combined, pairwise in their order; `out` may be the first or the second of them."""
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
