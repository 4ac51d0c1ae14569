"""Messages from one rank to another of the same machine, through memory that both see.

    the sender's file   [ letters to rank 0 | letters to rank 1 | ... ]    [ slot | slot | slot ... ] [ slot ...
    send                copy into a free slot | write a letter: where, what | signal
    receive             hear | read the letter | copy out of the slot | answer: the slot is free

A sender never waits: its file gets another slot where none is free, and keeps it.  So what a rank has sent is its own again
at once, however late the other is.  Only what is sent when 256 letters are on their way already stays with the sender, until
it hears an answer.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.rendezvous import Listening, Meeting, Peer

_LETTERS = 256  # from one rank to another that may be on their way at a time
_LETTER = struct.Struct("<QQ48s")  # offset and length of the slot, label
_SEGMENT = 1 << 26  # slots are cut from it; what is not used of it takes no memory


def area_bytes(ranks: int) -> int:
    """Length of the letters of one rank to all others, in a file that has no slot yet."""
    return ranks * _LETTERS * _LETTER.size


class Parcel:
    """One tensor on its way.

    Args:
        tensor: contiguous; read or written.

    Raises:
        ValueError: it is not contiguous.
    """

    def __init__(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"messages are contiguous, got {list(tensor.shape)} with strides {list(tensor.stride())}")
        self.label = f"{tensor.numel()} {tensor.dtype}".encode().ljust(48)
        self.bytes = tensor.detach().view(-1).view(torch.uint8)
        self.is_done = False

    @property
    def slot_length(self) -> int:
        """A power of two, so that few lengths are about."""
        return max(mmap.PAGESIZE, 1 << (len(self.bytes) - 1).bit_length())


class _Slot(NamedTuple):
    offset: int
    length: int
    memory: Tensor


class _File:
    """The slots of one rank, mapped a segment at a time; a slot that is longer than a segment has one of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._segments: dict[int, Tensor] = {}

    def slot(self, offset: int, length: int) -> _Slot:
        start = offset // _SEGMENT * _SEGMENT
        if start not in self._segments:
            mapped = mmap.mmap(self._descriptor, max(_SEGMENT, length), offset=start)
            with torch.inference_mode(False):  # who comes here first may be evaluating, and train with it afterwards
                self._segments[start] = torch.frombuffer(mapped, dtype=torch.uint8)
        return _Slot(offset, length, self._segments[start][offset - start :][:length])


