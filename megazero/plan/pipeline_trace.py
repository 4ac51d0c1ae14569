"""Draws the step that `logging.pipeline_trace_step` names, beside the bubble that its schedule predicts."""

from __future__ import annotations

import json
from pathlib import Path

from megazero.plan.schedule_picture import chrome_trace, draw_svg
from megazero.schedules.action import write_text
from megazero.schedules.proof import Timeline, measured_costs, simulate
from megazero.training.callbacks.base import Callback, RunContext, StepRecord


class PipelineTrace(Callback):
    """Writes a picture and a Chrome trace of a measured pipeline into the run directory, on rank 0."""

    def __init__(self, context: RunContext) -> None:
        self._run_dir, self._say = Path(context.run.config.training.run_dir), context.say

    def after_step(self, record: StepRecord) -> None:
        timeline = record.timeline
        if timeline is None:
            return
        predicted = simulate(timeline.schedule, measured_costs(timeline))
        name = self._run_dir / f"pipeline-step-{record.step:08d}"
        spans = {action: (start * 1e3, end * 1e3) for action, (start, end) in timeline.spans.items()}
        picture = draw_svg(Timeline(timeline.schedule, spans), " ms", f"step {record.step}, measured: ")
        files = f"{name}.svg, {name}.json"
        try:
            write_text(name.with_suffix(".svg"), picture)
            write_text(name.with_suffix(".json"), json.dumps(chrome_trace(timeline, unit_us=1e6)))
        except OSError as error:
            files = f"its picture could not be written ({error})"
        self._say(
            f"pipeline of step {record.step}: ranks idle {timeline.bubble_fraction:.1%} of the time (bubble); predicted "
            f"{predicted.bubble_fraction:.1%}, if every pass took the mean time of its kind and messages none "
            f"| {files}"
        )
