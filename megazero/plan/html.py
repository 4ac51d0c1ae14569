"""One page for a browser, with nothing but itself: memory of every pipeline rank, the step's timeline, the search.

summary     fits or not, seconds, MFU, days
memory      a bar for each pipeline rank, by kind, and the device's memory as a line      table
timeline    a row for each pipeline rank: computes, waits by axis, idle                   table
search      a point for each computed shape, the front as a line                          table with limits
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise

from megazero.plan.devices import size_text
from megazero.plan.page import LEFT, WIDE, axis, legend, page, section, svg, table
from megazero.plan.report import Plan
from megazero.plan.schedule_drawing import ticks
from megazero.plan.search import Candidate, Found
from megazero.plan.step_time import Span
from megazero.plan.svg import rect, text
from megazero.plan.text import NAMES, duration, fit_text, plain, shape_text, shown_kinds

_ROW, _GAP = 22, 6  # pixels
_MOST_TITLES = 4000  # spans; of more, a row is one path for each kind
_KINDS = {  # of memory, in the order of a bar
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gather_buffers": "buffers",
    "gradient_buffers": "buffers",
    "activations": "activations",
    "working memory": "working",
}
_WORKS = {"F": ("forward", "forward"), "B": ("backward", "backward"), "W": ("weight", "weight gradients")}


def plan_html(plan: Plan, found: Found | None = None) -> str:
    """The page."""
    title = f"Plan: {plan.parameters / 1e9:.3g}B parameters on {plan.cluster.ranks} {plan.cluster.device.name}"
    parts = [_summary(plan, title), _memory(plan), _timeline(plan), _traffic(plan), _run(plan)]
    if found is not None:
        parts.insert(1, _search(found, plan.cluster.device.memory_bytes))
    return page(title, parts)


def _summary(plan: Plan, title: str) -> str:
    use, cost = plan.throughput, plan.cost
    numbers = [
        (f"{plan.time.seconds:.3g} s", "a step"),
        ("?" if use.mfu is None else f"{use.mfu:.1%}", "MFU"),
        (f"{use.tokens_per_second:,.0f}", "tokens/s"),
        (size_text(plan.fullest.peak), f"of {size_text(plan.cluster.device.memory_bytes)} on the fullest rank"),
        (f"{cost.days:,.1f}", f"days for {cost.tokens:.3g} tokens"),
    ]
    if cost.dollars is not None:
        numbers.append((f"{cost.dollars:,.0f}", "dollars"))
    boxes = "".join(
        f"<div><b>{escape(value)}</b><span class=dim>{escape(name)}</span></div>" for value, name in numbers
    )
    verdict = f'<p class="{"yes" if plan.fits else "no"}">{escape(fit_text(plan))}</p>'
    lines = f"<p>{escape(str(plan.cluster))}</p><p>{escape(shape_text(plan))}</p>"
    return f'<section><h1>{escape(title)}</h1>{lines}{verdict}<div class="numbers">{boxes}</div></section>'


# ---- memory


def _memory(plan: Plan) -> str:
    kinds = sorted(shown_kinds(plan), key=_place)
    capacity = plan.cluster.device.memory_bytes
    most = max(plan.fullest.peak, capacity) * 1.02
    scale, body = (WIDE - LEFT - 90) / most, list[str]()
    height = len(plan.memory) * (_ROW + _GAP)
    for row, one in enumerate(plan.memory):
        x, y = float(LEFT), row * (_ROW + _GAP) + 4
        body.append(text(0, y + 15, f"pipeline rank {one.stage}" if len(plan.memory) > 1 else "a rank"))
        for kind in kinds:
            wide = one.kinds.get(kind, 0) * scale
            if wide > 0:
                about = f"{plain(kind)}: {size_text(one.kinds[kind])}"
                body.append(rect(x, y, wide, _ROW, f'style="fill:var(--{_paint(kind)})"', about))
            x += wide
        rest = one.peak - sum(one.kinds.get(kind, 0) for kind in kinds)
        body.append(rect(x, y, rest * scale, _ROW, 'style="fill:var(--other)"', f"rest: {size_text(rest)}"))
        x += rest * scale
        mark = "  fullest" if one is plan.fullest and len(plan.memory) > 1 else ""
        body.append(text(max(x, LEFT) + 6, y + 15, size_text(one.peak) + mark, "small"))
    at = LEFT + capacity * scale
    body.append(f'<path class="limit" d="M{at:.1f} 0v{height + 6}"/>')
    body += list(axis(most / 2**30, scale * 2**30, height + 6, "GiB"))
    picture = svg(height + 34, body)
    paints = [(_paint(kind), plain(kind)) for kind in kinds]
    colours = legend([*paints, ("other", "rest"), ("mark", "memory of the device")])
    away = ["off the device"] if any(one.off_device for one in plan.memory) else []
    heads = ["GiB", *map(plain, kinds), "in all", *away, "fullest in"]
    rows = [
        [
            f"pipeline rank {one.stage}",
            *(f"{one.kinds.get(kind, 0) / 2**30:.2f}" for kind in kinds),
            f"{one.peak / 2**30:.2f}",
            *(f"{sum(one.off_device.values()) / 2**30:.2f}" for _ in away),
            one.moment,
        ]
        for one in plan.memory
    ]
    return section("Memory at each rank's fullest moment", picture, colours, table(heads, rows, (0, len(heads) - 1)))


def _place(kind: str) -> int:
    """Of a kind in a bar."""
    order = list(_KINDS)
    return order.index(kind) if kind in order else len(order)


def _paint(kind: str) -> str:
    """The variable of a kind's colour."""
    return _KINDS.get(kind, "other")


