"""Choose the backend for the collectives of CPU ranks, by the hosts that they run on.

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
    """Return the class of the backend for ranks on these hosts, if the ranks of a host can share memory; see `hosts_of`."""
    if hosts is None or not 1 < hosts.size <= MOST_SHARING_RANKS:
        return SocketBackend
    return TwoLevelBackend if hosts.count > 1 else SharedMemoryBackend


def cpu_backend(axis: Axis, group: Group, gather: GatherObjects) -> Backend:
    """Return the backend of a group, at the seam "backend".  All ranks of the group must call this together."""
    hosts, shares_hosts = None, axis.shares_hosts
    if group.shares_memory:
        each, rank = group.local_world_size, axis.ranks[axis.index]
        # Tests treat one machine as several hosts.
        name = this_host() + (f" {rank // each} of {each}" if each > 1 else "")
        names: list[str] = gather(name)
        hosts, shares_hosts = hosts_of(names, axis.index), len(set(names)) < len(names)
    chosen = backend_between(hosts)
    if hosts is not None and chosen is not SocketBackend:
        first = hosts.host * hosts.size

        def gather_on_host(offer: Offer) -> list[Offer]:
            return gather(offer)[first : first + hosts.size]

        found = [rendezvous(hosts.local, hosts.size, AREA_BYTES, gather_on_host) for _ in range(2)]
        connected = [peers for peers in found if peers is not None]
        if all(gather(len(connected) == len(found))):
            if chosen is TwoLevelBackend:
                about = hosts.local, group.timeout_seconds, f"channel of {axis.name}"
                return TwoLevelBackend(axis.name, hosts, *(ThreadedChannel(peers, *about) for peers in connected))
            poller = poller_of(group) or Poller()
            reducing, gathering = (Channel(peers, axis.index, group.timeout_seconds, poller) for peers in connected)
            return SharedMemoryBackend(reducing, gathering, poller)
    # If hosts run different numbers of ranks, ranks know different things about the others, so they must agree.
    return SocketBackend(axis.name, shares_hosts=any(gather(shares_hosts)))
