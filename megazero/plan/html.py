"""One page for a browser, with nothing but itself: what the terminal says, and two pictures.

memory      a bar for each pipeline rank, by kind, and the device's memory as a line
timeline    a row for each pipeline rank: computes, waits by axis, idle

Colours are variables of the page, one set for light and one for dark: `fill:var(--weights)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from megazero.plan.devices import size_text
from megazero.plan.memory import RankMemory
from megazero.plan.report import Plan
from megazero.plan.search import Found
from megazero.plan.step_time import Span
from megazero.plan.svg import Bar, bars
from megazero.plan.text import NAMES, fit_text, plain, plan_text, search_text, shown_kinds

_WIDE, _LEFT = 1040, 190  # pixels: of a picture, of the names beside it
_KINDS = {  # of memory, in the order of a bar, and the variable of its colour
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gather_buffers": "buffers",
    "gradient_buffers": "buffers",
    "activations": "activations",
    "working memory": "working",
}
_AXES = ("tp", "cp", "dp", "pp", "idle")
_WORKS = {"F": ("forward", "forward"), "B": ("backward", "backward"), "W": ("weight", "weight gradients")}
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
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0 0 10px; } p { margin: 4px 0; }
pre { margin: 0; font: 12px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.yes { color: var(--good); } .no { color: var(--mark); }
svg { display: block; max-width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
svg .small { font-size: 11px; fill: var(--dim); } svg .mid { text-anchor: middle; }
.line { stroke: var(--line); fill: none; } .limit { stroke: var(--mark); stroke-width: 2; fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 8px 0 0; font-size: 12px; color: var(--dim); }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
"""


def plan_html(plan: Plan, found: Found | None = None) -> str:
    """Return the page as HTML."""
    title = escape(f"Plan: {plan.parameters / 1e9:.3g}B parameters on {plan.cluster.ranks} {plan.cluster.device.name}")
    verdict = f'<p class="{"yes" if plan.fits else "no"}">{escape(fit_text(plan))}</p>'
    parts = [f"<section><h1>{title}</h1>{verdict}</section>", _memory(plan), _timeline(plan)]
    parts.append(_section("The plan", f"<pre>{escape(plan_text(plan))}</pre>"))
    if found is not None:
        told = search_text(found, plan.cluster.device.memory_bytes, is_whole=True)
        parts.append(_section("Search", f"<pre>{escape(told)}</pre>"))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"\n<style>{_STYLE}</style>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def _section(heading: str, *parts: str) -> str:
    """Return a card of the page."""
    return f"<section><h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "</section>"


def _picture(rows: Iterable[tuple[str, Iterable[Bar]]], end: float, unit: str, mark: float | None = None) -> str:
    """Return a picture of rows above an axis from 0 to `end`, with a line at `mark`."""
    wide = _WIDE - _LEFT
    body, height = bars(rows, end, wide, unit, x=0, left=_LEFT)
    if mark is not None:
        body.append(f'<path class="limit" d="M{_LEFT + mark / end * wide:.1f} 0v{height - 20}"/>')
    size = f'viewBox="0 0 {_WIDE + 10} {height}" width="{_WIDE + 10}" height="{height}"'
    return f'<svg {size} role="img">{"".join(body)}</svg>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend of (colour variable, meaning)."""
    items = "".join(f'<span><i style="background:var(--{paint})"></i>{escape(word)}</span>' for paint, word in entries)
    return f'<div class="legend">{items}</div>'


def _memory(plan: Plan) -> str:
    order = list(_KINDS)
    kinds = sorted(shown_kinds(plan), key=lambda kind: order.index(kind) if kind in order else len(order))
    capacity, size = plan.cluster.device.memory_bytes, 2**30

    def row(rank: RankMemory) -> Iterator[Bar]:
        at, rest = 0.0, rank.peak - sum(rank.kinds.get(kind, 0) for kind in kinds)
        for kind, count in (*((kind, rank.kinds.get(kind, 0)) for kind in kinds), ("rest", max(rest, 0))):
            about = f"{plain(kind)}: {size_text(count)}"
            yield Bar(at, at + count / size, f'style="fill:var(--{_KINDS.get(kind, "other")})"', about)
            at += count / size

    rows = [
        (f"{_name(plan, rank.stage)}: {size_text(rank.peak)}{', fullest' * (rank is plan.fullest)}", row(rank))
        for rank in plan.memory
    ]
    paints = [(_KINDS.get(kind, "other"), plain(kind)) for kind in kinds]
    colours = _legend([*paints, ("other", "rest"), ("mark", "memory of the device")])
    picture = _picture(rows, max(plan.fullest.peak, capacity) * 1.02 / size, "GiB", capacity / size)
    return _section("Memory at each rank's fullest moment", picture, colours)


def _timeline(plan: Plan) -> str:
    time = plan.time
    rows = [(_name(plan, rank), map(_bar, spans)) for rank, spans in enumerate(time.timelines)]
    used = dict.fromkeys(_look(span) for spans in time.timelines for span in spans)
    picture = _picture(rows, time.seconds, "seconds")
    return _section(f"One step: {time.seconds:.3f} s", picture, _legend(used))


def _name(plan: Plan, rank: int) -> str:
    return f"rank {rank}" if len(plan.memory) > 1 else "a rank"


def _bar(span: Span) -> Bar:
    paint, meaning = _look(span)
    about = f"{span.name or meaning}: {meaning} {span.start * 1e3:.1f} to {span.end * 1e3:.1f} ms"
    return Bar(span.start, span.end, f'style="fill:var(--{paint})"', about)


def _look(span: Span) -> tuple[str, str]:
    """Return a span's colour variable and its meaning."""
    if span.kind == "compute":
        return _WORKS.get(span.name[:1], ("forward", "compute"))
    paint = {"optimizer": "step"}.get(span.kind, span.kind if span.kind in _AXES else "other")
    return paint, NAMES.get(span.kind, span.kind)
