"""Draws timelines of pipelines, measured or simulated: spans (rank, action) -> (start, end).

    draw_text       rank 0 F0F1..B0==B1==       columns of a terminal are time; dots are idle time
                    rank 1 ..F0B0==F1B1==
                    time   |0   |2   |4
    draw_svg        the same as a picture
    trace_text      the same for chrome://tracing and ui.perfetto.dev
    comparison      a table of all schedules for the same sizes
    picture         named rows of bars above an axis, as SVG; the page of a plan uses it, too

Times begin at 0.  Activations are counted in micro-batches on all v chunks of a rank: a micro-batch on one chunk is 1/v.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from rich.table import Column, Table
from rich.text import Text

from megazero.schedules.action import Action, Op, Schedule
from megazero.schedules.proof import Costs, Timeline, peak_activations, simulate
from megazero.schedules.registry import SCHEDULES

LOOKS = tomllib.loads((Path(__file__).parent / "pictures.toml").read_text(encoding="utf-8"))
_MARGIN, _TOP, _HIGH, _GAP, _DIGIT, _LETTER = 20, 50, 24, 5, 7, 6.2  # pixels


class Bar(NamedTuple):
    """A box in a row of a picture.

    Args:
        title: the tooltip.
        label: the text inside, drawn if it fits.
    """

    start: float
    end: float
    colour: str
    title: str = ""
    label: str = ""


def ticks(end: float, at_most: float) -> list[float]:
    """Return up to about `at_most` tick values from 0 to `end`: multiples of 1, 2 or 5 times a power of ten."""
    least = end / max(at_most, 1)
    power = 10.0 ** floor(log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    return [index * step for index in range(floor(end / step + 1e-9) + 1)]


def picture(
    title: str,
    rows: Sequence[tuple[str, Iterable[Bar]]],
    end: float,
    unit: str,
    meanings: Iterable[tuple[Sequence[str], str]],
    *,
    wide: float = 720.0,
    mark: float | None = None,
) -> str:
    """Return the text of an SVG file: a heading, named rows of bars above an axis, a legend.

    Args:
        title: the heading.
        rows: (name, bars) of each row.
        end: end of the axis, which begins at 0.
        unit: name of the axis's unit.
        meanings: (colours, meaning) of each entry of the legend.
        wide: length of the axis in pixels.
        mark: position of a line across all rows; None for no line.
    """
    left = _MARGIN + 12 + _DIGIT * max(len(name) for name, _ in rows)
    body, y, scale = list[str](), float(_TOP), wide / end
    for name, row in rows:
        body.append(_text(_MARGIN, y + _HIGH / 2 + 4, name))
        for bar in row:
            at, width = left + bar.start * scale, (bar.end - bar.start) * scale
            body.append(_rect(at, y, width, _HIGH, bar.colour, bar.title))
            if bar.label and len(bar.label) * _DIGIT + 2 <= width:
                body.append(_text(at + width / 2, y + _HIGH / 2 + 4, bar.label, "mid"))
        y += _HIGH + _GAP
    if mark is not None:
        body.append(f'<path class="limit" d="M{left + mark * scale:.1f} {_TOP}V{y}"/>')
    body += [_text(_MARGIN, y + 18, unit, "small"), f'<path class="line" d="M{left} {y + 2}h{wide:.2f}"/>']
    for tick in ticks(end, wide / 60):
        at = left + tick * scale
        body.append(f'<path class="line" d="M{at:.2f} {y + 2}v4"/>' + _text(at, y + 18, f"{tick:g}", "small mid"))
    x, y = float(left), y + 42
    for colours, meaning in meanings:
        if x > left and x + 14 * len(colours) + _LETTER * len(meaning) > left + wide:
            x, y = float(left), y + 20
        for colour in colours:
            body.append(_rect(x, y, 14, 14, colour))
            x += 14
        body.append(_text(x + 6, y + 11, meaning, "small"))
        x += 22 + _LETTER * len(meaning)
    width, height = max(left + wide, _MARGIN + 7.6 * len(title)) + _MARGIN, y + 32
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>'
    card = f'<rect class="card" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8"/>'
    style = f"<style>{LOOKS['svg_style']}</style>"
    return "\n".join([head, style, card, _text(_MARGIN, 32, title, "head"), *body, "</svg>\n"])


def _text(x: float, y: float, content: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.2f}" y="{y:.2f}">{escape(content)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}"'
    return f"{box}><title>{escape(title)}</title></rect>" if title else f"{box}/>"


# ---- timelines of pipelines


MIN_WIDTH = 40
_FILL = {Op.FORWARD: "-", Op.BACKWARD: "=", Op.WEIGHT: "~"}


def shade_of(action: Action) -> str:
    """Return the colour of an action.  Higher chunks are darker."""
    return str(LOOKS["passes"][action.op.value][min(action.chunk, 2)])


def number(value: float) -> str:
    """Format a number with up to three decimals, without trailing zeros."""
    return f"{round(value, 3) + 0.0:.3f}".rstrip("0").rstrip(".")


def title(timeline: Timeline, unit: str = "") -> str:
    """Return the title of a drawing, with makespan and bubble.  `unit` follows the times, as " ms"."""
    schedule = timeline.schedule
    chunks = f", {schedule.chunks} chunks per rank" if schedule.chunks > 1 else ""
    plural = "es" if schedule.microbatches > 1 else ""
    return (
        f"{schedule.name}: pp {schedule.pp}, {schedule.microbatches} micro-batch{plural}{chunks}; "
        f"makespan {number(timeline.makespan)}{unit}, bubble {timeline.bubble_fraction:.1%}"
    )


def ops_of(schedule: Schedule) -> dict[Op, str]:
    """Return the operations of a schedule, each with its meaning."""
    ops = {Op.FORWARD: "forward"}
    if schedule.splits_backward:
        return ops | {Op.BACKWARD: "gradient of the input", Op.WEIGHT: "gradient of the weights"}
    return ops | ({Op.BACKWARD: "backward"} if schedule.has_backward else {})


def spans_of_ranks(timeline: Timeline) -> list[list[tuple[float, float, Action]]]:
    """Return the (start, end, action) spans of each rank, in order of time."""
    rows: list[list[tuple[float, float, Action]]] = [[] for _ in range(timeline.schedule.pp)]
    for (rank, action), (start, end) in timeline.spans.items():
        rows[rank].append((start, end, action))
    return [sorted(row, key=lambda span: span[:2]) for row in rows]


# ---- text


def draw_text(timeline: Timeline, width: int) -> Text:
    """Draw a timeline as text: a row of cells per rank, a scale, a legend, and a table of idle time and peak activations.

    Args:
        width: columns of the terminal to fill, at least `MIN_WIDTH`.
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
    """Return the columns per unit of time.  The shortest action gets a whole number of columns if it gets any."""
    per_time = columns / timeline.makespan
    shortest = min((end - start for start, end in timeline.spans.values() if end > start), default=timeline.makespan)
    return floor(per_time * shortest + 1e-9) / shortest if per_time * shortest >= 1 else per_time


