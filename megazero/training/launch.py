"""Starts the ranks of a run: joins torchrun if it started this process, else starts them itself.

Ranks that this module starts use the loopback interface only and meet through a file, so nothing listens to the network.
On the CPU they are forked: torch is imported once instead of once per rank.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from megazero.checkpoint.index import OwnerError
from megazero.comm.meeting import name_hint
from megazero.comm.messages import LostPeerError
from megazero.config import ConfigError, ResolvedRun
from megazero.config.load import import_extensions
from megazero.data.sampler import UnfitDataError
from megazero.parallel_state import ParallelState
from megazero.terminal import Terminal, drain, warn
from megazero.training import world
from megazero.training.callbacks.base import RunSummary
from megazero.training.callbacks.registry import CallbackError
from megazero.training.signals import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, StopRequest, die_of_signals
from megazero.training.trainer import train
from megazero.training.world import join_world, leave_world

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessException

T = TypeVar("T")
Work = Callable[[ResolvedRun, ParallelState], T]  # what each rank does; picklable, as is its result


# Files in which ranks that are started here report why they failed, and rank 0 what it has found.
_CAUSE, _CONSEQUENCE, _ANSWER = "error-0", "error-1", "answer"
# How long a rank that cannot read its configuration waits for the others.
_MEETING_TIME = timedelta(seconds=600)
# So that nothing of a run of this machine listens to the network, whatever a profile exports.
_LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo")
# A rank that lost a peer ends this much later, so that the launcher sees the cause before its consequences.
_CAUSE_FIRST_SECONDS = 1.0


@dataclass(frozen=True)
class Failed:
    """The result of a run that ended with an error.  The error has been printed."""

    status: int = EXIT_FAILED  # of the process
    has_cause: bool = True  # to be mended; otherwise only peers were lost, and the same command may succeed


def train_rank(run: ResolvedRun, state: ParallelState, stop: StopRequest) -> RunSummary:
    """Train on one rank until the run is done, or until `stop` is requested."""
    show = Terminal()
    if state.rank == 0:
        for notice in run.notices:
            show(notice)
        if state.device.type == "cpu" and run.config.launch.device == "auto" and (devices := world.cuda_devices()):
            hint = f"launch.device=auto takes CUDA with a device for each rank, torch finds {devices}"
            show(f"computes on the CPU: {hint}")
        if _starts_again_in_one_store(run):
            show(
                "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: it keeps the address of its "
                "first node otherwise, and ranks that are started again may not find one another"
            )
    summary = train(run, state, show, stop.wanted)
    stop.close()
    return summary


def _starts_again_in_one_store(run: ResolvedRun) -> bool:
    """Whether torchrun on several nodes may restart the ranks with the store that the dead ranks used."""
    given = os.environ.get
    shares = given("TORCHELASTIC_USE_AGENT_STORE") == "True" and given("GROUP_WORLD_SIZE") != "1"
    return shares and (run.config.elastic.enabled or given("TORCHELASTIC_MAX_RESTARTS", "0") != "0")


def run_ranks(run: ResolvedRun, work: Work[T], stop: StopRequest | None = None) -> T | Failed:
    """Do the work on every rank: join the ranks that torchrun started, else start `launch.nproc_per_node` ranks here.

    `stop` is the stop request that `work` checks; None if signals end the work at once.  A spare rank of an elastic run
    does not return: it exits with the status of rank 0.

    Returns: the result of this rank, or of rank 0 if the ranks were started here; `Failed` if one failed and printed
    why.
    """
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # a launcher has started this process
    return run_rank(run, work) if is_rank or run.world_size == 1 else _launch(run, work, stop)


def run_rank(run: ResolvedRun, work: Work[T]) -> T | Failed:
    """Join the world that the environment describes and do the work of this rank."""
    world.prefer_expandable_segments(os.environ)
    try:
        (problem, place), timeout = _problem_and_place(run), timedelta(seconds=run.config.parallel.timeout_seconds)
        store = world.open_store(timeout)
        if (
            store is not None
            and world.LAUNCH_FOLDER not in os.environ
            and (problems := world.meet(store, timeout, problem, world.choices_of(run.config), place))
        ):
            return refuse(problems)
        if problem is not None:
            _report(problem, is_cause=True)
            return Failed(EXIT_REFUSED)
        if store is not None and world.this_rank() >= run.world_size:
            raise SystemExit(world.wait_as_spare(store))
        answer = work(run, join_world(run, store))
    except LostPeerError as error:
        _report(f"{error}{name_hint(os.environ)}", is_cause=False)
        time.sleep(_CAUSE_FIRST_SECONDS)
        return Failed(has_cause=" ended in step " in str(error))  # by an error of its own, which the watchdog has found
    except (OwnerError, ConfigError, UnfitDataError) as error:
        _report(str(error), is_cause=True)
        return Failed(EXIT_REFUSED)
    except Exception as error:
        _report(str(error) if _is_explained(error) else traceback.format_exc(), is_cause=True)
        return Failed()
    leave_world()
    if store is not None and world.this_rank() == 0:
        status = EXIT_STOPPED if isinstance(answer, RunSummary) and answer.stopped else 0
        world.release_spare_ranks(store, range(run.world_size, world.started_ranks()), status)
    return answer


def _is_explained(error: Exception) -> bool:
    """Whether the message of an error is enough for the user, as for this package's errors, unless a script's callback
    caused it.
    """
    is_own = type(error).__module__.startswith("megazero.") and not isinstance(error, CallbackError)
    return is_own or isinstance(error, OSError)


def _problem_and_place(run: ResolvedRun) -> tuple[str | None, dict[str, str]]:
    """Return the problem of this rank, a missing extension or device (None if it has none), and where it trains.

    A spawned rank is a new interpreter, so it may lack an extension that others have.
    """
    if problems := import_extensions(run.config.launch.extensions):
        return str(ConfigError(problems)), {}
    try:
        return None, world.place_of(run)
    except world.DeviceError as error:
        return str(error), {}


def refuse(problems: Sequence[str]) -> Failed:
    """Print the problems that keep ranks from starting, once on every host."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for problem in problems:
            warn(problem)
    return Failed(EXIT_REFUSED)


