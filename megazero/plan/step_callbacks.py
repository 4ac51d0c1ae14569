"""Callbacks that measure single steps: a profile for Perfetto, a memory snapshot for torch's viewer, a pipeline timeline.

    logging.profile_steps = [10, 12]       profile-step-00000012-rank-0.json.gz, and the profile of the slowest rank
    logging.memory_snapshot = 10           memory-step-00000010-rank-0.pickle; out of memory: memory-out-rank-3.pickle
    logging.pipeline_trace_step = 10       pipeline-step-00000010.svg and .json, with the bubble that the schedule predicts

All other steps run as if none of these keys were set.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megazero.comm.collectives import gather_objects
from megazero.config import ResolvedRun
from megazero.engine import Position
from megazero.engine.outline import schedule_of
from megazero.parallel_state import ParallelState
from megazero.plan.schedule_drawing import draw_svg, trace_text
from megazero.schedules.action import Action, Op
from megazero.schedules.proof import Costs, Timeline, simulate
from megazero.settings import write_text
from megazero.training.callbacks.base import Callback, RunContext, StepRecord


class Measuring(Callback):
    """A callback whose failures print a line and do not end training."""

    def __init__(self, context: RunContext) -> None:
        self._run, self._state, self._log = context.run, context.engine.state, context.log

    def _tried(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # of kineto, of CUDA or of the disk
            self._log(f"{type(self).__name__} failed: {error!r}")


class StepProfile(Measuring):
    """Profiles the steps of `logging.profile_steps` on every rank.  Rank 0 and the slowest rank write their profiles."""

    def __init__(self, context: RunContext) -> None:
        self._first, self._last = context.run.config.logging.profile_steps or (0, -1)
        super().__init__(context)
        self._profiler: torch.profiler.profile | None = None
        self._seconds = 0.0  # of this rank's own work in these steps

    def before_step(self, position: Position) -> None:
        if self._profiler is None and self._first <= position.step + 1 <= self._last:
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # above every level of the profiler's own messages
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
        self._log(f"profile of steps {self._first} to {record.step}: {own} | {path} (Perfetto)")

    def on_rollback(self, position: Position) -> None:  # noqa: ARG002
        """Discard the profile.  The steps are profiled when they run again."""
        self.close()

    def close(self) -> None:
        if self._profiler is not None:
            self._tried(self._profiler.stop)
        self._profiler = None


class MemorySnapshot(Measuring):
    """Records every allocation of the step in `logging.memory_snapshot`, on rank 0 on CUDA."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        state, step = self._state, context.run.config.logging.memory_snapshot
        self._step = step if state.rank == 0 and state.device.type == "cuda" else 0
        if step and state.device.type != "cuda":
            context.log("logging.memory_snapshot: torch has snapshots of CUDA's memory only, and this run is on a CPU")

    def before_step(self, position: Position) -> None:
        if position.step + 1 == self._step:
            self._tried(torch.cuda.memory._record_memory_history)

    def after_step(self, record: StepRecord) -> None:
        if record.step == self._step:
            self._log(f"memory of step {record.step}: {_write_snapshot(self._run, f'step-{record.step:08d}-rank-0')}")
            self._tried(lambda: torch.cuda.memory._record_memory_history(enabled=None))


def add_snapshot(text: str, run: ResolvedRun, state: ParallelState, engine: Any) -> str:
    """Write a snapshot after CUDA has run out of memory; return the error text with a line about it."""
    if not run.config.logging.memory_snapshot or state.device.type != "cuda":
        return text
    return f"{text}\nwhat the device holds: {_write_snapshot(run, f'out-rank-{state.rank}')}"


def _write_snapshot(run: ResolvedRun, what: str) -> str:
    path = _path(run, f"memory-{what}.pickle")
    try:
        _written(path, torch.cuda.memory._dump_snapshot)
    except Exception as error:  # must not hide the error about memory
        return f"a snapshot could not be written ({error!r})"
    return f"{path} (https://pytorch.org/memory_viz)"


def _path(run: ResolvedRun, name: str) -> str:
    return os.path.join(run.config.training.run_dir, name)


