"""A pipeline's timeline, drawn: spans (rank, action) -> (start, end), measured or simulated.

    draw_text       rank 0 F0F1..B0==B1==       a terminal's columns as time; dots are idle time
                    rank 1 ..F0B0==F1B1==
                    time   |0   |2   |4
    draw_svg        the same as a picture
    trace_text      the same for chrome://tracing and ui.perfetto.dev
    comparison      a table of all schedules for the same numbers

Times count from 0.  Activations are counted in micro-batches on all chunks of a rank: one of v chunks holds 1/v.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from math import ceil, floor
from statistics import median
from typing import Any, NamedTuple

from rich.table import Column, Table
from rich.text import Text

from megazero.plan.svg import LOOKS, Bar, picture, ticks
from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.proof import Costs, Timeline, peak_activations, simulate
from megazero.schedules.registry import SCHEDULES

MIN_WIDTH = 40
_FILL = {ActionKind.FORWARD: "-", ActionKind.BACKWARD: "=", ActionKind.WEIGHT: "~"}


def shade_of(action: Action) -> str:
    """Return the colour of an action; the higher its chunk, the darker."""
    return str(LOOKS["passes"][action.kind.value][min(action.chunk, 2)])


def number(value: float) -> str:
    """Format a number with up to three decimals, without trailing zeros."""
    return f"{round(value, 3) + 0.0:.3f}".rstrip("0").rstrip(".")


def title(timeline: Timeline, unit: str = "") -> str:
    """Return the title of a drawing, with makespan and bubble.  `unit`: of the times."""
    schedule = timeline.schedule
    chunks = f", {schedule.chunks} chunks per rank" if schedule.chunks > 1 else ""
    plural = "es" if schedule.microbatches > 1 else ""
    return (
        f"{schedule.name}: pp {schedule.pp}, {schedule.microbatches} micro-batch{plural}{chunks}; "
        f"makespan {number(timeline.makespan)}{unit}, bubble {timeline.bubble_fraction:.1%}"
    )


def kinds_of(schedule: Schedule) -> dict[ActionKind, str]:
    """Return the kinds of action in a schedule with their meanings."""
    kinds = {ActionKind.FORWARD: "forward"}
    if schedule.splits_backward:
        return kinds | {ActionKind.BACKWARD: "gradient of the input", ActionKind.WEIGHT: "gradient of the weights"}
    return kinds | ({ActionKind.BACKWARD: "backward"} if schedule.has_backward else {})


def spans_of_ranks(timeline: Timeline) -> list[list[tuple[float, float, Action]]]:
    """Return (start, end, action) of each rank, in order of time."""
    rows: list[list[tuple[float, float, Action]]] = [[] for _ in range(timeline.schedule.pp)]
    for (rank, action), (start, end) in timeline.spans.items():
        rows[rank].append((start, end, action))
    return [sorted(row, key=lambda span: span[:2]) for row in rows]


# ---- text


def draw_text(timeline: Timeline, width: int) -> Text:
    """Return a row of cells per rank, a scale, a legend, and each rank's idle time and peak activations.

    Args:
        width: columns of the terminal to fill, `MIN_WIDTH` or more.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    margin = len(f"rank {schedule.pp - 1} ")
    columns = width - margin
    per_time = _columns_per_time(timeline, columns)

    def column(time: float) -> int:
        return min(ceil(time * per_time - 0.5), columns)  # the first one whose middle is not before `time`

    lines = [Text(title(timeline))]
    for rank, spans in enumerate(spans_of_ranks(timeline)):
        row, at = Text(f"rank {rank}".ljust(margin)), 0
        for start, end, action in spans:
            first = max(column(start), at)
            last = max(column(end), first)
            columns_of = last - first
            together = "&" if columns_of > 2 and (rank, action) in schedule.beside else ""
            row.append("." * (first - at)).append_text(_cell(action, columns_of - len(together), schedule.chunks))
            row.append(together)
            at = last
        lines.append(row.append("." * (column(makespan) - at) + " " * (columns - max(column(makespan), at))))
    lines.append(Text("time".ljust(margin) + _scale(makespan, column, columns)))
    lines += [_legend(schedule), Text(), Text("rank    busy        idle   peak activations")]
    for rank in range(schedule.pp):
        idle, peak = timeline.idle(rank), peak_activations(schedule, rank) / schedule.chunks
        lines.append(Text(f"{rank:<4}  {1 - idle / makespan:>6.1%}  {number(idle):>10}   {number(peak)}"))
    return Text("\n").join(lines)


