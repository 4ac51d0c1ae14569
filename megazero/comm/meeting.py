"""Start of a rank: the store through which ranks find each other, and settings that must precede process groups."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megazero.comm.agreement import in_thread
from megazero.launchers import SET_CARDS, MeetingError
from megazero.parallel_state.state import connect_on_demand
from megazero.registry import added


def open_meeting(rank: int, world: int, timeout: timedelta, *, waits: bool = False) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT through which the ranks meet.  Rank 0 serves it, unless torchrun
    does.

    A thread connects, and is abandoned if it takes too long: torch waits without limit for a server that accepts the
    connection but never answers.

    Args:
        waits: whether rank 0 waits here until all other ranks have connected.

    Raises: MeetingError, the store cannot be reached.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves, seconds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True", timeout.total_seconds()
    opened = in_thread(lambda: TCPStore(address, port, world, serves, timeout, waits, multi_tenant=True))
    try:  # torch's own error tells more, and comes after its timeout
        return opened.result(seconds + min(seconds, 30) + 1)
    except Exception as error:
        found = str(error).partition("\n")[0] or f"no answer in {seconds:g} s"
    raise MeetingError(
        f"MASTER_ADDR={address}, MASTER_PORT={port}, where ranks meet, cannot be reached from rank {rank} on "
        f"{socket.gethostname()}: {found}; MASTER_ADDR must be the host of "
        "rank 0, by a name that every host resolves, and MASTER_PORT a port that is free there and open to all ranks; "
        f"afterwards, on hosts with several network cards, {SET_CARDS}"
    )


def name_hint(environment: Mapping[str, str]) -> str:
    """Return advice for an error message if this host's name, by which gloo finds its address, leads only to the host
    itself; otherwise "".

    Debian writes such a line into /etc/hosts: 127.0.1.1 and the name.
    """
    one_host = environment.get("LOCAL_WORLD_SIZE") in (None, environment.get("WORLD_SIZE"))
    if one_host or "GLOO_SOCKET_IFNAME" in environment:
        return ""
    try:
        own = socket.gethostbyname(host := socket.gethostname())
    except OSError:
        return f"; this host's own name does not resolve: {SET_CARDS}"
    return f"; {host} resolves to {own} here, where no other host reaches it: {SET_CARDS}" * own.startswith("127.")


def of_this_start(store: Store) -> Store:
    """Return the store with a prefix for this start of the ranks.

    If torchrun keeps one store over its restarts, the store still contains the keys of the last start.  With a
    single agent all ranks see the same restart count; for several agents see docs/elastic.md.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
    return PrefixStore(f"megazero/start{count}", store)


def prepare_rank(device: torch.device, local_world_size: int) -> None:
    """Prepare the process of a rank for process groups.

    Args:
        local_world_size: number of ranks on this host, including this one.
    """
    connect_on_demand(os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if (prepare := added("rank").get(device.type)) is not None:
        prepare(local_world_size)
