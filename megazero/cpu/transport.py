"""What carries the collectives of CPU ranks, chosen by where they run.

on one host, at most 16 of them              SharedMemoryBackend    memory that the ranks share
on hosts with as many ranks each             TwoLevelBackend        memory within a host, messages between hosts
elsewhere                                    SocketBackend          messages over sockets
"""

from megazero.comm.backend import GatherObjects
from megazero.cpu.rendezvous import Offer, Poller, rendezvous, this_host
from megazero.cpu.shared_memory import AREA_BYTES, Channel, SharedMemoryBackend, poller_of
from megazero.cpu.sockets import SocketBackend
from megazero.cpu.two_level import ThreadedChannel, TwoLevelBackend
from megazero.parallel_state import Axis
from megazero.parallel_state.grid import Hosts, hosts_of
from megazero.parallel_state.state import MOST_SHARING_RANKS, Backend, Group


def backend_between(hosts: Hosts | None) -> type[SocketBackend | SharedMemoryBackend]:
    """What carries the tensors of ranks on these hosts, if they can share memory; see `hosts_of`."""
    if hosts is None or not 1 < hosts.size <= MOST_SHARING_RANKS:
        return SocketBackend
    return TwoLevelBackend if hosts.count > 1 else SharedMemoryBackend


def cpu_backend(axis: Axis, group: Group, gather: GatherObjects) -> Backend:
    """The backend of a group, at the seam "backend"."""
    hosts, shares_hosts = None, axis.shares_hosts
    if group.shares_memory:
        each, rank = group.local_world_size, axis.ranks[axis.index]
        name = this_host() + (f" {rank // each} of {each}" if each > 1 else "")  # so one machine passes for several
        names: list[str] = gather(name)
        hosts, shares_hosts = hosts_of(names, axis.index), len(set(names)) < len(names)
    kind = backend_between(hosts)
    if hosts is not None and kind is not SocketBackend:
        first = hosts.host * hosts.size

        def gather_on_host(offer: Offer) -> list[Offer]:
            return gather(offer)[first : first + hosts.size]

        found = [rendezvous(hosts.local, hosts.size, AREA_BYTES, gather_on_host) for _ in range(2)]
        connected = [peers for peers in found if peers is not None]
        if all(gather(len(connected) == len(found))):
            if kind is TwoLevelBackend:
                about = hosts.local, group.timeout_seconds, f"channel of {axis.name}"
                return TwoLevelBackend(axis.name, hosts, *(ThreadedChannel(peers, *about) for peers in connected))
            poller = poller_of(group) or Poller()
            reducing, gathering = (Channel(peers, axis.index, group.timeout_seconds, poller) for peers in connected)
            return SharedMemoryBackend(reducing, gathering, poller)
    # Hosts may have started different numbers of ranks, and so differ in what they know of others.
    return SocketBackend(axis.name, shares_hosts=any(gather(shares_hosts)))
