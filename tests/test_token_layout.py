"""Ring ranks share a sample of documents evenly, and tiles hold every pair of tokens that see each other once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.layers.token_layout import Tile, TokenRanges, balance, ring_ranges, tile_table, tiles_of, work

RANKS = st.integers(1, 6)


@st.composite
def samples(draw: st.DrawFn, ranks: int) -> list[int]:
    """Lengths of documents, of a total that `ranks` divide; many of length 1, some long."""
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 60)), min_size=1, max_size=12))
    left = -sum(lengths) % ranks
    return [*lengths, left] if left else lengths


ranks_and_lengths = RANKS.flatmap(lambda ranks: st.tuples(st.just(ranks), samples(ranks)))
windows = st.one_of(st.none(), st.integers(1, 70))


class Run(NamedTuple):
    """A row of `Runs`."""

    document: int
    first: int
    start: int
    length: int


def rows_of(runs: TokenRanges) -> list[Run]:
    columns = (runs.document, runs.first, runs.start, runs.length)
    return [Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def tiles(queries: TokenRanges, keys: TokenRanges, window: int | None = None) -> tuple[Tile, ...]:
    return tiles_of(tile_table(queries, keys, window))


def tokens(runs: TokenRanges) -> list[tuple[int, int]]:
    """Document and position of every row."""
    return [(run.document, run.first + i) for run in rows_of(runs) for i in range(run.length)]


def seen(queries: TokenRanges, keys: TokenRanges, window: int | None) -> set[tuple[int, int]]:
    """Rows of the queries and keys that see each other, one by one."""
    reach = window or 10**9
    return {
        (i, j)
        for i, (a, p) in enumerate(tokens(queries))
        for j, (b, r) in enumerate(tokens(keys))
        if a == b and 0 <= p - r < reach
    }


def cells(tile: Tile, window: int | None) -> list[tuple[int, int]]:
    """The pairs that a tile says see each other."""
    rows, columns = range(tile.q_start, tile.q_stop), range(tile.k_start, tile.k_stop)
    every = [(i, j) for i in rows for j in columns]
    if tile.offset is None:
        return every
    reach = window or 10**9
    return [(i, j) for i, j in every if 0 <= tile.offset + (i - tile.q_start) - (j - tile.k_start) < reach]


# ---- ring_ranges


@given(ranks_and_lengths)
def test_every_token_is_on_one_rank_and_every_rank_has_as_many_in_order(drawn: tuple[int, list[int]]) -> None:
    ranks, lengths = drawn
    own = [tokens(runs) for runs in ring_ranges(lengths, ranks)]
    assert {len(row) for row in own} == {sum(lengths) // ranks}
    assert all(row == sorted(row) for row in own)
    assert sorted(token for row in own for token in row) == [
        (d, p) for d, length in enumerate(lengths) for p in range(length)
    ]


@given(ranks_and_lengths)
def test_rows_are_counted_and_runs_of_a_document_do_not_touch(drawn: tuple[int, list[int]]) -> None:
    ranks, lengths = drawn
    for sharded in ring_ranges(lengths, ranks):
        runs = rows_of(sharded)
        assert sharded.documents.tolist() == [document for document, _ in tokens(sharded)]
        assert sharded.positions.tolist() == [position for _, position in tokens(sharded)]
        assert [run.start for run in runs] == [sum(run.length for run in runs[:i]) for i in range(len(runs))]
        ends = {(run.document, run.first + run.length) for run in runs}
        assert not ends & {(run.document, run.first) for run in runs}


def test_a_total_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ring ranks"):
        ring_ranges([2, 1], 2)
    with pytest.raises(ValueError, match="1 token or more"):
        ring_ranges([2, 0], 2)


# ---- tiles


@given(ranks_and_lengths, windows)
def test_a_ranks_tiles_over_the_ring_are_its_work(drawn: tuple[int, list[int]], window: int | None) -> None:
    ranks, lengths = drawn
    of_ranks = ring_ranges(lengths, ranks)
    found = [
        sum(len(cells(tile, window)) for keys in of_ranks for tile in tiles(queries, keys, window))
        for queries in of_ranks
    ]
    assert found == [work(runs, window) for runs in of_ranks]
    assert sum(found) == sum(min(p + 1, window or 10**9) for length in lengths for p in range(length))
    assert balance(lengths, ranks, window) == pytest.approx(max(found) * ranks / sum(found))


@st.composite
def scattered(draw: st.DrawFn) -> TokenRanges:
    """TokenRanges as no ring has them: gaps anywhere, neighbours that touch."""
    runs: list[Run] = []
    for document in range(draw(st.integers(1, 3))):
        position = 0
        for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=4)):
            start = runs[-1].start + runs[-1].length if runs else 0
            runs.append(Run(document, position + gap, start, length))
            position += gap + length
    return TokenRanges(*np.array(runs, np.int64).reshape(-1, 4).T)


@given(scattered(), scattered(), windows)
def test_tiles_of_any_runs_hold_every_visible_pair_once(
    queries: TokenRanges, keys: TokenRanges, window: int | None
) -> None:
    for other in (keys, queries):
        made = tiles(queries, other, window)
        found = [cell for tile in made for cell in cells(tile, window)]
        assert len(set(found)) == len(found)
        assert set(found) == seen(queries, other, window)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 400))
def test_a_window_costs_time_that_grows_with_the_window(window: int, ranks: int, length: int) -> None:
    of_ranks = ring_ranges([length * ranks + ranks], ranks)
    made = [tile for queries in of_ranks for keys in of_ranks for tile in tiles(queries, keys, window)]
    masked = [tile for tile in made if tile.offset is not None and tile.q_stop - tile.q_start > window]
    assert all(tile.k_stop - tile.k_start <= window for tile in masked)
    area = sum((tile.q_stop - tile.q_start) * (tile.k_stop - tile.k_start) for tile in made)
    assert area <= 2 * window * (length + 1) * ranks


# ---- balance


def documents(rng: np.random.Generator, kind: str, total: int) -> list[int]:
    """Documents of a distribution, the last one cut at the sample's end."""
    drawn = {
        "lognormal 1K": lambda count: rng.lognormal(np.log(1024) - 0.5, 1.0, count),
        "lognormal 8K": lambda count: rng.lognormal(np.log(8192) - 0.5, 1.0, count),
        "uniform to 20": lambda count: rng.integers(1, 21, count),
        "uniform to 2000": lambda count: rng.integers(1, 2001, count),
        "fixed 1000": lambda count: np.full(count, 1000),
        "huge and short": lambda count: np.append(total // 2, rng.integers(1, 21, count)),
    }[kind](total // 5)
    stops = np.minimum(np.maximum(drawn.astype(np.int64), 1).cumsum(), total)
    return np.diff(stops[: np.searchsorted(stops, total) + 1], prepend=0).tolist()


@pytest.mark.parametrize("ranks", [2, 16, 64])
@pytest.mark.parametrize(
    "kind", ["lognormal 1K", "lognormal 8K", "uniform to 20", "uniform to 2000", "fixed 1000", "huge and short"]
)
def test_work_is_even_within_2_per_cent_at_128k(kind: str, ranks: int) -> None:
    for seed in range(3):
        lengths = documents(np.random.default_rng(seed), kind, 131072)
        assert balance(lengths, ranks) <= 1.02, (kind, ranks, seed)


@pytest.mark.parametrize("lengths", [[131072], [1] * 8192, [16] * 512, [8064, *[1] * 128]])
def test_plain_samples_are_even(lengths: list[int]) -> None:
    assert all(balance(lengths, ranks) <= 1.02 for ranks in (2, 8, 64))
