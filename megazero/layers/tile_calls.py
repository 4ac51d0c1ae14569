"""The kernel calls of a ring step: one per tile, or one for many tiles.

    tiles               rows 0-3 see keys 0-3 | rows 4-9 see keys 6-7
    packed queries      [ 0 1 2 3 | 4 5 6 7 8 9 ]      ends 0 4 10
    packed keys         [ 0 1 2 3 | 6 7 ]              ends 0 4 6

Tiles are packed into one call if the kernel accepts segments of any length (`packs_tiles`).  Causal tiles, full tiles,
and tiles that a sliding window cuts at different distances go into separate calls.  No row occurs twice in a call, so
results and gradients can be added by index.

    a long document     rows 0 ... 3000 | the 71 rows behind them, whatever they are
    its own call        3072 rows, causal

cuDNN's kernel is faster than the packed kernel, but it accepts only segments of equal length and compiles once per
length. So a long document goes to cuDNN with some extra rows, up to one of a few lengths.  No row of the document sees
the extra rows, and their gradients are zero, so they add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.layers.attention_kernels import (
    CAUSAL,
    EVERY_KEY,
    Segments,
    Sight,
    TileKernel,
    packs_tiles,
    takes_cudnn,
    varlen_backward,
    varlen_forward,
)
from megazero.layers.sequence_shard import SequenceShard, copied_to
from megazero.layers.token_layout import EVERY_HEAD, HeadGroup, Ints, Tile, tiles_of

Rows: TypeAlias = tuple[slice | Tensor, ...]  # index into [batch, heads, seq, ...]
EVERYTHING: Rows = (slice(None), slice(None), slice(None))
_MOST_TILES = 65_535  # CUDA's limit of blocks along one grid dimension
_LEAST_ROWS = 3072  # shortest document with its own call: it keeps an H100 busy longer than the host needs to launch it


_TORCHS = TileKernel()


def calls(
    shard: SequenceShard, source: int, window: int | None, q: Tensor, k: Tensor, kernel: TileKernel = _TORCHS
) -> list[Call]:
    """Return the kernel calls for this rank's queries over the keys of ring rank `source`.

    The calls are made once and reused by all layers.

    Args:
        shard: the tokens of the samples that this rank holds.
        source: the ring rank that owns the keys.
        window: how many positions a query sees, including its own; None for no window.
        q, k: [batch, heads or kv heads, seq, size]; their shapes, type and device decide which kernel is used.
        kernel: for tiles that get a call each.

    Raises: ValueError: as `packs_tiles`.
    """
    where = (q.shape[0], q.shape[2], q.device) if packs_tiles(q) else None

    def make() -> list[Call]:
        tables = shard.plan.tables(source, window, masked=where is None)
        if where is not None:
            return _few_calls(tables, window, *where, separates_long=takes_cudnn(q, k))
        return [call for tile in _single_tiles(tables, window) for call in tile.calls_of(kernel, q, k)]

    shape = where or (q.shape[1], k.shape[1], q.dtype)
    return shard.derived((calls, source, window, type(kernel), shape), make)


@dataclass(frozen=True, eq=False)
class OneTile:
    """One tile of some samples and heads, for a kernel that takes segments of one length."""

    samples: slice
    tile: Tile
    window: int | None
    kernel: TileKernel = _TORCHS
    heads: HeadGroup = EVERY_HEAD

    @property
    def queries(self) -> Rows:
        return self.samples, self.heads.queries, slice(self.tile.q_start, self.tile.q_stop)

    @property
    def keys(self) -> Rows:
        return self.samples, self.heads.keys, slice(self.tile.k_start, self.tile.k_stop)

    def calls_of(self, kernel: TileKernel, q: Tensor, k: Tensor) -> list[OneTile]:
        """Split this tile into the calls that a kernel needs for it."""
        cuts = kernel.cut(self.tile, self.window, q, k)
        return [replace(self, tile=tile, kernel=kernel, heads=heads) for tile, heads in cuts]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        given = q[self.queries], k[self.keys], v[self.keys]
        return self.kernel.forward(*given, self.tile, self.window)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, seen = self.queries, self.keys
        given = grad[rows], q[rows], k[seen], v[seen], out[rows], lse[rows]
        return self.kernel.backward(*given, self.tile, self.window)


@dataclass(frozen=True, eq=False)
class PackedTiles:
    """Tiles of any samples in one call of a kernel that takes segments of any length.

    Args:
        queries, keys: the rows of all tiles, one tile after the other; `EVERYTHING` if these are all rows in order.
        segments: where each tile begins and ends among these rows.
    """

    queries: Rows
    keys: Rows
    segments: Segments

    @staticmethod
    def of(sample: Ints, table: Ints, shape: tuple[int, int], sight: Sight, device: torch.device) -> PackedTiles:
        """Pack the rows of a `tile_table`.

        Args:
            sample: the sample of each tile.
            table: the tiles.
            shape: number of samples, and of rows in each.
            sight: which keys the rows of these tiles see.
            device: of the indices.
        """
        q_start, q_stop, k_start, k_stop, _ = table.T
        q_size, k_size = q_stop - q_start, k_stop - k_start
        q_ends, k_ends = (copied_to(device, np.append(0, size.cumsum()).astype(np.int32)) for size in (q_size, k_size))
        return PackedTiles(
            _rows(sample, q_start, q_size, shape, device),
            _rows(sample, k_start, k_size, shape, device),
            Segments(q_ends, k_ends, int(q_size.max()), int(k_size.max()), sight),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = varlen_forward(_packed(q, self.queries), _packed(k, self.keys), _packed(v, self.keys), self.segments)
        return _unpacked(out, self.queries, q), _unpacked(lse.t(), self.queries, q)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, packed_q, out, lse = (_packed(x, self.queries) for x in (grad, q, out, lse))
        packed_k, packed_v = (_packed(x, self.keys) for x in (k, v))
        dq, dk, dv = varlen_backward(grad, packed_q, packed_k, packed_v, out, lse.t().contiguous(), self.segments)
        return _unpacked(dq, self.queries, q), _unpacked(dk, self.keys, k), _unpacked(dv, self.keys, k)


@dataclass(frozen=True, eq=False)
class Documents:
    """All documents of some samples.  Each long document has its own causal call; the others are packed.

    Args:
        long: (sample, first row, rows, tile of the call) of each long document.
        others: the calls of all other documents.
    """

    long: Sequence[tuple[int, int, int, Tile]]
    others: Sequence[PackedTiles]
    queries: Rows = EVERYTHING
    keys: Rows = EVERYTHING

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), torch.empty_like(q[..., 0], dtype=torch.promote_types(q.dtype, torch.float32))
        for sample, start, rows, tile in self.long:
            its_q, its_k, its_v = (_cut(x, sample, start, tile) for x in (q, k, v))
            _fill((out, lse), _TORCHS.forward(its_q, its_k, its_v, tile, None), sample, start, rows)
        for call in self.others:
            out[call.queries], lse[call.queries] = call.forward(q, k, v)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        for sample, start, rows, tile in self.long:
            its_q, its_k, its_v, its_out = (_cut(x, sample, start, tile) for x in (q, k, v, out))
            its_grad, its_lse = torch.zeros_like(its_q), lse.new_full(its_q.shape[:3], 1e30)  # so exp(score - lse) = 0
            for padded, whole in ((its_grad, grad), (its_lse, lse)):
                padded[0, :, :rows] = whole[sample, :, start : start + rows]
            given = its_grad, its_q, its_k, its_v, its_out, its_lse
            _fill((dq, dk, dv), _TORCHS.backward(*given, tile, None), sample, start, rows)
        for call in self.others:
            dq[call.queries], dk[call.keys], dv[call.keys] = call.backward(grad, q, k, v, out, lse)
        return dq, dk, dv


#: A kernel call: `queries` and `keys` say which rows it reads of this rank's queries, and of the keys of a ring step.
#:
#: `forward` gives out and lse of its queries; `backward` the gradients of its queries, keys and values from this tile, with
#: `out` and `lse` over all keys.
Call: TypeAlias = OneTile | PackedTiles | Documents


def _tile_of(rows: int) -> Tile:
    """Return the tile of a long document, with its length rounded up.

    Lengths are rounded to blocks of at least 128 rows, at most 16 lengths between two powers of two, so that few shapes
    are compiled.
    """
    step = max(128, 1 << (rows - 1).bit_length() >> 5)
    room = -(-rows // step) * step
    return Tile(0, room, 0, room, 0)


def _cut(x: Tensor, sample: int, start: int, tile: Tile) -> Tensor:
    """Return the rows of a tile from `start` on, [1, heads, rows, size], padded with zeros if the sample ends earlier."""
    rows = x[sample : sample + 1, :, start : start + tile.q_stop]
    missing = tile.q_stop - rows.shape[2]
    return F.pad(rows.transpose(1, 2), (0, 0, 0, 0, 0, missing)).transpose(1, 2) if missing else rows


def _fill(whole: tuple[Tensor, ...], results: tuple[Tensor, ...], sample: int, start: int, rows: int) -> None:
    for tensor, result in zip(whole, results, strict=True):
        tensor[sample, :, start : start + rows] = result[0, :, :rows]


def _packed(x: Tensor, rows: Rows) -> Tensor:
    """Return [batch, heads, seq, ...] as [rows, heads, ...].  All rows of a single sample are returned without a copy."""
    return x.transpose(1, 2).flatten(0, 1) if rows is EVERYTHING else x[rows]


def _unpacked(x: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Return [rows, heads, ...] in the shape of `like[rows]`."""
    return x.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2) if rows is EVERYTHING else x


