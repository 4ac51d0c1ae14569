"""A timeline as a picture for a paper, in SVG."""

from __future__ import annotations

from statistics import median
from xml.sax.saxutils import escape

from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.proof import Timeline
from megazero.tools.draw import by_rank, kinds_of, number, ticks, title

_FILL_RGB = {ActionKind.FORWARD: 0xCFE3F8, ActionKind.BACKWARD: 0xD5EDD3, ActionKind.WEIGHT: 0xFBE3C0}
_EDGE_RGB = {ActionKind.FORWARD: 0x5B92C9, ActionKind.BACKWARD: 0x5F9E5A, ActionKind.WEIGHT: 0xC98F35}
_SVG_STYLE = """
    text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
    .head { font-size: 14px; font-weight: 600; }
    .small { font-size: 11px; fill: #52606d; }
    .mid { text-anchor: middle; }
    .card { fill: #ffffff; stroke: #d9dde1; }
    .idle { fill: #f0f2f4; }
    .line { stroke: #9aa5b1; fill: none; }
"""
_MARGIN, _LABELS, _TOP, _ROW, _GAP, _DIGIT = 20, 54, 50, 24, 5, 7  # pixels


def draw_svg(timeline: Timeline) -> str:
    """A picture of a timeline on a light ground, as text.

    Each action is one `<rect class="cell">` of the group of its rank, its `<title>` says which action it is and its times.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    typical = median(end - start for start, end in timeline.spans.values()) or makespan
    wide = min(max(24 * makespan / typical, 720.0), 1600.0)
    left, per_time = _MARGIN + _LABELS, wide / makespan
    bottom = _TOP + schedule.pp * (_ROW + _GAP)
    body = [f'<text class="head" x="{_MARGIN}" y="32">{escape(title(timeline))}</text>']
    for rank, spans in enumerate(by_rank(timeline)):
        y = _TOP + rank * (_ROW + _GAP)
        body.append(f'<g><text x="{_MARGIN}" y="{y + 16}">rank {rank}</text>')
        body.append(f'<rect class="idle" x="{left}" y="{y}" width="{wide:.2f}" height="{_ROW}"/>')
        body += [_svg_cell(schedule, span, left, y, per_time) for span in spans]
        body.append("</g>")
    body += _svg_axis(makespan, left, bottom, per_time)
    legend, legend_end = _svg_legend(schedule, left, bottom + 42)
    width, height = max(left + wide, legend_end, _MARGIN + 7.6 * len(title(timeline))) + _MARGIN, bottom + 74
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"'
            f' height="{height}" role="img">',
            f"<title>{escape(title(timeline))}</title>",
            f"<style>{_SVG_STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>',
            *body,
            *legend,
            "</svg>\n",
        ]
    )


def _paint(kind: ActionKind, chunk: int, chunks: int) -> str:
    """Fill and stroke of a cell; a later chunk's fill is nearer to the stroke."""
    share = 0.75 * chunk / max(chunks - 1, 1)
    fill = 0
    for shift in (16, 8, 0):
        light, dark = _FILL_RGB[kind] >> shift & 255, _EDGE_RGB[kind] >> shift & 255
        fill |= round(light + (dark - light) * share) << shift
    return f'fill="#{fill:06x}" stroke="#{_EDGE_RGB[kind]:06x}" stroke-width="0.8"'


def _svg_cell(schedule: Schedule, span: tuple[float, float, Action], left: int, y: int, per_time: float) -> str:
    start, end, action = span
    x, wide = left + start * per_time, (end - start) * per_time
    rect = (
        f'<rect class="cell" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" '
        f"{_paint(action.kind, action.chunk, schedule.chunks)}>"
        f"<title>{action}: {number(start)} to {number(end)}</title></rect>"
    )
    label = str(action.microbatch)
    if len(label) * _DIGIT + 2 > wide:
        return rect
    return f'{rect}<text class="mid" x="{x + wide / 2:.2f}" y="{y + 16}">{label}</text>'


def _svg_axis(makespan: float, left: int, y: int, per_time: float) -> list[str]:
    end = left + makespan * per_time
    lines = [
        f'<text class="small" x="{_MARGIN}" y="{y + 18}">time</text>',
        f'<path class="line" d="M{left} {y + 2}H{end:.2f}"/>',
    ]
    for tick in ticks(makespan, makespan * per_time / 60):
        x = left + tick * per_time
        lines.append(f'<path class="line" d="M{x:.2f} {y + 2}v4"/>')
        lines.append(f'<text class="small mid" x="{x:.2f}" y="{y + 18}">{number(tick)}</text>')
    return lines


def _svg_legend(schedule: Schedule, x: float, y: int) -> tuple[list[str], float]:
    """A swatch for each kind, of the shades of all chunks, and where the line ends."""
    lines = []
    between = " and " if schedule.chunks == 2 else " to "
    for kind, meaning in kinds_of(schedule).items():
        for chunk in range(schedule.chunks):
            paint = _paint(kind, chunk, schedule.chunks)
            lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" {paint}/>')
            x += 14
        text = meaning if schedule.chunks == 1 else f"{meaning}, chunk 0{between}{schedule.chunks - 1}"
        lines.append(f'<text class="small" x="{x + 6}" y="{y + 11}">{text}</text>')
        x += 6 + 6.2 * len(text) + 16
    lines.append(f'<rect class="idle" x="{x}" y="{y}" width="14" height="14"/>')
    lines.append(f'<text class="small" x="{x + 20}" y="{y + 11}">idle</text>')
    return lines, x + 44
