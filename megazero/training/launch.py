"""Starting ranks: join torchrun where it started us, start the ranks through torch's elastic launcher where we are alone.

Ranks that this module starts talk over the loopback interface only and meet through a file, so nothing listens to the
outside.  On the CPU they are forked: torch is imported once instead of once per rank.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from megazero.checkpoint.index import CheckpointError
from megazero.comm.collectives import LostPeerError
from megazero.config import ResolvedRun
from megazero.engine import NonFiniteError
from megazero.parallel_state import ParallelState
from megazero.schedules.proof import ScheduleError
from megazero.training.allocator import prefer_expandable_segments
from megazero.training.batches import DataError
from megazero.training.loop import RunSummary, train
from megazero.training.signals import EXIT_FAILED, EXIT_STOPPED, StopRequest, die_of_signals
from megazero.training.world import (
    LAUNCH_FOLDER,
    DeviceError,
    SpareRankError,
    device_type,
    join_world,
    leave_world,
    meet,
    started_ranks,
    tell_spare_ranks,
    this_rank,
    wait_as_spare,
)
from megazero.zero.loss_scaler import LossScaleError
from megazero.zero.storage import StorageError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

T = TypeVar("T")

# Errors whose text says all there is to say; any other comes with its traceback.
_TOLD_IN_WORDS = (
    CheckpointError,
    DataError,
    DeviceError,
    LossScaleError,
    LostPeerError,
    NonFiniteError,
    OSError,
    ScheduleError,
    SpareRankError,
    StorageError,
)
# A rank that lost a peer waits so long before it ends, so that the launcher meets the cause before its consequences.
_CAUSE_FIRST_SECONDS = 1.0
# What the launcher itself dies of, with its ranks, while a `StopRequest` takes the signals that ask for a stop.
_DEADLY = "SIGHUP,SIGQUIT"


def launched_by_torchrun() -> bool:
    """Whether a launcher has already started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def train_rank(run: ResolvedRun, state: ParallelState, stop: StopRequest) -> RunSummary:
    """The work of one rank of a training run; arguments as `train`, and what says whether to stop."""

    def show(line: str) -> None:
        print(line, flush=True)

    if state.rank == 0:
        for notice in (*run.notices, *_torchrun_notices(run)):
            show(notice)
    summary = train(run, state, show, stop.wanted)
    stop.close()
    return summary


def _torchrun_notices(run: ResolvedRun) -> list[str]:
    shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") != "1"
    if not (run.config.elastic.enabled and shares):
        return []
    return [
        "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: it keeps the address of its first "
        "node otherwise, and ranks that are started again may not find one another"
    ]


def run_ranks(
    run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T], stop: StopRequest | None = None
) -> T | None:
    """Do the work on every rank: on those that torchrun started, else on `launch.nproc_per_node` that are started here.

    Args:
        run: the resolved run; its shape is that of the world.
        work: what each rank does; picklable, as is its answer.
        stop: the request to stop that `work` looks at, listening; None where signals end the work.

    Returns: the answer of this rank, or of rank 0 where the ranks were started here; None when one failed (it has said
        why).

    A spare rank of an elastic run does not return: it ends as rank 0 does.
    """
    return run_rank(run, work) if launched_by_torchrun() else launch(run, work, stop)


def run_rank(run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T]) -> T | None:
    """Join the world that the environment describes and do the work of this rank; arguments as `run_ranks`.

    Returns: the answer, or None when the work failed and this rank has reported why.
    """
    prefer_expandable_segments(os.environ)
    try:
        store = meet(timedelta(seconds=run.config.parallel.timeout_seconds))
        if store is not None and this_rank() >= run.world_size:
            raise SystemExit(wait_as_spare(store))
        answer = work(run, join_world(run, store))
    except LostPeerError as error:
        _report(str(error), is_cause=False)
        time.sleep(_CAUSE_FIRST_SECONDS)
        return None
    except _TOLD_IN_WORDS as error:
        _report(str(error), is_cause=True)
        return None
    except Exception:
        _report(traceback.format_exc(), is_cause=True)
        return None
    leave_world()
    if store is not None and this_rank() == 0:
        tell_spare_ranks(store, range(run.world_size, started_ranks()), exit_status(answer))
    return answer


def exit_status(answer: object) -> int:
    """How a process ends whose rank gave this answer: 0, or 75 for a run that was stopped before its last step."""
    return EXIT_STOPPED if isinstance(answer, RunSummary) and answer.stopped else 0


def _report(text: str, *, is_cause: bool) -> None:
    """Say why this rank failed: to the launcher, which prints each cause once, or where there is none to the terminal."""
    rank, folder = this_rank(), os.environ.get(LAUNCH_FOLDER)
    if folder is None:
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
    else:
        # Read in order of their names: causes before their consequences.
        (Path(folder) / f"error-{0 if is_cause else 1}-{rank:06d}").write_text(text)


def _run_started_rank(
    run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T], stop: StopRequest | None, launcher: int
) -> T:
    if stop is not None:
        stop.listen()
    answer = run_rank(run, work)
    if stop is not None:
        die_of_signals()  # one comes when the launcher dies, and nobody then takes the answer
    if answer is None or os.getppid() != launcher:
        leave_at_once()
    return answer


def leave_at_once() -> NoReturn:
    """End this process without the interpreter's shutdown: communication threads may still wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def launch(
    run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T], stop: StopRequest | None = None
) -> T | None:
    """Start `launch.nproc_per_node` ranks on this machine and wait for them; arguments as `run_ranks`.

    Returns: rank 0's answer, or None when a rank failed (it has said why).
    """
    count = run.world_size
    if count == 1:
        return run_rank(run, work)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    try:
        on_cpu = device_type(run.config, count) == "cpu"
    except DeviceError as error:
        print(error, file=sys.stderr)
        return None
    if on_cpu:
        import torch._dynamo  # noqa: F401  every optimizer imports it: once here instead of once per rank

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are told below
    with tempfile.TemporaryDirectory(prefix="megazero-") as folder:
        os.environ[LAUNCH_FOLDER] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "agent"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.2,
            start_method="fork" if on_cpu else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        if stop is not None:
            stop.spread(Path(folder))
            config.signals_to_handle = _DEADLY
        try:
            answers = elastic_launch(config, _run_started_rank)(run, work, stop, os.getpid())
        except ChildFailedError as error:
            _report_failures(Path(folder), error)
            return None
        except SignalException as error:
            print(f"{error.sigval.name}: the ranks were stopped", file=sys.stderr)
            return None
        finally:
            del os.environ[LAUNCH_FOLDER]
    return answers[0]


def _report_failures(folder: Path, error: ChildFailedError) -> None:
    """Print each cause once, with the ranks that met it; what others suffered from it only where no cause is known."""
    # The launcher itself ends the ranks that are left with SIGTERM.
    killed = {
        rank: failure.signal_name()
        for rank, failure in sorted(error.failures.items())
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    }
    for rank, name in killed.items():
        print(f"rank {rank} was killed by {name}; the other ranks were stopped", file=sys.stderr)
    told: dict[str, list[int]] = {}
    for path in sorted(folder.glob("error-*")):
        told.setdefault(path.read_text(), []).append(int(path.name.split("-")[2]))
    for text, ranks in told.items():
        print(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}", file=sys.stderr)
    if not killed and not told:
        print(error, file=sys.stderr)
    sys.stderr.flush()