def _rows(sample: Ints, start: Ints, size: Ints, shape: tuple[int, int], device: torch.device) -> Rows:
    """Return the index of `size` rows from `start` on in each sample, one sample after the other."""
    rows = np.arange(size.sum()) + np.repeat(start - (size.cumsum() - size), size)
    samples = np.repeat(sample, size)
    if len(rows) == shape[0] * shape[1] and (samples * shape[1] + rows == np.arange(len(rows))).all():
        return EVERYTHING
    return copied_to(device, samples), slice(None), copied_to(device, rows)


def _single_tiles(tables: Sequence[Ints], window: int | None) -> list[OneTile]:
    own = [slice(None)] if len(tables) == 1 else [slice(row, row + 1) for row in range(len(tables))]
    found = zip(own, map(tiles_of, tables), strict=True)
    return [OneTile(samples, tile, window) for samples, tiles in found for tile in tiles]


def _few_calls(
    tables: Sequence[Ints], window: int | None, batch: int, seq: int, device: torch.device, *, separates_long: bool
) -> list[Call]:
    """Make one call for all tiles with the same `Sight`.  A single table applies to all samples.

    separates_long: give long documents their own calls.
    """
    found: list[Call] = []
    tables = [_split_first_rows(table, window) for table in tables]
    sights = [_sights(table, window) for table in tables]
    for sight in sorted({Sight(*sight_of_tile) for its in sights for sight_of_tile in its.tolist()}):
        chosen = [table[(its == sight).all(1)] for table, its in zip(tables, sights, strict=True)]
        if (
            sight in (CAUSAL, EVERY_KEY)
            and sum(map(len, chosen)) == 1
            and _is_whole_chunks(np.concatenate(chosen), seq)
        ):
            found += _single_tiles(chosen, window)
            continue
        chosen = chosen * batch if len(chosen) == 1 else chosen
        sample, table = np.repeat(np.arange(batch), [len(tiles) for tiles in chosen]), np.concatenate(chosen)
        rows = table[:, 1] - table[:, 0]
        long = (rows >= _LEAST_ROWS) & (separates_long and sight == CAUSAL and rows.sum() == batch * seq)
        others = np.flatnonzero(~long)
        packed = [
            PackedTiles.of(sample[tiles], table[tiles], (batch, seq), sight, device)
            for tiles in (others[chosen] for chosen in _without_repeats((sample * seq)[others], table[others]))
        ]
        documents = np.column_stack([sample, table[:, 0], rows])[long].tolist()
        found += [Documents([(*rows, _tile_of(rows[2])) for rows in documents], packed)] if documents else packed
    return found


