"""Memory that the ranks of one machine all see, and the signals by which they take turns in it.

    rank 0's area   [ half 0 | half 1 ]     every rank writes its own area and reads the others'
    rank 1's area   [ half 0 | half 1 ]
    round k         write half k % 2 | signal everyone | hear everyone | read the others' half k % 2

[Note: two halves]  Whoever has signalled round k + 1 has read round k to its end.  So once all have been heard in round
k + 1, half k % 2 may be written again, and one signal a round is enough.

[Note: one order]  What ranks begin in one room pairs up by its order, so every half says what it belongs to, and a rank that
finds something else there stops.  Ranks may differ in when they gather and when they reduce, so the two have rooms of their
own; and who waits in one room goes on in all others, or two ranks could wait for one another.

[Note: why not through sockets]  A rank that computes has a core to itself, and a socket's bytes are copied by a thread that
has to get hold of it: on two busy cores an exchange of half a megabyte took 2 ms beside a computation, and 0.25 ms without
one.  Here the ranks copy for themselves, once.  Signals go through event counters: who is woken by a socket may be moved
to the core of whoever wakes it, and then the two take turns there.  Sockets only tell when a rank has died.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from weakref import finalize

import torch
from torch import Tensor

HALF_BYTES = 1 << 19
_LABEL_BYTES = 64
_MEETING_SECONDS = 10.0
_LONGEST_POLL = 1 << 30  # ms

Rounds: TypeAlias = Generator[None, None, None]
"""An operation: it writes its area, yields, reads the others' areas, says `turn`, and so on."""


class Operation:
    """One operation under way; equal ones have equal labels on all ranks."""

    def __init__(self, label: str, rounds: Rounds) -> None:
        self.label = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)
        self.rounds, self.has_begun, self.is_done = rounds, False, False


class Peer:
    """Another rank of this machine.

    Args:
        connection: closed by its end.
        to_it, from_it: event counters that one of the two writes and the other reads.

    Attributes:
        signals: heard and not yet acted on.
        is_gone: its end of the connection is closed.
    """

    def __init__(self, connection: socket.socket, to_it: int, from_it: int) -> None:
        self.connection, self._to_it, self.from_it = connection, to_it, from_it
        self.signals, self.is_gone = 0, False
        self.close = finalize(self, _close_all, connection, to_it, from_it)

    def signal(self) -> None:
        """Say that a round has been written."""
        os.eventfd_write(self._to_it, 1)


def _close_all(connection: socket.socket, *counters: int) -> None:
    connection.close()
    for counter in counters:
        os.close(counter)


class Listening:
    """Hears the peers of several rooms at a time."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._rooms: list[SharedMemory] = []
        self._speaks: dict[int, Peer] = {}
        self._ends: dict[int, Peer] = {}

    def add(self, room: SharedMemory, peers: Sequence[Peer]) -> None:
        """Listen to a room's peers, too."""
        self._rooms.append(room)
        for peer in peers:
            self._speaks[peer.from_it] = self._ends[peer.connection.fileno()] = peer
            self._poll.register(peer.from_it, select.POLLIN)
            self._poll.register(peer.connection, select.POLLIN)

    def remove(self, room: SharedMemory, peers: Sequence[Peer]) -> None:
        """Listen to them no longer."""
        self._rooms.remove(room)
        for peer in peers:
            self._poll.unregister(peer.from_it)
            del self._speaks[peer.from_it]
            if self._ends.pop(peer.connection.fileno(), None) is not None:
                self._poll.unregister(peer.connection)

    def hear(self, seconds: float) -> bool:
        """Wait until a peer says something or is gone, and let every room go on.  False where nothing came in time."""
        found = self._poll.poll(min(max(seconds, 0.0) * 1e3, _LONGEST_POLL))
        for descriptor, _ in found:
            if descriptor in self._speaks:
                os.eventfd_read(descriptor)
                self._speaks[descriptor].signals += 1
            else:
                self._poll.unregister(descriptor)
                self._ends.pop(descriptor).is_gone = True
        for room in self._rooms:
            room.go_on()
        return bool(found)


