"""Contenders in worlds of their own, which take turns.

    conductor        turn(A) | turn(B) | turn(floor) | turn(floor) | turn(B) | turn(A) ...
    A's ranks        step step .                                            step step
    B's ranks                  step step .                          step step

Each contender has its own forked processes, one thread each, so that none sees another's memory or patches; those whose
turn it is not wait in a pipe.  A turn begins behind a barrier; its steps follow one another as in training, so that what
one leaves to be sent behind the next is in the next one's time.  A step takes as long as its slowest rank.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo  # imported by every optimizer; once here instead of once per rank
import torch.distributed as dist
from torch import Tensor

from benchmarks.hosts_net import LOOPBACK, Counted, Network

TIMEOUT_SECONDS = 300
_STILL_SECONDS = 0.02
_PR_SET_PDEATHSIG, _M_MMAP_THRESHOLD = 1, -3  # of the C library
_TENSOR_BYTES = 1 << 15


@dataclass(frozen=True)
class Work:
    """Seconds of a floor's step: what a pipeline's bubbles stretch, and what they do not."""

    passes: float
    rest: float = 0.0


class Contender(Protocol):
    """One rank of something that trains."""

    dp_index: int

    def step(self, *batch: Tensor) -> float | Work | None:
        """One step.

        Args:
            batch: of the row's work; where it is a model, tokens and labels, int64 [rank's samples, seq].

        Returns: the mean loss of the rank's samples or of all; None where the rank has none. A floor says its `Work`.
        """


class Given:
    """The work of a row, on `world` ranks."""

    world: int

    def batch(self, step: int, dp_index: int) -> tuple[Tensor, ...]:
        """A data-parallel rank's part of a step; none for contenders that have their own inputs."""
        return ()


Build = Callable[[int], Contender]
"""rank -> contender; the default process group is there."""


@dataclass(frozen=True)
class Turn:
    """What some steps in a row took.

    Args:
        seconds: of each step, its slowest rank's.
        losses: of each step, the mean over those ranks that have one.
        works: of each step, by rank; empty for contenders that are no floor.
        loopback_bytes: of a step, per rank, as the interfaces counted them.
        link_bytes: of a step, all ranks together, over the links between hosts.
        busiest_bytes: of a step, in the direction of a link that carried most.
        metered_bytes: of a step, per rank, as the contender's own meter did; None without one.
        processor_seconds: of a step, per rank, of all its threads.
    """

    seconds: list[float]
    losses: list[float | None]
    works: list[list[Work]]
    loopback_bytes: float
    link_bytes: float
    busiest_bytes: float
    metered_bytes: float | None
    processor_seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that has most.

    Args:
        state: tensors that are there between two steps.
        peak: resident memory at its highest while it trains, above that of the process before the contender was built.
        own_peak: the same without pages of files, which are the code of libraries and differ by who imports what, and with
            this rank's share of the pages that ranks share.
    """

    state: int
    peak: int
    own_peak: int


class ContenderFailedError(RuntimeError):
    """A contender cannot run here: a rank raised, died or did not answer."""


def imported(place: str) -> Any:
    """What makes a contender, by "module of benchmarks:name": imported on first use, since the peers are optional.

    Raises: ContenderFailedError, when the peer is not installed.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(f"benchmarks.{module}"), name)
    except ImportError as error:
        raise ContenderFailedError(
            f"it cannot be imported ({error}); `make .venv/.bench` installs the peers"
        ) from error


class World:
    """The ranks of one contender.

    Args:
        name: for messages.
        build: makes the contender on each rank.
        setting: the row's work.
        network: where the ranks are.
        keeps_no_gaps: what the C library's allocator keeps of freed tensors differs by a tenth from one start to the next.
            Here each tensor has pages of its own, so memory is what is needed at once; steps take longer.

    Raises:
        ContenderFailedError: a rank could not be built.
    """

    def __init__(
        self, name: str, build: Build, setting: Given, network: Network = LOOPBACK, *, keeps_no_gaps: bool = False
    ) -> None:
        self.name, self._network = name, network
        context = mp.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(setting.world):
            here, there = context.Pipe()
            arguments = (build, setting, rank, network, Path(self._folder.name) / "store", keeps_no_gaps, there)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def turn(self, batches: Sequence[int], run_in: int = 0) -> Turn:
        """Run a step on each batch.

        Args:
            run_in: first steps whose time and losses are left out: what the step before them left to be sent has long
                arrived.  Their bytes count.

        Raises: ContenderFailedError.
        """
        before = self._bytes_until_now()
        self._tell(("steps", list(batches)))
        told, count = self._answers(), len(batches)
        after = self._bytes_until_now()
        linked = [(new[0] - old[0], new[1] - old[1]) for new, old in zip(after.links, before.links, strict=True)]
        metered = [counted for _, counted, _ in told if counted is not None]
        answers = [steps[run_in:] for steps, _, _ in told]
        steps = list(zip(*answers, strict=True))  # [step][rank] of (seconds, result)
        losses: list[float | None] = []
        for step in steps:
            found = [result for _, result in step if isinstance(result, float)]
            losses.append(sum(found) / len(found) if found else None)
        works = [[result for _, result in step if isinstance(result, Work)] for step in steps]
        return Turn(
            [max(seconds for seconds, _ in step) for step in steps],
            losses,
            works,
            (after.sent - before.sent) / len(told) / count,
            sum(sent for _, sent in linked) / count,
            max(map(max, linked)) / count,
            sum(metered) / len(metered) / count if metered else None,
            sum(processor for _, _, processor in told) / len(told) / count,
        )

    def memory(self) -> Memory:
        """Of the rank that has most; to be asked after some steps."""
        self._tell(("memory", None))
        answers = self._answers()
        return Memory(*map(max, zip(*answers, strict=True)))

    def ask(self, method: str) -> list[Any]:
        """What each rank's contender returns from a method."""
        self._tell(("ask", method))
        return self._answers()

    def _bytes_until_now(self) -> Counted:
        """When the links are still: the next contender must not share it with what this one's last step left to be sent."""
        pids = [process.pid for process in self._processes if process.pid is not None]
        found = self._network.bytes_until_now(pids)
        while self._network.namespaces:
            time.sleep(_STILL_SECONDS)
            before, found = found, self._network.bytes_until_now(pids)
            if before.links == found.links:
                break
        return found

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._folder.cleanup()

    def _tell(self, command: tuple[str, object]) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(command)
            except OSError:
                raise ContenderFailedError(f"{self.name}: rank {rank} died") from None

    def _answers(self) -> list:  # type: ignore[type-arg]
        found = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(TIMEOUT_SECONDS):
                    raise ContenderFailedError(f"{self.name}: rank {rank} did not answer within {TIMEOUT_SECONDS} s")
                kind, answer = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise ContenderFailedError(f"{self.name}: rank {rank} died") from None
            if kind == "error":
                short, trace = answer
                raise ContenderFailedError(f"{self.name}: rank {rank}: {short}") from RuntimeError(trace)
            found.append(answer)
        return found


