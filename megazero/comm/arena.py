"""Memory for tensors of many sizes that come and go, allocated once, so that the device's allocator keeps no gaps.

    buffer   [ taken |  free  | taken |    free     ]      the smallest free part that is large enough is taken

What does not fit gets a further buffer of its size.  `reserve`, called while nothing is taken, puts one buffer in place of
all, where free parts are neighbours: sizes that vary from step to step then share memory.

[Note: page-locked]  Locking pages may wait for the device, and so for a message that a rank sends only after it has locked
its own.  So on the host only `reserve` locks pages; it is called where no message under way waits for one of this rank's.
Copies to a further buffer block the host.

Source: C_B and M_D of Rajbhandari et al. 2020, section 6.
"""

from __future__ import annotations

from bisect import bisect
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.host_memory import host_tensor
from megazero.comm.identity import address_of

ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as with torch's CUDA allocator."""


class _Part(NamedTuple):
    """Bytes [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Arena:
    """Gives out parts of a flat buffer.

    Memory that was given back may be taken again at once: whoever uses it on another CUDA stream waits for that first.

    Args:
        device: of the memory; the host's is page-locked where there is CUDA.
        remedy: how to need less memory on the host, for the error when there is too little.

    Attributes:
        nbytes, nbytes_in_use: bytes from the allocator, and those taken, each part rounded up to `ALIGNMENT`.
    """

    def __init__(self, device: torch.device, remedy: str | None = None) -> None:
        self._device, self._remedy = device, remedy
        self._buffers: list[Tensor] = []
        self._taken: dict[tuple[int, int], _Part] = {}  # by `address_of` its memory
        self._free: list[_Part] = []  # sorted; no two are neighbours
        self._has_grown = False
        self.nbytes = self.nbytes_in_use = 0

    def reserve(self, nbytes: int = 0) -> None:
        """Have one buffer of at least so much memory and of all there is, unless some is taken.  Raises: StorageError."""
        if not self._taken and (self._has_grown or self.nbytes < nbytes):
            nbytes = max(nbytes, self.nbytes)
            self._buffers.clear()  # before the new one is allocated
            self._free.clear()
            self.nbytes, self._has_grown = 0, False
            self._free.append(self._allocate(nbytes, pin=True))

    def acquire(self, nbytes: int) -> Tensor:
        """Memory, uint8 [nbytes], with undefined content.  Raises: StorageError."""
        needed = rounded_up(nbytes)
        fitting = [part for part in self._free if part.nbytes >= needed]
        if fitting:
            free = min(fitting, key=lambda part: part.nbytes)
            self._free.remove(free)
        else:
            free, self._has_grown = self._allocate(needed, pin=False), True
        taken = free._replace(stop=free.start + needed)
        if taken != free:
            self._give_back(free._replace(start=taken.stop))
        self.nbytes_in_use += needed
        memory = self._buffers[taken.buffer][
            taken.start : taken.start + nbytes
        ].data  # its changes are not those of others
        self._taken[address_of(memory)] = taken
        return memory

    def release(self, memory: Tensor) -> None:
        """Take memory back.  Raises: KeyError: it is not taken."""
        taken = self._taken.pop(address_of(memory))
        self.nbytes_in_use -= taken.nbytes
        self._give_back(taken)

    def _give_back(self, part: _Part) -> None:
        """Make a part free, as one with its free neighbours."""
        at = bisect(self._free, part)
        if at < len(self._free) and self._free[at][:2] == (part.buffer, part.stop):
            part = part._replace(stop=self._free.pop(at).stop)
        if at and (self._free[at - 1].buffer, self._free[at - 1].stop) == part[:2]:
            at -= 1
            part = part._replace(start=self._free.pop(at).start)
        self._free.insert(at, part)

    def _allocate(self, nbytes: int, *, pin: bool) -> _Part:
        """A further buffer, whole."""
        if self._device.type == "cpu":
            buffer = host_tensor(nbytes, torch.uint8, pin=pin, remedy=self._remedy)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        self.nbytes += nbytes
        return _Part(len(self._buffers) - 1, 0, nbytes)


def rounded_up(nbytes: int) -> int:
    """The bytes that a part of an arena takes."""
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
