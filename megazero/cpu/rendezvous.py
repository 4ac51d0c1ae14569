"""How ranks of one host find each other, signal each other, and detect that one has died.

Every rank gives every other rank an area of memory that it writes and the other reads, an event counter for signals,
and one end of a socket.  The socket carries no further data: the kernel closes it when its process dies.  Any process
of the host can connect to a socket if it knows the name, so both ends ask the kernel which user the other process
belongs to.

[Note: why not sockets]  The bytes of a socket are copied by a thread that needs a core, and ranks keep every core busy:
during a computation, an exchange of half a megabyte took 2 ms instead of 0.25 ms.  Here each rank copies for itself,
once. Signals are event counters because the scheduler may move a process that is woken by a socket to the core of the
sender.
"""

import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from weakref import finalize

_CONNECT_SECONDS = 10.0
_LONGEST_POLL = 1 << 30  # ms

Offer: TypeAlias = tuple[str, str] | None  # where a rank listens: its host, the name of its socket
Gather: TypeAlias = Callable[[Offer], list[Offer]]  # an all-gather of one value per rank, in rank order


class Peer:
    """Another rank of this host.

    It has a socket, which closes when the rank dies, and event counters for signals to it and from it.
    """

    def __init__(self, connection: socket.socket, to_it: int, from_it: int) -> None:
        self.connection, self._to_it = connection, to_it
        self.descriptors = (from_it, connection.fileno())  # readable: it has signalled, it has died
        self.signals = 0  # received, but not yet used
        self.is_lost = False
        self.close = finalize(self, _close_all, connection, to_it, from_it)

    def signal(self) -> None:
        """Signal to the peer that this rank has written its area."""
        os.eventfd_write(self._to_it, 1)

    def hang_up(self) -> None:
        """Disconnect, so that each of the two processes finds that the other is lost."""
        with suppress(OSError):  # already disconnected
            self.connection.shutdown(socket.SHUT_RDWR)

    def poll(self) -> None:
        """Receive the peer's signals, if any."""
        with suppress(BlockingIOError):
            self.signals += os.eventfd_read(self.descriptors[0])


def _close_all(connection: socket.socket, *counters: int) -> None:
    connection.close()
    for counter in counters:
        os.close(counter)


HostRanks: TypeAlias = tuple[list[Peer], list[mmap.mmap]]  # the other ranks, and the areas of all; in rank order


class Poller:
    """Polls the peers of all channels of this rank together.  The channels are also closed together.

    Every signal lets all channels make progress, not only the channel that is waited for.  Otherwise two ranks that
    wait in different channels would wait for each other.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._channels: list[Callable[[], None]] = []
        self._peers: dict[int, Peer] = {}

    def add(self, progress: Callable[[], None], peers: Sequence[Peer]) -> None:
        """Add the peers of a channel.  `progress` continues the channel's operations."""
        self._channels.append(progress)
        for peer in peers:
            for descriptor in peer.descriptors:
                self._peers[descriptor] = peer
                self._poll.register(descriptor, select.POLLIN)

    def forget(self) -> None:
        """Drop all channels after they have been closed."""
        self._channels.clear()
        self._peers.clear()
        self._poll = select.poll()

    def poll(self, seconds: float) -> bool:
        """Wait for any peer, then let every channel make progress.  Return False if nothing happened within `seconds`."""
        ready = self._poll.poll(min(max(seconds, 0.0) * 1e3, _LONGEST_POLL))
        for descriptor, _ in ready:
            peer = self._peers[descriptor]
            peer.poll()  # signals that a peer sent before it died still count
            if descriptor != peer.descriptors[0]:
                peer.is_lost = True
                self._poll.unregister(descriptor)
        for progress in self._channels:
            progress()
        return bool(ready)


def rendezvous(index: int, size: int, area_bytes: int, gather: Gather) -> HostRanks | None:
    """Connect this rank to all others of a group of `size`, each with an area of `area_bytes`.

    Every rank calls `gather` exactly twice, even if something fails.

    Returns: None on all ranks if they are on several hosts, or if a system call fails on one of them.
    """
    listener, offer = _listen()
    offers = [found for found in gather(offer) if found is not None]
    peers: dict[int, Peer] = {}
    areas: dict[int, mmap.mmap] = {}
    if listener is not None and len(offers) == size and len({host for host, _ in offers}) == 1:
        with suppress(OSError), listener, open(os.memfd_create("megazero"), "r+b") as file:
            file.truncate(area_bytes)
            areas[index] = mmap.mmap(file.fileno(), area_bytes)
            for connection in _connections(index, offers, listener):
                other, peer, area = _introduce(connection, index, file.fileno(), area_bytes)
                peers[other], areas[other] = peer, area
    if not all(gather(offer if len(peers) == size - 1 else None)):
        return None
    return [peers[other] for other in sorted(peers)], [areas[rank] for rank in sorted(areas)]


def this_host() -> str:
    """Return a string that is equal for processes that can share memory; empty if this one cannot."""
    try:
        # socket names are local to a network namespace
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _listen() -> tuple[socket.socket | None, Offer]:
    host, name = this_host(), f"\0megazero-{secrets.token_hex(16)}"
    if not host or not hasattr(os, "memfd_create"):
        return None, None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(name)
        listener.listen()
    except OSError:
        return None, None
    listener.settimeout(_CONNECT_SECONDS)
    return listener, (host, name)


def _connections(index: int, offers: Sequence[tuple[str, str]], listener: socket.socket) -> Iterator[socket.socket]:
    """Yield a connection to every other rank.  This rank connects to the ranks before it and accepts those after it."""
    for _, name in offers[:index]:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(name)
        if not _is_ours(connection):
            connection.close()
            raise ConnectionError("another user listens under the name of a rank")
        yield connection
    expected, deadline = len(offers) - index - 1, time.monotonic() + _CONNECT_SECONDS
    while expected:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        if not _is_ours(connection):  # any process of the host may connect
            connection.close()
            continue
        connection.settimeout(_CONNECT_SECONDS)
        expected -= 1
        yield connection


def _is_ours(connection: socket.socket) -> bool:
    """Whether, according to the kernel, the process at the other end belongs to the same user as this one."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def _introduce(connection: socket.socket, index: int, file: int, area_bytes: int) -> tuple[int, Peer, mmap.mmap]:
    """Exchange indices, event counters and areas with another rank."""
    from_it = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    received = [from_it]
    try:
        socket.send_fds(connection, [bytes([index])], [from_it, file])
        other, descriptors, _, _ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
        received += descriptors
        to_it, its_file = descriptors
        area = mmap.mmap(its_file, area_bytes)
    except (OSError, ValueError) as error:  # ValueError: descriptors are missing, since this process has too many
        for descriptor in received:
            os.close(descriptor)
        raise ConnectionError("a rank could not share its memory") from error
    os.close(its_file)
    return other[0], Peer(connection, to_it, from_it), area
