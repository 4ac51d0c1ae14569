"""One page for a browser, with nothing but itself: two pictures and what the terminal says.

memory      a bar for each pipeline rank, by kind, and the device's memory as a line
timeline    a row for each pipeline rank: computes, waits by axis, idle
"""

from collections.abc import Iterator
from html import escape
from itertools import cycle
from string import Template

from megazero.plan.devices import size_text
from megazero.plan.memory import RankMemory
from megazero.plan.report import Plan
from megazero.plan.search import Found
from megazero.plan.step_time import Span
from megazero.plan.svg import LOOKS, Bar, picture
from megazero.plan.text import NAMES, plain, plan_text, search_text, shown_kinds

_WIDE = 840.0  # pixels of an axis


def plan_html(plan: Plan, found: Found | None = None) -> str:
    """Return the page as HTML."""
    title = escape(f"Plan: {plan.parameters / 1e9:.3g}B parameters on {plan.cluster.ranks} {plan.cluster.device.name}")
    texts = {"The plan": plan_text(plan)}
    if found is not None:
        texts["Search"] = search_text(found, plan.cluster.device.memory_bytes, is_whole=True)
    fits = f"<p>{escape(plan.fullest.fit_text(plan.cluster.device.memory_bytes))}</p>"
    parts = [f"<h2>{heading}</h2>\n<pre>{escape(text)}</pre>" for heading, text in texts.items()]
    body = "\n".join([fits, _memory(plan), _timeline(plan), *parts])
    return Template(LOOKS["page"].lstrip()).substitute(title=title, body=body)


def _memory(plan: Plan) -> str:
    kinds = shown_kinds(plan)
    colours = dict(zip(kinds, cycle(LOOKS["memory"]))) | {"rest": LOOKS["rest"]}
    capacity, size = plan.cluster.device.memory_bytes, 2**30

    def row(rank: RankMemory) -> Iterator[Bar]:
        at, rest = 0.0, rank.peak - sum(rank.kinds.get(kind, 0) for kind in kinds)
        for kind, count in (*((kind, rank.kinds.get(kind, 0)) for kind in kinds), ("rest", max(rest, 0))):
            yield Bar(at, at + count / size, colours[kind], f"{plain(kind)}: {size_text(count)}")
            at += count / size

    rows = [
        (f"{rank.name}: {size_text(rank.peak)}{', fullest' * (rank is plan.fullest)}", row(rank))
        for rank in plan.memory
    ]
    meanings = [([colour], plain(kind)) for kind, colour in colours.items()]
    end = max(plan.fullest.peak, capacity) * 1.02 / size
    heading = f"Memory at each rank's fullest moment; the line is the device's {size_text(capacity)}"
    return picture(heading, rows, end, "GiB", meanings, wide=_WIDE, mark=capacity / size)


def _timeline(plan: Plan) -> str:
    time = plan.time
    rows = [(rank.name, map(_bar, spans)) for rank, spans in zip(plan.memory, time.timelines, strict=True)]
    looks = dict.fromkeys(_look(span) for spans in time.timelines for span in spans)
    meanings = [([colour], meaning) for meaning, colour in looks]
    return picture(f"One step: {time.seconds:.3f} s", rows, time.seconds, "seconds", meanings, wide=_WIDE)


def _bar(span: Span) -> Bar:
    meaning, colour = _look(span)
    title = f"{span.name or meaning}: {meaning} {span.start * 1e3:.1f} to {span.end * 1e3:.1f} ms"
    return Bar(span.start, span.end, colour, title)


def _look(span: Span) -> tuple[str, str]:
    """Return the meaning and the colour of a span."""
    if span.kind == "compute":
        return NAMES[span.name[0]], LOOKS["passes"][span.name[0]][0]
    return NAMES.get(span.kind, span.kind), LOOKS["waits"].get(span.kind, LOOKS["rest"])
