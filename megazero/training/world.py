"""Joining the ranks that a launcher has started; a spare rank waits beside them.

torchrun starts 7 ranks, the run has 6      ranks 0 to 5 join a process group of 6
                                            rank 6 waits until rank 0 writes into the store how the run ended
"""

import contextlib
import gc
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from megazero.comm.meeting import of_this_start, open_meeting, prepare_rank
from megazero.config import ResolvedRun, RunConfig
from megazero.engine.phases import values_by_key
from megazero.launchers import ALLOCATOR, stay_near
from megazero.parallel_state import Links, ParallelState
from megazero.settings import listed
from megazero.training.heartbeat import missing_keys
from megazero.training.signals import EXIT_FAILED, die_of_signals

LAUNCH_FOLDER = "MEGAZERO_LAUNCH_FOLDER"  # the folder in which ranks that `launch` starts meet and write their errors
SHARE_DEVICE = "MEGAZERO_SHARE_DEVICE"  # for tests only: where it is set, several ranks may compute on one CUDA device

_PROBLEMS, _MET, _ALL_MET, _READ, _ALL_READ = "problems", "met", "all met", "read", "all read"
_CHOICES, _SEARCHED, _MISSING = "choices", "searched", "missing"
# The keys that every rank must have alike: not those of a host, nor what rank 0 alone does.
_OF_SOME_RANKS = ("data.", "logging.", "launch.")
_OF_ALL_RANKS = {
    *("data.document_mask", "data.validation_fraction"),
    *("logging.every_steps", "logging.straggler_every_steps", "logging.pipeline_trace_step", "logging.profile_steps"),
}
_OF_A_HOST = {
    *("zero.offload.nvme_path", "zero.offload.pin_memory", "parallel.schedule_file", "parallel.timeout_seconds"),
    *("training.run_dir", "checkpoint.directory", "checkpoint.host_memory_bytes"),
}
_MOST_PROBLEMS = 64  # that a rank reads
_ENDED = "megazero/ended"
_LOOK_SECONDS = 0.5  # between two looks of a spare rank at the store
_FAREWELL_SECONDS = 10.0  # rank 0 waits so long for spare ranks: the store may end with it


class DeviceError(RuntimeError):
    """The machine lacks the devices that the configuration requires."""


class MissingRanksError(RuntimeError):
    """Some ranks have not started in time; the message lists them."""


def device_type(config: RunConfig, local_ranks: int) -> str:
    """Return the device type on which `local_ranks` ranks of this machine compute, "cpu" or "cuda".

    If a machine has lost a device, the job of a launcher must fail instead of training at the speed of a CPU.  Ranks that
    the command itself has started may use the CPU; `train_rank` then prints a line.

    Raises: DeviceError: some of these ranks have no device.
    """
    choice, devices = config.launch.device, cuda_devices()
    if choice == "cpu" or (choice == "auto" and not devices):
        return "cpu"
    if device_index(os.environ, devices, local_ranks) is None:
        if choice == "auto" and LAUNCH_FOLDER in os.environ:
            return "cpu"
        here = " (LOCAL_WORLD_SIZE is unset, so all ranks count)" if _is_local_world_unknown() else ""
        raise DeviceError(
            f"launch.device={choice} needs a CUDA device for each of {local_ranks} ranks on this machine{here}, torch finds "
            f"{devices}; start fewer ranks, or set launch.device=cpu to compute without CUDA"
        )
    return "cuda"


def device_index(environment: Mapping[str, str], devices: int, local_ranks: int) -> int | None:
    """Return the index of the CUDA device, among those that this rank sees, on which it computes; None if the machine
    has too few.

    A launcher may show each rank only its own device, as `srun --gpus-per-task=1` does.  torchrun does so only with
    `--virtual-local-rank`, which gives every rank the local rank 0.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if devices and SHARE_DEVICE in environment:
        return local_rank % devices
    has_launcher = "RANK" in environment and LAUNCH_FOLDER not in environment
    has_launcher &= local_rank == 0 or "TORCHELASTIC_RUN_ID" not in environment
    if devices == 1 and has_launcher and "," not in (environment.get("CUDA_VISIBLE_DEVICES") or ","):
        return 0
    return local_rank if local_ranks <= devices else None


def cuda_devices() -> int:
    """Return the number of CUDA devices that torch finds on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _is_local_world_unknown() -> bool:
    """Whether a launcher has started this rank without saying how many ranks it has started on this machine."""
    return "RANK" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ


