"""The tokens of the i-th sample of a run: a pure function of (seed, i).

    global sample i  --blend-->  (source, n)                       n counts 0, 1, 2, ... within the source
                                 epoch = n // windows
                                 window = permutation[n % windows]  another permutation for each (seed, source, epoch)

    tokens    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...        seq_len = 4
    window 0  [t0 t1 t2 t3 t4]                      seq_len + 1 tokens: inputs t0..t3, targets t1..t4
    window 1              [t4 t5 t6 t7 t8]          stride seq_len: every target is predicted once in an epoch

There is no state and no rank: a resumed run, on any cluster shape, asks for the same indices and gets the same tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megazero.data.blend import Blend
from megazero.data.indexed import DocumentBorders
from megazero.data.permutation import Permutation

_TOLD_OF: Final = 64  # samples


@dataclass(frozen=True, eq=False)
class Windows:
    """Consecutive samples of one source: windows `first` to `first + count` of its token stream."""

    tokens: NDArray[Any]  # [total tokens], the whole stream
    seq_len: int  # tokens that a sample predicts; it has one more
    first: int
    count: int
    content: str = ""  # hash of the tokens
    borders: DocumentBorders | None = None  # None: every sample is one document

    @classmethod
    def over(
        cls, tokens: NDArray[Any], seq_len: int, name: str = "the token source", borders: DocumentBorders | None = None
    ) -> "Windows":
        """All windows of a stream, which an error calls `name`.  Raises: ValueError for fewer than one sample."""
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        count = (len(tokens) - 1) // seq_len
        if count < 1:
            raise ValueError(
                f"{name} holds {len(tokens):,} tokens, fewer than one sample of seq_len + 1 = {seq_len + 1:,}; "
                "use more data or a shorter seq_len"
            )
        return cls(tokens, seq_len, 0, count, borders=borders)

    @property
    def end(self) -> int:
        """The token whose window is the next one; the last target."""
        return (self.first + self.count) * self.seq_len

    def behind(self, end: int) -> "Windows":
        """Those of the windows that have no target up to the token `end`."""
        first = max(self.first, -(-end // self.seq_len))
        return replace(self, first=first, count=max(self.first + self.count - first, 0))

    def read(self, position: int) -> NDArray[Any]:
        """The sample at `position` in [0, count): [seq_len + 1], a view in the dtype of the file."""
        start = (self.first + position) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]

    def documents(self, position: int) -> tuple[list[int], bool]:
        """What the inputs at `position` consist of, and whether their last target is of the last input's document.

        Lengths of the documents, or of the parts of documents, in order, all > 0, in sum seq_len.  A document that goes on
        from the window before counts from this one's start.
        """
        if self.borders is None:
            return [self.seq_len], True
        start = (self.first + position) * self.seq_len
        *lengths, last = self.borders.lengths(start, start + self.seq_len + 1)  # with the last target
        return ([*lengths, last - 1], True) if last > 1 else (lengths, False)


def split(
    windows: Windows, validation_fraction: float, name: str = "the token source"
) -> tuple[Windows, Windows | None]:
    """(training, validation): the last `validation_fraction` of a source's windows, rounded down, validate.

    No target token is on both sides. A fraction of 0 means no validation; it is taken as the decimal that it is written as.
    Raises: ValueError where it is outside [0, 1), or one side would be empty.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must be at least 0 and below 1")
    if validation_fraction == 0:
        return windows, None
    held_out = int(windows.count * Fraction(str(validation_fraction)))
    kept = windows.count - held_out
    if not (held_out and kept):
        side = "training" if held_out else "validation"
        fix = f"it takes at least 1/{windows.count} = {1 / windows.count:.2g}, or 0 for no validation"
        if windows.count < 2:
            fix = "it takes two windows at least: use more data, a shorter seq_len, or 0"
        raise ValueError(
            f"validation_fraction={validation_fraction} of the {windows.count:,} windows of {name} leaves none for "
            f"{side}; {fix}"
        )
    return replace(windows, count=kept), replace(windows, first=windows.first + kept, count=held_out)


