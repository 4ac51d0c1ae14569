"""metrics.jsonl: one JSON object per step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TextIO

from megazero.engine import Position
from megazero.training.callbacks.base import Callback
from megazero.training.record import Metric, StepRecord

METRICS_FILE = "metrics.jsonl"


class MetricsFile(Callback):
    """Appends a line per step.  After a resume or a rollback it first drops the steps that will be done again."""

    def __init__(self, path: Path, after_step: int) -> None:
        self._path = path
        self._file = self._open(after_step)

    def _open(self, after_step: int) -> TextIO:
        path = self._path
        if path.exists():  # this also drops a line that a killed run left half written
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= after_step]
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(path)
        return path.open("a", buffering=1)

    def after_step(self, record: StepRecord) -> None:
        self._file.write(as_json(record) + "\n")

    def on_rollback(self, position: Position) -> None:
        self._file.close()
        self._file = self._open(position.step)

    def close(self) -> None:
        self._file.close()


def as_json(record: StepRecord) -> str:
    """One line.  JSON has no infinity: a value that is not finite becomes null."""
    return json.dumps({key: _finite(value) for key, value in record.reported().items()})


def _finite(value: Metric) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
