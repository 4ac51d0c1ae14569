"""Draws the step that `logging.pipeline_trace_step` names, beside the bubble that its schedule predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megazero.schedules.proof import measured_costs, simulate
from megazero.schedules.table import write_text
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord


class PipelineTrace(Callback):
    """Writes a picture and a Chrome trace of a measured pipeline into the run directory, on rank 0."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say

    def after_step(self, record: StepRecord) -> None:
        timeline = record.timeline
        if timeline is None:
            return
        from megazero.tools.draw import chrome_trace, draw_svg

        predicted = simulate(timeline.schedule, measured_costs(timeline))
        name = self._run_dir / f"pipeline-step-{record.step:08d}"
        write_text(name.with_suffix(".svg"), draw_svg(timeline))
        write_text(name.with_suffix(".json"), json.dumps(chrome_trace(timeline, unit_us=1e6)))
        self._say(
            f"pipeline of step {record.step}: bubble {timeline.bubble_fraction:.1%} measured, "
            f"{predicted.bubble_fraction:.1%} predicted for its costs | {name}.svg, {name}.json"
        )
