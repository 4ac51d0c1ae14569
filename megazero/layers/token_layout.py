"""Which tokens of a sample of documents a ring rank has, which of them attend to which, and in which pieces heads are used.

    document of 16 tokens, 2 ranks     tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
                                       chunk      0         1          2            3
                                       rank       0         1          1            0

Every document is cut into 2 * ranks chunks whose lengths differ by one at most, and rank i has chunks i and
2 * ranks - 1 - i of each (zigzag).  A later token sees more keys, but an early chunk and a late one together see as many as
every other two, so ranks have even work whatever the documents' lengths are.

In a document of 2 * ranks * n + m tokens, m chunks are one token longer than the others; where n is 0, the others are
empty.  Which chunks these are changes from document to document (`Shards`), so that all ranks have exactly as many tokens.
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
    """The queries of rows [q_start, q_stop) see the keys of rows [k_start, k_stop).

    All of them where `offset` is None.  Else query row i and key row j, both counted from the tile's start, see each other
    where 0 <= offset + i - j (< window, if there is one).
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    offset: int | None = None

    def is_causal(self, window: int | None) -> bool:
        """Whether row i sees keys 0 to i, and nothing is out of a window's reach."""
        rows = self.q_stop - self.q_start
        return self.offset == 0 and rows == self.k_stop - self.k_start and (window is None or rows <= window)


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """Ranges of consecutive tokens of one document on one ring rank, in the order of its rows, none empty.

    As columns, since a sample may have ten thousand documents.

    Args:
        document: number of the document in its sample.
        first: position of the first token within the document.
        start: row of the first token among the rank's tokens.
        length: tokens.
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
class Shards:
    """The token ranges of each ring rank for a sample of documents; those of a rank are computed on request.

    The m tokens that are left of a document, fewer than 2 * ranks, go to one chunk each.  The chunks take them in one fixed
    order (`_order`): each document goes on where the one before stopped, from the longest to the shortest, so that documents
    of like length even out what each of them leaves uneven.

    Args:
        length: of each document.
        first: index in the order of the chunk that takes a document's first token that is left.
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
        """Positions of each document at which a chunk begins and ends."""
        order = np.tile(_order(self.ranks), 2)
        size, left = self.length // (2 * self.ranks), self.length % (2 * self.ranks)

        def border(chunk: int) -> Ints:
            earlier = np.append(0, (order < chunk).cumsum())  # how many of the order's first entries are earlier chunks
            return size * chunk + earlier[self.first + left] - earlier[self.first]

        return border(chunk), border(chunk + 1)


