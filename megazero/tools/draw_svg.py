"""A timeline as an SVG picture, for a paper."""

from __future__ import annotations

from statistics import median

from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.proof import Timeline
from megazero.tools.draw import kinds_of, number, spans_of_ranks, title
from megazero.tools.svg import MARGIN, document, text, ticks

_FILL_RGB = {ActionKind.FORWARD: 0xCFE3F8, ActionKind.BACKWARD: 0xD5EDD3, ActionKind.WEIGHT: 0xFBE3C0}
_EDGE_RGB = {ActionKind.FORWARD: 0x5B92C9, ActionKind.BACKWARD: 0x5F9E5A, ActionKind.WEIGHT: 0xC98F35}
_LABELS, _TOP, _ROW, _GAP, _DIGIT = 54, 50, 24, 5, 7  # pixels


def draw_svg(timeline: Timeline) -> str:
    """The text of an SVG file on a light ground.

    Each action is one `<rect class="cell">` in the group of its rank; its `<title>` names the action and its times.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    typical = median(end - start for start, end in timeline.spans.values()) or makespan
    wide = min(max(24 * makespan / typical, 720.0), 1600.0)
    left, per_time = MARGIN + _LABELS, wide / makespan
    bottom = _TOP + schedule.pp * (_ROW + _GAP)
    body = []
    for rank, spans in enumerate(spans_of_ranks(timeline)):
        y = _TOP + rank * (_ROW + _GAP)
        body += ["<g>" + text(MARGIN, y + 16, f"rank {rank}")]
        body += [f'<rect class="idle" x="{left}" y="{y}" width="{wide:.2f}" height="{_ROW}"/>']
        body += [*(_cell(schedule, span, left, y, per_time) for span in spans), "</g>"]
    legend, legend_end = _legend(schedule, left, bottom + 42)
    body += [*_time_axis(makespan, left, bottom, per_time), *legend]
    width = max(left + wide, legend_end, MARGIN + 7.6 * len(title(timeline))) + MARGIN
    return document(width, bottom + 74, title(timeline), body)


def _paint(kind: ActionKind, chunk: int, chunks: int) -> str:
    """Fill and stroke of a cell; the higher the chunk, the nearer its fill is to the stroke."""
    share = 0.75 * chunk / max(chunks - 1, 1)
    fill = 0
    for shift in (16, 8, 0):
        light, dark = _FILL_RGB[kind] >> shift & 255, _EDGE_RGB[kind] >> shift & 255
        fill |= round(light + (dark - light) * share) << shift
    return f'fill="#{fill:06x}" stroke="#{_EDGE_RGB[kind]:06x}" stroke-width="0.8"'


def _cell(schedule: Schedule, span: tuple[float, float, Action], left: int, y: int, per_time: float) -> str:
    start, end, action = span
    x, wide = left + start * per_time, (end - start) * per_time
    rect = (
        f'<rect class="cell" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" '
        f"{_paint(action.kind, action.chunk, schedule.chunks)}>"
        f"<title>{action}: {number(start)} to {number(end)}</title></rect>"
    )
    label = str(action.microbatch)
    return rect if len(label) * _DIGIT + 2 > wide else rect + text(x + wide / 2, y + 16, label, "mid")


def _time_axis(makespan: float, left: int, y: int, per_time: float) -> list[str]:
    end = left + makespan * per_time
    lines = [text(MARGIN, y + 18, "time", "small"), f'<path class="line" d="M{left} {y + 2}H{end:.2f}"/>']
    for tick in ticks(makespan, makespan * per_time / 60):
        x = left + tick * per_time
        lines += [f'<path class="line" d="M{x:.2f} {y + 2}v4"/>', text(x, y + 18, number(tick), "small mid")]
    return lines


def _legend(schedule: Schedule, x: float, y: int) -> tuple[list[str], float]:
    """Samples of the colours of each kind, one for each chunk, and where the line ends."""
    lines = []
    between = " and " if schedule.chunks == 2 else " to "
    for kind, meaning in kinds_of(schedule).items():
        for chunk in range(schedule.chunks):
            lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" {_paint(kind, chunk, schedule.chunks)}/>')
            x += 14
        words = meaning if schedule.chunks == 1 else f"{meaning}, chunk 0{between}{schedule.chunks - 1}"
        lines.append(text(x + 6, y + 11, words, "small"))
        x += 6 + 6.2 * len(words) + 16
    lines.append(f'<rect class="idle" x="{x}" y="{y}" width="14" height="14"/>')
    return [*lines, text(x + 20, y + 11, "idle", "small")], x + 44
