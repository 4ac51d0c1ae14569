"""A function in forked processes of one thread each that share a gloo group: how this machine is measured."""

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by every optimizer; once here instead of once in each process
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes


class ProcessFailedError(RuntimeError):
    """A process raised, died or did not finish."""


def in_processes(count: int, work: Callable[..., Any], *arguments: Any, timeout: float = 600) -> list[Any]:
    """Run `work(rank, *arguments)` in `count` processes that share a default group; return the answers in rank order.

    Args:
        timeout: seconds until all have answered, and of every wait inside.

    Raises:
        ProcessFailedError: of the first that failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, ends = Path(name), time.monotonic() + timeout
        given = count, folder, timeout, work, arguments
        group = start_processes(_main, given, count, join=False, daemon=True, start_method="fork")
        assert group is not None
        try:
            while not group.join(max(0.0, ends - time.monotonic())):  # it returns whenever one of them ends
                if time.monotonic() >= ends:
                    raise ProcessFailedError(f"{count} processes did not all finish within {timeout} s")
        except ProcessException as error:
            rank, reason = _first_failure(group, error.error_index)
            raise ProcessFailedError(f"process {rank} of {count}: {reason}") from error
        finally:
            for process in group.processes:
                process.kill()
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(count)]


def _first_failure(group: ProcessContext, found: int) -> tuple[int, str]:
    """Return the rank that failed first and why: the others lose their connection to it and fail, too.

    A process that died left no traceback, and its end is what the tracebacks of the others are about.

    Args:
        found: a rank that failed.
    """
    raised = {rank: trace for rank, path in enumerate(group.error_files) if (trace := Path(path)).exists()}
    died = [
        rank
        for rank, process in enumerate(group.processes)
        if rank not in raised and process.exitcode not in (0, -signal.SIGTERM)  # SIGTERM: torch ended it
    ]
    if died or not raised:
        rank = died[0] if died else found
        return rank, f"exit code {group.processes[rank].exitcode}"
    rank = min(raised, key=lambda rank: raised[rank].stat().st_mtime_ns)
    return rank, str(pickle.loads(raised[rank].read_bytes())).strip().splitlines()[-1]


def _main(
    rank: int, count: int, folder: Path, timeout: float, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=limit)
    dist.barrier()
    (folder / str(rank)).write_bytes(pickle.dumps(work(rank, *arguments)))
