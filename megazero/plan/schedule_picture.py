"""A pipeline's timeline as files: an SVG picture, and a trace for chrome://tracing and ui.perfetto.dev.

Times count from 0.
"""

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from megazero.plan.schedule_drawing import kinds_of, number, shade_of, spans_of_ranks, title
from megazero.plan.svg import LOOKS, Bar, picture
from megazero.schedules.action import Action
from megazero.schedules.proof import Timeline


def draw_svg(timeline: Timeline, unit: str = "", about: str = "") -> str:
    """The text of an SVG file, for a paper.

    Args:
        unit: of the times, as " ms".
        about: goes before the title.
    """
    schedule, makespan, idle = timeline.schedule, timeline.makespan, LOOKS["waits"]["idle"]
    typical = median(end - start for start, end in timeline.spans.values()) or makespan
    wide = min(max(24 * makespan / typical, 720.0), 1600.0)

    def row(spans: list[tuple[float, float, Action]]) -> Iterator[Bar]:
        yield Bar(0, makespan, idle)
        for start, end, action in spans:
            times = f"{action}: {number(start)} to {number(end)}{unit}"
            yield Bar(start, end, shade_of(action), times, str(action.microbatch))

    rows = [(f"rank {rank}", row(spans)) for rank, spans in enumerate(spans_of_ranks(timeline))]
    last = schedule.chunks - 1
    of_chunks = f", chunk 0{' and ' if last == 1 else ' to '}{last}" if last else ""
    meanings = [
        ([shade_of(Action(kind, 0, chunk)) for chunk in range(min(last, 2) + 1)], meaning + of_chunks)
        for kind, meaning in kinds_of(schedule).items()
    ]
    heading, axis = about + title(timeline, unit), f"time{unit and f',{unit}'}"
    return picture(heading, rows, makespan, axis, [*meanings, ([idle], "idle")], wide=wide)


def trace_text(timeline: Timeline, unit_us: float = 1000.0) -> str:
    """Return a trace for chrome://tracing and ui.perfetto.dev: a thread per rank, a complete event per action.

    `unit_us` is one unit of the timeline in microseconds.
    """
    events: list[dict[str, Any]] = []

    def add(ph: str, rank: int, name: str, args: dict[str, Any], **more: Any) -> None:
        events.append({"name": name, "ph": ph, "pid": 0, "tid": rank, "args": args, **more})

    add("M", 0, "process_name", {"name": timeline.schedule.name})
    for rank, spans in enumerate(spans_of_ranks(timeline)):
        add("M", rank, "thread_name", {"name": f"rank {rank}"})
        add("M", rank, "thread_sort_index", {"sort_index": rank})
        for start, end, action in spans:
            about = {"microbatch": action.microbatch, "chunk": action.chunk}
            ts, dur = start * unit_us, (end - start) * unit_us
            add("X", rank, str(action), about, cat=action.kind.name.lower(), ts=ts, dur=dur)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
