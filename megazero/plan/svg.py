"""What the pictures have in common: one style, a document on a light ground, boxes, a legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

MARGIN = 20  # pixels

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
    .formula { stroke: #b3261e; stroke-width: 2; fill: none; }
"""


def document(width: float, height: int, title: str, body: Iterable[str]) -> str:
    """Return the text of an SVG file with a heading."""
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
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
