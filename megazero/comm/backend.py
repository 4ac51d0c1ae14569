"""The boundary between collectives and what carries them: `parallel_state.Backend`, and which one a group gets.

    CPU ranks of one host            SharedMemoryBackend    memory that they share
    other CPU ranks                  GlooBackend            messages over sockets
    ranks with devices of their own  TorchBackend           torch's collectives, over NCCL

`Backend` is declared beside `Axis`, which lies on the floor below this room.
"""

from __future__ import annotations

from megazero.comm.process_group import GlooBackend, TorchBackend
from megazero.comm.rendezvous import Gather, Poller, rendezvous
from megazero.comm.shared_memory import AREA_BYTES, Channel, SharedMemoryBackend
from megazero.parallel_state import Axis, Backend, Group

_MOST_SHARING_RANKS = 16  # every rank signals every other, which is slow among more


def choose_backend(axis: Axis, group: Group, gather: Gather) -> Backend:
    """The backend of a group.  All its ranks call this at the same operation, so all choose the same one.

    Args:
        axis: an axis of the group.
        group: its communication.
        gather: every rank's value, on every rank.
    """
    if group.device.type != "cpu":
        return TorchBackend()
    if not group.shares_memory or axis.size > _MOST_SHARING_RANKS:
        return GlooBackend()
    reduce = rendezvous(axis.index, axis.size, AREA_BYTES, gather)
    gathers = rendezvous(axis.index, axis.size, AREA_BYTES, gather) if reduce else None
    if reduce is None or gathers is None:
        if reduce is not None:
            reduce.close()
        return GlooBackend()
    of_siblings = (one.backend.poller for one in group.siblings if isinstance(one.backend, SharedMemoryBackend))
    poller = next(of_siblings, None) or Poller()
    channels = [Channel(one, axis.index, group.timeout_seconds, poller) for one in (reduce, gathers)]
    return SharedMemoryBackend(channels[0], channels[1], poller)