def _columns_per_time(timeline: Timeline, columns: int) -> float:
    """Return the columns per unit of time, such that the shortest action has a whole number of them if it has any."""
    per_time = columns / timeline.makespan
    shortest = min((end - start for start, end in timeline.spans.values() if end > start), default=timeline.makespan)
    return floor(per_time * shortest + 1e-9) / shortest if per_time * shortest >= 1 else per_time


def _cell(action: Action, columns: int, chunks: int) -> Text:
    """Return F0--, B0== or W0~~, shortened to fit.  Chunks above 0 have small letters and darker colours."""
    letter = action.kind.value.lower() if action.chunk else action.kind.value
    short = f"{letter}{action.microbatch}"
    long = f"{short}.{action.chunk}" if action.chunk and chunks > 2 else short
    label = next(label for label in (long, short, letter, "") if len(label) <= columns)
    style = f"{'#ffffff' if action.chunk > 1 else '#000000'} on {shade_of(action)}"
    return Text().append(label.ljust(columns, _FILL[action.kind]), style)


def _scale(makespan: float, column: Callable[[float], int], columns: int) -> str:
    line = ""
    for tick in ticks(makespan, column(makespan) / 10):
        mark = f"|{number(tick)}"
        if len(line) <= column(tick) <= columns - len(mark):
            line = line.ljust(column(tick)) + mark
    return line.ljust(columns)


def _legend(schedule: Schedule) -> Text:
    """Return sample cells with their meanings."""
    chunks = schedule.chunks
    entries = [_cell(Action(kind, 0), 3, chunks).append(f" {meaning}") for kind, meaning in kinds_of(schedule).items()]
    if chunks > 1:
        meaning = "chunk 1" if chunks == 2 else "chunks from 1 on"
        entries.append(_cell(Action(ActionKind.FORWARD, 0, 1), 3, 2).append(f" {meaning}"))
    entries += [Text("F0& beside the next")] if schedule.beside else []
    return Text("   ").join([*entries, Text("... idle")])


# ---- files


def draw_svg(timeline: Timeline, unit: str = "", about: str = "") -> str:
    """Return the text of an SVG file, for a paper.

    Args:
        unit: the unit of the times, as " ms".
        about: text before the title.
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


# ---- comparison


class Figures(NamedTuple):
    """What a schedule costs; idle time and peak activations are of the rank that has most."""

    makespan: float
    idle: float
    bubble_fraction: float
    peak_activations: float

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs | None) -> Figures:
        """Simulate a schedule."""
        timeline, ranks = simulate(schedule, costs), range(schedule.pp)
        idle = max(timeline.idle(rank) for rank in ranks)
        peak = max(peak_activations(schedule, rank) for rank in ranks) / schedule.chunks
        return cls(timeline.makespan, idle, timeline.bubble_fraction, peak)

    def cells(self) -> list[str]:
        """Return the cells of its row."""
        return [number(self.makespan), number(self.idle), f"{self.bubble_fraction:.1%}", number(self.peak_activations)]


def compare_table(
    pp: int, microbatches: int, virtual_stages: int = 1, costs: Costs | None = None, own: Iterable[Schedule] = ()
) -> Iterator[tuple[str, int, Figures | str]]:
    """Yield (name, chunks, figures) of every named schedule, then of the user's own.

    If a schedule is impossible for these numbers, its reason takes the place of figures.

    Args:
        virtual_stages: chunks per rank of schedules that do not fix their number.
    """
    for name in SCHEDULES:
        kind = SCHEDULES[name]
        chunks = kind.chunks or virtual_stages
        try:
            yield name, chunks, Figures.of(kind.build(pp, microbatches, chunks), costs)
        except ValueError as error:
            yield name, chunks, str(error)
    yield from ((schedule.name, schedule.chunks, Figures.of(schedule, costs)) for schedule in own)


def comparison(pp: int, microbatches: int, virtual_stages: int, costs: Costs, own: Iterable[Schedule]) -> Table:
    """Return `compare_table` as a table for the terminal."""
    numbers = ("chunks", "makespan", "idle", "bubble", "peak activations")
    table = Table("schedule", *(Column(name, justify="right") for name in numbers), "", box=None)
    for name, count, found in compare_table(pp, microbatches, virtual_stages, costs, own):
        table.add_row(name, str(count), *(["-"] * 4 + [found] if isinstance(found, str) else found.cells()))
    return table
