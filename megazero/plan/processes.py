"""Runs a function in forked processes, to measure this machine.  Each has one thread, and they share a gloo group."""

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by every optimizer; once here instead of once in each process
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes


class ProcessFailedError(RuntimeError):
    """A forked process raised an error, died, or did not finish in time."""


def in_processes(count: int, work: Callable[..., Any], *arguments: Any, timeout: float = 600) -> list[Any]:
    """Run `work(rank, *arguments)` in `count` processes that share a default group; return their results by rank.

    Args:
        timeout: seconds until all must have finished, and the timeout of every collective inside.

    Raises:
        ProcessFailedError: a process failed; the message has its rank and its error or exit code.
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
            reason = str(error).strip().splitlines()[-1]
            raise ProcessFailedError(f"process {error.error_index} of {count}: {reason}") from error
        finally:
            for process in group.processes:
                process.kill()
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(count)]


def _main(
    rank: int, count: int, folder: Path, timeout: float, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=limit)
    dist.barrier()
    (folder / str(rank)).write_bytes(pickle.dumps(work(rank, *arguments)))
