"""The tokens of the i-th sample of a run: a pure function of (seed, i).

    global sample i  --blend-->  (source, n)                       n counts 0, 1, 2, ... within the source
                                 epoch = n // windows
                                 window = permutation[n % windows]  another permutation for each (seed, source, epoch)

    tokens    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...        seq_len = 4
    window 0  [t0 t1 t2 t3 t4]                      seq_len + 1 tokens: inputs t0..t3, targets t1..t4
    window 1              [t4 t5 t6 t7 t8]          stride seq_len: every target is predicted once in an epoch

There is no state, and nothing depends on the rank.  A resumed run, on any cluster shape, asks for the same indices and
gets the same tokens.
"""

from __future__ import annotations  # of the function within `locate`: numpy takes long to spell out a type

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, gcd, isfinite, lcm
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megazero.data.indexed import DocumentBorders

_LARGEST_TOTAL: Final = 2**30  # keeps 2 * remainder * weight below 2^63 in `_count_left`
_ROUNDS: Final = 8  # four for each half
_DESCRIBED_SAMPLES: Final = 64  # samples


class DataError(ValueError):
    """The data of a run cannot be used."""


class UnfitDataError(DataError):
    """The data is intact, but does not fit the run's configuration."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Consecutive samples of one source: windows [first, first + count) of its token stream."""

    tokens: NDArray[Any]  # [total tokens], the whole stream
    seq_len: int  # tokens that a sample predicts; a sample has one more
    first: int
    count: int
    content: str = ""  # hash of the tokens
    borders: DocumentBorders | None = None  # None: every sample is one document

    @classmethod
    def over(
        cls, tokens: NDArray[Any], seq_len: int, name: str = "the token source", borders: DocumentBorders | None = None
    ) -> Windows:
        """Cut a token stream into consecutive windows of `seq_len` targets.

        Args:
            name: names the source in errors.
            borders: where documents end.

        Raises:
            UnfitDataError: the stream has fewer tokens than one sample.
        """
        count = (len(tokens) - 1) // seq_len
        if count < 1:
            sample = f"one sample of seq_len + 1 = {seq_len + 1:,}; use more data or a shorter seq_len"
            raise UnfitDataError(f"{name} holds {len(tokens):,} tokens, fewer than {sample}")
        return cls(tokens, seq_len, 0, count, borders=borders)

    @property
    def end(self) -> int:
        """Position of the last target token.  The next window would begin there."""
        return (self.first + self.count) * self.seq_len

    def behind(self, end: int) -> Windows:
        """Return the windows that have all their targets after token `end`."""
        first = max(self.first, -(-end // self.seq_len))
        return replace(self, first=first, count=max(self.first + self.count - first, 0))

    def read(self, position: int) -> NDArray[Any]:
        """Return the sample at `position` in [0, count): [seq_len + 1], a view in the dtype of the file."""
        start = (self.first + position) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]

    def documents(self, position: int) -> tuple[list[int], bool]:
        """Return the document lengths in a sample, and whether its last target belongs to the same document as its last
        input.

        The lengths are of documents, or of the parts of documents that lie in the sample, in order.  All are > 0, and
        their sum is seq_len.  A document that began in the previous window counts from the start of this one.
        """
        if self.borders is None:
            return [self.seq_len], True
        start = (self.first + position) * self.seq_len
        *lengths, last = self.borders.lengths(start, start + self.seq_len + 1)  # including the last target
        return ([*lengths, last - 1], True) if last > 1 else (lengths, False)


class Stream(ABC):
    """Samples by index over several sources.  Subclasses decide which window an index stands for."""

    def __init__(self, sources: Sequence[Windows]) -> None:
        self.sources = tuple(sources)
        self.seq_len = sources[0].seq_len  # one for all
        self.num_windows = sum(windows.count for windows in sources)  # number of different samples

    @abstractmethod
    def locate(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map sample indices [n] to (source, window within it).  Raises: IndexError: an index is outside the class'
        range.
        """

    def batch(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the samples of indices [n]: int64 [n, seq_len + 1].  Raises: IndexError."""
        found = list(self._windows(indices))
        samples = np.empty((len(found), self.seq_len + 1), np.int64)
        for row, (windows, position) in zip(samples, found, strict=True):
            row[:] = windows.read(position)
        return samples

    def documents(self, indices: ArrayLike) -> list[tuple[list[int], bool]]:
        """Return `Windows.documents` for the samples of indices [n].  Raises: IndexError."""
        return [windows.documents(position) for windows, position in self._windows(indices)]

    def _windows(self, indices: ArrayLike) -> Iterator[tuple[Windows, int]]:
        """Yield the source of each sample, and the position of its window in that source."""
        source, window = self.locate(indices)
        for number, position in zip(source.tolist(), window.tolist(), strict=True):
            yield self.sources[number], position


class SampleStream(Stream):
    """Endless training samples, for indices from 0.  Sources are blended by weight, and each is shuffled anew in every
    epoch.

    Source: Megatron-LM blends by greedy error minimisation, with a table for each run.  Here the same bound follows
    from arithmetic (see `Blend`, `Permutation`).
    """

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float], seed: int) -> None:
        super().__init__(sources)
        self._blend, self._seed = Blend(weights), seed

    def epochs(self, samples: int) -> list[float]:
        """Return how often each source has been read when the first `samples` samples have been read."""
        total = sum(self._blend.weights)
        pairs = zip(self._blend.weights, self.sources, strict=True)
        return [samples * weight / (total * source.count) for weight, source in pairs]

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source."""
        return self._blend.counts(samples)

    def first_documents(self) -> list[list[int]]:
        """Return the document lengths in each of the first samples, which serve as an estimate for the whole run."""
        count = min(_DESCRIBED_SAMPLES, sum(source.count for source in self.sources))
        return [lengths for lengths, _ in self.documents(range(count))]

    def ends(self) -> dict[str, int]:
        """Return the position, in tokens, at which the windows of each source end, by the hash of the source's content."""
        return {source.content: source.end for source in self.sources}

    def locate(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        source, window = self._blend.locate(sample_indices(indices))
        for number, rows in _rows_by(source):
            count = self.sources[number].count
            epoch, position = np.divmod(window[rows], count)
            for shuffle, now in _rows_by(epoch):
                position[now] = Permutation(count, (self._seed, number, shuffle))(position[now])
            window[rows] = position
        return source, window


def _rows_by(values: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield (value, mask of its rows) for each distinct value.

    numpy's `unique` is slower for so few values, and loads masked arrays.
    """
    for value in sorted(set(values.tolist())):
        yield value, values == value


def sample_indices(indices: ArrayLike) -> NDArray[np.int64]:
    """Return sample indices as an array.  Raises: IndexError: one is negative."""
    array = np.asarray(indices, np.int64)
    if array.size and int(array.min()) < 0:
        raise IndexError(f"sample index {array.min()} is negative; samples count from 0")
    return array


class Blend:
    """Sources interleaved by weight.  The source of the i-th sample is computed, without a table or state.

        weights 3 : 1 : 2            (0 1 2)          Of the first n samples that reach a node, round(n * p) go left, where
                                     /     \\          p is the weight of the left side. So sample n goes left when that
        sample  0 1 2 3 4 5        (0)    (1 2)       number grows from n to n + 1, and the number itself is its index there.
        source  0 2 0 1 0 2                /  \\
        within  0 0 1 0 2 1              (1)  (2)     Counts never drift: each level of the tree is off by half at most.

    Everything is integer arithmetic, so the result is the same on every machine, also at sample 10^12.  Among the first
    n samples, source k has n * weights[k] / sum(weights), with an error of at most ceil(log2(sources)) / 2.

    Args:
        weights: a positive number for each source; their sum does not matter.  Decimals are taken as written (0.1 is
            one tenth), and ratios finer than 2**-30 are rounded.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = _integer_weights(weights)  # integers in the ratio of the weights

    def locate(self, indices: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map global samples [n] to (source, index within the source).  Within a source, indices are 0, 1, 2, ...
        without gaps.
        """
        source = np.empty(len(indices), np.int64)
        within = np.empty(len(indices), np.int64)

        def descend(first: int, last: int, rows: NDArray[np.int64], index: NDArray[np.int64]) -> None:
            if not rows.size:
                return
            if last - first == 1:
                source[rows], within[rows] = first, index
                return
            middle = (first + last) // 2
            weights = sum(self.weights[first:middle]), sum(self.weights[first:last])
            left = _count_left(index, *weights)
            goes_left = _count_left(index + 1, *weights) > left
            descend(first, middle, rows[goes_left], left[goes_left])
            descend(middle, last, rows[~goes_left], (index - left)[~goes_left])

        descend(0, len(self.weights), np.arange(len(indices)), np.asarray(indices, np.int64))
        return source, within

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples each source has."""

        def descend(first: int, last: int, count: int) -> list[int]:
            if last - first == 1:
                return [count]
            middle = (first + last) // 2
            weights = sum(self.weights[first:middle]), sum(self.weights[first:last])
            left = int(_count_left(np.asarray(count, np.int64), *weights))
            return descend(first, middle, left) + descend(middle, last, count - left)

        return descend(0, len(self.weights), samples)


def _count_left(n: NDArray[np.int64], left: int, both: int) -> NDArray[np.int64]:
    """Compute round(n * left / both), with halves rounded up.  Exact: no product exceeds 2^62, however large n is."""
    rounds, rest = np.divmod(n, both)
    return rounds * left + (2 * rest * left + both) // (2 * both)


def _integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    for number, weight in enumerate(weights):
        if not (isfinite(weight) and weight > 0):
            raise ValueError(f"weight {weight} of source {number} must be positive and finite; leave the source out")
    exact = [Fraction(str(weight)) for weight in weights]  # by its decimal digits: 0.1 is 1/10
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole)
    whole = [weight // divisor for weight in whole]
    total = sum(whole)
    if total <= _LARGEST_TOTAL:
        return tuple(whole)
    target = _LARGEST_TOTAL - len(whole)  # each weight may be rounded up by one
    return tuple(ceil(Fraction(weight * target, total)) for weight in whole)


class Permutation:
    """A keyed bijection on [0, size): computes any element of a shuffle in O(1), without storing anything.

        index = [ high | low ]          high ^= F(low), low ^= F(high), high ^= ...   one half at a time,
                  a bits  b bits        so every round can be undone and the whole is a bijection on [0, 2^(a+b))

    Cycle walking adapts it to any size: apply the bijection again until the value is below `size`, which takes fewer
    than two applications on average.  A product moves differences only towards the high bits, so F shifts right between
    its multiplications.

    Source: Luby and Rackoff 1988 (Feistel networks); Black and Rogaway 2002 (cycle walking); Steele et al. 2014
    (SplitMix64).
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        self.size = size
        bits = (size - 1).bit_length()
        self._low_bits = np.uint64(bits - bits // 2)
        self._low_mask = np.uint64(2 ** (bits - bits // 2) - 1)
        self._high_mask = np.uint64(2 ** (bits // 2) - 1)
        text = ",".join(str(int(number)) for number in key).encode()
        self._round_keys = [np.uint64(xxhash.xxh3_64_intdigest(text, seed=round_)) for round_ in range(_ROUNDS)]

    def __call__(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the elements at positions in [0, size), of any shape: int64, of the same shape."""
        flat = np.asarray(positions, np.int64).ravel()
        values = self._network(flat.astype(np.uint64))
        while (outside := np.flatnonzero(values >= np.uint64(self.size))).size:
            values[outside] = self._network(values[outside])
        return values.astype(np.int64).reshape(np.shape(positions))

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low_mask
        for key_high, key_low in zip(self._round_keys[::2], self._round_keys[1::2], strict=True):
            high ^= _mix(low ^ key_high) & self._high_mask
            low ^= _mix(high ^ key_low) & self._low_mask
        return (high << self._low_bits) | low


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
