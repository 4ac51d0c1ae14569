"""metrics.jsonl: one JSON object per step."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from math import isfinite

from megazero.training.callbacks.record_file import RecordFile
from megazero.training.record import Metric, StepRecord

METRICS_FILE = "metrics.jsonl"


class MetricsFile(RecordFile):
    """Appends a line per step; one that comes again, with what its evaluation has found, replaces its line.

    After a resume or a rollback it first drops the steps that will be done again.
    """

    _start = 0  # of the last line

    def _open(self, after_step: int) -> None:
        kept = end = 0
        if self._path.exists():
            with self._path.open("rb") as lines:
                for line in lines:  # one without an end is of a run that was killed
                    end += len(line)
                    kept = end if line.endswith(b"\n") and _step_of(line) <= after_step else kept
        self._path.touch()
        self._file = self._path.open("r+b", buffering=0)
        self._file.truncate(kept)

    def _write(self, record: StepRecord) -> None:
        is_again = record.step == self._written
        self._start = self._file.seek(self._start) if is_again else self._file.seek(0, os.SEEK_END)
        line = (as_json(record) + "\n").encode()
        if self._file.write(line) < len(line):  # the rest does not fit on the disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if is_again:
            self._file.truncate()

    def _shut(self) -> None:
        self._file.close()


def as_json(record: StepRecord) -> str:
    """One line.  JSON has no infinity: a value that is not finite becomes null."""
    return json.dumps({key: _finite(value) for key, value in record.reported().items()})


def _finite(value: Metric) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
