"""A memory report as tables for the terminal."""

from collections.abc import Iterator
from textwrap import fill

from megazero.plan.measured_step import POINTS, STEP
from megazero.plan.memory_report import Report
from megazero.plan.text import table_lines

_NOTES_WIDTH = 120
_NAMES = "dtype", "ZeRO", "offload"


def draw_text(report: Report) -> str:
    """Return the report as text: memory, traffic and time, activations, notes."""
    notes = [fill(note, _NOTES_WIDTH) for note in _notes(report)]
    tables = [*_memory(report), *_traffic(report), *(_activations(report) if report.policies else ())]
    return "\n".join([report.on, report.of, "", *tables, *notes])


def _memory(report: Report) -> Iterator[str]:
    yield "Memory in MiB of the rank with most state: its state and ZeRO's buffers after a step, and all live tensors"
    after = (f"after {point}" for point in POINTS)
    rows = [[*_NAMES, "state", "off device", "planned", "ratio", "buffers", "planned", *after, "peak", "planned"]]
    for row in report.rows:
        worst = row.worst
        (state, buffers), (planned, planned_buffers) = worst.measured_state, worst.planned_state
        away = sum(count for kind, count in worst.counted[STEP].items() if " on " in kind)
        live = (worst.live[point] for point in POINTS)
        sizes = map(_mib, (buffers, planned_buffers, *live, worst.peak, worst.planned.peak))
        about = [*map(_mib, (state, away, planned)), _ratio(state, planned)]
        rows.append([*map(str, row.about.values()), *about, *sizes])
    yield from table_lines("", rows, range(3))
    yield ""


def _traffic(report: Report) -> Iterator[str]:
    yield "Sent by that rank in a step, and time"
    pairs = sorted({(axis, name) for row in report.rows for axis, sent in row.worst.sent.items() for name in sent})
    axes = (f"{axis} {name.replace('_', '-')}" for axis, name in pairs)
    rows = [[*_NAMES, *axes, f"planned over {report.rows[0].axis}", "ratio", f"{report.iterations} steps"]]
    for row in report.rows:
        sent = [_size(row.worst.sent.get(axis, {}).get(name, 0)) for axis, name in pairs]
        about = [_size(row.planned_sent), _ratio(row.sent, row.planned_sent), f"{row.seconds:.2f} s"]
        rows.append([*map(str, row.about.values()), *sent, *about])
    yield from table_lines("", rows, range(3))
    yield ""


def _activations(report: Report) -> Iterator[str]:
    """Yield a table by policy: planned bytes of a layer and of the fullest rank, and what a step allocates."""
    yield "Kept for the backward passes in MiB, on the fullest rank, nothing offloaded"
    rows = [["recompute", "a layer, planned", "rank at most, planned", "a step allocates", "computes more"]]
    for row in report.policies:
        rank = row.fullest
        sizes = map(_mib, (rank.layer, rank.planned.kept, rank.allocated))
        rows.append([str(row.about["policy"]), *sizes, f"{rank.planned.again:.1%}"])
    yield from table_lines("", rows, range(1))
    yield ""


def _notes(report: Report) -> Iterator[str]:
    rows = report.rows
    padding = max(rank.padding / rank.elements for row in rows for rank in row.ranks)
    yield "planned: by a trace of the engine on tensors that hold nothing; ratio: measured / planned."
    yield f"Buckets are padded by {padding:.3%} of a rank's parameters at most; padding is held and sent too."
    if report.on_cpu:
        yield (
            "Live tensors: every allocation and release of torch's CPU allocator. On the CPU the host is the device: the"
            " live bytes hold what is offloaded to the host, and its time says nothing about a GPU."
        )
    if skipped := max(rank.skipped for row in rows for rank in row.ranks):
        yield f"Under fp16 up to {skipped} steps overflowed and were skipped."


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f}"


def _size(count: float) -> str:
    return f"{count / 2**10:,.1f} KiB" if count else "-"


def _ratio(measured: float, formula: float) -> str:
    return f"{measured / formula:.4f}" if formula else "-"
