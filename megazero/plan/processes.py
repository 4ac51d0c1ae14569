"""A function in forked processes of one thread each that share a gloo group: how this machine is measured."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by every optimizer; once here instead of once in each process
import torch.distributed as dist

_CAUSE_SECONDS = 1.0  # in which a death is seen that another process has told of first


class ProcessFailedError(RuntimeError):
    """A process raised, died or did not finish."""


def in_processes(count: int, work: Callable[..., Any], *arguments: Any, timeout: float = 600) -> list[Any]:
    """Run `work(rank, *arguments)` in `count` processes that share a default group; return the answers in rank order.

    Args:
        timeout: seconds without an answer, and of every wait inside.

    Raises:
        ProcessFailedError: of the first that failed.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = list[Connection](), []
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            given = (rank, count, str(Path(folder) / "store"), timeout, work, arguments, there)
            processes.append(context.Process(target=_main, args=given, daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        try:
            return _answers(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], timeout: float) -> list[Any]:
    answers = dict[int, Any]()
    while len(answers) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in answers], timeout)
        if not ready:
            raise ProcessFailedError(f"no process of {len(pipes)} finished within {timeout} s")
        rank = pipes.index(ready[0])  # type: ignore[arg-type]
        try:
            is_done, answers[rank] = pipes[rank].recv()
        except EOFError:
            raise ProcessFailedError(f"process {rank} of {len(pipes)} died without an answer") from None
        if not is_done:
            short, trace = answers[rank]
            for pipe in wait([one for other, one in enumerate(pipes) if other not in answers], _CAUSE_SECONDS):
                if _has_died(pipe):  # type: ignore[arg-type]
                    raise ProcessFailedError(f"process {pipes.index(pipe)} of {len(pipes)} died without an answer")  # type: ignore[arg-type]
            raise ProcessFailedError(f"process {rank} of {len(pipes)}: {short}") from RuntimeError(trace)
    return [answers[rank] for rank in range(len(pipes))]


def _has_died(pipe: Connection) -> bool:
    try:
        pipe.recv()
    except EOFError:
        return True
    return False


def _end_with(parent: int) -> None:
    """End this process when its parent has been killed; it would disturb later measurements."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _main(
    rank: int,
    count: int,
    store: str,
    timeout: float,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    out: Connection,
) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.set_num_threads(1)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
        dist.barrier()
        out.send((True, work(rank, *arguments)))
    except BaseException as error:  # the parent raises
        out.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
    finally:
        out.close()
        os._exit(0)  # gloo's threads may still wait for peers
