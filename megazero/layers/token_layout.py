"""Which tokens of a sample of documents each ring rank holds, which tokens attend to which, and how heads are grouped.

    document of 16 tokens, 2 ranks     tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
                                       chunk      0         1          2            3
                                       rank       0         1          1            0

Every document is cut into 2 * ranks chunks with lengths that differ by at most one token.  Rank i holds chunks i and 2
* ranks - 1 - i of each document (zigzag).  A later token sees more keys, but every such pair of an early and a late
chunk sees the same number, so ranks have equal work whatever the lengths of the documents.

In a document of 2 * ranks * n + m tokens, m chunks have one token more than the others; if n is 0, the others are
empty. Which chunks are longer varies from document to document (`RingRanges`), so that all ranks hold equally many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Tile(NamedTuple):
    """Queries of rows [q_start, q_stop), and the keys of rows [k_start, k_stop) that they see.

    If `offset` is None, every query sees every key.  Otherwise query row i and key row j, both counted from the tile's
    start, see each other if 0 <= offset + i - j (and offset + i - j < window, if there is a window).
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    offset: int | None = None

    def is_causal(self, window: int | None) -> bool:
        """Whether row i sees exactly keys 0 to i: the mask is causal and the window hides none of them."""
        rows = self.q_stop - self.q_start
        return self.offset == 0 and rows == self.k_stop - self.k_start and (window is None or rows <= window)


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """Ranges of consecutive tokens of one document on one ring rank, in the order of its rows.  No range is empty.

    Stored as columns, because a sample may have ten thousand documents.

    Args:
        document: index of the document in its sample.
        first: position of the first token within the document.
        start: row of the first token among the rank's tokens.
        length: number of tokens.
    """

    document: Ints
    first: Ints
    start: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.document)

    @property
    def documents(self) -> Ints:
        """The document of each row."""
        return np.repeat(self.document, self.length)

    @property
    def positions(self) -> Ints:
        """The position of each row within its document."""
        rows = np.arange(int(self.length.sum()), dtype=np.int64)
        return rows + np.repeat(self.first - self.start, self.length)


@dataclass(frozen=True, eq=False)
class RingRanges:
    """The token ranges of every ring rank for a sample of documents.  The ranges of a rank are computed on request.

    Each document leaves m < 2 * ranks remaining tokens, which go to m chunks, one token each.  The chunks receive them
    in one fixed cyclic order (`_order`).  Each document continues in this order where the previous one stopped, from
    the longest document to the shortest, so that the imbalances of documents of similar length cancel.

    Args:
        ranks: number of ring ranks.
        length: of each document.
        first: the index, in the cyclic order, of the chunk that receives the document's first remaining token.
    """

    ranks: int
    length: Ints
    first: Ints

    def __iter__(self) -> Iterator[TokenRanges]:
        return map(self.__getitem__, range(self.ranks))

    def __getitem__(self, rank: int) -> TokenRanges:
        borders = [self._borders(chunk) for chunk in (rank, 2 * self.ranks - 1 - rank)]
        firsts = np.stack([first for first, _ in borders], 1)
        return _ranges_of(firsts, np.stack([stop for _, stop in borders], 1) - firsts)

    def _borders(self, chunk: int) -> tuple[Ints, Ints]:
        """Return the positions at which a chunk begins and ends in each document."""
        order = np.tile(_order(self.ranks), 2)
        size, left = self.length // (2 * self.ranks), self.length % (2 * self.ranks)

        def border(chunk: int) -> Ints:
            earlier = np.append(0, (order < chunk).cumsum())  # how many of the order's first entries are earlier chunks
            return size * chunk + earlier[self.first + left] - earlier[self.first]

        return border(chunk), border(chunk + 1)


def ring_ranges(lengths: Sequence[int], ranks: int) -> RingRanges:
    """Compute the token ranges of each ring rank for a sample of documents of these lengths.

    Raises: ValueError: the number of tokens is not divisible by `ranks`, or a document is empty.
    """
    length = np.asarray(lengths, np.int64)
    if length.sum() % ranks or (length < 1).any():
        raise ValueError(
            f"{ranks} ring ranks need documents of 1 token or more, of a total that {ranks} divides: "
            f"got {len(length)} documents of {length.sum()} tokens, the shortest of {length.min(initial=0)}"
        )
    left = length % (2 * ranks)
    longest = np.argsort(-length, kind="stable")
    first = np.empty_like(length)
    first[longest] = (left[longest].cumsum() - left[longest]) % (2 * ranks)
    return RingRanges(ranks, length, first)


@lru_cache
def _order(ranks: int) -> Ints:
    """Return the order in which chunks receive remaining tokens.  Each half of the order has every rank once.

    Chunks that are neighbours in the order belong to distant ranks (the ranks are sorted by multiples of the golden
    ratio) and are alternately early and late.  So wherever a document starts in the order, its longer chunks are spread
    over the whole document.  The second half is the first one reversed, with early and late chunks exchanged, so that
    no document length favours the same rank every time.
    """
    number = np.arange(ranks)
    rank = np.argsort(np.argsort(number * ((5**0.5 - 1) / 2) % 1))
    half = np.where(number % 2, 2 * ranks - 1 - rank, rank)
    return np.concatenate([half, 2 * ranks - 1 - half[::-1]])


