"""One page for a browser, with nothing but itself: what the terminal says, and two pictures.

memory      a bar for each pipeline rank, by kind, and the device's memory as a line
timeline    a row for each pipeline rank: computes, waits by axis, idle

Colours are variables of the page, one set for light and one for dark: `fill:var(--weights)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from megazero.plan.devices import size_text
from megazero.plan.report import Plan
from megazero.plan.schedule_drawing import ticks
from megazero.plan.search import Found
from megazero.plan.step_time import Span
from megazero.plan.svg import rect, text
from megazero.plan.text import NAMES, fit_text, plain, plan_text, search_text, shown_kinds

_WIDE, _LEFT, _ROW, _GAP = 1040, 120, 22, 6  # pixels: of a picture, of the names beside it, of a row
_KINDS = {  # of memory, in the order of a bar, and the variable of its colour
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gather_buffers": "buffers",
    "gradient_buffers": "buffers",
    "activations": "activations",
    "working memory": "working",
}
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
.axis { stroke: var(--line); fill: none; } .limit { stroke: var(--mark); stroke-width: 2; fill: none; }
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


def _picture(body: Iterable[str], rows: int, end: float, scale: float, unit: str) -> str:
    """Return a picture of rows above an axis from 0 to `end`."""
    y, lines = rows * (_ROW + _GAP) + 6, [*body]
    lines.append(f'<path class="axis" d="M{_LEFT} {y:.1f}h{end * scale:.1f}"/>')
    for tick in ticks(end, 10):
        x = _LEFT + tick * scale
        lines.append(f'<path class="axis" d="M{x:.1f} {y:.1f}v4"/>' + text(x, y + 17, f"{tick:g}", "small mid"))
    lines.append(text(0, y + 17, unit, "small"))
    size = f'viewBox="0 0 {_WIDE + 10} {y + 28}" width="{_WIDE + 10}" height="{y + 28}"'
    return f'<svg {size} role="img">{"".join(lines)}</svg>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend of (colour variable, meaning)."""
    items = "".join(f'<span><i style="background:var(--{paint})"></i>{escape(word)}</span>' for paint, word in entries)
    return f'<div class="legend">{items}</div>'


def _memory(plan: Plan) -> str:
    order = list(_KINDS)
    kinds = sorted(shown_kinds(plan), key=lambda kind: order.index(kind) if kind in order else len(order))
    capacity = plan.cluster.device.memory_bytes
    most = max(plan.fullest.peak, capacity) * 1.02
    scale, body = (_WIDE - _LEFT - 90) / most, list[str]()
    for row, rank in enumerate(plan.memory):
        x, y = float(_LEFT), row * (_ROW + _GAP) + 4
        body.append(text(0, y + 15, f"pipeline rank {rank.stage}" if len(plan.memory) > 1 else "a rank"))
        rest = rank.peak - sum(rank.kinds.get(kind, 0) for kind in kinds)
        for kind, count in (*((kind, rank.kinds.get(kind, 0)) for kind in kinds), ("rest", rest)):
            if count > 0:
                paint = f'style="fill:var(--{_KINDS.get(kind, "other")})"'
                body.append(rect(x, y, count * scale, _ROW, paint, f"{plain(kind)}: {size_text(count)}"))
            x += count * scale
        mark = "  fullest" if rank is plan.fullest and len(plan.memory) > 1 else ""
        body.append(text(max(x, _LEFT) + 6, y + 15, size_text(rank.peak) + mark, "small"))
    height = len(plan.memory) * (_ROW + _GAP)
    body.append(f'<path class="limit" d="M{_LEFT + capacity * scale:.1f} 0v{height + 6}"/>')
    paints = [(_KINDS.get(kind, "other"), plain(kind)) for kind in kinds]
    colours = _legend([*paints, ("other", "rest"), ("mark", "memory of the device")])
    picture = _picture(body, len(plan.memory), most / 2**30, scale * 2**30, "GiB")
    return _section("Memory at each rank's fullest moment", picture, colours)


def _timeline(plan: Plan) -> str:
    time, body = plan.time, list[str]()
    scale = (_WIDE - _LEFT) / time.seconds
    for row, spans in enumerate(time.timelines):
        y = row * (_ROW + _GAP) + 4
        body.append(text(0, y + 15, f"pipeline rank {row}" if len(time.timelines) > 1 else "a rank"))
        body.append(rect(_LEFT, y, time.seconds * scale, _ROW, 'style="fill:var(--idle)"'))
        works = [span for span in spans if span.kind != "idle"]
        body += _boxes(works, y, scale)
    used = dict.fromkeys(_look(span) for spans in time.timelines for span in spans if span.kind != "idle")
    picture = _picture(body, len(time.timelines), time.seconds, scale, "seconds")
    return _section(f"One step: {time.seconds:.3f} s", picture, _legend([*used, ("idle", "idle")]))


def _look(span: Span) -> tuple[str, str]:
    """Return a span's colour variable and its meaning."""
    if span.kind == "compute":
        return _WORKS.get(span.name[:1], ("forward", "compute"))
    if span.kind == "optimizer":
        return "step", "optimizer"
    return (span.kind if span.kind in ("tp", "cp", "dp", "pp") else "other"), NAMES.get(span.kind, span.kind)


def _boxes(spans: Iterable[Span], y: int, scale: float) -> Iterator[str]:
    for span in spans:
        paint, meaning = _look(span)
        about = f"{span.name or meaning}: {meaning} {span.start * 1e3:.1f} to {span.end * 1e3:.1f} ms"
        wide = (span.end - span.start) * scale
        edge = ";stroke:var(--card);stroke-width:.6" if wide > 3 else ""
        yield rect(_LEFT + span.start * scale, y, wide, _ROW, f'style="fill:var(--{paint}){edge}"', about)
