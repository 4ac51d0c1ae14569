"""What a measurement says: a table for people, one JSON line for programs."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import FLOOR, OURS, Line

HEADS = (
    "contender",
    "step ms (least to most)",
    "megazero / it",
    "over the floor",
    "tokens/s",
    "state MB",
    "peak MB",
    "loopback MB",
    "own meter MB",
    "loss diff",
)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, aligned for the terminal."""
    cells = [heads, *rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def table(lines: Sequence[Line]) -> str:
    """One row's contenders."""
    return markdown(HEADS, [_cells(line) for line in lines])


def _cells(line: Line) -> list[str]:
    if line.ms is None:
        return [line.name, f"cannot run: {line.error}", *[""] * (len(HEADS) - 2)]

    def megabytes(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:.1f}"

    return [
        line.name,
        f"{line.ms[0]:.1f} ({line.ms[1]:.1f} to {line.ms[2]:.1f})",
        "" if line.ratio is None else f"{line.ratio[0]:.3f} ({line.ratio[1]:.3f} to {line.ratio[2]:.3f})",
        "" if line.over_floor is None else f"{line.over_floor:.3f}",
        "" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}",
        megabytes(line.state_bytes),
        megabytes(line.peak_bytes),
        megabytes(line.loopback_bytes),
        megabytes(line.metered_bytes),
        "" if line.loss_difference is None else f"{line.loss_difference:.1e}",
    ]


def lines_of(row: dict[str, Any]) -> dict[str, Line]:
    """A stored row's contenders, by name."""
    return {line["name"]: Line(**line) for line in row["lines"]}


def fastest_peer(lines: dict[str, Line]) -> Line | None:
    """The peer to beat; None where none could run."""
    peers = [
        line for name, line in lines.items() if name != FLOOR and not name.startswith(OURS) and line.ms is not None
    ]
    return max(peers, key=lambda line: line.ratio[0] if line.ratio else 0.0, default=None)


def write_whole(file: Path, text: str) -> None:
    """Replace a file's text at once, so that an interrupted run leaves the old one."""
    beside = file.with_name(file.name + ".new")
    beside.write_text(text, "utf-8")
    beside.rename(file)


def machine() -> dict[str, str]:
    """Where and with what this was measured."""
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    told = {
        "cpu": found[1] if found else platform.processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    with contextlib.suppress(PackageNotFoundError):
        told["deepspeed"] = version("deepspeed")
    return told
