"""Memory for tensors of many sizes that come and go, allocated once, so that the device's allocator keeps no gaps.

    buffer   [ taken |  free  | taken |    free     ]      first fit; what is given back joins its free neighbours

The first steps show how much is needed: what does not fit gets a further buffer as large as all before, and once nothing is
taken, one buffer replaces them all.  After that the arena asks the allocator for nothing.

Source: C_B and M_D of Rajbhandari et al. 2020, section 6.
"""

from __future__ import annotations

from bisect import bisect
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as with torch's CUDA allocator."""


class _Span(NamedTuple):
    """Bytes of a buffer, by its number."""

    buffer: int
    start: int
    stop: int


class Arena:
    """Gives out parts of one flat buffer.

    Memory that was given back may be taken again at once: whoever uses it on another CUDA stream waits for that first.

    Attributes:
        peak_bytes: most that was taken at once, each tensor rounded up to `ALIGNMENT`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._free: list[_Span] = []  # sorted; no two touch
        self._taken: dict[int, tuple[Tensor, _Span]] = {}  # by identity
        self._taken_bytes = self.peak_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the arena has from the allocator."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor; its content is undefined.  Keep this very tensor, to give it back."""
        wanted = numel * dtype.itemsize
        needed = -(-max(1, wanted) // ALIGNMENT) * ALIGNMENT
        if not self._taken and len(self._buffers) > 1:
            self._replace(self.nbytes)
        fitting = (at for at, span in enumerate(self._free) if span.stop - span.start >= needed)
        if (at := next(fitting, None)) is None:
            at = self._grow(needed)
        buffer, start, stop = self._free.pop(at)
        if start + needed < stop:
            self._free.insert(at, _Span(buffer, start + needed, stop))
        tensor = self._buffers[buffer][start : start + wanted].view(dtype)
        self._taken[id(tensor)] = tensor, _Span(buffer, start, start + needed)
        self._taken_bytes += needed
        self.peak_bytes = max(self.peak_bytes, self._taken_bytes)
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Free the memory of a tensor that `take` has given.

        Raises:
            ValueError: it is given back already, or it is not what `take` returned.
        """
        if id(tensor) not in self._taken:
            raise ValueError(
                f"a tensor of {tensor.numel()} elements in {tensor.dtype} is not taken from this arena, or was given back "
                "already; give back the very tensor that `take` returned, once"
            )
        _, (buffer, start, stop) = self._taken.pop(id(tensor))
        self._taken_bytes -= stop - start
        at = bisect(self._free, (buffer, start, stop))
        if at < len(self._free) and self._free[at][:2] == (buffer, stop):
            stop = self._free.pop(at).stop
        if at > 0 and (self._free[at - 1].buffer, self._free[at - 1].stop) == (buffer, start):
            at -= 1
            start = self._free.pop(at).start
        self._free.insert(at, _Span(buffer, start, stop))

    def _grow(self, needed: int) -> int:
        """Double the memory, and further if that is not enough; the number of the free span that fits."""
        if self._taken:  # those stay where they are
            self._add(max(self.nbytes, needed))
        else:
            self._replace(max(2 * self.nbytes, needed))
        return len(self._free) - 1

    def _replace(self, nbytes: int) -> None:
        self._free.clear()
        self._buffers.clear()  # before the new one is allocated
        self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        self._buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        self._free.append(_Span(len(self._buffers) - 1, 0, nbytes))