def _written(path: str, write: Callable[[str], object]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # a host may have a run directory of its own
    write(path)


# ---- the pipeline


Spans = list[tuple[Action, tuple[float, float]]]


class ActionClock:
    """Records when the actions of a pipeline step start and end; see `Engine.on_action`.  Its time begins at construction.

    On CUDA, the marks are events in the stream of the actions, which are read after the step.  If the host waited for the
    device within the step, it would also wait for posted messages, and so change the step that it measures.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._start = self._now()
        self._marks: list[tuple[Action, Any]] = []

    def mark(self, action: Action) -> None:
        """Record the time; calls for an action alternate between its start and its end."""
        self._marks.append((action, self._now()))

    def spans(self) -> Spans:
        """Return the (start, end) of each action in seconds since construction.  Blocks until the device is done."""
        spans, marks = Spans(), [(action, self._seconds_to(moment)) for action, moment in self._marks]
        while marks:
            first, begin = marks[0]
            count = [action for action, _ in marks[1:]].index(first) + 1  # above one: a pair of actions
            each = (marks[2 * count - 1][1] - begin) / count  # which of a pair ran when is not known
            spans += [
                (action, (begin + i * each, begin + (i + 1) * each)) for i, (action, _) in enumerate(marks[:count])
            ]
            del marks[: 2 * count]
        return spans

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_to(self, moment: Any) -> float:
        if not self._on_cuda:
            return float(moment - self._start)
        moment.synchronize()
        return float(self._start.elapsed_time(moment)) / 1e3  # elapsed_time is in milliseconds


class PipelineTrace(Callback):
    """Measures one step of a pipeline.  Rank 0 writes a picture and a Chrome trace of it to the run directory."""

    def __init__(self, context: RunContext) -> None:
        self._run, self._engine, self._log = context.run, context.engine, context.log
        self._clock: ActionClock | None = None  # in the step that is measured

    def before_step(self, position: Position) -> None:
        """Start the clocks of all ranks together, so that the times of different machines can be compared."""
        if position.step + 1 != self._run.config.logging.pipeline_trace_step:
            return
        state = self._engine.state
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)  # what is still queued is not of this step
        gather_objects(None, state.pp)
        self._clock = ActionClock(state.device)
        self._engine.on_action = self._clock.mark

    def after_step(self, record: StepRecord) -> None:
        if self._clock is None:
            return
        ranks = gather_objects(self._clock.spans(), self._engine.state.pp)
        self.on_rollback(record.position)
        if self._engine.state.rank == 0 and any(ranks):  # a step that was skipped has no actions
            self._draw(record.step, ranks)

    def on_rollback(self, position: Position) -> None:  # noqa: ARG002
        """Discard the clock.  The step is measured when it runs again."""
        self._clock, self._engine.on_action = None, lambda _: None

    def _draw(self, step: int, ranks: Sequence[Spans]) -> None:
        begin = min(start for spans in ranks for _, (start, _) in spans)
        every = [(rank, action, span) for rank, spans in enumerate(ranks) for action, span in spans]
        spans = {(rank, action): (start - begin, end - begin) for rank, action, (start, end) in every}
        timeline = Timeline(schedule_of(self._run), spans)
        predicted = simulate(timeline.schedule, measured_costs(timeline))
        name = Path(self._run.config.training.run_dir) / f"pipeline-step-{step:08d}"
        in_ms = {action: (start * 1e3, end * 1e3) for action, (start, end) in timeline.spans.items()}
        picture = draw_svg(Timeline(timeline.schedule, in_ms), " ms", f"step {step}, measured: ")
        files = f"{name}.svg, {name}.json"
        try:
            write_text(name.with_suffix(".svg"), picture)
            write_text(name.with_suffix(".json"), trace_text(timeline, unit_us=1e6))
        except OSError as error:
            files = f"its picture could not be written ({error})"
        self._log(
            f"pipeline of step {step}: ranks idle {timeline.bubble_fraction:.1%} of the time (bubble); predicted "
            f"{predicted.bubble_fraction:.1%}, if every pass took the mean time of its kind and messages none "
            f"| {files}"
        )


def measured_costs(timeline: Timeline) -> Costs:
    """Return the mean cost of each operation in a measured timeline.  Messages get no cost, since none is measured."""

    def mean(op: Op) -> float:
        times = [end - start for (_, action), (start, end) in timeline.spans.items() if action.op is op]
        return sum(times) / max(1, len(times)) * timeline.schedule.chunks

    return Costs(mean(Op.FORWARD), mean(Op.BACKWARD), mean(Op.WEIGHT))
