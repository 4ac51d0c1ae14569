"""The network between ranks: the loopback of this machine, or two hosts joined by a link of a limited rate.

    namespace megazero-<pid>-0                               namespace megazero-<pid>-1
    ranks 0 .. n/2 - 1   mz0 10.77.0.1  ===  10.77.0.2 mz0   ranks n/2 .. n - 1

A host is a network namespace. The two are joined by a veth pair, and each end sends through a token bucket (`tc ... tbf`).
Ranks of one host reach each other over the loopback of their namespace, which has no limit.  Making namespaces needs root
and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_LINK = "mz0"


class NoHostsError(RuntimeError):
    """This machine does not let this process make network namespaces."""


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
        return rank // self.neighbours(world)

    def neighbours(self, world: int) -> int:
        """Ranks of one host."""
        return world // max(1, len(self.namespaces))

    def join(self, rank: int, world: int) -> None:
        """Move this thread to its rank's host.  To be called before `init_process_group`, while there is one thread.

        Raises: OSError.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        if self.namespaces:
            _enter(Path("/run/netns") / self.namespaces[self.host(rank, world)])

    def sent_bytes(self, pids: Sequence[int]) -> tuple[int, int]:
        """Bytes that all hosts have sent until now: over any interface, and over the link between hosts.

        Args:
            pids: of the ranks, in their order.
        """
        first_of_host = {self.host(rank, len(pids)): pid for rank, pid in enumerate(pids)}
        found = [_sent_by_interface(pid) for pid in first_of_host.values()]
        return sum(one.get(name, 0) for one in found for name in {"lo", _LINK}), sum(one.get(_LINK, 0) for one in found)


LOOPBACK = Network()


@contextlib.contextmanager
def two_hosts(mbit: int) -> Iterator[Network]:
    """Two hosts for the ranks that are started within; removed at the end.

    Args:
        mbit: rate of each direction of the link, in 10^6 bits per second.

    Raises: NoHostsError.
    """
    names = tuple(f"megazero-{os.getpid()}-{host}" for host in range(2))
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoHostsError("two hosts need root, and `ip` and `tc` of iproute2")
    try:
        for name in names:
            _command("ip", "netns", "add", name)
        ends = [["name", _LINK, "netns", name] for name in names]
        _command("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host, name in enumerate(names):
            _command("ip", "-n", name, "address", "add", f"10.77.0.{host + 1}/24", "dev", _LINK)
            for interface in ("lo", _LINK):
                _command("ip", "-n", name, "link", "set", interface, "up")
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "200ms"]
            _command("tc", "-n", name, "qdisc", "add", "dev", _LINK, "root", *limit)
        yield Network(_LINK, names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextlib.contextmanager
def network_of(hosts: int, mbit: int) -> Iterator[Network]:
    """The loopback for one host, else `two_hosts`."""
    if hosts == 1:
        yield LOOPBACK
    else:
        with two_hosts(mbit) as network:
            yield network


def _command(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoHostsError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _enter(namespace: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    with namespace.open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _sent_by_interface(pid: int) -> dict[str, int]:
    """Bytes by interface, in the namespace of a process; nothing where it has died."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="utf-8").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            found[name.strip()] = int(numbers.split()[8])
    return found
