"""Starting ranks: join torchrun where it started us, start the ranks through torch's elastic launcher where we are alone.

Ranks that this module starts talk over the loopback interface only and meet through a file, so nothing listens to the
outside.  On the CPU they are forked: torch is imported once instead of once per rank.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megazero.checkpoint.index import CheckpointError
from megazero.comm.collectives import LostPeerError
from megazero.config import ResolvedRun, RunConfig
from megazero.engine import NonFiniteError
from megazero.parallel_state import ParallelState, RankGrid
from megazero.training.loop import RunSummary, train

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
_RAISED_ON_EVERY_RANK = (CheckpointError, NonFiniteError, ValueError, FileNotFoundError)
_MEETING_FILE = "MEGAZERO_MEETING_FILE"


def launched_by_torchrun() -> bool:
    """Whether a launcher has already started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def device_type(config: RunConfig) -> str:
    """ "cpu" or "cuda", resolving "auto"."""
    if config.launch.device != "auto":
        return config.launch.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_rank(run: ResolvedRun) -> RunSummary:
    """Join the world that the environment describes and train.  Ends the process with status 1 when training fails.

    Args:
        run: the resolved run.

    Errors that every rank sees are printed by rank 0; what one rank sees is printed by that rank.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        state = _join(run, rank)
        summary = train(run, state, show=lambda line: print(line, flush=True))
    except _RAISED_ON_EVERY_RANK as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        _stop()
    except LostPeerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _stop()
    except Exception:
        print(f"error on rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        _stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    return summary


def _stop() -> None:
    # Not sys.exit: communication threads may still wait for ranks that are gone.
    sys.stdout.flush()
    os._exit(EXIT_FAILED)


def _join(run: ResolvedRun, rank: int) -> ParallelState:
    config, world = run.config, run.world_size
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    device = torch.device("cpu")
    backend = "gloo"
    if device_type(config) == "cuda":
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    parallel = config.parallel
    if world > 1:
        timeout = timedelta(seconds=parallel.timeout_seconds)
        meeting = os.environ.get(_MEETING_FILE)
        if meeting:
            dist.init_process_group(
                backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timeout
            )
        else:
            dist.init_process_group(backend, timeout=timeout)
    grid = RankGrid(tp=parallel.tp, dp=run.dp, pp=parallel.pp, order=parallel.order)
    return ParallelState(grid, rank, device, parallel.timeout_seconds)


def launch(run: ResolvedRun) -> RunSummary | None:
    """Start `launch.nproc_per_node` ranks on this machine and wait for them.

    Args:
        run: the resolved run.

    Returns: rank 0's summary, or None when a rank failed (it has said why).
    """
    count = run.world_size
    if count == 1:
        return run_rank(run)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    on_cpu = device_type(run.config) == "cpu"
    if on_cpu:
        import torch._dynamo  # noqa: F401  every optimizer imports it: once here instead of once per rank

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory(prefix="megazero-") as folder:
        os.environ[_MEETING_FILE] = str(Path(folder) / "ranks")
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
            logs_specs=DefaultLogsSpecs(),
            shutdown_timeout=5,
        )
        try:
            summaries = elastic_launch(config, run_rank)(run)
        except ChildFailedError as error:
            # A rank that failed by itself has said why; the launcher ends the others with SIGTERM.
            for rank, failure in sorted(error.failures.items()):
                if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                    lost = f"error: rank {rank} was killed by {failure.signal_name()}; the other ranks were stopped"
                    print(lost, file=sys.stderr, flush=True)
            return None
        finally:
            del os.environ[_MEETING_FILE]
    return summaries[0]
