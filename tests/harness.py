"""Worlds of gloo ranks as forked processes, and commands without an interpreter's start-up.

    results = run_world(4, law, argument)      law(rank, argument) runs on four ranks; results in rank order
    done = run_command("train", "a.toml")      `megazero train a.toml`, forked from a process that has imported torch

A rank that fails, dies or hangs ends the world at once with an error that names it.

MEGAZERO_TEST_DEVICE=cuda puts every rank on the one GPU there is, and they talk over NCCL.  NCCL refuses two ranks on one
device of one machine, so each says that it is a machine of its own (NCCL_HOSTID), and messages go over loopback sockets.
"""

from __future__ import annotations

import gc
import io
import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
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
DEVICE = torch.device(os.environ.get("MEGAZERO_TEST_DEVICE", "cpu"))
# A server of its own: the process of the tests has used OpenMP, whose threads do not survive a fork.
_COMMANDS = mp.get_context("forkserver")
_COMMANDS.set_forkserver_preload(["megazero.training.launch", "torch._dynamo", "torch.distributed.launcher.api"])


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish."""


class _Pickler(pickle.Pickler):
    """Tensors go as their bytes: not as shared memory, which would not outlive the rank, nor as torch.save's archives, which
    take a quarter of a millisecond each to read."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or not value.numel():
            return NotImplemented
        return _from_bytes, (
            bytearray(value.cpu().contiguous().view(-1).view(torch.uint8).numpy()),
            value.dtype,
            value.shape,
        )


def _from_bytes(content: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _main(
    rank: int, world: int, store: str, timeout: float, body: Callable[..., Any], args: tuple[Any, ...], out: Connection
) -> None:
    gc.freeze()  # what was forked stays shared: collecting it would copy its pages
    try:
        torch.set_num_threads(1)
        if world > 1:
            os.environ["NCCL_HOSTID"] = f"machine {rank}"
            dist.init_process_group(
                "gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # one that ended before another had connected to it would fail that one
        answer = ("ok", body(rank, *args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    out.send_bytes(_pickled(answer))
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


def run_command(
    *words: str | Path,
    timeout: float = WORLD_TIMEOUT_SECONDS,
    env: dict[str, str] | None = None,
    stdout: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `megazero` with some words to its end.  As `subprocess.run`, but torch need not be imported again.

    Args:
        words: of the command line.
        timeout: seconds.
        env: on top of this process's.
        stdout: a device or a pipe for its output, which the result then lacks.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        given = (list(map(str, words)), stdout or out, err, {**os.environ, **(env or {})})
        process = _COMMANDS.Process(target=_command, args=given)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(given[0], timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(
            given[0], process.exitcode, "" if stdout else out.read_text(), err.read_text()
        )


def _command(words: list[str], out: Path, err: Path, environment: dict[str, str]) -> None:
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["megazero", *words]
    from megazero.cli import main

    main()
