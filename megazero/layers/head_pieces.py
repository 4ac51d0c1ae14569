"""Heads in pieces, each with the heads of keys and values that it reads."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


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
