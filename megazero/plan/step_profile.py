"""What a few steps do, measured by torch: operators as a trace for Perfetto, memory as a snapshot for its viewer.

    logging.profile_steps = [10, 12]       profile-step-00000012-rank-0.json.gz, and that of the slowest rank in these steps
    logging.memory_snapshot = 10           memory-step-00000010-rank-0.pickle; out of memory: memory-out-rank-3.pickle

Every other step runs as if neither key were set.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from megazero.comm.collectives import gather_objects
from megazero.config import ResolvedRun
from megazero.engine import Position
from megazero.parallel_state import ParallelState
from megazero.training.callbacks.base import Callback, RunContext, StepRecord


class Measuring(Callback):
    """A callback the failures of which are a line: they end no training."""

    def __init__(self, context: RunContext) -> None:
        self._run, self._state, self._say = context.run, context.engine.state, context.say

    def _tried(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # of kineto, of CUDA or of the disk
            self._say(f"{type(self).__name__} failed: {error!r}")


class StepProfile(Measuring):
    """Profiles the steps of `logging.profile_steps` on every rank; rank 0 and the slowest rank write what they found."""

    def __init__(self, context: RunContext) -> None:
        self._first, self._last = context.run.config.logging.profile_steps or (0, -1)
        super().__init__(context)
        self._profiler: torch.profiler.profile | None = None
        self._seconds = 0.0  # of this rank's own work in these steps

    def before_step(self, position: Position) -> None:
        if self._profiler is None and self._first <= position.step + 1 <= self._last:
            self._profiler, self._seconds = torch.profiler.profile(), 0.0
            self._tried(self._profiler.start)

    def after_step(self, record: StepRecord) -> None:
        if self._profiler is None:
            return
        self._seconds += record.work_seconds or 0.0
        if record.step < self._last and not record.is_last:
            return
        profiler, rank = self._profiler, self._state.rank
        self.close()
        seconds = gather_objects(self._seconds, self._state.world)
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        path = _path(self._run, f"profile-step-{record.step:08d}-rank-{rank}.json.gz")
        if rank in (0, slowest):
            self._tried(lambda: _written(path, profiler.export_chrome_trace))
        own = f"rank {slowest} worked longest in them, {seconds[slowest]:.2f} s; rank 0 {seconds[0]:.2f} s"
        self._say(f"profile of steps {self._first} to {record.step}: {own} | {path} (Perfetto)")

    def on_rollback(self, position: Position) -> None:  # noqa: ARG002
        """Drop what was measured; the steps are profiled when they are done again."""
        self.close()

    def close(self) -> None:
        if self._profiler is not None:
            self._tried(self._profiler.stop)
        self._profiler = None


class MemorySnapshot(Measuring):
    """Records every allocation of the step that `logging.memory_snapshot` names, on rank 0 on CUDA."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        state, step = self._state, context.run.config.logging.memory_snapshot
        self._step = step if state.rank == 0 and state.device.type == "cuda" else 0
        if step and state.device.type != "cuda":
            context.say("logging.memory_snapshot: torch has snapshots of CUDA's memory only, and this run is on a CPU")

    def before_step(self, position: Position) -> None:
        if position.step + 1 == self._step:
            self._tried(torch.cuda.memory._record_memory_history)

    def after_step(self, record: StepRecord) -> None:
        if record.step == self._step:
            self._say(f"memory of step {record.step}: {_write_snapshot(self._run, f'step-{record.step:08d}-rank-0')}")
            self._tried(lambda: torch.cuda.memory._record_memory_history(enabled=None))


def add_snapshot(text: str, run: ResolvedRun, state: ParallelState, engine: Any) -> str:
    """Write a snapshot where CUDA's memory has run out, and add a line to the explanation."""
    if not run.config.logging.memory_snapshot or state.device.type != "cuda":
        return text
    return f"{text}\nwhat the device holds: {_write_snapshot(run, f'out-rank-{state.rank}')}"


def _write_snapshot(run: ResolvedRun, what: str) -> str:
    path = _path(run, f"memory-{what}.pickle")
    try:
        _written(path, torch.cuda.memory._dump_snapshot)
    except Exception as error:  # what is known must not hide behind it
        return f"a snapshot could not be written ({error!r})"
    return f"{path} (https://pytorch.org/memory_viz)"


def _path(run: ResolvedRun, name: str) -> str:
    return os.path.join(run.config.training.run_dir, name)


def _written(path: str, write: Callable[[str], object]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # a host may have a run directory of its own
    write(path)
