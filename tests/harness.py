"""Worlds of gloo ranks as forked processes.

    results = run_world(4, law, argument)      law(rank, argument) runs on four ranks; results in rank order

A rank that fails, dies or hangs ends the world at once with an error that names it.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by every optimizer; once here instead of once per rank
import torch.distributed as dist

WORLD_TIMEOUT_SECONDS = 120


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish."""


def _main(
    rank: int, world: int, store: str, timeout: float, body: Callable[..., Any], args: tuple[Any, ...], out: Connection
) -> None:
    gc.freeze()  # what was forked stays shared: collecting it would copy its pages
    try:
        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
        answer = ("ok", body(rank, *args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    # plain pickle, not torch's shared-memory reductions: a result must outlive its rank
    out.send_bytes(pickle.dumps(answer))
    out.close()
    os._exit(0)  # no interpreter shutdown: gloo's threads may still be waiting for lost peers


def run_world(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = WORLD_TIMEOUT_SECONDS,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Run `body(rank, *args)` on every rank of a new world and return the results in rank order.

    Args:
        world: number of ranks; 1 runs without a process group.
        body: any callable; forked, so it need not be importable. Returns something picklable.
        timeout: seconds for the whole world, and for every wait inside it.
        may_die: ranks that the test kills itself; their result is None.

    Raises:
        RankFailedError: names the first rank that raised, died or hung.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(rank, world, store, timeout, body, args, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout, may_die)
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()


def _collect(pipes: list[Connection], timeout: float, may_die: tuple[int, ...]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    open_ranks = set(range(len(pipes)))
    end = time.monotonic() + timeout
    while open_ranks:
        ready = wait([pipes[rank] for rank in open_ranks], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(open_ranks)} did not finish within {timeout} s")
        for rank in [rank for rank in sorted(open_ranks) if pipes[rank] in ready]:
            open_ranks.discard(rank)
            try:
                kind, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                if rank in may_die:
                    continue
                raise RankFailedError(f"rank {rank} died without a result") from None
            if kind == "error":
                raise RankFailedError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return results