def tell_others(problem: str) -> Failed:
    """Print why this rank cannot start, and tell the other ranks that a launcher has started."""
    die_of_signals()  # there is nothing to save
    failed, found = refuse([f"{world.this_place()}: {problem}"]), list[str]()
    with suppress(RuntimeError, ValueError, OSError):  # the others do not come, or there is no launcher
        if (store := world.open_store(_MEETING_TIME)) is not None:
            found = world.meet(store, _MEETING_TIME, problem)
    refuse([line for line in found if not line.endswith(problem)])
    return failed


def _report(text: str, *, is_cause: bool) -> None:
    """Report why this rank failed: to the launcher, which prints each cause once, else to the terminal."""
    rank, folder = world.this_rank(), os.environ.get(world.LAUNCH_FOLDER)
    if folder is None:
        warn(f"rank {rank}: {text}")
    else:  # files are read in order of their names: causes before consequences
        (Path(folder) / f"{_CAUSE if is_cause else _CONSEQUENCE}-{rank:06d}").write_text(text)


def _run_started_rank(
    rank: int, run: ResolvedRun, work: Work[T], stop: StopRequest | None, folder: Path, launcher: int
) -> None:
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(run.world_size))
    os.environ |= {**numbers, **_LOOPBACK, world.LAUNCH_FOLDER: str(folder)}
    if stop is not None:
        stop.listen()
    answer = run_rank(run, work)
    if stop is not None:
        die_of_signals()  # one arrives when the launcher dies; then nobody reads the result
    if isinstance(answer, Failed) or os.getppid() != launcher:
        leave_at_once(answer.status if isinstance(answer, Failed) else EXIT_FAILED)
    if rank == 0:
        (folder / _ANSWER).write_bytes(pickle.dumps(answer))
    drain()


def leave_at_once(status: int = EXIT_FAILED) -> NoReturn:
    """Exit without the interpreter's shutdown, because communication threads may still wait for dead ranks."""
    drain()
    os._exit(status)


def _launch(run: ResolvedRun, work: Work[T], stop: StopRequest | None) -> T | Failed:
    """Start the ranks on this machine and wait for them."""
    from torch.multiprocessing.spawn import ProcessException, start_processes

    count = run.world_size
    try:
        on_cpu = world.device_type(run.config, count) == "cpu"
    except world.DeviceError as error:
        return refuse([str(error)])
    if on_cpu:
        import torch._dynamo  # noqa: F401  every optimizer imports it: once here instead of once per rank
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)  # failures are printed below
    with tempfile.TemporaryDirectory(prefix="megazero-") as name:
        folder = Path(name)
        if stop is not None:
            stop.spread(folder)
        arguments, method = (run, work, stop, folder, os.getpid()), "fork" if on_cpu else "spawn"
        ranks = start_processes(_run_started_rank, arguments, count, join=False, start_method=method)
        try:
            while not ranks.join():
                pass
        except ProcessException as error:
            return _report_failures(folder, error)
        finally:
            for process in ranks.processes:  # where an interrupt has ended the wait
                process.kill()
        answer: T = pickle.loads((folder / _ANSWER).read_bytes())
    return answer


def _report_failures(folder: Path, error: ProcessException) -> Failed:
    """Print each cause once, with the ranks that reported it; `error` is of the rank that ended first."""
    status, killed_by = getattr(error, "exit_code", EXIT_FAILED), getattr(error, "signal_name", None)
    if killed_by:
        warn(f"rank {error.error_index} was killed by {killed_by}; the other ranks were stopped")
    reported: dict[str, list[int]] = {}
    for path in sorted(folder.glob("error-*")):
        reported.setdefault(path.read_text(), []).append(int(path.name.split("-")[2]))
    for text, ranks in reported.items():
        warn(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}")
    if not killed_by and not reported:
        warn(str(error))
    status = EXIT_REFUSED if status == EXIT_REFUSED else EXIT_FAILED
    return Failed(status, has_cause=any(folder.glob(f"{_CAUSE}-*")))
