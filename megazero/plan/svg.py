"""The one picture of the plan, as SVG: named rows of bars above an axis, with a legend.

rank 0   [ 0 ][ 1 ]      [ 0 ][ 1 ]
rank 1        [ 0 ][ 1 ][ 0 ][ 1 ]
time     |0   |2   |4   |6            [ ] forward  [ ] backward
"""

import tomllib
from collections.abc import Iterable, Sequence
from math import floor, log10
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

LOOKS = tomllib.loads((Path(__file__).parent / "pictures.toml").read_text(encoding="utf-8"))
_MARGIN, _TOP, _HIGH, _GAP, _DIGIT, _LETTER = 20, 50, 24, 5, 7, 6.2  # pixels


class Bar(NamedTuple):
    """A box of a row.

    Args:
        title: shown where the mouse points at it.
        label: written inside where it has room.
    """

    start: float
    end: float
    colour: str
    title: str = ""
    label: str = ""


def ticks(end: float, at_most: float) -> list[float]:
    """Values on an axis from 0 to `end`: multiples of 1, 2 or 5 times a power of ten, about `at_most` of them."""
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
    """Return the text of an SVG file: a heading, named rows of bars above an axis from 0 to `end`, a legend.

    Args:
        meanings: (colours, meaning) of the legend.
        wide: pixels of the axis.
        mark: where a line crosses all rows.
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
