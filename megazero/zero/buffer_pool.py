"""Working buffers, used again and again: the allocator is not asked for large blocks within a step.

acquire(numel, dtype)  ->  a free buffer of this size and dtype, or a new one
release(buffer)        ->  free for the next acquire
"""

from __future__ import annotations

from operator import eq, ge

import torch
from torch import Tensor

from megazero.comm.identity import storage_of


class BufferPool:
    """Buffers of one device, by size and dtype; `pinned` ones on the host are page-locked, for a GPU to read and write."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._free: list[Tensor] = []
        self._in_use: dict[int, tuple[int, bool]] = {}  # by storage: bytes, and whether it is free again after its use

    def acquire(self, numel: int, dtype: torch.dtype, *, or_larger: bool = False, reusable: bool = True) -> Tensor:
        """A flat buffer; its content is undefined.  `or_larger`: a larger free one will do.

        One that is not `reusable`, of a size that is not asked for again soon, is new, and `release` forgets it.
        """
        fits = ge if or_larger else eq
        fitting = [at for at, free in enumerate(self._free) if free.dtype == dtype and fits(free.numel(), numel)]
        if fitting and reusable:
            buffer = self._free.pop(fitting[-1])
        else:
            with torch.inference_mode(False):  # it is used again, and not only in an evaluation
                buffer = torch.empty(numel, dtype=dtype, device=self._device, pin_memory=self._pinned)
        self._in_use[storage_of(buffer)] = (buffer.nbytes, reusable)
        return buffer

    def bytes_after(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of all buffers if this one were acquired now."""
        is_free = any(free.dtype == dtype and free.numel() == numel for free in self._free)
        return self.nbytes + (0 if is_free else numel * dtype.itemsize)

    def free_above(self, nbytes: int) -> None:
        """Give free buffers back to the allocator until all have so many bytes at most."""
        while self._free and self.nbytes > nbytes:
            self._free.pop(0)

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back, as `acquire` gave it."""
        _, is_reusable = self._in_use.pop(storage_of(buffer))
        if is_reusable:
            self._free.append(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, free and in use."""
        return sum(buffer.nbytes for buffer in self._free) + sum(nbytes for nbytes, _ in self._in_use.values())
