"""Working buffers that are reused, so that no step asks the allocator for large blocks.

acquire(numel, dtype)  ->  a free buffer of this size and dtype, or a new one
release(buffer)        ->  free for the next acquire
"""

from operator import eq, ge

import torch
from torch import Tensor

from megazero.comm.backend import address_of
from megazero.comm.memory import Arena


class BufferPool:
    """A pool of the buffers of one device, by size and dtype.

    With `pinned`, buffers are page-locked host memory, which a GPU can read and write.  With an `arena`, buffers are
    blocks of that arena, which other pools may share.
    """

    def __init__(self, device: torch.device, arena: Arena | None = None, *, pinned: bool = False) -> None:
        self._device, self._arena, self._pinned = device, arena, pinned
        self._free: list[Tensor] = []
        # By address; whether the buffer is reused after its release.
        self._in_use: dict[tuple[int, int], tuple[Tensor, bool]] = {}

    def acquire(self, numel: int, dtype: torch.dtype, *, or_larger: bool = False, reusable: bool = True) -> Tensor:
        """Return a flat buffer with undefined content.

        Args:
            or_larger: accept a larger free buffer.
            reusable: False for a size that is not needed again soon: the buffer is new, and `release` drops it.
        """
        fits = ge if or_larger else eq
        fitting = [at for at, free in enumerate(self._free) if free.dtype == dtype and fits(free.numel(), numel)]
        if fitting and reusable:
            buffer = self._free.pop(fitting[-1])
        else:
            with torch.inference_mode(False):  # an evaluation may create a buffer that training uses later
                if self._arena is not None:
                    buffer = self._arena.acquire(numel * dtype.itemsize, line=1).view(dtype)
                else:
                    buffer = torch.empty(numel, dtype=dtype, device=self._device, pin_memory=self._pinned)
        self._in_use[address_of(buffer)] = (buffer, reusable)
        return buffer

    def bytes_after(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that all buffers would take after `acquire(numel, dtype)`."""
        is_free = any(free.dtype == dtype and free.numel() == numel for free in self._free)
        return self.nbytes + (0 if is_free else numel * dtype.itemsize)

    def free_above(self, nbytes: int) -> None:
        """Return free buffers to the allocator until the pool takes at most `nbytes` bytes."""
        while self._free and self.nbytes > nbytes:
            self._forget(self._free.pop(0))

    def begin_step(self) -> None:
        """Release the buffers that a failed step left in use.  With an arena, return every free buffer to it, so that
        the step starts with one contiguous block.
        """
        self.release(*[buffer for buffer, _ in self._in_use.values()])
        if self._arena is not None:
            self.free_above(0)

    def release(self, *buffers: Tensor) -> None:
        """Return buffers that `acquire` handed out to the pool."""
        for buffer in buffers:
            _, is_reusable = self._in_use.pop(address_of(buffer))
            if is_reusable:
                self._free.append(buffer)
            else:
                self._forget(buffer)

    def _forget(self, buffer: Tensor) -> None:
        if self._arena is not None:
            self._arena.release(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, free and in use."""
        return sum(buffer.nbytes for buffer in self._free) + sum(buffer.nbytes for buffer, _ in self._in_use.values())
