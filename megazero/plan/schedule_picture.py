"""A pipeline's timeline as files: an SVG picture, and a trace for chrome://tracing and ui.perfetto.dev.

Times count from 0.
"""

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from megazero.plan.schedule_drawing import kinds_of, number, spans_of_ranks, title
from megazero.plan.svg import Bar, picture
from megazero.schedules.action import Action, ActionKind
from megazero.schedules.proof import Timeline

_COLOURS = {ActionKind.FORWARD: "#5b92c9", ActionKind.BACKWARD: "#5f9e5a", ActionKind.WEIGHT: "#c98f35"}
_IDLE = 'class="idle"'


def draw_svg(timeline: Timeline, unit: str = "", about: str = "") -> str:
    """The text of an SVG file on a light ground, for a paper.

    `unit` is that of the times, as " ms"; `about` goes before the title.

    Each action is one `<rect class="cell">`, whose `<title>` names the action and its times.
    """
    schedule, makespan, chunks = timeline.schedule, timeline.makespan, timeline.schedule.chunks
    typical = median(end - start for start, end in timeline.spans.values()) or makespan
    wide = min(max(24 * makespan / typical, 720.0), 1600.0)

    def row(spans: list[tuple[float, float, Action]]) -> Iterator[Bar]:
        yield Bar(0, makespan, _IDLE)
        for start, end, action in spans:
            paint = f'class="cell" {_paint(action.kind, action.chunk, chunks)}'
            about = f"{action}: {number(start)} to {number(end)}{unit}"
            yield Bar(start, end, paint, about, str(action.microbatch))

    rows = [(f"rank {rank}", row(spans)) for rank, spans in enumerate(spans_of_ranks(timeline))]
    of_chunks = f", chunk 0{' and ' if chunks == 2 else ' to '}{chunks - 1}" if chunks > 1 else ""
    colours = [
        ([_paint(kind, chunk, chunks) for chunk in range(chunks)], meaning + of_chunks)
        for kind, meaning in kinds_of(schedule).items()
    ]
    heading, axis = about + title(timeline, unit), f"time{unit and f',{unit}'}"
    return picture(heading, rows, makespan, axis, [*colours, ([_IDLE], "idle")], wide=wide)


def _paint(kind: ActionKind, chunk: int, chunks: int) -> str:
    """Fill and stroke of a cell; the higher the chunk, the more solid its fill."""
    colour, share = _COLOURS[kind], 0.3 + 0.5 * chunk / max(chunks - 1, 1)
    return f'fill="{colour}" fill-opacity="{share:.2f}" stroke="{colour}" stroke-width="0.8"'


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
