"""torch's process groups carry broadcasts, messages between two ranks, and small values: see `parallel_state.Messages`."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megazero.comm import objects
from megazero.comm.messages import group_of, wait_of
from megazero.launchers import MeetingError
from megazero.parallel_state import Axis
from megazero.parallel_state.groups import Transfers, Wait
from megazero.parallel_state.state import connect_on_demand


class ProcessGroups:
    """Sends over the process groups of the axis that is given."""

    gather = staticmethod(objects.gather)
    from_first = staticmethod(objects.from_first)
    largest = staticmethod(objects.largest)

    def broadcast(self, tensor: Tensor, axis: Axis, source: int) -> Wait:
        wait: Wait = dist.broadcast(tensor, src=axis.ranks[source], group=axis.process_group, async_op=True).wait
        return wait

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis) -> list[Wait]:
        group = group_of((*sends, *receives)[0][0], axis)
        operations = [dist.P2POp(dist.isend, tensor, peer, group=group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, buffer, peer, group=group) for buffer, peer in receives]
        works = dist.batch_isend_irecv(operations)
        waits = [wait_of(work, operation.tensor) for work, operation in zip(works, operations, strict=False)]
        return waits if len(waits) == len(operations) else waits * len(operations)  # NCCL has one for the whole batch


def open_meeting(rank: int, world: int, timeout: timedelta, *, waits: bool = False) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT through which the ranks meet; rank 0 serves it, unless torchrun does.

    A thread connects, and is left behind if it is late: torch waits without limit for a server that accepts and is silent.

    waits: whether rank 0 waits here until all others have come.  Raises: MeetingError.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves, seconds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True", timeout.total_seconds()
    found: list[Any] = []

    def connect() -> None:
        try:
            found.append(TCPStore(address, port, world, serves, timeout, waits, multi_tenant=True))
        except Exception as error:
            found.append(str(error).partition("\n")[0])

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds + min(seconds, 30) + 1)  # torch's own error says more, and comes later than it was asked for
    if found and isinstance(found[0], Store):
        return found[0]
    raise MeetingError(
        f"MASTER_ADDR={address}, MASTER_PORT={port}, where ranks meet, cannot be reached from rank {rank} on "
        f"{socket.gethostname()}: {found[0] if found else f'no answer in {seconds:g} s'}; MASTER_ADDR must be the host of "
        "rank 0, by a name that every host resolves, and MASTER_PORT a port that is free there and open to all ranks"
    )


def of_this_start(store: Store) -> Store:
    """The store as this start of the ranks sees it.

    A torchrun that keeps one store over its restarts still has in it what the ranks of the last start wrote.  With a single
    agent all ranks see the same restart count; for several agents see docs/elastic.md.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
    return PrefixStore(f"megazero/start{count}", store)


def prepare_rank(device: torch.device, neighbours: int) -> None:
    """Set what a rank needs before process groups are made: its GPU, or its share of the host's cores.

    neighbours: ranks of this host, this one included.
    """
    connect_on_demand(os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    if neighbours > 1:
        torch.set_num_threads(_cores(neighbours))
    schedule_as_batch_job()


def _cores(neighbours: int) -> int:
    """This rank's share of those that it may use: a container has some of the host's.

    Where a launcher has bound it to some of its own cores (mpirun, srun, numactl), these are the rank's alone.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // neighbours)
    mine = os.sched_getaffinity(0)
    is_bound = False
    with suppress(OSError):  # the launcher has ended, or is not to be seen
        is_bound = mine < os.sched_getaffinity(os.getppid())
    return len(mine) if is_bound else max(1, len(mine) // neighbours)


def schedule_as_batch_job() -> None:
    """Have Linux treat this process's threads, also those to come, as a batch job's: one that wakes takes nobody's core.

    gloo's thread spins while another holds the lock of a connection.  If it wakes where that other one runs, and takes its
    core, it spins for a whole time slice.  Whoever has chosen another policy keeps it; only on Linux anything happens.
    """
    with suppress(OSError, AttributeError):  # a thread that has just ended, no such system, not allowed
        for thread in map(int, os.listdir("/proc/self/task")):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
