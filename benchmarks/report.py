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
from statistics import median

import torch


def spread(values: tuple[float, float, float] | None, digits: int) -> str:
    """A median with its least and most."""
    if values is None:
        return ""
    middle, least, most = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({least} to {most})"


def middle_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return median(values), min(values), max(values)


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def megabytes(value: float | None, digits: int = 1) -> str:
    """Bytes as MB of 10^6, or nothing where there are none."""
    return number(None if value is None else value / 1e6, digits)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, aligned for the terminal."""
    cells = [heads, *rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def filled_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`markdown` without the columns in which no row has a figure."""
    used = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    return markdown([heads[column] for column in used], [[row[column] for column in used] for row in rows])


def write_whole(file: Path, text: str) -> None:
    """Replace a file's text at once, so that an interrupted run leaves the old one."""
    beside = file.with_name(file.name + ".new")
    beside.write_text(text, "utf-8")
    beside.rename(file)


def machine() -> dict[str, str]:
    """Where and with what this was measured."""
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    described = {
        "cpu": found[1] if found else platform.processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    with contextlib.suppress(PackageNotFoundError):
        described["deepspeed"] = version("deepspeed")
    return described
