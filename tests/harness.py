"""Worlds of gloo ranks as forked processes, and commands without an interpreter's start-up.

    results = run_world(4, law, argument)      law(rank, argument) runs on four ranks; results in rank order
    done = run_command("train", "a.toml")      `megazero train a.toml`, forked from a process that has imported torch
    run = start_program(sys.executable, "a.py")    the same for a script, and for torchrun and its ranks

A rank that fails, dies or hangs ends the world at once with an error that names it.  Importing torch takes a process four
seconds, and the first step of a model a tenth of one: both are done once, before a fork.

MEGAZERO_TEST_DEVICE=cuda puts every rank on the one GPU there is, and they talk over NCCL.  NCCL refuses two ranks on one
device of one machine, so each says that it is a machine of its own (NCCL_HOSTID), and messages go over loopback sockets.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import logging
import multiprocessing as mp
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

WORLD_TIMEOUT_SECONDS = 300
DEVICE = torch.device(os.environ.get("MEGAZERO_TEST_DEVICE", "cpu"))
# A server of its own: the process of the tests has used OpenMP, whose threads do not survive a fork.
_COMMANDS = mp.get_context("forkserver")
_COMMANDS.set_forkserver_preload(["warm", "megazero.training.launch", "torch.distributed.run"])


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics; none before there are any."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def children_of(pid: int) -> list[int]:
    """Processes that a process has started; none of one that has ended."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def without_launcher() -> dict[str, str]:
    """This process's environment without a launcher's words, for ranks that talk over the loopback interface."""
    given = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # threads that spin starve the other ranks of a small machine
    return given | {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_WAIT_POLICY": "passive"}


def wait_until(is_so: Callable[[], bool], run: Any = None, log: Callable[[], str] | None = None) -> None:
    """Wait for it, as long as a program goes on; `log` gives what it has said, which else is read from its pipe."""
    end = time.monotonic() + WORLD_TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < end, log and log()
        assert run is None or run.poll() is None, log() if log else run.communicate()[0]
        time.sleep(0.02)


def free_port() -> int:
    """A port of the loopback interface on which nobody listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
        if world > 1 and DEVICE.type == "cuda":  # a peer may still wait for what this rank's device has not sent yet
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1))
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
    import warm  # noqa: F401

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


def killed(body: Callable[[], Any]) -> None:
    """Run something that kills its process, in a process of its own."""
    assert run_world(1, lambda _: body(), may_die=(0,)) == [None], "it was not killed"


def open_files() -> Counter[str]:
    """What this process has open."""
    found = Counter[str]()
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself, and what gloo's threads close meanwhile
            found[os.readlink(f"/proc/self/fd/{one}")] += 1
    return found


def assert_nothing_is_left(before: Counter[str]) -> None:
    """After a rank has left its groups: none of their memory is mapped, and what is open was open before.

    gloo's threads may still be closing what peers have left.
    """
    assert "memfd:megazero" not in Path("/proc/self/maps").read_text()
    end = time.monotonic() + 20
    while (left := open_files() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left


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


# ---------------------------------------------------------------------------------------------------------------------
# Programs


class Program:
    """A process that `start_program` has started: what `subprocess.Popen` has, as far as tests use it."""

    def __init__(self, process: Any, stdout: IO[str] | None) -> None:
        self._process, self.pid, self.stdout = process, int(process.pid), stdout

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return int(self._process.exitcode)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Its output, until nobody holds the other end of the pipe."""
        assert self.stdout is not None
        output = self.stdout.read()
        self.wait(timeout)
        return output, None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start_program(
    *words: str | Path,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> Program:
    """Start a program in a session of its own.  As `subprocess.Popen`, but torch need not be imported again.

    Args:
        words: "megazero" or Python's interpreter, and what follows it; of Python's options "-u" and "-m" are known.
        stdout: a file for its output; by default it is a pipe, which the result has.
        stderr: a file for its errors; by default they go where the output goes.
        env: all of its environment; by default this process's.
        cwd: by default this process's.
    """
    _start_server()
    ours, theirs = (None, None) if stdout else os.pipe()
    out = Connection(os.dup(stdout.fileno()) if stdout else theirs, readable=False)
    err = Connection(os.dup((stderr or out).fileno()), readable=False)
    given = (list(map(str, words)), out, err, dict(os.environ) if env is None else env, str(cwd or Path.cwd()))
    process = _COMMANDS.Process(target=_program, args=given)
    process.start()
    out.close()
    err.close()
    return Program(process, None if ours is None else os.fdopen(ours))


@lru_cache(maxsize=1)
def _start_server() -> None:
    """Programs are forked from it.  It must find the modules of the tests, which it imports before it knows their path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def _program(words: list[str], out: Connection, err: Connection, environment: dict[str, str], folder: str) -> NoReturn:
    os.setsid()
    if sys.platform == "linux":  # it ends with the tests, whatever they have left
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.chdir(folder)
    _become(words, environment)


def _become(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Be the program of these words, in a process that has been forked for it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    gc.freeze()  # as in `_main`; the ranks of a command are forked from here
    subprocess_handler.Popen = _ForkedRank  # type: ignore[attr-defined, assignment, misc]
    os.environ.clear()
    os.environ.update(environment)
    for name in logging.root.manager.loggerDict:  # torch reads this variable when it is imported
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(environment.get("LOGLEVEL", "WARNING"))
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # of runpy: they all are
    atexit._clear()  # what the process before the fork wanted
    status: Any = 0
    try:
        _run_program([word for word in words if word != "-u"])
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_program(words: list[str]) -> None:
    if words[0] == "megazero":
        from megazero.cli import main

        sys.argv = words
        main()
    elif words[1] == "-m":
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words[1:]
        sys.path.insert(0, str(Path(words[1]).parent))
        runpy.run_path(words[1], run_name="__main__")


class _ForkedRank:
    """What torchrun takes for the `subprocess.Popen` of a rank: forked from torchrun, which has torch imported."""

    def __init__(self, args: list[str], env: dict[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_DFL)  # torchrun's
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _become(args, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return self.returncode  # type: ignore[return-value]


def run_program(
    *words: str | Path,
    timeout: float = WORLD_TIMEOUT_SECONDS,
    env: dict[str, str] | None = None,
    stdout: Path | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.  As `subprocess.run`, but torch need not be imported again.

    Args:
        words, env, cwd: as for `start_program`.
        timeout: seconds.
        stdout: a device or a pipe for its output, which the result then lacks.
    """
    with open(stdout, "wb") if stdout else tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = start_program(*words, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            status = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
        finally:
            texts = ["" if file is out and stdout else _text(file) for file in (out, err)]
        return subprocess.CompletedProcess(list(map(str, words)), status, *texts)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def run_command(*words: str | Path, env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    """`run_program("megazero", *words)`, with what `env` adds to this process's environment."""
    return run_program("megazero", *words, env={**os.environ, **(env or {})}, **more)
