"""How ranks of one machine find one another, hear one another, and learn that one has died.

Each gives every other a file in memory that it writes and the other reads, an event counter to be told by, and one end of a
socket that only tells when the other has died.

[Note: why not through sockets]  A rank that computes has a core to itself, and a socket's bytes are copied by a thread that
has to get hold of it: on two busy cores an exchange of half a megabyte took 2 ms beside a computation, and 0.25 ms without
one.  Here the ranks copy for themselves, once.  Signals go through event counters: who is woken by a socket may be moved
to the core of whoever wakes it, and then the two take turns there.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

_MEETING_SECONDS = 10.0
_LONGEST_POLL = 1 << 30  # ms
_ONE_READ = 1 << 32  # in a counter: below it what was written, from it on what was read


class Peer:
    """Another rank of this machine.

    Args:
        connection: closed by its end.
        to_it, from_it: event counters that one of the two writes and the other reads.

    Attributes:
        signals: times it has written, heard and not yet acted on.
        answers: times it has read, where it says so; heard and not yet acted on.
        is_gone: its end of the connection is closed.
    """

    def __init__(self, connection: socket.socket, to_it: int, from_it: int) -> None:
        self.connection, self._to_it, self.from_it = connection, to_it, from_it
        self.signals, self.answers, self.is_gone = 0, 0, False
        self.close = finalize(self, _close_all, connection, to_it, from_it)

    def signal(self) -> None:
        """Say that something has been written for it."""
        os.eventfd_write(self._to_it, 1)

    def answer(self) -> None:
        """Say that something of it has been read."""
        os.eventfd_write(self._to_it, _ONE_READ)

    def hear(self) -> None:
        """Take up what it has said, if anything."""
        with suppress(BlockingIOError):
            answers, signals = divmod(os.eventfd_read(self.from_it), _ONE_READ)
            self.signals += signals
            self.answers += answers


def _close_all(connection: socket.socket, *counters: int) -> None:
    connection.close()
    for counter in counters:
        os.close(counter)


class Room(Protocol):
    """Where ranks exchange something."""

    def go_on(self) -> None:
        """Do what the peers' signals allow."""


class Listening:
    """Hears the peers of several rooms at a time."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._rooms: list[Room] = []
        self._speaks: dict[int, Peer] = {}
        self._ends: dict[int, Peer] = {}

    def add(self, room: Room, peers: Sequence[Peer]) -> None:
        """Listen to a room's peers, too."""
        self._rooms.append(room)
        for peer in peers:
            self._speaks[peer.from_it] = self._ends[peer.connection.fileno()] = peer
            self._poll.register(peer.from_it, select.POLLIN)
            self._poll.register(peer.connection, select.POLLIN)

    def remove(self, room: Room, peers: Sequence[Peer]) -> None:
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
                self._speaks[descriptor].hear()
            else:
                self._poll.unregister(descriptor)
                gone = self._ends.pop(descriptor)
                gone.hear()  # its last words
                gone.is_gone = True
        for room in self._rooms:
            room.go_on()
        return bool(found)

    def hear_until(self, is_done: Callable[[], bool], is_lost: Callable[[], bool], seconds: float) -> None:
        """Wait for something that peers bring about.

        Args:
            is_done: whether it is there.
            is_lost: whether it can no longer come, since one of them is gone.
            seconds: how long to wait.

        Raises:
            RuntimeError: it is lost, or late.
        """
        deadline = time.monotonic() + seconds
        while not is_done():
            if is_lost():
                raise RuntimeError("Connection closed by a rank of this machine")
            if not self.hear(deadline - time.monotonic()):
                raise RuntimeError(f"Timed out waiting {seconds:g} s for a rank of this machine")


@dataclass
class Meeting:
    """What the ranks of a group have given one another.

    Args:
        place: this rank's place among them.
        peers: the others, by place.
        areas: by place, every rank's file, this one's included; whoever takes the meeting closes them.
    """

    place: int
    peers: list[Peer]
    areas: list[int]

    def close_areas(self) -> None:
        """Give the files back; what is mapped of them stays."""
        while self.areas:
            os.close(self.areas.pop())


def meet(place: int, size: int, area_bytes: int, gather: Callable[[Any], list[Any]]) -> Meeting | None:
    """Find the other ranks; None where they are on different machines, or their system has no memory to share.

    Args:
        place: this rank's place among them.
        size: their number.
        area_bytes: length of each rank's file.
        gather: every rank's value, by place, on every rank.
    """
    listener, offer = _listen()
    offers = gather(offer)
    if listener is None or offer is None or any(other is None or other[0] != offer[0] for other in offers):
        return None
    found: dict[int, tuple[Peer | None, int]] = {}
    try:
        mine = os.memfd_create("megazero")
        found[place] = None, mine
        os.ftruncate(mine, area_bytes)
        for other in range(place):
            found[other] = _introduce(_call(offers[other][1], place), mine)
        for _ in range(place + 1, size):
            connection, other = _answer(listener)
            found[other] = _introduce(connection, mine)
    except OSError:
        pass
    listener.close()
    ordered = [found[other] for other in sorted(found)]
    meeting = Meeting(place, [peer for peer, _ in ordered if peer is not None], [area for _, area in ordered])
    if all(gather(len(meeting.peers) == size - 1)):
        return meeting
    meeting.close_areas()
    for peer in meeting.peers:
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


def _introduce(connection: socket.socket, area: int) -> tuple[Peer, int]:
    """Exchange event counters and areas with a rank; its area is the caller's to close."""
    from_it = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        socket.send_fds(connection, [b"\0"], [from_it, area])
        found = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)[1]
        if len(found) < 2:  # too many are open
            for one in found:
                os.close(one)
            raise ConnectionError("a rank could not be given its descriptors")
    except OSError:
        os.close(from_it)
        raise
    return Peer(connection, found[0], from_it), found[1]