# ---- timeline


def _timeline(plan: Plan) -> str:
    time = plan.time
    scale = (WIDE - LEFT) / time.seconds
    is_large = sum(map(len, time.timelines)) > _MOST_TITLES
    body: list[str] = []
    for row, spans in enumerate(time.timelines):
        y = row * (_ROW + _GAP) + 4
        body.append(text(0, y + 15, f"pipeline rank {row}" if len(time.timelines) > 1 else "a rank"))
        body.append(rect(LEFT, y, time.seconds * scale, _ROW, 'style="fill:var(--idle)"'))
        body += _paths(spans, y, scale) if is_large else _boxes(spans, y, scale)
    height = len(time.timelines) * (_ROW + _GAP)
    body += list(axis(time.seconds, scale, height + 4, "seconds"))
    used = dict.fromkeys(_look(span) for spans in time.timelines for span in spans if span.kind != "idle")
    colours = legend([*used, ("idle", "idle")])
    parts = plan.breakdown
    known = [kind for kind in NAMES if kind in parts] + [kind for kind in parts if kind not in NAMES]
    rows = [
        [
            NAMES.get(kind, kind),
            f"{parts[kind]:.4f}",
            f"{parts[kind] / time.seconds:.1%}",
            f"{time.hidden.get(kind, 0):.4f}" if kind in time.hidden else "",
        ]
        for kind in known
    ]
    rest = table(["the busiest pipeline rank", "seconds", "share", "and hidden"], rows, (0,))
    return section(f"One step: {time.seconds:.3f} s", svg(height + 32, body), colours, rest)


def _look(span: Span) -> tuple[str, str]:
    """Variable and meaning of a span."""
    if span.kind == "compute":
        return _WORKS.get(span.name[:1], ("forward", "compute"))
    if span.kind == "optimizer":
        return "step", "optimizer"
    return (span.kind if span.kind in ("tp", "cp", "dp", "pp") else "other"), NAMES.get(span.kind, span.kind)


def _boxes(spans: Iterable[Span], y: int, scale: float) -> Iterator[str]:
    for span in spans:
        if span.kind == "idle":
            continue
        paint, meaning = _look(span)
        about = f"{span.name or meaning}: {meaning} {span.start * 1e3:.1f} to {span.end * 1e3:.1f} ms"
        wide = (span.end - span.start) * scale
        edge = ";stroke:var(--card);stroke-width:.6" if wide > 3 else ""
        yield rect(LEFT + span.start * scale, y, wide, _ROW, f'style="fill:var(--{paint}){edge}"', about)


def _paths(spans: Iterable[Span], y: int, scale: float) -> Iterator[str]:
    """One path for each colour."""
    shapes: dict[str, list[str]] = {}
    for span in spans:
        if span.kind != "idle":
            x, wide = LEFT + span.start * scale, (span.end - span.start) * scale
            shapes.setdefault(_look(span)[0], []).append(f"M{x:.2f} {y}h{wide:.2f}v{_ROW}h{-wide:.2f}z")
    for paint, lines in shapes.items():
        yield f'<path style="fill:var(--{paint})" d="{"".join(lines)}"/>'


# ---- traffic and the run


def _traffic(plan: Plan) -> str:
    rows = []
    for stage, of_rank in enumerate(plan.traffic):
        for (name, operation), found in sorted(of_rank.items()):
            numbers = [f"{found.calls:,}", f"{found.sent_bytes / 2**20:,.1f}", f"{found.link_bytes / 2**20:,.1f}"]
            rows.append([f"{stage}", name, operation, *numbers])
    if not rows:
        return section("Traffic", "<p>One rank sends nothing.</p>")
    heads = ["pipeline rank", "axis", "operation", "calls", "MiB sent", "to other nodes, of the busiest rank"]
    sent = table(heads, rows, (1, 2))
    if len(rows) > 12:
        sent = f"<details><summary>{len(rows)} rows</summary>{sent}</details>"
    return section("Sent by a rank in a step", sent)