def _is_whole_chunks(table: Ints, seq: int) -> bool:
    """Whether a tile consists of whole chunks of a sample.

    cuDNN compiles for each shape, and tiles of documents would have many shapes.
    """
    sizes = table[:, (1, 3)] - table[:, (0, 2)]
    return bool(np.isin(sizes, (seq, seq // 2, seq - seq // 2)).all())


def _split_first_rows(table: Ints, window: int | None) -> Ints:
    """Split off the rows that see every key of a tile, if the kernel would hide keys from them.

    The kernel is given how many keys before a row are seen, and "all" for the keys after it.  It replaces "all" by the
    length of its longest segment of keys (set_params_fprop), which is too few for the first rows of a segment with more
    queries than keys.
    """
    if window is None:
        return table
    queries, keys, offset = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2], table[:, 4]
    losing = (offset >= keys - 1) & (offset + queries > window) & (queries > keys + 1)
    if not losing.any():
        return table
    first, rest = table[losing], table[losing]
    rows = np.maximum(window - first[:, 4], 0)
    first[:, 1] = rest[:, 0] = first[:, 0] + rows
    first[:, 4], rest[:, 4] = -1, rest[:, 4] + rows
    found = np.concatenate([table[~losing], first[rows > 0], rest])
    return found[np.lexsort(found.T[::-1])]


def _sights(table: Ints, window: int | None) -> Ints:
    """Return the `Sight` of each tile, [tiles, 2].

    The queries and keys of a tile are of the same range of tokens, or of two ranges that share no position (see
    `ring_ranges`). So either the last query is at the position of the last key, or every query sees the last key.  Tiles of
    the first kind share one call: a tile that the window does not cut, and a tile of one query and one key, get the
    numbers of the others.
    """
    queries, keys, offset = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2], table[:, 4]
    behind = offset + queries - keys  # distance from the last key to the last query
    sees_first = (offset < 0) | (offset + queries <= (window or offset + queries))
    sees_last = (offset < 0) | (offset >= keys - 1)
    before = np.where(sees_first, EVERY_KEY.before, (window or 0) - 1 - behind)
    after = np.where(sees_last, EVERY_KEY.after, behind)
    if (at_last := after == 0).any():
        before[at_last | ((queries == 1) & (keys == 1))] = before[at_last].max()
        after[(queries == 1) & (keys == 1)] = 0
    return np.stack([before, after], 1)


def _without_repeats(first_row: Ints, table: Ints) -> list[Ints]:
    """Group tiles such that no row of queries or keys occurs twice in a group.  Return the indices of each group.

    first_row: first row of each tile's sample, among the rows of all samples.
    """
    starts, stops = table[:, (0, 2)] + first_row[:, None], table[:, (1, 3)] + first_row[:, None]
    groups, left = [], np.arange(len(table))
    while len(left):
        if (starts[left][1:] >= stops[left][:-1]).all():
            taken = np.full(len(left), True)
        else:
            taken, last = np.full(len(left), False), np.zeros(2, np.int64)
            for number, (start, stop) in enumerate(zip(starts[left], stops[left], strict=True)):
                if (start >= last).all():
                    taken[number], last = True, stop
        groups += np.split(left[taken], range(_MOST_TILES, int(taken.sum()), _MOST_TILES))
        left = left[~taken]
    return groups