def local_world_size(world: int) -> int:
    """Return how many of the ranks run on this machine; all of them if the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments, unless the user has configured the allocator.  Call this before a
    device is used.

    Buckets, activations and compiled kernels ask for blocks of many sizes; segments of fixed size would keep gaps.
    """
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


def this_rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def this_place() -> str:
    """Return the rank and host of this process, for messages."""
    return f"rank {this_rank()} on {socket.gethostname()}"


def started_ranks() -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def open_store(timeout: timedelta) -> Store | None:
    """Return the store through which the ranks find one another; None for a single process."""
    world, folder = started_ranks(), os.environ.get(LAUNCH_FOLDER)
    if world == 1:
        return None
    store = FileStore(str(Path(folder) / "ranks"), world) if folder else open_meeting(this_rank(), world, timeout)
    store.set_timeout(timeout)
    return of_this_start(store)


def choices_of(config: RunConfig) -> dict[str, str]:
    """Return, by key, the settings that must be equal on every rank: ranks that differ would wait for one another."""
    values = values_by_key(config.model_dump(mode="json"))
    alike = {key for key in values if not key.startswith(_OF_SOME_RANKS)} - _OF_A_HOST | _OF_ALL_RANKS
    return {key: str(values[key]) for key in sorted(alike)}


def place_of(run: ResolvedRun) -> dict[str, str]:
    """Return, by name, the properties of this rank's machine and device that must be equal on all ranks that train.

    Empty for a spare rank.  Raises: DeviceError.
    """
    if this_rank() >= run.world_size:
        return {}
    found = {"the device": device_type(run.config, local_world_size(run.world_size))}
    if _is_local_world_unknown():
        hint = "LOCAL_WORLD_SIZE is unset: set it to the ranks of a machine"
        found[f"the machine of all ranks ({hint})"] = socket.gethostname()
    return found


def meet(store: Store, timeout: timedelta, problem: str | None = None, *choices: Mapping[str, str]) -> list[str]:
    """Exchange and return the problems that keep ranks from starting.  Every started rank calls this once, spare ones
    too.

    Otherwise a rank that ended before the process group existed would leave the others waiting without an explanation.

    Args:
        timeout: how long to wait for the other ranks.
        problem: the problem that keeps this rank from starting.
        choices: the results of `choices_of` and `place_of`.  Each is compared among the ranks where it is not empty,
            since ranks that differ would wait for one another in different operations.

    Returns: each problem once, with the ranks and hosts that have it; empty if every rank can start.

    Raises: MissingRanksError: not all ranks have started in time.
    """
    world = started_ranks()
    if problem is not None:
        store.set(f"{_PROBLEMS}/{store.add(_PROBLEMS, 1)}", json.dumps([this_place(), problem]))
    compared = [f"{_CHOICES}/{number}" for number in range(len(choices))]
    for prefix, table in zip(compared, choices, strict=True):
        mine = json.dumps(dict(sorted(table.items())))
        if table and store.add(f"{prefix}/{sha256(mine.encode()).hexdigest()}", 1) == 1:  # the first of those alike
            store.set(f"{prefix}/{store.add(prefix, 1)}", json.dumps([this_place(), mine]))
    store.set(_met(this_rank()), "")
    if store.add(_MET, 1) == world:
        store.set(_ALL_MET, "")
    try:
        store.wait([_ALL_MET], timeout)
    except RuntimeError as error:
        within = f"have started within {timeout.total_seconds():g} s"
        raise MissingRanksError(_missing(store, world, within)) from error
    unlike = [prefix for prefix in compared if store.add(prefix, 0) > 1]
    differing = [_differing(*(json.loads(store.get(f"{prefix}/{n}")) for n in (1, 2))) for prefix in unlike]
    count, places = store.add(_PROBLEMS, 0), dict[str, list[str]]()
    for number in range(1, min(count, _MOST_PROBLEMS) + 1):
        place, text = json.loads(store.get(f"{_PROBLEMS}/{number}"))
        places.setdefault(text, []).append(place)
    if count or differing:  # rank 0 may hold the store: it ends last
        if store.add(_READ, 1) == world:
            store.set(_ALL_READ, "")
        with contextlib.suppress(RuntimeError):
            store.wait([_ALL_READ], timedelta(seconds=_FAREWELL_SECONDS if this_rank() == 0 else 0.001))
    texts = [text if count == len(some) == world else f"{listed(some, 4)}: {text}" for text, some in places.items()]
    return texts + differing


