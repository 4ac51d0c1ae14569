"""A function on forked gloo ranks."""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by every optimizer; once here instead of once per rank
import torch.distributed as dist


def _main(rank: int, world: int, store: str, body: Callable[..., Any], args: tuple[Any, ...], out: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        answer = ("ok", body(rank, *args))
    except BaseException as error:
        answer = ("error", (f"{type(error).__name__}: {error}", traceback.format_exc()))
    out.send(answer)
    out.close()
    os._exit(0)  # gloo's threads may still wait for a lost rank


class RankFailedError(RuntimeError):
    """A rank raised, died or did not finish."""


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
    """body(rank, *args) on forked gloo ranks, one thread each; results in rank order.  Raises: RankFailedError."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            given = (rank, world, str(Path(folder) / "store"), body, args, sender)
            processes.append(context.Process(target=_main, args=given, daemon=True))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        try:
            results: dict[int, Any] = {}
            while len(results) < world:
                ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout)
                if not ready:
                    raise RankFailedError(f"no rank finished within {timeout} s")
                rank = pipes.index(ready[0])
                try:
                    kind, results[rank] = pipes[rank].recv()
                except EOFError:
                    raise RankFailedError(f"rank {rank} died without a result") from None
                if kind == "error":
                    short, trace = results[rank]
                    raise RankFailedError(f"rank {rank}: {short}") from RuntimeError(trace)
            return [results[rank] for rank in range(world)]
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
