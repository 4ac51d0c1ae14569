"""A shuffle that is computed, not stored: any element of a permutation of [0, size) in O(1).

    index = [ high | low ]          high ^= F(low), low ^= F(high), high ^= ...   one half at a time,
              a bits  b bits        so every round can be undone and the whole is a bijection on [0, 2^(a+b))

Cycle walking brings it to any size: apply it again until the value is below `size`, fewer than twice on average. A product
moves differences only towards the high bits, so F shifts right between its multiplications.

Source: Luby and Rackoff 1988 (Feistel networks); Black and Rogaway 2002 (cycle walking); Steele et al. 2014 (SplitMix64).
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

_ROUNDS: Final = 8  # four for each half


class Permutation:
    """A keyed bijection on [0, size), evaluated at any positions; another key is another permutation."""

    def __init__(self, size: int, key: Sequence[int]) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least 1 element, got size={size}")
        self.size = size
        bits = (size - 1).bit_length()
        self._low_bits = np.uint64(bits - bits // 2)
        self._low_mask = np.uint64(2 ** (bits - bits // 2) - 1)
        self._high_mask = np.uint64(2 ** (bits // 2) - 1)
        text = ",".join(str(int(part)) for part in key).encode()
        self._round_keys = [np.uint64(xxhash.xxh3_64_intdigest(text, seed=round_)) for round_ in range(_ROUNDS)]

    def __call__(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """The elements at positions in [0, size), of any shape: int64, of the same shape.  Raises: IndexError outside."""
        flat = np.asarray(positions, np.int64).ravel()
        if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < self.size:
            raise IndexError(f"positions {flat.min()} to {flat.max()} of a permutation of {self.size} elements")
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