class _Slots:
    """This rank's own slots."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._file = descriptor, _File(descriptor)
        self._free: dict[int, list[_Slot]] = {}
        self._end = _SEGMENT  # before it are the letters

    def take(self, length: int) -> _Slot:
        """A free slot of a length, or a new one."""
        free = self._free.get(length)
        if free:
            return free.pop()
        left = -self._end % _SEGMENT
        offset = self._end if length <= left else self._end + left
        os.ftruncate(self._descriptor, -(-(offset + length) // _SEGMENT) * _SEGMENT)
        slot = self._file.slot(offset, length)
        self._end = offset + length
        return slot

    def give_back(self, slot: _Slot) -> None:
        self._free.setdefault(slot.length, []).append(slot)


class _Correspondence:
    """What this rank exchanges with one peer.

    Args:
        place: the peer's.
        peer: the other.
        ours, theirs: letters to it and from it.
        slots: of this rank.
        file: the peer's slots.
    """

    def __init__(
        self, place: int, peer: Peer, ours: memoryview, theirs: memoryview, slots: _Slots, file: _File
    ) -> None:
        self.peer = peer
        self.to_send: deque[Parcel] = deque()
        self.to_receive: deque[Parcel] = deque()
        self._place, self._ours, self._theirs, self._slots, self._file = place, ours, theirs, slots, file
        self._on_their_way: deque[_Slot] = deque()
        self._sent, self._received = 0, 0

    def go_on(self) -> None:
        """Send and receive what can be."""
        while self.peer.answers:
            self.peer.answers -= 1
            self._slots.give_back(self._on_their_way.popleft())
        while self.to_send and len(self._on_their_way) < _LETTERS:
            self._write(self.to_send[0])
            self.to_send.popleft()
        while self.to_receive and self.peer.signals:
            self._read(self.to_receive[0])
            self.to_receive.popleft()

    def _write(self, parcel: Parcel) -> None:
        slot = self._slots.take(parcel.slot_length)
        slot.memory[: len(parcel.bytes)].copy_(parcel.bytes)
        _LETTER.pack_into(self._ours, self._sent % _LETTERS * _LETTER.size, slot.offset, slot.length, parcel.label)
        self._sent += 1
        self._on_their_way.append(slot)
        self.peer.signal()
        parcel.is_done = True

    def _read(self, parcel: Parcel) -> None:
        offset, length, label = _LETTER.unpack_from(self._theirs, self._received % _LETTERS * _LETTER.size)
        if label != parcel.label:
            raise RuntimeError(
                f"ranks differ in the order of their messages: number {self._place} of the group has sent one of "
                f"{label.decode().strip()}, this one awaits one of {parcel.label.decode().strip()}"
            )
        parcel.bytes.copy_(self._file.slot(offset, length).memory[: len(parcel.bytes)])
        self._received += 1
        self.peer.signals -= 1
        self.peer.answer()
        parcel.is_done = True


class Messages:
    """One rank's messages to and from those that it meets.  Those of a pair of ranks arrive in the order of sending.

    Args:
        meeting: with the ranks; their files have `area_bytes` each.
        timeout_seconds: how long a message may take.
        listening: shared by all rooms of this rank.
    """

    def __init__(self, meeting: Meeting, timeout_seconds: float, listening: Listening) -> None:
        self._timeout, self._listening = timeout_seconds, listening
        self._descriptors, meeting.areas = meeting.areas, []
        count = len(self._descriptors)
        letters = [memoryview(mmap.mmap(file, area_bytes(count))) for file in self._descriptors]
        slots = _Slots(self._descriptors[meeting.place])

        def of(writer: int, reader: int) -> memoryview:
            return letters[writer][area_bytes(reader) : area_bytes(reader + 1)]

        places = [place for place in range(count) if place != meeting.place]
        self._with = {
            place: _Correspondence(
                place,
                peer,
                of(meeting.place, place),
                of(place, meeting.place),
                slots,
                _File(self._descriptors[place]),
            )
            for place, peer in zip(places, meeting.peers, strict=True)
        }
        listening.add(self, meeting.peers)

    def send(self, tensor: Tensor, to: int) -> Parcel:
        """Send a tensor to a rank, by its place; the tensor is the caller's again when the parcel is done."""
        parcel = Parcel(tensor)
        self._of(to).to_send.append(parcel)
        self._listening.hear(0.0)  # slots that have become free
        self.go_on()
        return parcel

    def receive(self, tensor: Tensor, source: int) -> Parcel:
        """Receive what a rank sends, by its place, into a tensor."""
        parcel = Parcel(tensor)
        self._of(source).to_receive.append(parcel)
        return parcel

    def finish(self, parcel: Parcel, place: int) -> None:
        """Wait until a parcel to or from a rank is done.

        Raises:
            RuntimeError: the rank is lost, or late, or has sent something else.
        """
        peer = self._of(place).peer
        self.go_on()
        self._listening.hear_until(lambda: parcel.is_done, lambda: peer.is_gone, self._timeout)

    def go_on(self) -> None:
        """Do what the peers' signals and answers allow."""
        for one in self._with.values():
            one.go_on()

    def close(self) -> None:
        """Leave: nothing is sent or received from here any more."""
        peers = [one.peer for one in self._with.values()]
        if peers:
            self._listening.remove(self, peers)
        for peer in peers:
            peer.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._with.clear()

    def _of(self, place: int) -> _Correspondence:
        if not self._with:
            raise RuntimeError("this rank has left the memory that it shared")
        return self._with[place]
