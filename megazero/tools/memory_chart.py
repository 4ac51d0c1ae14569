"""A memory report as tables for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from textwrap import fill
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from megazero.tools.memory_formula import sent_terms
from megazero.tools.memory_report import POINTS, STATE_KINDS, STEP, Report, Row, ratio

_WIDTH, _NOTES = 200, 120

# ---------------------------------------------------------------------------------------------------------------------
# Tables


def draw_text(report: Report) -> str:
    """Memory, then traffic and time, then what the numbers mean."""
    notes = [fill(note, _NOTES) for note in _notes(report)]
    return "\n".join([_heading(report), "", _printed(_memory(report)), _printed(_traffic(report)), *notes])


def _heading(report: Report) -> str:
    return f"{report.shape} on {report.machine}\n{report.model}: {report.parameters:,} parameters; {report.batch}"


def _printed(table: Table) -> str:
    out = StringIO()
    Console(file=out, width=_WIDTH).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 3 else "right", no_wrap=True)
    return table


def _memory(report: Report) -> Table:
    table = _table(
        "Memory in MiB, of the rank that keeps most: state and ZeRO's buffers after a step, and all live tensors in it",
        *("dtype", "ZeRO", "offload", "state", "off device", "formula", "", "ratio", "buffers"),
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
    ways = sorted({(axis, name) for row in report.rows for axis, sent in row.worst.sent.items() for name in sent})
    table = _table(
        "Sent by that rank in a step, and time",
        *("dtype", "ZeRO", "offload"),
        *(f"{axis} {name.replace('_', '-')}" for axis, name in ways),
        *("formula", "", "ratio", f"{report.iterations} steps"),
    )
    for row in report.rows:
        sent = [_size(row.worst.sent.get(axis, {}).get(name, 0)) for axis, name in ways]
        formula = (_sent_text(row), _size(row.formula_sent), _ratio(row.sent, row.formula_sent))
        table.add_row(*_names(row), *sent, *formula, f"{row.seconds:.2f} s")
    return table


def _notes(report: Report) -> Iterator[str]:
    rows = report.rows
    padding = max(rank.padding / rank.elements for row in rows for rank in row.ranks)
    shards = rows[0].keeping.shards
    yield "N: parameters of the rank; [ ]: off the device; ratio: measured / formula."
    if padding:
        yield f"Buckets are padded by {padding:.3%} of N at most, kept and sent on top; padding has no moments."
    else:
        yield "No bucket needed padding."
    bound = "; at stage 3 a bound, since what is still in a buffer is not gathered again" if _has(3, rows) else ""
    if shards > 1:
        yield f"A rank sends {shards - 1}/{shards} of the traffic's terms over {rows[0].axis}{bound}."
    if any(row.worst.offloaded for row in rows):
        yield (
            "Offloaded state is the masters, the moments and the gradient that steps them; where the device keeps whole"
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


def _has(stage: int, rows: tuple[Row, ...]) -> bool:
    return any(row.combination.stage == stage for row in rows)


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


def _sent_text(row: Row) -> str:
    return " + ".join(f"{count}N" for count in sent_terms(row.keeping).values()) or "-"


# ---------------------------------------------------------------------------------------------------------------------
# Picture

_FILLS = {
    "weights and masters": "#5b92c9",
    "gradients": "#5f9e5a",
    "moments": "#c98f35",
    "buffers of ZeRO": "#b7a5cf",
    "activations and the rest": "#dfe3e8",
}
_KINDS = dict(zip((*STATE_KINDS, "working"), _FILLS, strict=False))
_STYLE = """
    text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
    .head { font-size: 14px; font-weight: 600; }
    .small { font-size: 11px; fill: #52606d; }
    .mid { text-anchor: middle; }
    .end { text-anchor: end; }
    .card { fill: #ffffff; stroke: #d9dde1; }
    .line { stroke: #d9dde1; fill: none; }
    .formula { stroke: #b3261e; stroke-width: 2; fill: none; }
"""
_MARGIN, _LABELS, _TOP, _PLOT, _FOOT = 20, 44, 112, 200, 70  # pixels
_BAR, _GAP = 20, 18


def draw_svg(report: Report) -> str:
    """A picture of the memory of each combination at the three points of a step, on a light ground, as text.

    A panel for each precision, a group of bars for each stage and offload. Each part of a bar is a `<rect class="cell">`
    whose `<title>` says what it is; what is off the device is hatched. A line across a group is the formula.
    """
    precisions = list(dict.fromkeys(row.combination.precision for row in report.rows))
    panels = {
        precision: [row for row in report.rows if row.combination.precision == precision] for precision in precisions
    }
    group = len(POINTS) * _BAR + _GAP
    wide = max(max(map(len, panels.values())) * group + _GAP, 640)
    width, height = 2 * _MARGIN + _LABELS + wide, _TOP + len(panels) * (_PLOT + _FOOT)
    most = max(_tallest(row) for row in report.rows)
    title = "Memory of a rank by ZeRO stage: after forward, backward and step"
    body = [
        f'<text class="head" x="{_MARGIN}" y="32">{escape(title)}</text>',
        *(
            f'<text class="small" x="{_MARGIN}" y="{50 + 16 * index}">{escape(line)}</text>'
            for index, line in enumerate(_heading(report).splitlines())
        ),
        *_legend(_MARGIN, 78, any(row.worst.off_device_bytes() for row in report.rows)),
    ]
    for index, (precision, rows) in enumerate(panels.items()):
        bottom = _TOP + index * (_PLOT + _FOOT) + _PLOT
        body += _axis(precision, most, bottom, wide)
        for place, row in enumerate(rows):
            body += _group(row, _MARGIN + _LABELS + _GAP + place * group, bottom, (_PLOT - 20) / most)
    width = max(width, 820, round(2 * _MARGIN + 5.9 * max(map(len, _heading(report).splitlines()))))  # 820: the legend
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><pattern id="off" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path d="M0 0V6" stroke="#ffffff" stroke-width="3"/></pattern></defs>',
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def _parts(row: Row, point: str) -> Iterator[tuple[str, bool, int]]:
    """(what, whether it is off the device, bytes) of a bar, from its foot; what lies in files is not in memory."""
    counted = row.worst.counted[point]
    known = 0
    for kind, meaning in _KINDS.items():
        for off in (False, True):
            count = sum(
                size
                for key, size in counted.items()
                if not key.endswith(" on file")
                and (" on " in key) == off
                and (key.split(" on ")[0] == kind or (kind == "working" and key.split(" on ")[0] not in STATE_KINDS))
            )
            known += count
            if count:
                yield meaning, off, count
    host = sum(size for key, size in counted.items() if key.endswith(" on host"))
    # A GPU's allocator knows nothing of the host; the CPU's knows of both.
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
            place = f'x="{x + index * _BAR + 1}" y="{y:.2f}" width="{_BAR - 2}" height="{count * per_byte:.2f}"'
            told = f"<title>{one}, after {point}: {what}{' off the device' if off else ''}, {_mib(count)} MiB</title>"
            yield f'<rect class="cell" {place} fill="{_FILLS[what]}">{told}</rect>'
            if off:
                yield f'<rect {place} fill="url(#off)" fill-opacity="0.55" pointer-events="none"/>'
        yield f'<text class="small mid" x="{x + index * _BAR + _BAR / 2}" y="{bottom + 13}">{point[0].upper()}</text>'
    level = bottom - row.formula_bytes * per_byte
    told = f"<title>model state by the formula {row.formula_text}: {_mib(row.formula_bytes)} MiB</title>"
    yield f'<path class="formula" d="M{x - 3} {level:.2f}h{wide + 6}">{told}</path>'
    middle = x + wide / 2
    yield f'<text class="mid" x="{middle}" y="{bottom + 29}">ZeRO {one.stage}</text>'
    offload = "" if one.offload == "none" else f"offload {one.offload}"
    yield f'<text class="small mid" x="{middle}" y="{bottom + 43}">{offload}</text>'


def _axis(precision: str, most: float, bottom: int, wide: int) -> Iterator[str]:
    left, per_byte = _MARGIN + _LABELS, (_PLOT - 20) / most
    step = _round_step(most / 2**20 / 4)
    yield f'<text class="head" x="{_MARGIN}" y="{bottom - _PLOT + 14}">{precision}, MiB</text>'
    value = 0.0
    while value * 2**20 <= most:
        y = bottom - value * 2**20 * per_byte
        yield f'<path class="line" d="M{left} {y:.2f}H{left + wide}"/>'
        yield f'<text class="small end" x="{left - 6}" y="{y + 4:.2f}">{value:g}</text>'
        value += step


def _round_step(least: float) -> float:
    """The first of 1, 2 and 5 times a power of ten that is not below."""
    power = 1e-6
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


def _legend(x: float, y: int, offloads: bool) -> Iterator[str]:
    for what, colour in _FILLS.items():
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield f'<text class="small" x="{x + 18}" y="{y + 10}">{what}</text>'
        x += 34 + 5.9 * len(what)
    if offloads:
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="#7b8794"/>'
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="url(#off)" fill-opacity="0.55"/>'
        yield f'<text class="small" x="{x + 18}" y="{y + 10}">off the device</text>'
        x += 110
    yield f'<path class="formula" d="M{x} {y + 6}h14"/><text class="small" x="{x + 20}" y="{y + 10}">formula</text>'