def _cell(action: Action, columns: int, chunks: int) -> Text:
    """Return the cell of an action, such as F0--, B0== or W0~~, cut to fit.  Chunks above 0 get small letters."""
    letter = action.op.value.lower() if action.chunk else action.op.value
    short = f"{letter}{action.microbatch}"
    long = f"{short}.{action.chunk}" if action.chunk and chunks > 2 else short
    label = next(label for label in (long, short, letter, "") if len(label) <= columns)
    style = f"{'#ffffff' if action.chunk > 1 else '#000000'} on {shade_of(action)}"
    return Text().append(label.ljust(columns, _FILL[action.op]), style)


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
    entries = [_cell(Action(op, 0), 3, chunks).append(f" {meaning}") for op, meaning in ops_of(schedule).items()]
    if chunks > 1:
        meaning = "chunk 1" if chunks == 2 else "chunks from 1 on"
        entries.append(_cell(Action(Op.FORWARD, 0, 1), 3, 2).append(f" {meaning}"))
    entries += [Text("F0& beside the next")] if schedule.beside else []
    return Text("   ").join([*entries, Text("... idle")])


# ---- files


def draw_svg(timeline: Timeline, unit: str = "", about: str = "") -> str:
    """Draw a timeline as an SVG picture for a paper; return the text of the file.

    Args:
        unit: unit of the times, as " ms".
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
        ([shade_of(Action(op, 0, chunk)) for chunk in range(min(last, 2) + 1)], meaning + of_chunks)
        for op, meaning in ops_of(schedule).items()
    ]
    heading, axis = about + title(timeline, unit), f"time{unit and f',{unit}'}"
    return picture(heading, rows, makespan, axis, [*meanings, ([idle], "idle")], wide=wide)


def trace_text(timeline: Timeline, unit_us: float = 1000.0) -> str:
    """Return a trace for chrome://tracing and ui.perfetto.dev: a thread per rank, a complete event per action.

    Args:
        unit_us: microseconds of one time unit of the timeline.
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
            add("X", rank, str(action), about, cat=action.op.name.lower(), ts=ts, dur=dur)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


# ---- comparison


class Figures(NamedTuple):
    """The costs of a schedule.  Idle time and peak activations are those of the rank that has the most."""

    makespan: float
    idle: float
    bubble_fraction: float
    peak_activations: float

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs | None) -> Figures:
        """Simulate a schedule and return its costs."""
        timeline, ranks = simulate(schedule, costs), range(schedule.pp)
        idle = max(timeline.idle(rank) for rank in ranks)
        peak = max(peak_activations(schedule, rank) for rank in ranks) / schedule.chunks
        return cls(timeline.makespan, idle, timeline.bubble_fraction, peak)

    def cells(self) -> list[str]:
        """Return the cells of the schedule's row in the table."""
        return [number(self.makespan), number(self.idle), f"{self.bubble_fraction:.1%}", number(self.peak_activations)]


def compare_table(
    pp: int, microbatches: int, virtual_stages: int = 1, costs: Costs | None = None, own: Iterable[Schedule] = ()
) -> Iterator[tuple[str, int, Figures | str]]:
    """Yield (name, chunks, figures) of every named schedule, then of the user's own.

    If a schedule is impossible for these sizes, the reason takes the place of the figures.

    Args:
        pp, microbatches: the sizes.
        virtual_stages: chunks per rank, for schedules that allow any number.
        costs: time of each operation; None for the default.
        own: schedules of the user.
    """
    for name in SCHEDULES:
        factory = SCHEDULES[name]
        chunks = factory.chunks or virtual_stages
        try:
            yield name, chunks, Figures.of(factory.build(pp, microbatches, chunks), costs)
        except ValueError as error:
            yield name, chunks, str(error)
    yield from ((schedule.name, schedule.chunks, Figures.of(schedule, costs)) for schedule in own)


def comparison(pp: int, microbatches: int, virtual_stages: int, costs: Costs, own: Iterable[Schedule]) -> Table:
    """Format `compare_table` for the terminal."""
    numbers = ("chunks", "makespan", "idle", "bubble", "peak activations")
    table = Table("schedule", *(Column(name, justify="right") for name in numbers), "", box=None)
    for name, count, found in compare_table(pp, microbatches, virtual_stages, costs, own):
        table.add_row(name, str(count), *(["-"] * 4 + [found] if isinstance(found, str) else found.cells()))
    return table
