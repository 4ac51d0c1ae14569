"""The source of the i-th sample, chosen by weight, with no table and no state.

    weights 3 : 1 : 2            (0 1 2)          Of the first n samples that reach a node, round(n * p) go left, where
                                 /     \\          p is the left side's share. So sample n goes left when that number
    sample  0 1 2 3 4 5        (0)    (1 2)       grows from n to n + 1, and the number itself is its index there.
    source  0 2 0 1 0 2                /  \\
    within  0 0 1 0 2 1              (1)  (2)     Counts never drift: each level of the tree is off by half at most.

Everything is integer arithmetic, so it is the same on every machine and at sample 10^12.
"""

from __future__ import annotations  # of the function within `locate`: numpy takes long to spell out a type

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, gcd, isfinite, lcm
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LARGEST_TOTAL: Final = 2**30  # keeps 2 * remainder * weight below 2^63 in `_count_left`


class Blend:
    """Sources interleaved by weight.

    After any number of samples n, source k has had n * weights[k] / sum(weights) of them, give or take
    ceil(log2(sources)) / 2.

    Args:
        weights: a positive number for each source; their sum does not matter. Decimals are taken as written
            (0.1 is one tenth); ratios finer than 2**-30 are rounded.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = _integer_weights(weights)  # integers that stand for them

    def locate(self, indices: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, index within source) of global samples [n]; within a source they count 0, 1, 2, ... with no gap."""
        source = np.empty(len(indices), np.int64)
        within = np.empty(len(indices), np.int64)

        def descend(first: int, last: int, rows: NDArray[np.int64], index: NDArray[np.int64]) -> None:
            if not rows.size:
                return
            if last - first == 1:
                source[rows], within[rows] = first, index
                return
            middle = (first + last) // 2
            part, whole = sum(self.weights[first:middle]), sum(self.weights[first:last])
            left = _count_left(index, part, whole)
            goes_left = _count_left(index + 1, part, whole) > left
            descend(first, middle, rows[goes_left], left[goes_left])
            descend(middle, last, rows[~goes_left], (index - left)[~goes_left])

        descend(0, len(self.weights), np.arange(len(indices)), np.asarray(indices, np.int64))
        return source, within


def _count_left(n: NDArray[np.int64], part: int, whole: int) -> NDArray[np.int64]:
    """round(n * part / whole), halves up: exact, with no product beyond 2^62 however large n is."""
    rounds, rest = np.divmod(n, whole)
    return rounds * part + (2 * rest * part + whole) // (2 * whole)


def _integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    if not weights:
        raise ValueError("a blend needs at least one source")
    for number, weight in enumerate(weights):
        if not (isfinite(weight) and weight > 0):
            raise ValueError(f"weight {weight} of source {number} must be positive and finite; leave the source out")
    exact = [Fraction(str(weight)) for weight in weights]  # through its digits: 0.1 is 1/10
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole)
    whole = [weight // divisor for weight in whole]
    total = sum(whole)
    if total <= _LARGEST_TOTAL:
        return tuple(whole)
    target = _LARGEST_TOTAL - len(whole)  # each may be rounded up by one
    return tuple(ceil(Fraction(weight * target, total)) for weight in whole)
