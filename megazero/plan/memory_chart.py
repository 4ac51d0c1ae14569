"""A memory report as tables for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from megazero.plan.measured_step import POINTS
from megazero.plan.memory_report import Report
from megazero.plan.schedule_drawing import ticks
from megazero.plan.svg import MARGIN, document, legend, text
from megazero.plan.text import table_lines

_NOTES_WIDTH = 120
_NAMES = "dtype", "ZeRO", "offload"


def draw_text(report: Report) -> str:
    """Return the report as text: memory, traffic and time, activations, notes."""
    notes = [fill(note, _NOTES_WIDTH) for note in _notes(report)]
    tables = [*_memory(report), *_traffic(report), *(_activations(report) if report.policies else ())]
    return "\n".join([report.on, report.of, "", *tables, *notes])


def _memory(report: Report) -> Iterator[str]:
    yield "Memory in MiB of the rank with most state: its state and ZeRO's buffers after a step, and all live tensors"
    after = (f"after {point}" for point in POINTS)
    rows = [[*_NAMES, "state", "off device", "planned", "ratio", "buffers", "planned", *after, "peak", "planned"]]
    for row in report.rows:
        worst = row.worst
        state, live = worst.state_bytes, (worst.live[point] for point in POINTS)
        sizes = map(_mib, (worst.buffer_bytes, worst.planned_buffers, *live, worst.peak, worst.planned.peak))
        about = [_mib(state), _mib(worst.off_device_bytes), _mib(worst.planned_bytes)]
        rows.append([*map(str, row.about.values()), *about, _ratio(state, worst.planned_bytes), *sizes])
    yield from table_lines("", rows, range(3))
    yield ""


def _traffic(report: Report) -> Iterator[str]:
    yield "Sent by that rank in a step, and time"
    pairs = sorted({(axis, name) for row in report.rows for axis, sent in row.worst.sent.items() for name in sent})
    axes = (f"{axis} {name.replace('_', '-')}" for axis, name in pairs)
    rows = [[*_NAMES, *axes, f"planned over {report.rows[0].axis}", "ratio", f"{report.iterations} steps"]]
    for row in report.rows:
        sent = [_size(row.worst.sent.get(axis, {}).get(name, 0)) for axis, name in pairs]
        about = [_size(row.planned_sent), _ratio(row.sent, row.planned_sent), f"{row.seconds:.2f} s"]
        rows.append([*map(str, row.about.values()), *sent, *about])
    yield from table_lines("", rows, range(3))
    yield ""


def _activations(report: Report) -> Iterator[str]:
    """Yield a table by policy: planned bytes of a layer and of the fullest rank, and what a step allocates."""
    yield "Kept for the backward passes in MiB, on the fullest rank, nothing offloaded"
    rows = [["recompute", "a layer, planned", "rank at most, planned", "a step allocates", "computes more"]]
    for row in report.policies:
        rank = row.fullest
        sizes = map(_mib, (rank.layer, rank.planned.kept, rank.allocated))
        rows.append([str(row.about["policy"]), *sizes, f"{rank.planned.again:.1%}"])
    yield from table_lines("", rows, range(1))
    yield ""


def _notes(report: Report) -> Iterator[str]:
    rows = report.rows
    padding = max(rank.padding / rank.elements for row in rows for rank in row.ranks)
    yield "planned: by a trace of the engine on tensors that hold nothing; ratio: measured / planned."
    yield f"Buckets are padded by {padding:.3%} of a rank's parameters at most; padding is held and sent too."
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
    fullest = [row.fullest for row in report.policies]
    courses = [rank.course or [(0.0, rank.allocated), (1.0, rank.allocated)] for rank in fullest]
    most = max(count for course in courses for _, count in course) * 1.05
    paints = [_COURSES[index % len(_COURSES)] for index in range(len(courses))]
    body = [text(MARGIN, 50 + 16 * index, line, "small") for index, line in enumerate((report.on, report.of))]
    meanings = [
        ([f'fill="{paint}"'], f"{row.about['policy']}, {_mib(row.fullest.allocated)} MiB at most")
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
        title = f"<title>{row.about['policy']}: keeps {_mib(row.fullest.planned.kept)} MiB by the plan</title>"
        body.append(f'<polyline points="{points}" fill="none" stroke="{paint}" stroke-width="1.5">{title}</polyline>')
    body.append(
        text(_LEFT + wide / 2, top + high + 22, "one step, from its start to its end; MiB that it allocates", "mid")
    )
    width = max(_LEFT + wide + MARGIN, end, 2 * MARGIN + 5.9 * max(len(report.on), len(report.of)))
    return document(width, top + high + 40, "Memory over one step, by what is recomputed", body)