def shards(lengths: Sequence[int], ranks: int) -> Shards:
    """The token ranges of each ring rank for a sample of documents of these lengths.

    Raises: ValueError where `ranks` do not divide the sample's tokens, or a document has none.
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
    return Shards(ranks, length, first)


@lru_cache
def _order(ranks: int) -> Ints:
    """The chunks in the order in which they take the tokens that are left: each half of the order has every rank once.

    Chunks that follow each other belong to ranks far apart, as multiples of the golden ratio are, and are early and late
    in alternation: wherever a document starts in the order, its longer chunks are spread over all of it.  The second half
    is the first one backwards, with early chunks for late ones: no length of documents favours the same rank each time.
    """
    number = np.arange(ranks)
    rank = np.argsort(np.argsort(number * ((5**0.5 - 1) / 2) % 1))
    half = np.where(number % 2, 2 * ranks - 1 - rank, rank)
    return np.concatenate([half, 2 * ranks - 1 - half[::-1]])


def _ranges_of(firsts: Ints, sizes: Ints) -> TokenRanges:
    """The ranges of a rank that has two chunks of each document, [documents, 2]; chunks that touch become one."""
    adjacent = firsts[:, 0] + sizes[:, 0] == firsts[:, 1]
    first, size = firsts.copy(), sizes.copy()
    size[adjacent, 0] += size[adjacent, 1]
    size[adjacent, 1] = 0
    kept = size.ravel() > 0
    length = size.ravel()[kept]
    document = np.repeat(np.arange(len(sizes), dtype=np.int64), 2)[kept]
    return TokenRanges(document, first.ravel()[kept], length.cumsum() - length, length)


def tiles_of(table: Ints) -> tuple[Tile, ...]:
    """The tiles of a `tile_table`."""
    return tuple(Tile(a, b, c, d, None if offset < 0 else offset) for a, b, c, d, offset in table.tolist())


def tile_table(q: TokenRanges, k: TokenRanges, window: int | None = None, *, masked: bool = True) -> Ints:
    """The pairs of a query and a key that see each other, each in one tile; int64 [tiles, 5], with offset -1 for None.

    A query at position p sees the keys of its document at positions up to p, the last `window` of them where there is one.
    A table is faster than `Tile`s for ten thousand documents.

    Args:
        q, k: the runs of queries and of keys.
        window: how many positions a query sees, its own included.
        masked: the kernel takes a window as a mask, so a tile that is partly masked has at most `window` rows of queries and
            twice that of keys; else tiles are as large as can be.
    """
    whole, found = _own_tiles(q, k, window)
    boxes = _Boxes.of(q, k, ~whole)
    table = np.concatenate([found, (boxes.in_blocks(window) if masked else boxes.trimmed(window)).tiles(window)])
    return table[np.lexsort(table.T[::-1])]


def _own_tiles(q: TokenRanges, k: TokenRanges, window: int | None) -> tuple[NDArray[np.bool_], Ints]:
    """(whether each run of queries is in such a tile, one tile for each document) where queries and keys are the same rows.

    Rows of a document are in the order of their positions, so the causal mask of rows is that of positions.  A window counts
    positions, and a rank has gaps between them: a document that is longer than the window gets no such tile.
    """
    if (
        len(q) == 0
        or len(q) != len(k)
        or any((mine != other).any() for mine, other in zip(_columns(q), _columns(k), strict=True))
    ):
        return np.zeros(len(q), np.bool_), np.empty((0, 5), np.int64)
    _, begin, run = np.unique(q.document, return_index=True, return_inverse=True)
    end = np.append(begin[1:], len(q)) - 1
    start, stop = q.start[begin], q.start[end] + q.length[end]
    held = np.full(len(begin), True) if window is None else q.first[end] + q.length[end] - q.first[begin] <= window
    offset = np.where(stop - start > 1, 0, -1)
    return held[run], np.stack([start, stop, start, stop, offset], 1)[held]


def _columns(runs: TokenRanges) -> tuple[Ints, ...]:
    return runs.document, runs.first, runs.start, runs.length


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Rows of queries and of keys at consecutive positions of one document, as columns."""

    document: Ints
    q_row: Ints
    q_first: Ints
    q_size: Ints
    k_row: Ints
    k_first: Ints
    k_size: Ints

    @staticmethod
    def of(q: TokenRanges, k: TokenRanges, chosen: NDArray[np.bool_]) -> _Boxes:
        """Every chosen range of queries with every range of keys of its document."""
        low, high = (np.searchsorted(k.document, q.document, side) for side in ("left", "right"))
        count = np.where(chosen, high - low, 0)
        qs = np.repeat(np.arange(len(q)), count)
        ks = np.arange(len(qs)) + np.repeat(low - (count.cumsum() - count), count)
        return _Boxes(q.document[qs], q.start[qs], q.first[qs], q.length[qs], k.start[ks], k.first[ks], k.length[ks])

    def in_blocks(self, window: int | None) -> _Boxes:
        """The boxes within reach, in blocks of `window` queries where a box needs a mask."""
        trimmed = self.trimmed(window)
        if window is None:
            return trimmed
        blocks = np.where(trimmed._seen(window), 1, -(-trimmed.q_size // window))
        part = np.repeat(np.arange(len(blocks)), blocks)
        skipped = (np.arange(len(part)) - np.repeat(blocks.cumsum() - blocks, blocks)) * window
        size = np.where(blocks[part] > 1, np.minimum(window, trimmed.q_size[part] - skipped), trimmed.q_size[part])
        cut = (trimmed.q_row[part] + skipped, trimmed.q_first[part] + skipped, size)
        return _Boxes(
            trimmed.document[part], *cut, trimmed.k_row[part], trimmed.k_first[part], trimmed.k_size[part]
        ).trimmed(window)

    def trimmed(self, window: int | None) -> _Boxes:
        """Without the queries that see no key of their box, and the keys that no query of their box sees."""
        reach = np.int64(2**62) if window is None else np.int64(window)
        q_first = np.maximum(self.q_first, self.k_first)
        q_stop = np.minimum(self.q_first + self.q_size, self.k_first + self.k_size - 1 + reach)
        k_first = np.maximum(self.k_first, q_first - reach + 1)
        k_stop = np.minimum(self.k_first + self.k_size, q_stop)
        kept = (q_first < q_stop) & (k_first < k_stop)
        columns = (
            self.document,
            self.q_row + q_first - self.q_first,
            q_first,
            q_stop - q_first,
            self.k_row + k_first - self.k_first,
            k_first,
            k_stop - k_first,
        )
        return _Boxes(*(column[kept] for column in columns))

    def _seen(self, window: int | None) -> NDArray[np.bool_]:
        """Whether every query of a box sees every key."""
        seen = self.k_first + self.k_size - 1 <= self.q_first
        if window is not None:
            seen &= self.q_first + self.q_size - self.k_first <= window
        return seen

    def tiles(self, window: int | None) -> Ints:
        """A tile for each box; boxes of one document that touch and need no mask are joined to one tile."""
        full = self._seen(window)
        columns = (self.document, self.q_row, self.q_row + self.q_size, self.k_row, self.k_row + self.k_size)
        table = np.stack(columns, 1)
        joined = _joined(_joined(table[full], (3, 4)), (1, 2))
        offset = np.append((self.q_first - self.k_first)[~full], np.full(len(joined), -1))
        return np.column_stack([np.concatenate([table[~full], joined])[:, 1:], offset])


def _joined(table: Ints, along: tuple[int, int]) -> Ints:
    """Rows of (document, q start, q stop, k start, k stop), joined where all but one range is equal and those ranges touch.

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


def work(runs: TokenRanges, window: int | None = None) -> int:
    """The (query, key) pairs of a ring rank over the whole ring: a token at position p sees p + 1 keys, or `window`."""
    first, stop = runs.first + 1, runs.first + 1 + runs.length
    if window is None:
        return int(((first + stop - 1) * runs.length).sum()) // 2
    low, high = np.minimum(first, window), np.minimum(stop, window)
    return int(((high * (high - 1) - low * (low - 1)) // 2 + window * (stop - high - first + low)).sum())


def balance(lengths: Sequence[int], ranks: int, window: int | None = None) -> float:
    """Load imbalance of a ring: the pairs of the busiest rank over the mean of all ranks."""
    pairs_of_ranks = [work(runs, window) for runs in shards(lengths, ranks)]
    return max(pairs_of_ranks) * ranks / sum(pairs_of_ranks)


class HeadPiece(NamedTuple):
    """Some heads of queries, and the heads of keys and values that they read."""

    queries: slice
    keys: slice


EVERY_HEAD = HeadPiece(slice(None), slice(None))


def head_pieces(heads: int, kv_heads: int, most: int, *, shares_keys: bool) -> list[HeadPiece]:
    """All heads, in at most `most` pieces of about one size.

    4 heads of queries, 2 of keys, at most 4 pieces:    query head 0 | 1 | 2 | 3    where pieces may share keys
                                         key head   0 | 0 | 1 | 1
                                         query heads 0 1 | 2 3          where they may not
                                         key head      0 |   1

    Args:
        heads, kv_heads: how many there are; the former is a multiple of the latter.
        most: at least 1.
        shares_keys: pieces may read the same heads of keys; these pieces follow one another.
    """
    each, found = heads // kv_heads, []
    parts = min(kv_heads, most)
    cuts = max(1, min(each, most // parts)) if shares_keys else 1  # of the queries of a key head, where it is alone
    for start, stop in _ranges(kv_heads, parts):
        for first, last in _ranges((stop - start) * each, cuts):
            found.append(HeadPiece(slice(start * each + first, start * each + last), slice(start, stop)))
    return found


def _ranges(count: int, parts: int) -> list[tuple[int, int]]:
    return list(pairwise(count * number // parts for number in range(parts + 1)))