class SharedMemory:
    """One rank's view of the areas of all ranks that meet in it.  Operations run in the order in which they are begun.

    Args:
        place: this rank's place among them.
        areas: a file of all areas, by place; mapped here.
        peers: the other ranks, by place.
        timeout_seconds: how long an operation may take.
        listening: shared by all rooms of this rank.
    """

    def __init__(
        self, place: int, areas: int, peers: Sequence[Peer], timeout_seconds: float, listening: Listening
    ) -> None:
        self.place, self.size = place, len(peers) + 1
        self._peers, self._timeout, self._listening = peers, timeout_seconds, listening
        self._mapped = mmap.mmap(areas, _bytes_of(self.size))
        whole = torch.frombuffer(self._mapped, dtype=torch.uint8).view(self.size, 2, -1)
        self._halves = [[whole[rank, half, :HALF_BYTES] for rank in range(self.size)] for half in range(2)]
        self._half = 0
        self._begun: deque[Operation] = deque()
        listening.add(self, peers)

    def areas(self, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's half of this round, 1-D."""
        return [half.view(dtype) for half in self._halves[self._half]]

    def turn(self) -> None:
        """What was written in this round has been read; the next one begins."""
        self._half = 1 - self._half

    def begin(self, label: str, rounds: Rounds) -> Operation:
        """Start an operation; where none is under way its first round is written at once.

        Args:
            label: the same on all ranks; at most 64 characters count.
            rounds: what it does.

        Raises:
            RuntimeError: the ranks do not begin the same operations in one order.
        """
        operation = Operation(label, rounds)
        self._begun.append(operation)
        self.go_on()
        return operation

    def finish(self, operation: Operation) -> None:
        """Run everything up to this operation to its end.

        Raises:
            RuntimeError: a peer is lost, or late, or does something else.
        """
        self.go_on()
        deadline = time.monotonic() + self._timeout
        while not operation.is_done:
            if not self._peers:
                raise RuntimeError("this rank has left the memory that it shared")
            if any(peer.is_gone and not peer.signals for peer in self._peers):
                raise RuntimeError("Connection closed by a rank of this machine")
            if not self._listening.hear(deadline - time.monotonic()):
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for a rank of this machine")

    def go_on(self) -> None:
        """Run the operations under way as far as the peers' signals allow."""
        while self._begun:
            first = self._begun[0]
            if first.has_begun:
                if not all(peer.signals for peer in self._peers):
                    return
                for peer in self._peers:
                    peer.signals -= 1
                self._check_labels(first)
            first.has_begun = True
            try:
                next(first.rounds)
            except StopIteration:
                first.is_done = True
                self._begun.popleft()
                continue
            at = self._label_at(self.place)
            self._mapped[at : at + _LABEL_BYTES] = first.label
            for peer in self._peers:
                peer.signal()

    def close(self) -> None:
        """Leave: nothing is heard or said from here any more."""
        if self._peers:
            self._listening.remove(self, self._peers)
        for peer in self._peers:
            peer.close()
        self._peers = ()
        self._begun.clear()

    def _label_at(self, place: int) -> int:
        return (2 * place + self._half) * (HALF_BYTES + _LABEL_BYTES) + HALF_BYTES

    def _check_labels(self, mine: Operation) -> None:
        for place in range(self.size):
            at = self._label_at(place)
            its = self._mapped[at : at + _LABEL_BYTES]
            if its != mine.label:
                raise RuntimeError(
                    f"ranks differ in the order of their operations: number {place} of the group is in "
                    f"{its.decode().strip()}, this one in {mine.label.decode().strip()}"
                )


def _bytes_of(ranks: int) -> int:
    return 2 * (HALF_BYTES + _LABEL_BYTES) * ranks


def meet(
    place: int, size: int, timeout_seconds: float, listening: Listening, gather: Callable[[Any], list[Any]]
) -> SharedMemory | None:
    """Find the memory that ranks share; None where they are on different machines, or their system has no such thing.

    Args:
        place: this rank's place among them.
        size: their number.
        timeout_seconds, listening: see `SharedMemory`.
        gather: every rank's value, by place, on every rank.
    """
    listener, offer = _listen()
    offers = gather(offer)
    if listener is None or offer is None or any(other is None or other[0] != offer[0] for other in offers):
        return None
    peers: dict[int, Peer] = {}
    areas = None
    try:
        areas = os.memfd_create("megazero")  # that of the first rank counts
        os.ftruncate(areas, _bytes_of(size))
        for other in range(place):
            peers[other], theirs = _introduce(_call(offers[other][1], place), areas)
            if other == 0:
                os.dup2(theirs, areas, inheritable=False)
            os.close(theirs)
        for _ in range(place + 1, size):
            connection, other = _answer(listener)
            peers[other], theirs = _introduce(connection, areas)
            os.close(theirs)
    except OSError:
        pass
    listener.close()
    ordered = [peers[other] for other in sorted(peers)]
    agreed = all(gather(len(ordered) == size - 1))
    try:
        if agreed and areas is not None:
            return SharedMemory(place, areas, ordered, timeout_seconds, listening)
    finally:
        if areas is not None:
            os.close(areas)
    for peer in ordered:
        peer.close()
    return None


def _listen() -> tuple[socket.socket | None, tuple[str, str] | None]:
    """A socket that others on this machine can call, and what they have to know; None where there is no such thing."""
    if not hasattr(os, "memfd_create"):
        return None, None
    name = f"\0megazero-{secrets.token_hex(16)}"
    try:
        # such a name is known within a network namespace
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(_MEETING_SECONDS)
        listener.bind(name)
        listener.listen()
    except OSError:
        return None, None
    return listener, (machine, name)


def _call(name: str, place: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(_MEETING_SECONDS)
    peer.connect(name)
    peer.send(bytes([place]))
    return peer


def _answer(listener: socket.socket) -> tuple[socket.socket, int]:
    peer, _ = listener.accept()
    peer.settimeout(_MEETING_SECONDS)
    said = peer.recv(1)
    if not said:
        raise ConnectionError("a rank has hung up")
    return peer, said[0]


def _introduce(connection: socket.socket, areas: int) -> tuple[Peer, int]:
    """Exchange event counters and areas with a rank; its areas are the caller's to close."""
    from_it = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
    try:
        socket.send_fds(connection, [b"\0"], [from_it, areas])
        found = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)[1]
        if len(found) < 2:  # too many are open
            for one in found:
                os.close(one)
            raise ConnectionError("a rank could not be given its descriptors")
    except OSError:
        os.close(from_it)
        raise
    return Peer(connection, found[0], from_it), found[1]
