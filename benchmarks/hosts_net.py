"""The network between ranks: the loopback of this machine, or hosts joined by links of a limited rate.

    namespace megazero-<pid>-0                               namespace megazero-<pid>-1
    ranks 0 .. n/2 - 1   mz0 10.77.0.1  ===  10.77.0.2 mz0   ranks n/2 .. n - 1

A host is a network namespace. Two are joined by a veth pair, more by one each to a switch, a bridge in a namespace of its
own; each end of a pair sends through a token bucket (`tc ... tbf`).
Ranks of one host reach each other over the loopback of their namespace, which has no limit.  Making namespaces needs root
and iproute2.

The routes between hosts take Linux's default congestion control, cubic, whatever this machine has.  BBR estimates the rate
of a link from what it sends, and gloo announces each message by one of 48 bytes: the estimate falls, and pacing holds the
next message back, as a trace of the kernel showed: of 131 KB, all in the socket, six segments left at once and the next
after 105 ms, on an idle machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_CLONE_NEWNET = 0x40000000
_LINK = "mz0"


class NoHostsError(RuntimeError):
    """This machine does not let this process make network namespaces."""


class Counted(NamedTuple):
    """Bytes: sent by all hosts over any interface; of each host, received and sent over its link."""

    sent: int
    links: list[tuple[int, int]]


@dataclass(frozen=True)
class Network:
    """Where ranks are, and what they have sent.

    Args:
        interface: the one that gloo binds to.
        namespaces: one name for each host; none: all ranks stay in the namespace of this process.
    """

    interface: str = "lo"
    namespaces: tuple[str, ...] = ()

    def host(self, rank: int, world: int) -> int:
        """The host of a rank; the number of ranks is divisible by that of hosts."""
        return rank // self.local_world_size(world)

    def local_world_size(self, world: int) -> int:
        """Ranks of one host."""
        return world // max(1, len(self.namespaces))

    def join(self, rank: int, world: int) -> None:
        """Move this thread to its rank's host.  To be called before `init_process_group`, while there is one thread.

        Raises: OSError.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        if self.namespaces:
            _enter(Path("/run/netns") / self.namespaces[self.host(rank, world)])

    def bytes_until_now(self, pids: Sequence[int]) -> Counted:
        """What the interfaces of all hosts have counted.

        Args:
            pids: of the ranks, in their order.
        """
        first_of_host = {self.host(rank, len(pids)): pid for rank, pid in enumerate(pids)}
        found = [_bytes_by_interface(pid) for pid in first_of_host.values()]
        sent = sum(one[name][1] for one in found for name in {"lo", _LINK} & one.keys())
        return Counted(sent, [one.get(_LINK, (0, 0)) for one in found])


LOOPBACK = Network()


@contextlib.contextmanager
def network_of(count: int, mbit: int) -> Iterator[Network]:
    """Hosts for the ranks that are started within; removed at the end.

    Args:
        count: one, which is the loopback; two, joined directly, or more, each joined to a switch.
        mbit: rate of each direction of each link, in 10^6 bits per second.

    Raises: NoHostsError.
    """
    if count == 1:
        yield LOOPBACK
        return
    names = tuple(f"megazero-{os.getpid()}-{host}" for host in range(count))
    switch = f"megazero-{os.getpid()}-switch"
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoHostsError("more than one host needs root, and `ip` and `tc` of iproute2")
    _remove_those_of_the_dead()
    try:
        for name in (*names, switch):
            _command("ip", "netns", "add", name)
        if count == 2:
            _join((names[0], _LINK), (names[1], _LINK), mbit)
        else:
            _command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _command("ip", "-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            if count > 2:
                _join((name, _LINK), (switch, f"port{host}"), mbit)
                _command("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge")
            _command("ip", "-n", name, "address", "add", f"10.77.0.{host + 1}/24", "dev", _LINK, "noprefixroute")
            _command("ip", "-n", name, "route", "add", "10.77.0.0/24", "dev", _LINK, "congctl", "cubic")
            _command("ip", "-n", name, "link", "set", "lo", "up")
        yield Network(_LINK, names)
    finally:
        _remove((*names, switch))


def _remove(names: Iterable[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _remove_those_of_the_dead() -> None:
    """A process that was killed has left its namespaces."""
    _remove(filter(_is_of_the_dead, [path.name for path in Path("/run/netns").glob("megazero-*-*")]))


def _is_of_the_dead(name: str) -> bool:
    """Whether a process that is gone has made a namespace; one of another form is somebody else's."""
    made = re.fullmatch(r"megazero-(\d+)-(\d+|switch)", name)
    return made is not None and not Path("/proc", made[1]).exists()


def _join(one: tuple[str, str], other: tuple[str, str], mbit: int) -> None:
    """A link between two namespaces; each end is (namespace, its name there)."""
    ends = [["name", interface, "netns", namespace] for namespace, interface in (one, other)]
    _command("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for namespace, interface in (one, other):
        _command("ip", "-n", namespace, "link", "set", interface, "up")
        limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "200ms"]
        _command("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit)


def _command(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoHostsError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _enter(namespace: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    with namespace.open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _bytes_by_interface(pid: int) -> dict[str, tuple[int, int]]:
    """Bytes received and sent by interface, in the namespace of a process; nothing where it has died."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="utf-8").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            counters = numbers.split()
            found[name.strip()] = int(counters[0]), int(counters[8])
    return found
