"""Messages from one rank to another of the same machine, through memory that both see.

    the sender's file   [ letters to rank 0 | letters to rank 1 | ... ] [ slot ] [ slot ] [ slot ] ...
    send                copy into a free slot | write a letter: where, what | signal
    receive             hear | read the letter | copy out of the slot | answer: the slot is free

A sender never waits: its file gets another slot where none is free, and keeps it.  So what a rank has sent is its own again
at once, however late the other is.  Only what is sent when 32 letters are on their way already stays with the sender, until
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

from megazero.comm.meeting import Listening, Meeting, Peer

_LETTERS = 32  # from one rank to another that may be on their way at a time; each slot takes a descriptor on both
_LETTER = struct.Struct("<QQ48s")  # offset and length of the slot, label
_SMALLEST_SLOT = mmap.ALLOCATIONGRANULARITY


def area_bytes(ranks: int) -> int:
    """Length of the letters of one rank to all others, in a file that has no slot yet."""
    pages = -(-ranks * _LETTERS * _LETTER.size // mmap.ALLOCATIONGRANULARITY)
    return pages * mmap.ALLOCATIONGRANULARITY


class Message:
    """One message, sent or received.

    Args:
        tensor: contiguous; read or written.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.label = f"{tensor.numel()} {tensor.dtype}".encode().ljust(48)
        self.bytes = tensor.detach().view(-1).view(torch.uint8)
        self.is_done = False


class _Slot(NamedTuple):
    offset: int
    length: int
    memory: Tensor


class _Correspondence:
    """What this rank exchanges with one peer.

    Args:
        peer: the other.
        ours, theirs: letters to it and from it.
        their_file: where its slots are.
    """

    def __init__(self, peer: Peer, ours: memoryview, theirs: memoryview, their_file: int) -> None:
        self.peer, self._ours, self._theirs, self._their_file = peer, ours, theirs, their_file
        self.to_send: deque[Message] = deque()
        self.to_receive: deque[Message] = deque()
        self.on_their_way: deque[_Slot] = deque()
        self._sent, self._received = 0, 0
        self._their_slots: dict[int, Tensor] = {}

    def write(self, message: Message, slot: _Slot) -> None:
        """Send a message."""
        slot.memory[: len(message.bytes)].copy_(message.bytes)
        _LETTER.pack_into(self._ours, self._sent % _LETTERS * _LETTER.size, slot.offset, slot.length, message.label)
        self._sent += 1
        self.on_their_way.append(slot)
        self.peer.signal()
        message.is_done = True

    def read(self, message: Message) -> None:
        """Receive the next message.  Raises: RuntimeError where it is another one than was sent."""
        offset, length, label = _LETTER.unpack_from(self._theirs, self._received % _LETTERS * _LETTER.size)
        if label != message.label:
            raise RuntimeError(
                f"ranks differ in the order of their messages: sent was one of {label.decode().strip()}, "
                f"awaited is one of {message.label.decode().strip()}"
            )
        if offset not in self._their_slots:
            self._their_slots[offset] = _map(self._their_file, offset, length)
        message.bytes.copy_(self._their_slots[offset][: len(message.bytes)])
        self._received += 1
        self.peer.signals -= 1
        self.peer.answer()
        message.is_done = True


def _map(file: int, offset: int, length: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, length, offset=offset), dtype=torch.uint8)


class Messages:
    """One rank's messages to and from those that it meets.  Those of a pair of ranks arrive in the order of sending.

    Args:
        meeting: with the ranks; their files have `area_bytes` each.
        timeout_seconds: how long a message may take.
        listening: shared by all rooms of this rank.
    """

    def __init__(self, meeting: Meeting, timeout_seconds: float, listening: Listening) -> None:
        self._timeout, self._listening = timeout_seconds, listening
        self._files, meeting.areas = meeting.areas, []
        self._mine = self._files[meeting.place]
        self._end = area_bytes(len(self._files))
        self._free: dict[int, list[_Slot]] = {}
        letters = [memoryview(mmap.mmap(file, self._end)) for file in self._files]
        places = [place for place in range(len(self._files)) if place != meeting.place]
        length = _LETTERS * _LETTER.size
        self._with = {
            place: _Correspondence(
                peer,
                letters[meeting.place][place * length :][:length],
                letters[place][meeting.place * length :][:length],
                self._files[place],
            )
            for place, peer in zip(places, meeting.peers, strict=True)
        }
        listening.add(self, meeting.peers)

    def send(self, tensor: Tensor, to: int) -> Message:
        """Send a tensor to a rank, by its place; the tensor is the caller's again when the message is done."""
        message = Message(tensor)
        self._of(to).to_send.append(message)
        self._listening.hear(0.0)  # slots that have become free
        self.go_on()
        return message

    def receive(self, tensor: Tensor, source: int) -> Message:
        """Receive what a rank sends, by its place, into a tensor."""
        message = Message(tensor)
        self._of(source).to_receive.append(message)
        return message

    def finish(self, message: Message, peer: int) -> None:
        """Wait until a message to or from a rank is done.

        Raises:
            RuntimeError: the rank is lost, or late, or has sent something else.
        """
        self.go_on()
        if not message.is_done:
            self._listening.hear_until(lambda: message.is_done, [self._of(peer).peer], self._timeout)

    def go_on(self) -> None:
        """Do what the peers' signals and answers allow."""
        for one in self._with.values():
            for _ in range(one.peer.answers):
                slot = one.on_their_way.popleft()
                self._free.setdefault(slot.length, []).append(slot)
            one.peer.answers = 0
            while one.to_send and len(one.on_their_way) < _LETTERS:
                one.write(one.to_send[0], self._take(_slot_length(one.to_send[0])))
                one.to_send.popleft()
            while one.to_receive and one.peer.signals:
                one.read(one.to_receive[0])
                one.to_receive.popleft()

    def close(self) -> None:
        """Leave: nothing is sent or received from here any more."""
        peers = [one.peer for one in self._with.values()]
        if peers:
            self._listening.remove(self, peers)
        for peer in peers:
            peer.close()
        for file in self._files:
            os.close(file)
        self._files.clear()
        self._with.clear()
        self._free.clear()

    def _of(self, place: int) -> _Correspondence:
        if not self._with:
            raise RuntimeError("this rank has left the memory that it shared")
        return self._with[place]

    def _take(self, length: int) -> _Slot:
        free = self._free.get(length)
        if free:
            return free.pop()
        offset = self._end
        os.ftruncate(self._mine, offset + length)
        slot = _Slot(offset, length, _map(self._mine, offset, length))
        self._end += length
        return slot


def _slot_length(message: Message) -> int:
    """A power of two, so that few lengths are about; what is not used of a slot takes no memory."""
    return max(_SMALLEST_SLOT, 1 << (len(message.bytes) - 1).bit_length())
