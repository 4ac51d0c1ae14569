"""The one picture of the plan, as SVG: named rows of bars above an axis, with a legend.

rank 0   [ 0 ][ 1 ]      [ 0 ][ 1 ]
rank 1        [ 0 ][ 1 ][ 0 ][ 1 ]
time     |0   |2   |4   |6            [ ] forward  [ ] backward
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from megazero.plan.schedule_drawing import ticks

_MARGIN, _TOP, _GAP, _DIGIT, _LETTER = 20, 50, 5, 7, 6.2  # pixels
_STYLE = """
    text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
    .head { font-size: 14px; font-weight: 600; }
    .small { font-size: 11px; fill: #52606d; }
    .mid { text-anchor: middle; }
    .card { fill: #ffffff; stroke: #d9dde1; }
    .idle { fill: #f0f2f4; }
    .line { stroke: #9aa5b1; fill: none; }
    .limit { stroke: #b3261e; stroke-width: 2; fill: none; }
"""


class Bar(NamedTuple):
    """A box of a row.

    Args:
        paint: further attributes of its `<rect>`.
        title: what the mouse shows.
        label: stands inside where it has room.
        share: of the row's height.
    """

    start: float
    end: float
    paint: str
    title: str = ""
    label: str = ""
    share: float = 1.0


def picture(
    title: str,
    rows: Sequence[tuple[str, Iterable[Bar]]],
    end: float,
    unit: str,
    meanings: Iterable[tuple[Sequence[str], str]],
    *,
    wide: float = 720.0,
    high: float = 24.0,
    mark: float | None = None,
) -> str:
    """Return the text of an SVG file: a heading, named rows of bars above an axis from 0 to `end`, a legend.

    Args:
        meanings: (paints, meaning) of the legend.
        wide, high: pixels of the axis and of a row.
        mark: where a line crosses all rows.
    """
    left = _MARGIN + 12 + _DIGIT * max(len(name) for name, _ in rows)
    body, y, scale = list[str](), float(_TOP), wide / end
    for name, row in rows:
        body.append(_text(_MARGIN, y + high / 2 + 4, name))
        for bar in row:
            at, width = left + bar.start * scale, (bar.end - bar.start) * scale
            body.append(_rect(at, y + high * (1 - bar.share), width, high * bar.share, bar.paint, bar.title))
            if bar.label and len(bar.label) * _DIGIT + 2 <= width:
                body.append(_text(at + width / 2, y + high / 2 + 4, bar.label, "mid"))
        y += high + _GAP
    if mark is not None:
        body.append(f'<path class="limit" d="M{left + mark * scale:.1f} {_TOP}V{y}"/>')
    body += [_text(_MARGIN, y + 18, unit, "small"), f'<path class="line" d="M{left} {y + 2}h{wide:.2f}"/>']
    for tick in ticks(end, wide / 60):
        at = left + tick * scale
        body.append(f'<path class="line" d="M{at:.2f} {y + 2}v4"/>' + _text(at, y + 18, f"{tick:g}", "small mid"))
    x, y = float(left), y + 42
    for paints, meaning in meanings:
        if x > left and x + 14 * len(paints) + _LETTER * len(meaning) > left + wide:
            x, y = float(left), y + 20
        for paint in paints:
            body.append(_rect(x, y, 14, 14, paint))
            x += 14
        body.append(_text(x + 6, y + 11, meaning, "small"))
        x += 22 + _LETTER * len(meaning)
    width, height = max(left + wide, _MARGIN + 7.6 * len(title)) + _MARGIN, y + 32
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>"
    card = _rect(0.5, 0.5, width - 1, height - 1, 'class="card" rx="8"')
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        head,
        card,
        _text(_MARGIN, 32, title, "head"),
    ]
    return "\n".join([*lines, *body, "</svg>\n"])


def _text(x: float, y: float, content: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.2f}" y="{y:.2f}">{escape(content)}</text>'


def _rect(x: float, y: float, width: float, height: float, paint: str, title: str = "") -> str:
    box = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {paint}'
    return f"{box}><title>{escape(title)}</title></rect>" if title else f"{box}/>"
