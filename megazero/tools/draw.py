"""Pictures of a timeline.  They ask only who computed what from when to when, so a measured one is drawn as a simulated one.

    draw_text       rank 0 F0F1..B0==B1==       cells in columns of text; idle time as dots
                    rank 1 ..F0B0==F1B1==
                    time   |0   |2   |4
    chrome_trace    the same for chrome://tracing and ui.perfetto.dev
    compare_table   what every schedule costs for the same numbers
    draw_around     where in its rank's list a refused action stands

Times count from 0.  An activation is one of a rank's whole part of the model: on one of v chunks it counts 1/v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10
from textwrap import wrap
from typing import Any

from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.proof import Costs, ScheduleError, Timeline, peak_activations, simulate
from megazero.schedules.registry import SCHEDULES

MIN_WIDTH = 40
_FILL = {ActionKind.FORWARD: "-", ActionKind.BACKWARD: "=", ActionKind.WEIGHT: "~"}
_SHADES = {
    ActionKind.FORWARD: (153, 74, 25),
    ActionKind.BACKWARD: (157, 71, 28),
    ActionKind.WEIGHT: (223, 179, 130),
}  # of 256 colours


# ---- what every picture says


def number(value: float) -> str:
    """At most three decimals, none that say nothing."""
    return f"{round(value, 3) + 0.0:.3f}".rstrip("0").rstrip(".")


def peak_microbatches(schedule: Schedule, rank: int) -> float:
    """Most activations that a rank holds at once, in micro-batches on all its chunks."""
    return peak_activations(schedule, rank) / schedule.chunks


def title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    chunks = f", {schedule.chunks} chunks per rank" if schedule.chunks > 1 else ""
    plural = "es" if schedule.microbatches > 1 else ""
    return (
        f"{schedule.name}: pp {schedule.pp}, {schedule.microbatches} micro-batch{plural}{chunks}; "
        f"makespan {number(timeline.makespan)}, bubble {timeline.bubble_fraction:.1%}"
    )


def kinds_of(schedule: Schedule) -> dict[ActionKind, str]:
    """The kinds of action of a schedule, and what they are."""
    kinds = {ActionKind.FORWARD: "forward"}
    if schedule.splits_backward:
        return kinds | {ActionKind.BACKWARD: "gradient of the input", ActionKind.WEIGHT: "gradient of the weights"}
    return kinds | ({ActionKind.BACKWARD: "backward"} if schedule.has_backward else {})


def by_rank(timeline: Timeline) -> list[list[tuple[float, float, Action]]]:
    """Spans of each rank, (start, end, action), by time."""
    rows: list[list[tuple[float, float, Action]]] = [[] for _ in range(timeline.schedule.pp)]
    for (rank, action), (start, end) in timeline.spans.items():
        rows[rank].append((start, end, action))
    return [sorted(row, key=lambda span: span[:2]) for row in rows]


def ticks(makespan: float, at_most: float) -> list[float]:
    """Times of an axis: multiples of 1, 2 or 5 times a power of ten, from 0."""
    least = makespan / max(at_most, 1)
    power = 10.0 ** floor(log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    return [index * step for index in range(floor(makespan / step + 1e-9) + 1)]


# ---- text


def draw_text(timeline: Timeline, width: int, colour: bool) -> str:
    """A row of cells per rank, a scale, a legend, and what each rank does and holds.

    Args:
        timeline: what to draw.
        width: columns; the rows of the ranks and the scale fill them, no line is longer.
        colour: colours of a terminal that has 256; without them the text is ASCII, but for the schedule's name.

    Raises:
        ValueError: fewer columns than `MIN_WIDTH`.
    """
    if width < MIN_WIDTH:
        raise ValueError(f"width={width} must be at least {MIN_WIDTH} columns")
    schedule = timeline.schedule
    margin = len(f"rank {schedule.pp - 1} ")
    room = width - margin
    per_time = _columns_per_time(timeline, room)
    cell = _coloured_cell if colour else _plain_cell

    def column(time: float) -> int:
        return min(ceil(time * per_time - 0.5), room)  # the first one whose middle is not before `time`

    lines = wrap(title(timeline), width)
    for rank, spans in enumerate(by_rank(timeline)):
        lines.append(
            f"rank {rank}".ljust(margin) + _row(spans, schedule.chunks, column, cell, column(timeline.makespan), room)
        )
    lines.append("time".ljust(margin) + _scale(timeline.makespan, column, room))
    lines += _legend(schedule, cell, width)
    return "\n".join([*lines, "", *_figures_of_ranks(timeline)])


def _columns_per_time(timeline: Timeline, room: int) -> float:
    """Columns of a unit of time: whole ones for every cell where the times have a common measure, else all there are."""
    makespan = timeline.makespan
    measure = 0.0
    for time in sorted({time for span in timeline.spans.values() for time in span}, reverse=True):
        rest = time
        while rest > makespan * 1e-6:  # Euclid's algorithm on floats; the nearest multiple, not the one below
            measure, rest = rest, abs(measure - rest * round(measure / rest))
        if measure * room < makespan * (1 - 1e-6):
            return room / makespan
    return room // round(makespan / measure) / measure


def _row(
    spans: list[tuple[float, float, Action]],
    chunks: int,
    column: Callable[[float], int],
    cell: Callable[[Action, int, int], str],
    end_column: int,
    room: int,
) -> str:
    row, at = "", 0
    for start, end, action in spans:
        first = max(column(start), at)
        last = max(column(end), first)
        row += "." * (first - at) + cell(action, last - first, chunks)
        at = last
    return row + "." * (end_column - at) + " " * (room - max(end_column, at))


def _plain_cell(action: Action, columns: int, chunks: int) -> str:
    """F0--, B0==, W0~~; small letters for later chunks; without what does not fit."""
    letter = action.kind.value.lower() if action.chunk else action.kind.value
    short = f"{letter}{action.microbatch}"
    labels = [f"{short}.{action.chunk}"] if action.chunk and chunks > 2 else []
    label = next((label for label in (*labels, short, letter) if len(label) <= columns), "")
    return label.ljust(columns, _FILL[action.kind])


def _coloured_cell(action: Action, columns: int, chunks: int) -> str:
    """The number of the micro-batch, where it fits, on a ground that says kind and chunk."""
    if not columns:
        return ""
    shade = min(action.chunk, 2)
    ink = 231 if shade == 2 else 16
    label = str(action.microbatch) if len(str(action.microbatch)) <= columns else ""
    return f"\x1b[38;5;{ink};48;5;{_SHADES[action.kind][shade]}m{label.ljust(columns)}\x1b[0m"


def _scale(makespan: float, column: Callable[[float], int], room: int) -> str:
    line = ""
    for tick in ticks(makespan, column(makespan) / 10):
        mark = f"|{number(tick)}"
        if len(line) <= column(tick) <= room - len(mark):
            line = line.ljust(column(tick)) + mark
    return line.ljust(room)


def _legend(schedule: Schedule, cell: Callable[[Action, int, int], str], width: int) -> list[str]:
    """(what to show, its length, what it means), as many in a line as fit."""
    chunks = schedule.chunks
    entries = [(cell(Action(kind, 0), 3, chunks), 3, meaning) for kind, meaning in kinds_of(schedule).items()]
    if chunks > 1:
        later = "chunk 1" if chunks == 2 else "chunks from 1 on"
        entries.append((cell(Action(ActionKind.FORWARD, 0, 1), 3, 2), 3, later))
    entries.append(("...", 3, "idle"))
    lines, used = [""], 0
    for shown, length, meaning in entries:
        needed = length + 1 + len(meaning)
        if used and used + 3 + needed > width:
            lines.append("")
            used = 0
        lines[-1] += ("   " if used else "") + f"{shown} {meaning}"
        used += needed + (3 if used else 0)
    return lines


def _figures_of_ranks(timeline: Timeline) -> list[str]:
    schedule = timeline.schedule
    lines = ["rank    busy        idle   peak activations"]
    for rank in range(schedule.pp):
        idle = timeline.idle(rank)
        busy = 1 - idle / timeline.makespan
        peak = number(peak_microbatches(schedule, rank))
        lines.append(f"{rank:<4}  {busy:>6.1%}  {number(idle):>10}   {peak}")
    return lines


# ---- trace


def chrome_trace(timeline: Timeline, unit_us: float = 1000.0) -> dict[str, Any]:
    """The trace event format of chrome://tracing and ui.perfetto.dev: a thread per rank, a complete event per action.

    Args:
        timeline: what to trace.
        unit_us: microseconds of one unit of the timeline.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": timeline.schedule.name}}
    ]
    for rank, spans in enumerate(by_rank(timeline)):
        about = {"ph": "M", "pid": 0, "tid": rank}
        events.append({"name": "thread_name", **about, "args": {"name": f"rank {rank}"}})
        events.append({"name": "thread_sort_index", **about, "args": {"sort_index": rank}})
        for start, end, action in spans:
            events.append(
                {
                    "name": str(action),
                    "cat": action.kind.name.lower(),
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": start * unit_us,
                    "dur": (end - start) * unit_us,
                    "args": {"microbatch": action.microbatch, "chunk": action.chunk},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# ---- comparison


@dataclass(frozen=True)
class Figures:
    """What a schedule costs.

    Args:
        makespan: from the first start to the last end.
        idle: of the rank that idles most.
        bubble_fraction: idle share of all ranks' time.
        peak_activations: of the rank that holds most, in micro-batches on all its chunks.
    """

    makespan: float
    idle: float
    bubble_fraction: float
    peak_activations: float


@dataclass(frozen=True)
class Compared:
    """A row of `compare_table`: the figures, or why there are none.

    Args:
        name: of the schedule.
        chunks: per rank.
        figures: None where the schedule is impossible for these numbers.
        impossible: why.
    """

    name: str
    chunks: int
    figures: Figures | None
    impossible: str = ""


def compare_table(
    pp: int, microbatches: int, virtual_stages: int = 1, costs: Costs | None = None, own: Iterable[Schedule] = ()
) -> tuple[Compared, ...]:
    """What every schedule costs for the same numbers, then schedules of the user's own.

    Args:
        pp: pipeline ranks.
        microbatches: micro-batches of one step.
        virtual_stages: chunks of the schedules that leave their number open.
        costs: time of each kind of action.
        own: further schedules.
    """
    rows = []
    for name in SCHEDULES:
        kind = SCHEDULES[name]
        chunks = kind.chunks or virtual_stages
        try:
            rows.append(_compared(kind.build(pp, microbatches, chunks), costs))
        except ValueError as error:
            rows.append(Compared(name, chunks, None, str(error)))
    return (*rows, *(_compared(schedule, costs) for schedule in own))


def _compared(schedule: Schedule, costs: Costs | None) -> Compared:
    timeline, ranks = simulate(schedule, costs), range(schedule.pp)
    figures = Figures(
        timeline.makespan,
        max(timeline.idle(rank) for rank in ranks),
        timeline.bubble_fraction,
        max(peak_microbatches(schedule, rank) for rank in ranks),
    )
    return Compared(schedule.name, schedule.chunks, figures)


# ---- refused schedules


def draw_refused(schedule: Schedule, error: ScheduleError) -> str:
    """The schedule around the action that it was refused for; empty where there is none."""
    return "" if error.rank is None or error.action is None else draw_around(schedule, error.rank, error.action)


def draw_around(schedule: Schedule, rank: int, action: Action) -> str:
    """The lists of the ranks around an action of a refused schedule, in ASCII.

    The action is marked >F3<, the one that it waits for (F3).  Those two ranks are shown around them, the others around the
    same place of their list; of more than eight ranks only the near ones are shown.

    Args:
        schedule: what was refused; anything may be wrong with it.
        rank: where the action stands.
        action: what was refused; it may be missing from the rank's list.
    """
    has_stage = (rank, action.chunk) in schedule.placement
    source = schedule.source(rank, action) if has_stage else None
    end = len(schedule.ranks[rank])
    here = _place(
        schedule, rank, action, _place(schedule, rank, source[1], end) if source and source[0] == rank else end
    )
    shown = [r for r in range(schedule.pp) if schedule.pp <= 8 or abs(r - rank) <= 3 or (source and r == source[0])]
    words: dict[int, list[str]] = {}
    for other in shown:
        centre = _place(schedule, *source, here) if source and other == source[0] and other != rank else here
        words[other] = _words_around(schedule, other, centre, (rank, action), source)
    wide = max((len(word) for row in words.values() for word in row), default=0)
    lines = []
    for before, other in pairwise([shown[0] - 1, *shown]):
        lines += ["  ..."] if other > before + 1 else []
        mark = ">" if other == rank else " "
        lines.append(f"{mark} rank {other:<3} {' '.join(word.ljust(wide) for word in words[other])}".rstrip())
    if action not in schedule.ranks[rank]:
        lines.append(f"  {action} is not in the list of rank {rank}")
    return "\n".join(lines)


def _place(schedule: Schedule, rank: int, action: Action, otherwise: int) -> int:
    actions = schedule.ranks[rank]
    return actions.index(action) if action in actions else otherwise


def _words_around(
    schedule: Schedule, rank: int, centre: int, marked: tuple[int, Action], source: tuple[int, Action] | None
) -> list[str]:
    """Four actions on either side of a place, with dots where there are more, at the same columns for every rank."""
    actions = schedule.ranks[rank]
    words = ["..." if centre > 4 and actions else ""]
    for index in range(centre - 4, centre + 5):
        action = actions[index] if 0 <= index < len(actions) else None
        if action is None:
            words.append("")
        elif (rank, action) == marked:
            words.append(f">{action}<")
        elif (rank, action) == source:
            words.append(f"({action})")
        else:
            words.append(f" {action} ")
    return [*words, "..." if centre + 5 < len(actions) else ""]