def _run(plan: Plan) -> str:
    cost, saved, lost = plan.cost, plan.checkpoint, plan.failures
    rows = [
        ["tokens", f"{cost.tokens:.4g}"],
        ["days, if nothing fails", f"{cost.days_without:,.2f}"],
        ["days", f"{cost.days:,.2f}"],
        ["GPU hours", f"{cost.device_hours:,.0f}"],
        ["a checkpoint", f"{saved.nbytes / 1e9:,.1f} GB"],
        ["complete after", duration(saved.write_seconds)],
        ["training waits", duration(saved.wait_seconds)],
    ]
    if cost.dollars is not None:
        rows.insert(4, ["dollars", f"{cost.dollars:,.0f}"])
    if lost is not None:
        rows += [
            ["a failure every", duration(lost.mean_seconds)],
            ["best between checkpoints", duration(lost.interval_seconds)],
            ["lost to both", f"{lost.lost_share:.2%}"],
        ]
    return section("The run", table(["", ""], rows, (0,)))


# ---- search


def _search(found: Found, capacity: int) -> str:
    counts = found.counted
    told = [
        f"{counts.shapes:,} shapes",
        f"{sum(counts.refused.values()):,} refused by rules",
        f"{counts.too_large:,} too large",
    ]
    told += [
        f"{counts.slower:,} cannot be among the best",
        f"{counts.computed:,} computed",
        f"{counts.left_out:,} left out",
    ]
    parts = [f'<p class="dim">{", ".join(told)}</p>']
    if not found.best:
        least = (
            "" if found.least is None else f": the least is {size_text(found.least.need.peak)}, {found.least.choice}"
        )
        return section("Search", *parts, f'<p class="no">Nothing fits{escape(least)}.</p>')
    parts.append(_scatter(found, capacity))
    parts.append(
        legend([("gradients", "fits"), ("working", "the ten best"), ("activations", "front of memory and time")])
    )
    rows = []
    for index, one in enumerate(found.best, 1):
        need, choice = one.candidate.need, str(one.candidate.choice)
        limits = "".join(f"<li>{escape(line)}</li>" for line in one.limits)
        cell = f"<details><summary>{escape(choice)}</summary><ul>{limits}</ul></details>"
        rows.append(f"<tr><td>{index}<td>{one.candidate.seconds:.3f}<td>{need.peak / 2**30:.2f}<td class=w>{cell}</tr>")
    if own := found.own_row(capacity):
        *numbers, words = map(escape, own)
        rows.append(f"<tr>{''.join(f'<td>{one}' for one in numbers)}<td class=w>{words}</tr>")
    heads = '<tr><th><th>s a step<th>GiB<th class="l">shape; why it is not better</tr>'
    parts.append(f"<table>{heads}{''.join(rows)}</table>")
    return section("Search: the best that fit", *parts)


def _scatter(found: Found, capacity: int) -> str:
    """Time to the right, memory upwards."""
    points = list(found.computed)
    front = list(found.front)
    high = 300
    slowest = min(max(one.seconds for one in points), 4 * min(one.seconds for one in front))
    most = max(capacity, *(one.need.peak for one in points)) * 1.02
    least = 0.95 * min(one.seconds for one in front)
    across, up = (WIDE - LEFT) / (slowest - least), high / most

    def at(one: Candidate) -> tuple[float, float]:
        return LEFT + (one.seconds - least) * across, high - one.need.peak * up

    body = [f'<path class="axis" d="M{LEFT} 0v{high}h{WIDE - LEFT}"/>']
    for tick in ticks(most / 2**30, 6):
        y = high - tick * 2**30 * up
        body += [text(LEFT - 8, y + 4, f"{tick:g} GiB", "small end"), f'<path class="axis" d="M{LEFT - 4} {y:.1f}h4"/>']
    for tick in ticks(slowest, 12):
        if tick >= least:
            x = LEFT + (tick - least) * across
            body += [text(x, high + 18, f"{tick:.4g}", "small mid"), f'<path class="axis" d="M{x:.1f} {high}v4"/>']
    body.append(text(LEFT + (WIDE - LEFT) / 2, high + 34, "seconds a step", "small mid"))
    if capacity <= most:
        y = high - capacity * up
        body.append(f'<path class="limit" d="M{LEFT} {y:.1f}h{WIDE - LEFT}"/>')
    shown = [one for one in points if one.seconds <= slowest]
    best = {one.candidate.choice for one in found.best}
    for one in sorted(shown, key=lambda one: one.choice in best):
        x, y = at(one)
        kind = "top" if one.choice in best else "dot" if one.need.peak <= capacity else "big"
        about = escape(f"{one.choice}: {one.seconds:.3f} s, {size_text(one.need.peak)}")
        body.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{about}</title></circle>')
    corners = [at(one) for one in front if one.seconds <= slowest]
    line = "".join(f"H{x:.1f}V{y:.1f}" for (x, y), _ in pairwise([*corners[1:], (0, 0)])) if len(corners) > 1 else ""
    body.append(f'<path class="front" d="M{corners[0][0]:.1f} {corners[0][1]:.1f}{line}"/>')
    return svg(high + 42, body)
