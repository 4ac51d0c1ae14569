"""A memory report as tables for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from textwrap import fill

from megazero.plan.measured_step import POINTS, STEP
from megazero.plan.memory_report import Report, Row
from megazero.plan.schedule_drawing import ticks
from megazero.plan.svg import MARGIN, document, legend, text
from megazero.plan.text import table_lines

_NOTES_WIDTH = 120


def draw_text(report: Report) -> str:
    """Return the report as text: memory, traffic and time, activations, notes."""
    notes = [fill(note, _NOTES_WIDTH) for note in _notes(report)]
    tables = [_memory(report), *_gather_buffers(report), _traffic(report), *_activations(report)]
    return "\n".join([*_heading(report), "", *tables, *notes])


def _heading(report: Report) -> tuple[str, str]:
    about = f"{report.model}: {report.parameters:,} parameters; {report.batch}"
    return f"{report.shape} on {report.machine}", about


def _table(title: str, columns: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], list[str]]) -> str:
    return _printed(
        title, ("dtype", "ZeRO", "offload", *columns), [[*map(str, row.combination), *cells(row)] for row in rows], 3
    )


def _printed(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> str:
    """Return a table with `names` columns of words, then numbers."""
    return "\n".join([title, *table_lines("", [columns, *rows], range(names)), ""])


def _memory(report: Report) -> str:
    def cells(row: Row) -> list[str]:
        worst, state = row.worst, row.worst.state_bytes()
        live = [worst.buffer_bytes(), worst.most_buffer_bytes(), *(worst.live[point] for point in POINTS), worst.peak]
        sizes = [_mib(state), _mib(worst.off_device_bytes()), _mib(worst.planned_bytes())]
        return [*sizes, _ratio(state, worst.planned_bytes()), *map(_mib, live)]

    title = "Memory in MiB of the rank with most state: its state and ZeRO's buffers after a step, and all live tensors"
    after = (f"after {point}" for point in POINTS)
    columns = ("state", "off device", "planned", "ratio", "buffers", "at most", *after, "peak")
    return _table(title, columns, report.rows, cells)


def _gather_buffers(report: Report) -> Iterator[str]:
    """Yield a table of stage 3's gather buffers and their sizes."""

    def cells(row: Row) -> list[str]:
        sizes, counted = row.worst.gather_buffers, row.worst.counted[STEP]["gather_buffers"]
        shown = " + ".join(map(_mib, sizes[:4])) + (f" + {_mib(sum(sizes[4:]))}" if sizes[4:] else "")
        return [str(len(sizes)), shown, _mib(sum(sizes)), _mib(counted), _ratio(counted, sum(sizes))]

    rows = [row for row in report.rows if row.worst.gather_buffers]
    if rows:
        title = (
            "Buffers in MiB to which stage 3 gathers weights: of every n-th unit the largest (beyond four: their sum)"
        )
        yield _table(title, ("n", "largest units", "in all", "counted", "ratio"), rows, cells)


def _traffic(report: Report) -> str:
    pairs = sorted({(axis, name) for row in report.rows for axis, sent in row.worst.sent.items() for name in sent})

    def cells(row: Row) -> list[str]:
        sent = [_size(row.worst.sent.get(axis, {}).get(name, 0)) for axis, name in pairs]
        return [*sent, _size(row.planned_sent), _ratio(row.sent, row.planned_sent), f"{row.seconds:.2f} s"]

    sent = (f"{axis} {name.replace('_', '-')}" for axis, name in pairs)
    columns = (*sent, f"planned over {report.rows[0].axis}", "ratio", f"{report.iterations} steps")
    return _table("Sent by that rank in a step, and time", columns, report.rows, cells)


def _activations(report: Report) -> Iterator[str]:
    """Yield a table by policy: planned bytes of a layer and of the fullest rank, and what a step allocates."""
    if not report.policies:
        return
    rows = []
    for row in report.policies:
        rank = row.fullest
        rows.append([row.policy, *map(_mib, (rank.layer, rank.planned, rank.live)), f"{rank.again:.1%}"])
    columns = ("recompute", "a layer, planned", "rank at most, planned", "a step allocates", "computes more")
    yield _printed("Kept for the backward passes in MiB, on the fullest rank, nothing offloaded", columns, rows, 1)


def _notes(report: Report) -> Iterator[str]:
    rows = report.rows
    padding = max(rank.padding / rank.elements for row in rows for rank in row.ranks)
    yield "ratio: measured / planned, by a trace of the engine on tensors that hold nothing."
    yield f"Buckets are padded by {padding:.3%} of a rank's parameters at most; padding is held and sent too."
    yield "Buffers at most: those of weights as they are, and of gradients what docs/shapes.md allows."
    if report.on_cpu:
        yield (
            "Live tensors: every allocation and release of torch's CPU allocator. On the CPU the host is the device: the"
            " live bytes hold what is offloaded to the host, and its time says nothing about a GPU."
        )
    if skipped := max(rank.skipped for row in rows for rank in row.ranks):
        yield f"Under fp16 up to {skipped} steps overflowed and were skipped."


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f}"


def _size(count: float) -> str:
    if not count:
        return "-"
    if count < 2**10:
        return f"{count:.0f} B"
    return f"{count / 2**20:,.2f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _ratio(measured: float, formula: float) -> str:
    return f"{measured / formula:.4f}" if formula else "-"


# ---- picture

_LEFT = MARGIN + 44  # pixels
_COURSES = "#1f2933", "#5b92c9", "#c98f35", "#5f9e5a", "#8a6bb8", "#b3261e"


def draw_course(report: Report) -> str:
    """A picture of memory over one step for each policy, as the text of an SVG file.

    A line for each: all that the step has allocated on the rank that keeps most, from its start to its end.  Where the
    allocator tells no course, on CUDA, the line is level at the most.
    """
    wide, high, top = 720, 300, 112
    courses = [row.fullest.course or [(0.0, row.fullest.live), (1.0, row.fullest.live)] for row in report.policies]
    most = max(count for course in courses for _, count in course) * 1.05
    paints = [_COURSES[index % len(_COURSES)] for index in range(len(courses))]
    body = [text(MARGIN, 50 + 16 * index, line, "small") for index, line in enumerate(_heading(report))]
    meanings = [
        ([f'fill="{paint}"'], f"{row.policy}, {_mib(row.fullest.live)} MiB at most")
        for row, paint in zip(report.policies, paints, strict=True)
    ]
    samples, end = legend(MARGIN, 78, meanings)
    body += samples
    for value in ticks(most / 2**20, 5):
        y = top + high * (1 - value * 2**20 / most)
        body.append(f'<path class="grid" d="M{_LEFT} {y:.2f}h{wide}"/>')
        body.append(text(_LEFT - 6, y + 4, f"{value:g}", "small end"))
    for row, course, paint in zip(report.policies, courses, paints, strict=True):
        points = " ".join(f"{_LEFT + wide * at:.1f},{top + high * (1 - count / most):.1f}" for at, count in course)
        title = f"<title>{row.policy}: keeps {_mib(row.fullest.planned)} MiB by the plan</title>"
        body.append(f'<polyline points="{points}" fill="none" stroke="{paint}" stroke-width="1.5">{title}</polyline>')
    body.append(
        text(_LEFT + wide / 2, top + high + 22, "one step, from its start to its end; MiB that it allocates", "mid")
    )
    width = max(_LEFT + wide + MARGIN, end, 2 * MARGIN + 5.9 * max(map(len, _heading(report))))
    return document(width, top + high + 40, "Memory over one step, by what is recomputed", body)
