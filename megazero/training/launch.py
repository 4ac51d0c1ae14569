"""Starting ranks: join torchrun where it started us, start the ranks through torch's elastic launcher where we are alone.

Ranks that this module starts talk over the loopback interface only and meet through a file, so nothing listens to the
outside.  On the CPU they are forked: torch is imported once instead of once per rank.
"""

from __future__ import annotations

import gc
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

import torch
import torch.distributed as dist

from megazero.checkpoint.index import CheckpointError
from megazero.comm.collectives import LostPeerError
from megazero.config import ResolvedRun, RunConfig
from megazero.engine import NonFiniteError
from megazero.parallel_state import ParallelState, RankGrid
from megazero.schedules.simulate import ScheduleError
from megazero.training.batches import DataError
from megazero.training.loop import RunSummary, train
from megazero.zero.loss_scaler import LossScaleError
from megazero.zero.storage import StorageError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

T = TypeVar("T")

EXIT_FAILED = 1
_FOLDER = "MEGAZERO_LAUNCH_FOLDER"  # where ranks that this module starts meet, and leave their errors


class DeviceError(RuntimeError):
    """The devices that a configuration asks for are not there."""


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
    StorageError,
)
# A rank that lost a peer waits so long before it ends, so that the launcher meets the cause before its consequences.
_CAUSE_FIRST_SECONDS = 1.0


def launched_by_torchrun() -> bool:
    """Whether a launcher has already started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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


def train_rank(run: ResolvedRun, state: ParallelState) -> RunSummary:
    """The work of one rank of a training run; arguments as `train`."""
    return train(run, state, show=lambda line: print(line, flush=True))


def run_ranks(run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T]) -> T | None:
    """Do the work on every rank: on those that torchrun started, else on `launch.nproc_per_node` that are started here.

    Args:
        run: the resolved run; its shape is that of the world.
        work: what each rank does; picklable, as is its answer.

    Returns: the answer of this rank, or of rank 0 where the ranks were started here; None when one failed (it has said
        why).
    """
    return run_rank(run, work) if launched_by_torchrun() else launch(run, work)


def run_rank(run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T]) -> T | None:
    """Join the world that the environment describes and do the work of this rank; arguments as `run_ranks`.

    Returns: the answer, or None when the work failed and this rank has reported why.
    """
    try:
        answer = work(run, join_world(run))
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
    return answer


def _report(text: str, *, is_cause: bool) -> None:
    """Say why this rank failed: to the launcher, which prints each cause once, or where there is none to the terminal."""
    rank, folder = int(os.environ.get("RANK", "0")), os.environ.get(_FOLDER)
    if folder is None:
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
    else:
        # Read in order of their names: causes before their consequences.
        (Path(folder) / f"error-{0 if is_cause else 1}-{rank:06d}").write_text(text)


def _run_started_rank(run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T]) -> T:
    answer = run_rank(run, work)
    if answer is None:
        leave_at_once()
    return answer


def leave_at_once() -> NoReturn:
    """End this process without the interpreter's shutdown: communication threads may still wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def join_world(run: ResolvedRun) -> ParallelState:
    """This process's place among the ranks that the environment describes; one rank where it describes none.

    Args:
        run: the resolved run.

    Raises:
        DeviceError: there are too few devices.
    """
    config, world, rank = run.config, run.world_size, int(os.environ.get("RANK", "0"))
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
        folder = os.environ.get(_FOLDER)
        if folder:
            meeting = f"file://{folder}/ranks"
            dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    grid = RankGrid(tp=parallel.tp, dp=run.dp, pp=parallel.pp, order=parallel.order)
    return ParallelState(grid, rank, device, parallel.timeout_seconds, run.config.zero.shard_group_size, local_world)


def leave_world() -> None:
    """Leave the world that `join_world` joined; nothing else may hold on to its parallel state."""
    gc.collect()  # a process group that something still refers to would outlive its destruction and abort the exit
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(run: ResolvedRun, work: Callable[[ResolvedRun, ParallelState], T]) -> T | None:
    """Start `launch.nproc_per_node` ranks on this machine and wait for them; arguments as `run_ranks`.

    Returns: rank 0's answer, or None when a rank failed (it has said why).
    """
    count = run.world_size
    if count == 1:
        return run_rank(run, work)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
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
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are told below
    with tempfile.TemporaryDirectory(prefix="megazero-") as folder:
        os.environ[_FOLDER] = folder
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
        try:
            answers = elastic_launch(config, _run_started_rank)(run, work)
        except ChildFailedError as error:
            _report_failures(Path(folder), error)
            return None
        finally:
            del os.environ[_FOLDER]
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