@contextmanager
def started(
    names: Sequence[str],
    build_of: Callable[[str], Build],
    setting: Given,
    network: Network,
    *,
    steps: int = 1,
    required: Sequence[str] = (),
    keeps_no_gaps: bool = False,
) -> Iterator[tuple[dict[str, World], dict[str, str]]]:
    """Worlds of contenders after some steps, and why those that cannot run, cannot; all are ended at the end.

    Args:
        build_of: what makes a contender, by name.
        setting, network, keeps_no_gaps: see `World`.
        steps: some fail only when they run.
        required: those whose failure is raised.

    Raises: ContenderFailedError.
    """
    worlds: dict[str, World] = {}
    failures: dict[str, str] = {}
    try:
        for name in names:
            try:
                worlds[name] = World(name, build_of(name), setting, network, keeps_no_gaps=keeps_no_gaps)
                worlds[name].turn(range(steps))
            except ContenderFailedError as error:
                if name in required:
                    raise
                failures[name] = str(error)
                if name in worlds:
                    worlds.pop(name).close()
        yield worlds, failures
    finally:
        for world in worlds.values():
            world.close()


def _rank_main(
    build: Build, setting: Given, rank: int, network: Network, store: Path, keeps_no_gaps: bool, pipe: Connection
) -> None:
    gc.freeze()  # what was forked stays shared: collecting it would copy its pages
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the conductor
    if keeps_no_gaps:
        libc.mallopt(_M_MMAP_THRESHOLD, _TENSOR_BYTES)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % network.local_world_size(setting.world)),
        WORLD_SIZE=str(setting.world),
        LOCAL_WORLD_SIZE=str(network.local_world_size(setting.world)),
    )
    try:
        network.join(rank, setting.world)
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.world, timeout=limit
        )
        dist.barrier()
        gc.collect()
        libc.malloc_trim(0)
        before, not_own_before = _memory_of_this_process("VmRSS"), _not_own_memory()
        contender = build(rank)
        gc.collect()
        libc.malloc_trim(
            0
        )  # else what building took, and gave back, would count for those who build the whole model first
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of training, from here on
        pipe.send(("ok", None))
        while True:
            command, argument = pipe.recv()
            if command == "steps":
                meter = getattr(contender, "meter", None)
                before_steps = meter() if meter else 0
                given = [setting.batch(batch, contender.dp_index) for batch in argument]
                dist.barrier()
                begin = time.process_time()
                steps = [_timed(contender, *batch) for batch in given]
                processor = time.process_time() - begin
                answer: Any = (steps, meter() - before_steps if meter else None, processor)
            elif command == "ask":
                answer = getattr(contender, argument)()
            else:
                peak = _memory_of_this_process("VmHWM") - before
                answer = (_tensor_bytes(), peak, peak - (_not_own_memory() - not_own_before))
            pipe.send(("ok", answer))
    except EOFError:
        pass
    except BaseException as error:
        pipe.send(("error", (f"{type(error).__name__}: {error}"[:400], traceback.format_exc())))
    finally:
        os._exit(0)  # gloo's threads may still wait for a lost rank


def _timed(contender: Contender, *batch: Tensor) -> tuple[float, float | Work | None]:
    begin = time.perf_counter()
    result = contender.step(*batch)
    return time.perf_counter() - begin, result


def _memory_of_this_process(key: str, file: str = "status") -> int:
    lines = Path(f"/proc/self/{file}").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def _not_own_memory() -> int:
    """Resident pages of files, and the other ranks' share of those that ranks share."""
    shared = _memory_of_this_process("RssShmem") - _memory_of_this_process("Pss_Shmem", "smaps_rollup")
    return _memory_of_this_process("RssFile") + shared


def _tensor_bytes() -> int:
    """Of all tensors that Python can reach, each memory once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, torch.nn.Parameter) and one.device.type == "cpu" and one.layout == torch.strided:
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