def _ranges_of(firsts: Ints, sizes: Ints) -> TokenRanges:
    """Build the ranges of a rank from its two chunks of each document, [documents, 2].  Adjacent chunks become one
    range.
    """
    adjacent = firsts[:, 0] + sizes[:, 0] == firsts[:, 1]
    first, size = firsts.copy(), sizes.copy()
    size[adjacent, 0] += size[adjacent, 1]
    size[adjacent, 1] = 0
    filled = size.ravel() > 0
    length = size.ravel()[filled]
    document = np.repeat(np.arange(len(sizes), dtype=np.int64), 2)[filled]
    return TokenRanges(document, first.ravel()[filled], length.cumsum() - length, length)


def tiles_of(table: Ints) -> tuple[Tile, ...]:
    """Convert a `tile_table` to tiles."""
    return tuple(Tile(a, b, c, d, None if offset < 0 else offset) for a, b, c, d, offset in table.tolist())


def tile_table(q: TokenRanges, k: TokenRanges, window: int | None = None, *, masked: bool = True) -> Ints:
    """Cover all pairs of a query and a key that see each other, each pair by one tile.

    A query at position p sees the keys of its document at positions up to p; with a window, the last `window` of these.
    A table is faster to compute than `Tile`s for ten thousand documents.

    Args:
        q, k: the token ranges of queries and of keys.
        window: how many positions a query sees, including its own.
        masked: the kernel applies a window as a mask, so a partly masked tile is limited to `window` rows of queries
            and twice as many of keys.  Otherwise tiles are as large as possible.

    Returns:
        int64 [tiles, 5], the fields of `Tile`, with offset -1 for None.
    """
    whole, found = _own_tiles(q, k, window)
    boxes = _Boxes.of(q, k, ~whole)
    table = np.concatenate([found, (boxes.in_blocks(window) if masked else boxes.trimmed(window)).tiles(window)])
    return table[np.lexsort(table.T[::-1])]


def _own_tiles(q: TokenRanges, k: TokenRanges, window: int | None) -> tuple[NDArray[np.bool_], Ints]:
    """Find the documents for which queries and keys are the same rows, and give each of them one tile.

    The rows of a document are in the order of their positions, so the causal mask of rows is also the causal mask of
    positions.  A window counts positions, and the positions of a rank have gaps, so a document longer than the window
    gets no such tile.

    Returns:
        bool, whether each range of queries is in such a tile; and the tiles.
    """
    if (
        len(q) == 0
        or len(q) != len(k)
        or any((mine != other).any() for mine, other in zip(_columns(q), _columns(k), strict=True))
    ):
        return np.zeros(len(q), np.bool_), np.empty((0, 5), np.int64)
    _, begin, document = np.unique(q.document, return_index=True, return_inverse=True)
    end = np.append(begin[1:], len(q)) - 1
    start, stop = q.start[begin], q.start[end] + q.length[end]
    held = np.full(len(begin), True) if window is None else q.first[end] + q.length[end] - q.first[begin] <= window
    offset = np.where(stop - start > 1, 0, -1)
    return held[document], np.stack([start, stop, start, stop, offset], 1)[held]


