"""What the sections of a plan's page consist of: the style, pictures with an axis, legends, tables.

Colours are variables of the page, one set for light and one for dark: `fill:var(--weights)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from megazero.plan.schedule_drawing import ticks
from megazero.plan.svg import text

WIDE, LEFT = 1040, 120  # pixels: of a picture, and of the names beside it

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1f2933; --dim: #5f6c7b; --line: #d9dde1;
  --idle: #e9ecef; --weights: #1f4e8c; --gradients: #4a86c8; --optimizer: #9dc3ea; --buffers: #2a9d8f;
  --activations: #e08e2b; --working: #c8553d; --other: #8b95a1; --forward: #7fb0de; --backward: #86c07f; --weight: #e3c16f;
  --tp: #b3261e; --cp: #d2691e; --dp: #8e44ad; --pp: #d81b78; --step: #34507a; --mark: #b3261e; --good: #1b7f3b; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --card: #1d232a; --ink: #e4e8ec; --dim: #9aa7b4;
  --line: #38424d; --idle: #2a323b; --weights: #4f8fdb; --gradients: #7fb2ea; --optimizer: #b9d6f4; --buffers: #4fc1b4;
  --activations: #efa850; --working: #e37b64; --other: #77828e; --forward: #5b92c9; --backward: #5f9e5a; --weight: #c9a24a;
  --tp: #ff6f61; --cp: #f0a35e; --dp: #c58be0; --pp: #ff6fb5; --step: #a9bde0; --mark: #ff7b70; --good: #63d188; } }
body { margin: 0; padding: 24px; background: var(--page); color: var(--ink);
  font: 14px/1.5 ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1090px; margin: 0 auto; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 18px 24px; margin: 0 0 18px;
  overflow-x: auto; }
h1 { font-size: 20px; margin: 0 0 4px; }
h2 { font-size: 15px; margin: 0 0 10px; } p { margin: 4px 0; }
.dim { color: var(--dim); }
.numbers { display: flex; flex-wrap: wrap; gap: 10px 32px; margin: 14px 0 4px; }
.numbers div { min-width: 110px; } .numbers b { display: block; font-size: 20px; font-weight: 600; }
.yes { color: var(--good); } .no { color: var(--mark); }
table { border-collapse: collapse; margin: 10px 0 0; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; } .l { text-align: left; }
td.l:last-child { white-space: normal; }
td.w { white-space: normal; text-align: left; }
ul { margin: 2px 0 6px; padding-left: 18px; } summary { cursor: pointer; }
svg { display: block; max-width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
svg .small { font-size: 11px; fill: var(--dim); } svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
.axis { stroke: var(--line); fill: none; } .limit { stroke: var(--mark); stroke-width: 2; fill: none; }
.front { stroke: var(--activations); stroke-width: 2; fill: none; } .dot { fill: var(--gradients); fill-opacity: .55; }
.big { fill: var(--dim); fill-opacity: .45; } .top { fill: var(--working); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 8px 0 0; font-size: 12px; color: var(--dim); }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """The file."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"\n<style>{_STYLE}</style>"
    body = "\n".join(sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def section(heading: str, *parts: str) -> str:
    """A card of the page."""
    return f"<section><h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "</section>"


def svg(height: float, body: Iterable[str]) -> str:
    """A picture."""
    lines = "\n".join(body)
    wide, high = WIDE + 10, f"{height:.0f}"
    return f'<svg viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" role="img">{lines}</svg>'


def axis(end: float, scale: float, y: float, unit: str) -> Iterator[str]:
    """From 0 to the right."""
    yield f'<path class="axis" d="M{LEFT} {y:.1f}h{end * scale:.1f}"/>'
    for tick in ticks(end, 10):
        x = LEFT + tick * scale
        yield f'<path class="axis" d="M{x:.1f} {y:.1f}v4"/>' + text(x, y + 17, f"{tick:g}", "small mid")
    yield text(0, y + 17, unit, "small")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Of (variable, meaning)."""
    items = "".join(
        f'<span><i style="background:var(--{paint})"></i>{escape(meaning)}</span>' for paint, meaning in entries
    )
    return f'<div class="legend">{items}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """`left`: columns of words."""

    def cells(name: str, row: Sequence[str]) -> str:
        marks = ("class=l" if index in left else "" for index in range(len(row)))
        return "".join(f"<{name} {mark}>{escape(cell)}</{name}>" for mark, cell in zip(marks, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', heads)}</tr>{body}</table>"
