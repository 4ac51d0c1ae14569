"""Memory that the ranks of one machine all see, and the signals by which they take turns in it.

    rank 0's area   [ half 0 | half 1 ]     every rank writes its own area and reads the others'
    rank 1's area   [ half 0 | half 1 ]
    round k         write half k % 2 | signal everyone | hear everyone | read the others' half k % 2

[Note: two halves]  Whoever has signalled round k + 1 has read round k to its end.  So once all have been heard in round
k + 1, half k % 2 may be written again, and one signal a round is enough.

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
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

HALF_BYTES = 1 << 19
_MEETING_SECONDS = 10.0

Rounds: TypeAlias = Generator[None, None, None]
"""An operation: it writes its area, yields, reads the others' areas, says `turn`, and so on."""


class Operation:
    """One operation under way."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.has_begun, self.is_done = rounds, False, False


class Peer:
    """Another rank of this machine.

    Args:
        connection: closed by its end.
        to_it, from_it: event counters that one of the two writes and the other reads.
    """

    def __init__(self, connection: socket.socket, to_it: int, from_it: int) -> None:
        self._connection, self._to_it, self._from_it = connection, to_it, from_it
        self._poll = select.poll()
        self._poll.register(from_it, select.POLLIN)
        self._poll.register(connection, select.POLLIN)

    def signal(self) -> None:
        """Say that a round has been written."""
        os.eventfd_write(self._to_it, 1)

    def hear(self, timeout_seconds: float) -> None:
        """Wait until it has said so.  Raises: RuntimeError, when it is gone or takes too long."""
        ready = [descriptor for descriptor, _ in self._poll.poll(timeout_seconds * 1e3)]
        if self._from_it in ready:
            os.eventfd_read(self._from_it)
        elif ready:
            raise RuntimeError("Connection closed by a rank of this machine")
        else:
            raise RuntimeError(f"Timed out waiting {timeout_seconds:g} s for a rank of this machine")

    def close(self) -> None:
        """Nothing will be said any more."""
        self._connection.close()
        os.close(self._to_it)
        os.close(self._from_it)


class SharedMemory:
    """One rank's view of the areas of all ranks that meet in it.  Operations run in the order in which they are begun.

    Args:
        place: this rank's place among them.
        areas: a file of all areas, by place; mapped here.
        peers: the other ranks.
        timeout_seconds: how long a peer may keep the others waiting.
    """

    def __init__(self, place: int, areas: int, peers: Sequence[Peer], timeout_seconds: float) -> None:
        self.place, self.size = place, len(peers) + 1
        self._peers, self._timeout = peers, timeout_seconds
        mapped = mmap.mmap(areas, 2 * HALF_BYTES * self.size)
        whole = torch.frombuffer(mapped, dtype=torch.uint8).view(self.size, 2, HALF_BYTES)
        self._halves = [[whole[rank, half] for rank in range(self.size)] for half in range(2)]
        self._half = 0
        self._begun: deque[Operation] = deque()

    def areas(self, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's half of this round, 1-D."""
        return [half.view(dtype) for half in self._halves[self._half]]

    def turn(self) -> None:
        """What was written in this round has been read; the next one begins."""
        self._half = 1 - self._half

    def begin(self, rounds: Rounds) -> Operation:
        """Start an operation; where none is under way its first round is written at once."""
        operation = Operation(rounds)
        self._begun.append(operation)
        if len(self._begun) == 1:
            self._go_on(operation)
        return operation

    def finish(self, operation: Operation) -> None:
        """Run everything up to this operation to its end.  Raises: RuntimeError, where a peer is lost."""
        while not operation.is_done:
            first = self._begun[0]
            if first.has_begun:
                self._hear()
            self._go_on(first)
            if first.is_done:
                self._begun.popleft()
                if self._begun:
                    self._go_on(self._begun[0])

    def close(self) -> None:
        """Let the peers know that nothing will come from here any more."""
        for peer in self._peers:
            peer.close()

    def _go_on(self, operation: Operation) -> None:
        """Run an operation up to where it has written its next round, or to its end."""
        operation.has_begun = True
        try:
            next(operation.rounds)
        except StopIteration:
            operation.is_done = True
            return
        for peer in self._peers:
            peer.signal()

    def _hear(self) -> None:
        for peer in self._peers:
            peer.hear(self._timeout)


def meet(place: int, size: int, timeout_seconds: float, gather: Callable[[Any], list[Any]]) -> SharedMemory | None:
    """Find the memory that ranks share; None where they are on different machines, or their system has no such thing.

    Args:
        place: this rank's place among them.
        size: their number.
        timeout_seconds: see `SharedMemory`.
        gather: every rank's value, by place, on every rank.
    """
    listener, offer = _listen()
    offers = gather(offer)
    if listener is None or offer is None or any(other is None or other[0] != offer[0] for other in offers):
        return None
    areas = os.memfd_create("megazero")  # that of the first rank counts
    os.ftruncate(areas, 2 * HALF_BYTES * size)
    peers: dict[int, Peer] = {}
    try:
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
    agreed = all(gather(len(peers) == size - 1))
    ordered = [peers[other] for other in sorted(peers)]
    listener.close()
    try:
        if agreed:
            return SharedMemory(place, areas, ordered, timeout_seconds)
    finally:
        os.close(areas)
    for peer in ordered:
        peer.close()
    return None


def _listen() -> tuple[socket.socket | None, tuple[str, str] | None]:
    """A socket that others on this machine can call, and what they have to know; None where there is no such thing."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.is_file() or not hasattr(os, "memfd_create"):
        return None, None
    name = f"\0megazero-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(_MEETING_SECONDS)
    listener.bind(name)
    listener.listen()
    return listener, (boot.read_text(), name)


def _call(name: str, place: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(_MEETING_SECONDS)
    peer.connect(name)
    peer.send(bytes([place]))
    return peer


def _answer(listener: socket.socket) -> tuple[socket.socket, int]:
    peer, _ = listener.accept()
    peer.settimeout(_MEETING_SECONDS)
    return peer, peer.recv(1)[0]


def _introduce(connection: socket.socket, areas: int) -> tuple[Peer, int]:
    """Exchange event counters and areas with a rank; its areas are the caller's to close."""
    from_it = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
    socket.send_fds(connection, [b"\0"], [from_it, areas])
    _, (to_it, theirs), _, _ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
    return Peer(connection, to_it, from_it), theirs
