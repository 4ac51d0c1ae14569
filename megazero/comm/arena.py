"""Memory for tensors of many sizes that come and go, allocated once, so that the device's allocator keeps no gaps.

    buffer   [ taken |  free  | taken |    free     ]      first fit

What does not fit gets a further buffer as large as all before; once nothing is taken, one buffer replaces them all.

[Note: page-locked]  Locking pages may wait for the device, and so for a message that a rank sends only after it has locked
its own.  So on the host only what is allocated while nothing is taken is locked: before the first forward that keeps
something, when no message under way waits for one of this rank's.  Copies to a further buffer block the host.

Source: C_B and M_D of Rajbhandari et al. 2020, section 6.
"""

from __future__ import annotations

from bisect import insort

import torch
from torch import Tensor

from megazero.comm.host_memory import host_tensor

ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as with torch's CUDA allocator."""


class Arena:
    """Gives out parts of one flat buffer.

    Memory that was given back may be taken again at once: whoever uses it on another CUDA stream waits for that first.

    Args:
        device: of the memory; the host's is page-locked where there is CUDA.
        remedy: how to need less memory on the host, for the error when there is too little.
    """

    def __init__(self, device: torch.device, remedy: str | None = None) -> None:
        self._device, self._remedy = device, remedy
        self._buffers: list[Tensor] = []
        self._taken: list[tuple[int, int, int]] = []  # (buffer, first byte, byte after the last), sorted

    @property
    def nbytes(self) -> int:
        """Bytes that the arena has from the allocator."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def nbytes_in_use(self) -> int:
        """Bytes that are taken, each part of them rounded up to `ALIGNMENT`."""
        return sum(stop - start for _, start, stop in self._taken)

    def reserve(self, nbytes: int) -> None:
        """Have at least so much memory, of which nothing is taken yet, in one buffer.  Raises: StorageError."""
        if self.nbytes < nbytes or len(self._buffers) > 1:
            nbytes = max(nbytes, self.nbytes)
            self._buffers.clear()  # before the new one is allocated
            self._grow(nbytes)

    def acquire(self, nbytes: int) -> Tensor:
        """Memory, uint8 [nbytes], with undefined content.  Raises: StorageError."""
        needed = rounded_up(nbytes)
        if not self._taken:
            self.reserve(needed)
        buffer, start = self._gap(needed) or self._grow(max(self.nbytes, needed))
        insort(self._taken, (buffer, start, start + needed))
        # Not a slice, whose changes would count as changes of all others.
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(
            self._buffers[buffer].untyped_storage(), start, (nbytes,), (1,)
        )

    def release(self, memory: Tensor) -> None:
        """Take memory back.  Raises: ValueError: it is not taken."""
        addresses = [buffer.untyped_storage().data_ptr() for buffer in self._buffers]
        buffer, start = addresses.index(memory.untyped_storage().data_ptr()), int(memory.storage_offset())
        self._taken.remove((buffer, start, start + rounded_up(memory.numel())))

    def _gap(self, needed: int) -> tuple[int, int] | None:
        """The first (buffer, first byte) where so many bytes are free."""
        for number, buffer in enumerate(self._buffers):
            begin = 0
            for _, start, stop in [one for one in self._taken if one[0] == number] + [(number, buffer.nbytes, 0)]:
                if start - begin >= needed:
                    return number, begin
                begin = stop
        return None

    def _grow(self, nbytes: int) -> tuple[int, int]:
        """Allocate a further buffer; its number, and its first byte."""
        if self._device.type == "cpu":
            buffer = host_tensor(nbytes, torch.uint8, pin=not self._taken, remedy=self._remedy)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        return len(self._buffers) - 1, 0


def rounded_up(nbytes: int) -> int:
    """The bytes that a part of an arena takes."""
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
