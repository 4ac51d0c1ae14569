"""Draws the step that `logging.pipeline_trace_step` names, beside the bubble that its schedule predicts."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megazero.comm.collectives import gather_objects
from megazero.engine import Position
from megazero.engine.outline import schedule_of
from megazero.plan.schedule_drawing import draw_svg, trace_text
from megazero.schedules.action import Action, ActionKind, write_text
from megazero.schedules.proof import Costs, Timeline, simulate
from megazero.training.callbacks.base import Callback, RunContext, StepRecord

Spans = list[tuple[Action, tuple[float, float]]]


class ActionClock:
    """When the actions of a pipeline step start and end.  It starts when it is made; see `Engine.on_action`.

    On CUDA the marks are events in the stream of the actions, read after the step: a host that waits for the device within a
    step also waits for the messages that it has posted, so that the step would not be the one that it measures.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._start = self._now()
        self._marks: list[tuple[Action, Any]] = []

    def mark(self, action: Action) -> None:
        """Note the time at which an action starts, or ends."""
        self._marks.append((action, self._now()))

    def spans(self) -> Spans:
        """(start, end) of each action, in seconds from the start of the clock.  Waits for the device."""
        spans, marks = Spans(), [(action, self._seconds_to(moment)) for action, moment in self._marks]
        while marks:
            first, begin = marks[0]
            count = [action for action, _ in marks[1:]].index(first) + 1  # more than one: of a pair
            share = (marks[2 * count - 1][1] - begin) / count  # its parts cannot be told apart
            spans += [
                (action, (begin + i * share, begin + (i + 1) * share)) for i, (action, _) in enumerate(marks[:count])
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
    """Measures one step of a pipeline; rank 0 writes a picture and a Chrome trace of it into the run directory."""

    def __init__(self, context: RunContext) -> None:
        self._run, self._engine, self._say = context.run, context.engine, context.say
        self._clock: ActionClock | None = None  # in the step that is measured

    def before_step(self, position: Position) -> None:
        """Start the clocks of all ranks together, so that those of different machines are comparable."""
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
        """Stop the clock; the step is measured when it is done again."""
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
        self._say(
            f"pipeline of step {step}: ranks idle {timeline.bubble_fraction:.1%} of the time (bubble); predicted "
            f"{predicted.bubble_fraction:.1%}, if every pass took the mean time of its kind and messages none "
            f"| {files}"
        )


def measured_costs(timeline: Timeline) -> Costs:
    """Mean cost of each part of a rank's work in a timeline that was measured; without a hop, which it cannot tell."""

    def mean(kind: ActionKind) -> float:
        times = [end - start for (_, action), (start, end) in timeline.spans.items() if action.kind is kind]
        return sum(times) / max(1, len(times)) * timeline.schedule.chunks

    return Costs(mean(ActionKind.FORWARD), mean(ActionKind.BACKWARD), mean(ActionKind.WEIGHT))