class Stream(ABC):
    """Samples by index over several sources; subclasses say which window an index stands for."""

    def __init__(self, sources: Sequence[Windows]) -> None:
        self._sources = tuple(sources)
        lengths = sorted({windows.seq_len for windows in sources})
        if len(lengths) != 1:
            raise ValueError(f"a stream needs sources of one seq_len, got {lengths or 'no sources'}")
        self.seq_len = lengths[0]
        self.num_windows = sum(windows.count for windows in sources)  # different samples

    @abstractmethod
    def locate(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, window within it) of sample indices [n].  Raises: IndexError outside the range of the class."""

    def batch(self, indices: ArrayLike) -> NDArray[np.int64]:
        """The samples of indices [n]: int64 [n, seq_len + 1].  Raises: IndexError."""
        found = list(self._windows(indices))
        samples = np.empty((len(found), self.seq_len + 1), np.int64)
        for row, (windows, position) in zip(samples, found, strict=True):
            row[:] = windows.read(position)
        return samples

    def documents(self, indices: ArrayLike) -> list[tuple[list[int], bool]]:
        """What the inputs of each sample consist of, for indices [n]; see `Windows.documents`.  Raises: IndexError."""
        return [windows.documents(position) for windows, position in self._windows(indices)]

    def _windows(self, indices: ArrayLike) -> Iterator[tuple[Windows, int]]:
        """The source of each sample, and the position of its window there."""
        source, window = self.locate(indices)
        for number, position in zip(source.tolist(), window.tolist(), strict=True):
            yield self._sources[number], position


class SampleStream(Stream):
    """Training samples without end, for indices from 0: sources blended by weight, each shuffled anew in each of its epochs.

    Source: Megatron-LM blends by greedy error minimisation with a table for each run; here the same bound comes from
    arithmetic (see `Blend`, `Permutation`).
    """

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float], seed: int) -> None:
        if len(weights) != len(sources):
            raise ValueError(f"{len(sources)} sources and {len(weights)} weights; give each source one weight")
        super().__init__(sources)
        self._blend, self._seed = Blend(weights), seed

    def epochs(self, samples: int) -> list[float]:
        """How many times the first so many samples read each source."""
        total = sum(self._blend.weights)
        pairs = zip(self._blend.weights, self._sources, strict=True)
        return [samples * weight / (total * source.count) for weight, source in pairs]

    def first_documents(self) -> list[list[int]]:
        """Lengths of the documents in each of the first samples, which stand for all in what is told of a run."""
        count = min(_TOLD_OF, sum(source.count for source in self._sources))
        return [lengths for lengths, _ in self.documents(range(count))]

    def ends(self) -> dict[str, int]:
        """Where the windows of each source end, in tokens, by its content."""
        return {source.content: source.end for source in self._sources}

    def in_order(self) -> "ValidationStream":
        """The same windows, each once."""
        return ValidationStream(self._sources)

    def locate(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        source, window = self._blend.locate(_sample_indices(indices))
        for number, rows in _rows_by(source):
            count = self._sources[number].count
            epoch, position = np.divmod(window[rows], count)
            for shuffle, now in _rows_by(epoch):
                position[now] = Permutation(count, (self._seed, number, shuffle))(position[now])
            window[rows] = position
        return source, window


class ValidationStream(Stream):
    """Validation samples for indices in [0, len): each window of each source exactly once, in order.

    The sources are interleaved by their size, so the first samples represent all of them fairly.
    """

    def __init__(self, sources: Sequence[Windows]) -> None:
        super().__init__(sources)
        self._blend = Blend([windows.count for windows in self._sources])

    def __len__(self) -> int:
        return self.num_windows

    def behind(self, ends: Mapping[str, int]) -> "ValidationStream | None":
        """The windows behind the given end of each source, in tokens, by its content; None if none is left."""
        left = [source.behind(ends.get(source.content, 0)) for source in self._sources]
        return ValidationStream([source for source in left if source.count]) if any(one.count for one in left) else None

    def locate(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        checked = _sample_indices(indices)
        if checked.size and int(checked.max()) >= len(self):
            raise IndexError(f"validation sample {checked.max()} of {len(self):,}")
        return self._blend.locate(checked)


def _rows_by(values: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """(value, mask of its rows) of each different value.  numpy's `unique` is slower for so few, and loads masked arrays."""
    for value in sorted(set(values.tolist())):
        yield value, values == value


def _sample_indices(indices: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(indices, np.int64)
    if array.ndim != 1:
        raise ValueError(f"sample indices are one row of integers, got shape {array.shape}")
    if array.size and int(array.min()) < 0:
        raise IndexError(f"sample index {array.min()} is negative; samples count from 0")
    return array
