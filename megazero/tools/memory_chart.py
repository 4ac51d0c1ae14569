"""A memory report as tables for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from textwrap import fill

from rich.console import Console
from rich.table import Table

from megazero.tools.measured_step import POINTS, STATE_KINDS, STEP
from megazero.tools.memory_report import Report, Row, ratio
from megazero.tools.svg import MARGIN, document, text, ticks

_WIDTH, _NOTES = 200, 120

# ---- tables


def draw_text(report: Report) -> str:
    """Memory, then traffic and time, then notes on the numbers."""
    notes = [fill(note, _NOTES) for note in _notes(report)]
    return "\n".join([*_heading(report), "", _printed(_memory(report)), _printed(_traffic(report)), *notes])


def _heading(report: Report) -> tuple[str, str]:
    about = f"{report.model}: {report.parameters:,} parameters; {report.batch}"
    return f"{report.shape} on {report.machine}", about


def _printed(table: Table) -> str:
    out = StringIO()
    Console(file=out, width=_WIDTH).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for index, column in enumerate(("dtype", "ZeRO", "offload", *columns)):
        table.add_column(column, justify="left" if index < 3 else "right", no_wrap=True)
    return table


def _memory(report: Report) -> Table:
    table = _table(
        "Memory in MiB, of the rank that keeps most: state and ZeRO's buffers after a step, and all live tensors in it",
        *("state", "off device", "formula", "", "ratio", "buffers"),
        *(f"after {point}" for point in POINTS),
        "peak",
    )
    for row in report.rows:
        worst = row.worst
        state = worst.state_bytes()
        formula = (row.formula_text, _mib(row.formula_bytes), _ratio(state, row.formula_bytes))
        live = [_mib(worst.live[point]) for point in POINTS]
        kept = (_mib(state), _mib(worst.off_device_bytes()), *formula, _mib(worst.buffer_bytes()))
        table.add_row(*_names(row), *kept, *live, _mib(worst.peak))
    return table


def _traffic(report: Report) -> Table:
    pairs = sorted({(axis, name) for row in report.rows for axis, sent in row.worst.sent.items() for name in sent})
    columns = (f"{axis} {name.replace('_', '-')}" for axis, name in pairs)
    title = "Sent by that rank in a step, and time"
    table = _table(title, *columns, "formula", "", "ratio", f"{report.iterations} steps")
    for row in report.rows:
        sent = [_size(row.worst.sent.get(axis, {}).get(name, 0)) for axis, name in pairs]
        terms = " + ".join(f"{count}N" for count in row.formula.sent_terms().values()) or "-"
        formula = (terms, _size(row.formula_sent), _ratio(row.sent, row.formula_sent))
        table.add_row(*_names(row), *sent, *formula, f"{row.seconds:.2f} s")
    return table


def _notes(report: Report) -> Iterator[str]:
    rows = report.rows
    padding = max(rank.padding / rank.elements for row in rows for rank in row.ranks)
    shards = rows[0].formula.shards
    yield "N: parameters of the rank; [ ]: off the device; ratio: measured / formula."
    if padding:
        yield f"Buckets are padded by {padding:.3%} of N at most, kept and sent on top; padding has no moments."
    else:
        yield "No bucket needed padding."
    if shards > 1:
        has_stage_3 = any(row.combination.stage == 3 for row in rows)
        bound = "; at stage 3 a bound, since what is still in a buffer is not gathered again" if has_stage_3 else ""
        yield f"A rank sends {shards - 1}/{shards} of the traffic's terms over {rows[0].axis}{bound}."
    if any(row.worst.offloaded for row in rows):
        yield (
            "Offloaded state is the masters, the moments and the gradient that steps them; if the device keeps whole"
            " gradients or fp32 weights, those come on top of the formula without offload."
        )
    if report.on_cpu:
        yield (
            "Live tensors: every allocation and release of torch's CPU allocator. On the CPU the host is the device: the"
            " live bytes hold what is offloaded to the host, and its time says nothing about a GPU."
        )
    skipped = max(rank.skipped for row in rows for rank in row.ranks)
    if skipped:
        yield f"Under fp16 up to {skipped} steps overflowed and were skipped."


def _names(row: Row) -> tuple[str, str, str]:
    one = row.combination
    return one.precision, str(one.stage), one.offload


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f}"


def _size(count: float) -> str:
    if not count:
        return "-"
    if count < 2**10:
        return f"{count:.0f} B"
    return f"{count / 2**20:,.2f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _ratio(measured: float, formula: float) -> str:
    quotient = ratio(measured, formula)
    return "-" if quotient is None else f"{quotient:.4f}"


# ---- picture

_FILLS = {
    "weights and masters": "#5b92c9",
    "gradients": "#5f9e5a",
    "moments": "#c98f35",
    "buffers of ZeRO": "#b7a5cf",
    "activations and the rest": "#dfe3e8",
}
_MEANINGS = dict(zip(STATE_KINDS, _FILLS, strict=False))  # every other kind that an engine counts is a buffer
_LABELS, _TOP, _PLOT, _FOOT, _BAR, _GAP, _LEGEND = 44, 112, 200, 70, 20, 18, 820  # pixels
_HATCHING = (
    '<defs><pattern id="off" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" stroke="#ffffff" stroke-width="3"/></pattern></defs>'
)


def draw_svg(report: Report) -> str:
    """A picture of each combination's memory at the three points of a step, as the text of an SVG file.

    A panel for each precision, a group of bars for each stage and offload. Each part of a bar is a `<rect class="cell">`
    whose `<title>` says what it is; what is off the device is hatched. A line across a group is the formula.
    """
    panels: dict[str, list[Row]] = {}
    for row in report.rows:
        panels.setdefault(row.combination.precision, []).append(row)
    group = len(POINTS) * _BAR + _GAP
    wide = max(max(map(len, panels.values())) * group + _GAP, 640)
    most = max(_tallest(row) for row in report.rows)
    heading = _heading(report)
    body = [_HATCHING, *(text(MARGIN, 50 + 16 * index, line, "small") for index, line in enumerate(heading))]
    body += _legend(MARGIN, 78, any(row.worst.off_device_bytes() for row in report.rows))
    for index, (precision, rows) in enumerate(panels.items()):
        bottom = _TOP + index * (_PLOT + _FOOT) + _PLOT
        body += _memory_axis(precision, most, bottom, wide)
        for column, row in enumerate(rows):
            body += _group(row, MARGIN + _LABELS + _GAP + column * group, bottom, (_PLOT - 20) / most)
    width = max(2 * MARGIN + _LABELS + wide, _LEGEND, round(2 * MARGIN + 5.9 * max(map(len, heading))))
    title = "Memory of a rank by ZeRO stage: after forward, backward and step"
    return document(width, _TOP + len(panels) * (_PLOT + _FOOT), title, body)


def _parts(row: Row, point: str) -> Iterator[tuple[str, bool, int]]:
    """(what, whether it is off the device, bytes) of a bar, from its foot; files are not memory and left out."""
    counted = {key: size for key, size in row.worst.counted[point].items() if not key.endswith(" on file")}
    parts = dict.fromkeys(((what, off) for what in [*_FILLS][:4] for off in (False, True)), 0)
    for key, size in counted.items():
        parts[_MEANINGS.get(key.split(" on ")[0], "buffers of ZeRO"), " on " in key] += size
    yield from ((what, off, count) for (what, off), count in parts.items() if count)
    known = sum(counted.values())
    host = sum(size for key, size in counted.items() if key.endswith(" on host"))
    # A GPU's allocator does not count host memory, the CPU's counts both.
    rest = row.worst.live[point] - (known if row.worst.live[STEP] >= known else known - host)
    if rest > 0:
        yield "activations and the rest", False, rest


def _tallest(row: Row) -> float:
    heights = [sum(count for _, _, count in _parts(row, point)) for point in POINTS]
    return max(*heights, row.formula_bytes)


def _group(row: Row, x: int, bottom: int, per_byte: float) -> Iterator[str]:
    one, wide = row.combination, len(POINTS) * _BAR
    for index, point in enumerate(POINTS):
        y = float(bottom)
        for what, off, count in _parts(row, point):
            y -= count * per_byte
            box = f'x="{x + index * _BAR + 1}" y="{y:.2f}" width="{_BAR - 2}" height="{count * per_byte:.2f}"'
            title = f"<title>{one}, after {point}: {what}{' off the device' if off else ''}, {_mib(count)} MiB</title>"
            yield f'<rect class="cell" {box} fill="{_FILLS[what]}">{title}</rect>'
            if off:
                yield f'<rect {box} fill="url(#off)" fill-opacity="0.55" pointer-events="none"/>'
        yield text(x + index * _BAR + _BAR / 2, bottom + 13, point[0].upper(), "small mid")
    level = bottom - row.formula_bytes * per_byte
    title = f"<title>model state by the formula {row.formula_text}: {_mib(row.formula_bytes)} MiB</title>"
    yield f'<path class="formula" d="M{x - 3} {level:.2f}h{wide + 6}">{title}</path>'
    yield text(x + wide / 2, bottom + 29, f"ZeRO {one.stage}", "mid")
    yield text(x + wide / 2, bottom + 43, "" if one.offload == "none" else f"offload {one.offload}", "small mid")


def _memory_axis(precision: str, most: float, bottom: int, wide: int) -> Iterator[str]:
    left, per_mib = MARGIN + _LABELS, (_PLOT - 20) / most * 2**20
    yield text(MARGIN, bottom - _PLOT + 14, f"{precision}, MiB", "head")
    for value in ticks(most / 2**20, 4):
        y = bottom - value * per_mib
        yield f'<path class="grid" d="M{left} {y:.2f}H{left + wide}"/>'
        yield text(left - 6, y + 4, f"{value:g}", "small end")


def _legend(x: float, y: int, offloads: bool) -> Iterator[str]:
    for what, colour in _FILLS.items():
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>' + text(x + 18, y + 10, what, "small")
        x += 34 + 5.9 * len(what)
    if offloads:
        for fill_ in ('fill="#7b8794"', 'fill="url(#off)" fill-opacity="0.55"'):
            yield f'<rect x="{x}" y="{y}" width="12" height="12" {fill_}/>'
        yield text(x + 18, y + 10, "off the device", "small")
        x += 110
    yield f'<path class="formula" d="M{x} {y + 6}h14"/>' + text(x + 20, y + 10, "formula", "small")
