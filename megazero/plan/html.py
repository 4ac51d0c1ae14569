"""One page for a browser, with nothing but itself: two pictures and what the terminal says.

memory      a bar for each pipeline rank, by kind, and the device's memory as a line
timeline    a row for each pipeline rank: computes, waits by axis, idle
"""

from collections.abc import Iterator
from html import escape
from itertools import cycle

from megazero.plan.devices import size_text
from megazero.plan.memory import RankMemory
from megazero.plan.report import Plan
from megazero.plan.search import Found
from megazero.plan.step_time import Span
from megazero.plan.svg import Bar, picture
from megazero.plan.text import NAMES, plain, plan_text, search_text, shown_kinds

_WIDE = 840.0  # pixels of an axis
_OTHER = "#8b95a1"
#: Colours of kinds of memory, in the order of a bar.
_KINDS = "#1f4e8c #4a86c8 #9dc3ea #2a9d8f #e08e2b #c8553d #57b8ac #d81b78 #c9a227 #6b8e23 #8a6bb8 #5c4033 #34507a"
_WORKS = {"F": ("forward", "#7fb0de"), "B": ("backward", "#86c07f"), "W": ("weight gradients", "#e3c16f")}
_WAITS = {"tp": "#b3261e", "cp": "#d2691e", "ep": "#c9a227", "dp": "#8e44ad", "pp": "#d81b78"}
_WAITS |= {"optimizer": "#34507a", "idle": "#e9ecef"}
_STYLE = """
body { margin: 24px auto; max-width: 1100px; color: #1f2933; font: 14px/1.5 ui-sans-serif, system-ui, sans-serif; }
h1 { font-size: 20px; } h2 { font-size: 15px; } svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; font: 12px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
"""


def plan_html(plan: Plan, found: Found | None = None) -> str:
    """Return the page as HTML."""
    title = escape(f"Plan: {plan.parameters / 1e9:.3g}B parameters on {plan.cluster.ranks} {plan.cluster.device.name}")
    texts = {"The plan": plan_text(plan)}
    if found is not None:
        texts["Search"] = search_text(found, plan.cluster.device.memory_bytes, is_whole=True)
    body = [
        f"<h1>{title}</h1>",
        f"<p>{escape(plan.fullest.fit_text(plan.cluster.device.memory_bytes))}</p>",
        _memory(plan),
        _timeline(plan),
    ]
    body += [f"<h2>{heading}</h2>\n<pre>{escape(text)}</pre>" for heading, text in texts.items()]
    page = "\n".join(body)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"\n<style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{page}\n</body></html>\n'


def _memory(plan: Plan) -> str:
    kinds = shown_kinds(plan)
    paints = dict(zip(kinds, map(_paint, cycle(_KINDS.split())))) | {"rest": _paint(_OTHER)}  # noqa: B905
    capacity, size = plan.cluster.device.memory_bytes, 2**30

    def row(rank: RankMemory) -> Iterator[Bar]:
        at, rest = 0.0, rank.peak - sum(rank.kinds.get(kind, 0) for kind in kinds)
        for kind, count in (*((kind, rank.kinds.get(kind, 0)) for kind in kinds), ("rest", max(rest, 0))):
            yield Bar(at, at + count / size, paints[kind], f"{plain(kind)}: {size_text(count)}")
            at += count / size

    rows = [
        (f"{_name(plan, rank.stage)}: {size_text(rank.peak)}{', fullest' * (rank is plan.fullest)}", row(rank))
        for rank in plan.memory
    ]
    meanings = [([paint], plain(kind)) for kind, paint in paints.items()]
    end = max(plan.fullest.peak, capacity) * 1.02 / size
    heading = f"Memory at each rank's fullest moment; the line is the device's {size_text(capacity)}"
    return picture(heading, rows, end, "GiB", meanings, wide=_WIDE, mark=capacity / size)


def _timeline(plan: Plan) -> str:
    time = plan.time
    rows = [(_name(plan, rank), map(_bar, spans)) for rank, spans in enumerate(time.timelines)]
    looks = dict.fromkeys(_look(span) for spans in time.timelines for span in spans)
    meanings = [([_paint(colour)], meaning) for meaning, colour in looks]
    return picture(f"One step: {time.seconds:.3f} s", rows, time.seconds, "seconds", meanings, wide=_WIDE)


def _name(plan: Plan, rank: int) -> str:
    return f"rank {rank}" if len(plan.memory) > 1 else "a rank"


def _paint(colour: str) -> str:
    return f'fill="{colour}"'


def _bar(span: Span) -> Bar:
    meaning, colour = _look(span)
    about = f"{span.name or meaning}: {meaning} {span.start * 1e3:.1f} to {span.end * 1e3:.1f} ms"
    return Bar(span.start, span.end, _paint(colour), about)


def _look(span: Span) -> tuple[str, str]:
    """Return a span's meaning and its colour."""
    if span.kind == "compute":
        return _WORKS.get(span.name[:1], _WORKS["F"])
    return NAMES.get(span.kind, span.kind), _WAITS.get(span.kind, _OTHER)