def _columns(ranges: TokenRanges) -> tuple[Ints, ...]:
    return ranges.document, ranges.first, ranges.start, ranges.length


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Pairs of a range of queries and a range of keys, each at consecutive positions of the same document, as columns."""

    document: Ints
    q_row: Ints
    q_first: Ints
    q_size: Ints
    k_row: Ints
    k_first: Ints
    k_size: Ints

    @staticmethod
    def of(q: TokenRanges, k: TokenRanges, chosen: NDArray[np.bool_]) -> _Boxes:
        """Pair every chosen range of queries with every range of keys of its document."""
        low, high = (np.searchsorted(k.document, q.document, side) for side in ("left", "right"))
        count = np.where(chosen, high - low, 0)
        qs = np.repeat(np.arange(len(q)), count)
        ks = np.arange(len(qs)) + np.repeat(low - (count.cumsum() - count), count)
        return _Boxes(q.document[qs], q.start[qs], q.first[qs], q.length[qs], k.start[ks], k.first[ks], k.length[ks])

    def in_blocks(self, window: int | None) -> _Boxes:
        """Return the trimmed boxes, with each box that needs a mask cut into blocks of `window` queries."""
        trimmed = self.trimmed(window)
        if window is None:
            return trimmed
        blocks = np.where(trimmed._seen(window), 1, -(-trimmed.q_size // window))
        box = np.repeat(np.arange(len(blocks)), blocks)
        skipped = (np.arange(len(box)) - np.repeat(blocks.cumsum() - blocks, blocks)) * window
        size = np.where(blocks[box] > 1, np.minimum(window, trimmed.q_size[box] - skipped), trimmed.q_size[box])
        cut = (trimmed.q_row[box] + skipped, trimmed.q_first[box] + skipped, size)
        return _Boxes(
            trimmed.document[box], *cut, trimmed.k_row[box], trimmed.k_first[box], trimmed.k_size[box]
        ).trimmed(window)

    def trimmed(self, window: int | None) -> _Boxes:
        """Remove the queries that see no key of their box, and the keys that no query of their box sees."""
        reach = np.int64(2**62) if window is None else np.int64(window)
        q_first = np.maximum(self.q_first, self.k_first)
        q_stop = np.minimum(self.q_first + self.q_size, self.k_first + self.k_size - 1 + reach)
        k_first = np.maximum(self.k_first, q_first - reach + 1)
        k_stop = np.minimum(self.k_first + self.k_size, q_stop)
        is_left = (q_first < q_stop) & (k_first < k_stop)
        queries = self.q_row + q_first - self.q_first, q_first, q_stop - q_first
        keys = self.k_row + k_first - self.k_first, k_first, k_stop - k_first
        return _Boxes(*(column[is_left] for column in (self.document, *queries, *keys)))

    def _seen(self, window: int | None) -> NDArray[np.bool_]:
        """Whether every query of a box sees every key."""
        seen = self.k_first + self.k_size - 1 <= self.q_first
        if window is not None:
            seen &= self.q_first + self.q_size - self.k_first <= window
        return seen

    def tiles(self, window: int | None) -> Ints:
        """Make a tile of each box.  Adjacent boxes of a document that need no mask are joined into one tile."""
        full = self._seen(window)
        columns = (self.document, self.q_row, self.q_row + self.q_size, self.k_row, self.k_row + self.k_size)
        table = np.stack(columns, 1)
        joined = _joined(_joined(table[full], (3, 4)), (1, 2))
        offset = np.append((self.q_first - self.k_first)[~full], np.full(len(joined), -1))
        return np.column_stack([np.concatenate([table[~full], joined])[:, 1:], offset])


def _joined(table: Ints, along: tuple[int, int]) -> Ints:
    """Join rows (document, q start, q stop, k start, k stop) that are equal except for one range, if these ranges
    touch.

    along: the columns of that range.
    """
    start, stop = along
    same = [column for column in range(5) if column not in along]
    table = table[np.lexsort([table[:, start], *(table[:, column] for column in same)])]
    if len(table) == 0:
        return table
    new = np.append(True, (table[1:, same] != table[:-1, same]).any(1) | (table[1:, start] != table[:-1, stop]))
    joined = table[new]
    joined[:, stop] = table[np.append(np.flatnonzero(new)[1:], len(table)) - 1, stop]
    return joined


def work(ranges: TokenRanges, window: int | None = None) -> int:
    """Count the (query, key) pairs of a ring rank over the whole ring: the token at position p sees p + 1 keys, at most
    `window`.
    """
    first, stop = ranges.first + 1, ranges.first + 1 + ranges.length
    if window is None:
        return int(((first + stop - 1) * ranges.length).sum()) // 2
    low, high = np.minimum(first, window), np.minimum(stop, window)
    return int(((high * (high - 1) - low * (low - 1)) // 2 + window * (stop - high - first + low)).sum())


def balance(lengths: Sequence[int], ranks: int, window: int | None = None) -> float:
    """Compute the load imbalance of a ring: the pairs of the busiest rank divided by the mean over ranks."""
    pairs_of_ranks = [work(ranges, window) for ranges in ring_ranges(lengths, ranks)]
    return max(pairs_of_ranks) * ranks / sum(pairs_of_ranks)


class HeadGroup(NamedTuple):
    """Some query heads, and the heads of keys and values that they read."""

    queries: slice
    keys: slice


EVERY_HEAD = HeadGroup(slice(None), slice(None))


def head_groups(heads: int, kv_heads: int, most: int, *, shares_keys: bool) -> list[HeadGroup]:
    """Split all heads into at most `most` groups of about the same size.

        4 heads of queries, 2 of keys, at most 4 groups:    query head 0 | 1 | 2 | 3    where groups may share keys
                                             key head   0 | 0 | 1 | 1
                                             query heads 0 1 | 2 3          where they may not
                                             key head      0 |   1

    Args:
        heads, kv_heads: number of query heads and of kv heads; heads is a multiple of kv_heads.
        most: at least 1.
        shares_keys: several groups may read the same kv heads; such groups are adjacent.
    """
    each, found = heads // kv_heads, []
    key_groups = min(kv_heads, most)
    cuts = max(1, min(each, most // key_groups)) if shares_keys else 1  # groups of the queries of a single key head
    for start, stop in _ranges(kv_heads, key_groups):
        for first, last in _ranges((stop - start) * each, cuts):
            found.append(HeadGroup(slice(start * each + first, start * each + last), slice(start, stop)))
    return found


def _ranges(count: int, groups: int) -> list[tuple[int, int]]:
    return list(pairwise(count * number // groups for number in range(groups + 1)))