def _met(rank: int) -> str:
    return f"{_MET}/{rank}"


def _missing(store: Store, world: int, within: str) -> str:
    """List the ranks that have not started.  One rank searches and reports to the others, to spare the store."""
    try:
        if store.add(_SEARCHED, 1) == 1:
            absent = set(missing_keys(store, [_met(rank) for rank in range(world)]))
            missing = [rank for rank in range(world) if _met(rank) in absent]
            came, them = world - len(missing), listed(_intervals(missing), 4) or "none any more"
            text = f"only {came} of {world} ranks {within}; missing: {them}; look at their output and machines"
            store.set(_MISSING, text)
        store.wait([_MISSING], timedelta(seconds=_FAREWELL_SECONDS))
        return store.get(_MISSING).decode()
    except RuntimeError:  # the rank that holds the store has ended
        return f"not all of {world} ranks {within}, and their store does not answer: look at the output of rank 0"


def _intervals(ranks: Sequence[int]) -> list[str]:
    """Format ascending ranks as a text in which consecutive ranks form an interval."""
    groups = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    intervals = [[rank for _, rank in group] for _, group in groups]
    return [f"rank {own[0]}" if len(own) == 1 else f"ranks {own[0]} to {own[-1]}" for own in intervals]


def _differing(a: tuple[str, str], b: tuple[str, str]) -> str:
    (place, first), (elsewhere, second) = ((where, json.loads(text)) for where, text in (a, b))
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    pairs = [f"{key} is {first.get(key)} on {place} and {second.get(key)} on {elsewhere}" for key in keys]
    hint = "start all with one run file and the same overrides, on machines that have the same devices"
    return f"the ranks have different runs: {listed(pairs, 4, '; ')}; {hint}"


def join_world(run: ResolvedRun, store: Store | None = None) -> ParallelState:
    """Join the process group that the environment describes; without a launcher, a world of one rank.

    `store` is that of `open_store`, if the caller has opened it already.  Raises: DeviceError.
    """
    config, world, rank = run.config, run.world_size, this_rank()
    local_world = local_world_size(world)
    device, backend = torch.device("cpu"), "gloo"
    if device_type(config, local_world) == "cuda":
        index = device_index(os.environ, cuda_devices(), local_world)
        device, backend = torch.device(f"cuda:{index}"), "cpu:gloo,cuda:nccl"
        if SHARE_DEVICE in os.environ:
            os.environ["NCCL_HOSTID"] = f"machine {rank}"  # NCCL refuses two ranks on one device of one machine
    prepare_rank(device, local_world)
    if device.type == "cuda" and local_world > 1:
        place: Any = torch.cuda.get_device_properties(device)
        stay_near(f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0", local_world)
    seconds = config.parallel.timeout_seconds
    if world > 1:
        timeout = timedelta(seconds=seconds)
        store = store or open_store(timeout)
        # Unlike Triton's, inductor's own launcher holds Python's lock while a device's queue is full: the watchdog needs it.
        os.environ.setdefault("TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER", "0")
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    ctas = config.parallel.nccl_max_ctas.model_dump()
    return ParallelState(run.grid, rank, Links(device, seconds, local_world, max_ctas=ctas))


def leave_world() -> None:
    """Undo `join_world`.  No reference to its parallel state may remain."""
    gc.collect()  # a process group in a reference cycle would abort the exit
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_as_spare(store: Store) -> int:
    """Wait until the ranks that train are done.  Returns the exit status that rank 0 wrote, or 1 if the store died.

    SIGTERM and SIGINT end the wait at once. SIGUSR1 does not: every process of a job receives it, and if this rank
    ended, torchrun would kill the others while they save.
    """
    die_of_signals()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        while not store.check([_ENDED]):
            time.sleep(_LOOK_SECONDS)
        status = int(store.get(_ENDED))
        store.set(_left(this_rank()), "")
    except RuntimeError:  # the agent or the rank that held the store has died
        return EXIT_FAILED
    return status


def release_spare_ranks(store: Store, ranks: Sequence[int], status: int) -> None:
    """Write this rank's exit status for the spare ranks and wait until they have read it.  Called on rank 0."""
    if ranks:
        with contextlib.suppress(RuntimeError):  # a spare rank may have died
            store.set(_ENDED, str(status))
            store.wait([_left(rank) for rank in ranks], timedelta(seconds=_FAREWELL_SECONDS))


def _left(rank: int) -> str:
    return f"megazero/left/{rank}"
