"""The pictures as SVG: one style, a document on a light ground, rows of bars above an axis, a legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from megazero.plan.schedule_drawing import ticks

MARGIN = 20  # pixels
ROW, GAP, _DIGIT, _TOP = 24, 5, 7, 50

_STYLE = """
    text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
    .head { font-size: 14px; font-weight: 600; }
    .small { font-size: 11px; fill: #52606d; }
    .mid { text-anchor: middle; }
    .end { text-anchor: end; }
    .card { fill: #ffffff; stroke: #d9dde1; }
    .idle { fill: #f0f2f4; }
    .line { stroke: #9aa5b1; fill: none; }
    .grid { stroke: #d9dde1; fill: none; }
    .limit { stroke: #b3261e; stroke-width: 2; fill: none; }
"""


def document(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """Return the text of an SVG file with a heading."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        rect(0.5, 0.5, width - 1, height - 1, 'class="card" rx="8"'),
        text(MARGIN, 32, title, "head"),
        *body,
        "</svg>\n",
    ]
    return "\n".join(lines)


def text(x: float, y: float, content: str, style: str = "") -> str:
    """Return a `<text>` of one of the style's classes."""
    name = f' class="{style}"' if style else ""
    return f'<text{name} x="{x:.2f}" y="{y:.2f}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, paint: str, title: str = "") -> str:
    """Return a `<rect>`; `paint` is its further attributes, `title` is shown while the mouse is on it."""
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {paint}'
    return f"{box}><title>{escape(title)}</title></rect>" if title else f"{box}/>"


def legend(x: float, y: float, entries: Iterable[tuple[Sequence[str], str]]) -> tuple[list[str], float]:
    """Return a legend of (paints, meaning) in one line, and where it ends."""
    lines = []
    for paints, meaning in entries:
        for paint in paints:
            lines.append(rect(x, y, 14, 14, paint))
            x += 14
        lines.append(text(x + 6, y + 11, meaning, "small"))
        x += 22 + 6.2 * len(meaning)
    return lines, x


class Bar(NamedTuple):
    """A box of a row: `paint` is its further attributes, `title` is shown by the mouse, `label` inside where it has room."""

    start: float
    end: float
    paint: str
    title: str = ""
    label: str = ""


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
    """Return an SVG document of named rows of bars above an axis from 0 to `end`.

    Args:
        meanings: (paints, meaning) of the legend.
        wide: pixels of the axis.
        mark: where a line crosses all rows.
    """
    left = MARGIN + 12 + _DIGIT * max(len(name) for name, _ in rows)
    body, y, scale = list[str](), float(_TOP), wide / end
    for name, row in rows:
        body.append(text(MARGIN, y + 16, name))
        for bar in row:
            at, width = left + bar.start * scale, (bar.end - bar.start) * scale
            body.append(rect(at, y, width, ROW, bar.paint, bar.title))
            if bar.label and len(bar.label) * _DIGIT + 2 <= width:
                body.append(text(at + width / 2, y + 16, bar.label, "mid"))
        y += ROW + GAP
    if mark is not None:
        body.append(f'<path class="limit" d="M{left + mark * scale:.1f} {_TOP}V{y}"/>')
    body += [text(MARGIN, y + 18, unit, "small"), f'<path class="line" d="M{left} {y + 2}h{wide:.2f}"/>']
    for tick in ticks(end, wide / 60):
        at = left + tick * scale
        body.append(f'<path class="line" d="M{at:.2f} {y + 2}v4"/>' + text(at, y + 18, f"{tick:g}", "small mid"))
    samples, end_of_samples = legend(left, y + 42, meanings)
    width = max(left + wide, end_of_samples, MARGIN + 7.6 * len(title)) + MARGIN
    return document(width, y + 74, title, [*body, *samples])
