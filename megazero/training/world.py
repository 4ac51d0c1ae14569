"""Joining the ranks that a launcher has started, and waiting beside them where one is left over.

    torchrun, a world of 7, the run fitted to 6      ranks 0 to 5 join a process group of 6
                                                     rank 6 waits at the store until rank 0 says how the run ended

Whatever belongs to the run sees only the ranks that joined.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from megazero.config import ResolvedRun, RunConfig
from megazero.parallel_state import ParallelState, RankGrid
from megazero.training.signals import EXIT_FAILED, die_of_signals

LAUNCH_FOLDER = "MEGAZERO_LAUNCH_FOLDER"  # where ranks that `launch` starts meet, and leave their errors

_ENDED = "megazero/ended"
_LOOK_SECONDS = 0.5  # how often a spare rank looks whether the others have ended
_FAREWELL_SECONDS = 10.0  # how long rank 0 waits for spare ranks to have looked: the store may be its own


class DeviceError(RuntimeError):
    """The devices that a configuration asks for are not there."""


class SpareRankError(RuntimeError):
    """This rank has no place in the run's shape."""


def device_type(config: RunConfig, local_ranks: int) -> str:
    """Where ranks compute: "cpu" or "cuda".

    Args:
        config: `launch.device`; "auto" takes CUDA where there is a device for each rank of this machine.
        local_ranks: ranks on this machine.

    Raises:
        DeviceError: CUDA is asked for and there are too few devices.
    """
    wish, devices = config.launch.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cuda" and devices < local_ranks:
        raise DeviceError(
            f"launch.device=cuda needs a CUDA device for each of {local_ranks} ranks on this machine, torch finds "
            f"{devices}; start fewer ranks, or set launch.device=cpu"
        )
    return "cuda" if wish != "cpu" and devices >= local_ranks else "cpu"


def this_rank() -> int:
    """The number that the launcher gave this process; 0 where there is none."""
    return int(os.environ.get("RANK", "0"))


def started_ranks() -> int:
    """How many ranks the launcher started; 1 where there is none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def meet(timeout: timedelta) -> Store | None:
    """The store where the ranks that were started find one another; None for a process that is alone.

    Args:
        timeout: how long to wait for the others.
    """
    world, folder = started_ranks(), os.environ.get(LAUNCH_FOLDER)
    if world == 1:
        return None
    store: Store
    if folder:
        store = FileStore(str(Path(folder) / "ranks"), world)
    else:
        store, _, _ = next(rendezvous("env://", this_rank(), world, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(_attempt(), store)


def _attempt() -> str:
    """A name for this start of the ranks.

    A torchrun that keeps one store over its restarts leaves in it what the ranks of the last start wrote.  Only where it
    is the only agent do all ranks see one restart count; see docs/elastic.md for several.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
    return f"megazero/start{count}"


def join_world(run: ResolvedRun, store: Store | None = None) -> ParallelState:
    """This process's place among the ranks that the environment describes; one rank where it describes none.

    Args:
        run: the resolved run.
        store: what `meet` gave, where the caller has met already.

    Raises:
        DeviceError: there are too few devices.
        SpareRankError: an elastic run has no place for this rank.
    """
    config, world, rank = run.config, run.world_size, this_rank()
    if rank >= world:
        raise SpareRankError(
            f"rank {rank} is spare: tp*pp*dp={world} ranks train. `megazero train` lets such ranks wait; here start {world}"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    device = torch.device("cpu")
    backend = "gloo"
    if device_type(config, local_world) == "cuda":
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    parallel = config.parallel
    if world > 1:
        timeout = timedelta(seconds=parallel.timeout_seconds)
        store = store or meet(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    grid = RankGrid(tp=parallel.tp, dp=run.dp, pp=parallel.pp, order=parallel.order)
    return ParallelState(grid, rank, device, parallel.timeout_seconds, config.zero.shard_group_size, local_world)


def leave_world() -> None:
    """Leave the world that `join_world` joined; nothing else may hold on to its parallel state."""
    gc.collect()  # a process group that something still refers to would outlive its destruction and abort the exit
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_as_spare(store: Store) -> int:
    """Wait beside the ranks that train until they are done.

    SIGTERM and SIGINT end the wait at once. SIGUSR1 does not: it comes to every process of a job, and a rank that ended
    of it would make torchrun kill the others while they save; they say when it is time.

    Args:
        store: what `meet` gave.

    Returns: the exit status that rank 0 told; that of a failure where it is gone without a word.
    """
    die_of_signals()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        while not store.check([_ENDED]):
            time.sleep(_LOOK_SECONDS)
        status = int(store.get(_ENDED))
        store.set(_left(this_rank()), "")
    except RuntimeError:  # with the store, the agent or the rank that kept it is gone
        return EXIT_FAILED
    return status


def tell_spare_ranks(store: Store, ranks: Sequence[int], status: int) -> None:
    """Say how the run ended, and wait until the ranks that wait have heard it.  Called on rank 0.

    Args:
        store: what `meet` gave.
        ranks: the spare ranks.
        status: this rank's exit status.
    """
    if not ranks:
        return
    with contextlib.suppress(RuntimeError):  # one that died in the meantime hears nothing
        store.set(_ENDED, str(status))
        store.wait([_left(rank) for rank in ranks], timedelta(seconds=_FAREWELL_SECONDS))


def _left(rank: int) -> str:
    return f"megazero/left/{rank}"
