"""Memory for tensors of many sizes that come and go, allocated once, so that the device's allocator keeps no gaps.

    buffer   [ taken |  free  | taken |    free    |  taken  |  free  ]
               line 0: comes and goes                 line 1: stays until the step ends

A tensor takes the smallest free part of its line that is large enough.  Lines have no end: what lies beyond the buffer gets
memory of its own, and `reserve`, called while nothing is taken, makes a buffer as long as the lines have become.  A step
that takes and gives back in the order of one before finds the same parts, so it fits.  What stays until the step's end has a
line of its own, since it would leave gaps among what comes and goes.

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

from megazero.comm.host_memory import StorageError, host_tensor
from megazero.comm.identity import address_of

ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as with torch's CUDA allocator."""


_ENDLESS = 1 << 62


class _Part(NamedTuple):
    """Bytes [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class _FreeParts:
    """What is free of some buffers.

    Attributes:
        end: of the part that lay furthest from its buffer's begin.
    """

    def __init__(self, *free: _Part) -> None:
        self._free = list(free)  # sorted; no two are neighbours
        self.end = 0

    def take(self, nbytes: int) -> _Part | None:
        """So many bytes of the smallest part that has them."""
        fitting = [part for part in self._free if part.nbytes >= nbytes]
        if not fitting:
            return None
        free = min(fitting, key=lambda part: part.nbytes)
        self._free.remove(free)
        taken = free._replace(stop=free.start + nbytes)
        if taken != free:
            self.give_back(free._replace(start=taken.stop))
        self.end = max(self.end, taken.stop)
        return taken

    def give_back(self, part: _Part) -> None:
        """Make a part free, as one with its free neighbours."""
        at = bisect(self._free, part)
        if at < len(self._free) and self._free[at][:2] == (part.buffer, part.stop):
            part = part._replace(stop=self._free.pop(at).stop)
        if at and (self._free[at - 1].buffer, self._free[at - 1].stop) == part[:2]:
            at -= 1
            part = part._replace(start=self._free.pop(at).start)
        self._free.insert(at, part)


class _Taken(NamedTuple):
    """A tensor's part of its line and, where that lies beyond the buffer, of the further memory."""

    line: int
    part: _Part
    further: _Part | None


class Arena:
    """Gives out parts of a flat buffer.

    Memory that was given back may be taken again at once: whoever uses it on another CUDA stream waits for that first.

    Args:
        device: of the memory.
        remedy: how to need less memory on the host, for the error when there is too little.
        pins: page-lock it, on the host, where there is CUDA.

    Attributes:
        nbytes, nbytes_in_use: bytes from the allocator, and those taken, each part rounded up to `ALIGNMENT`.
    """

    def __init__(self, device: torch.device, remedy: str | None = None, *, pins: bool = False) -> None:
        self._device, self._remedy, self._pins = device, remedy, pins
        self._buffers: list[Tensor] = []  # the buffer, if `reserve` has made one, and further memory
        self._reserved = [0, 0]  # bytes of the buffer, by line
        self._lines = [_FreeParts(_Part(0, 0, _ENDLESS)) for _ in self._reserved]
        self._further = _FreeParts()
        self._taken: dict[tuple[int, int], _Taken] = {}  # by `address_of` its memory
        self.nbytes = self.nbytes_in_use = 0

    def reserve(self, nbytes: int = 0) -> None:
        """Have one buffer for all that was ever taken at once, and at least so many bytes; not while any is taken.

        Raises: StorageError: there is not so much memory to lock.
        """
        wanted = [max(line.end, had) for line, had in zip(self._lines, self._reserved, strict=True)]
        wanted[0] = max(wanted[0], rounded_up(nbytes) if nbytes else 0)
        if not self._taken and wanted != self._reserved:
            self._buffers.clear()  # before the new one is allocated
            self._further, self._reserved, self.nbytes = _FreeParts(), [0, 0], 0
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # else what was further memory would stay reserved beside the buffer
            try:
                self._allocate(sum(wanted), pin=self._pins)
            except (StorageError, torch.OutOfMemoryError):
                if self._pins:
                    raise
                return  # the lines may be longer than what was taken at once: further memory, as in the first step
            self._reserved = wanted

    def acquire(self, nbytes: int, *, line: int = 0) -> Tensor:
        """Memory, uint8 [nbytes], with undefined content.  Raises: StorageError.

        `line`: 1 for what is taken once in a step and given back at its end.
        """
        needed, end = rounded_up(nbytes), self._lines[line].end
        part, further = self._lines[line].take(needed), None
        assert part is not None  # a line has no end
        buffer, start = 0, part.start + self._reserved[0] * line
        if part.stop > self._reserved[line]:
            try:
                further = self._further.take(needed) or self._allocate(needed, pin=False)
            except BaseException:
                self._lines[line].give_back(part)
                self._lines[line].end = end  # else every later `reserve` would ask for what cannot be had
                raise
            buffer, start = further.buffer, further.start
        memory = self._buffers[buffer][start : start + nbytes].data  # changes of it are not those of others
        self._taken[address_of(memory)] = _Taken(line, part, further)
        self.nbytes_in_use += needed
        return memory

    def release(self, memory: Tensor) -> None:
        """Take memory back.  Raises: KeyError: it is not taken."""
        line, part, further = self._taken.pop(address_of(memory))
        self.nbytes_in_use -= part.nbytes
        self._lines[line].give_back(part)
        if further is not None:
            self._further.give_back(further)

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
