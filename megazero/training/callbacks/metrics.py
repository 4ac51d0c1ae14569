"""The files that record every step: metrics.jsonl, one JSON object per step, and TensorBoard's events.

A step that cannot be written is left out, and never ends training.

step        1    2    3         4         5         6    7
file        line line no space  no space  no space  line line
terminal              cannot be written             written again from step 6
"""

import errno
import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

from megazero.config.document import check_regular, copy_aside, to_toml
from megazero.data.sealed import parse_json
from megazero.engine import Position
from megazero.settings import Log
from megazero.training.callbacks.base import Callback, RunContext, StepRecord

METRICS_FILE = "metrics.jsonl"
_PROBE_BYTES = 1 << 16
_LINE = b'{"step": '  # how each line of metrics.jsonl begins


class RecordFile(Callback):
    """Writes every step to a file or a folder at `path`.

    A subclass opens, writes and closes.  If one of these raises OSError, the step is left out, and the next one tries again.

    Args:
        after_step: the last step before the run begins; records of later steps are removed, since they will be repeated.
    """

    def __init__(self, path: Path, after_step: int, log: Log) -> None:
        self._path, self._log = path, log
        self._written = after_step  # the last step that counts
        self._is_open = self._is_failing = False

    @abstractmethod
    def _open(self, after_step: int) -> None:
        """Open the file for the steps after this one, and remove what a run has written beyond it."""

    @abstractmethod
    def _write(self, record: StepRecord) -> None:
        """Write one step."""

    @abstractmethod
    def _shut(self) -> None:
        """Close the file."""

    def after_step(self, record: StepRecord) -> None:
        try:
            if self._is_failing:
                self._probe()
            if not self._is_open:
                self._open(self._written)
                self._is_open = True
            self._write(record)
        except OSError as error:
            self.close()
            if not self._is_failing:
                hint = "steps are missing in it until it can, the run goes on"
                self._log(f"{self._path} cannot be written ({error}): {hint}")
            self._is_failing = True
            return
        if self._is_failing:
            self._log(f"{self._path} is written again from step {record.step}")
        self._written, self._is_failing = record.step, False

    def _probe(self) -> None:
        """Check whether a file can be written, without leaving one behind.  Raises: OSError."""
        probe = self._path.with_name(f".{self._path.name}.probe")
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def on_rollback(self, position: Position) -> None:
        """Remove the records of the steps that will be repeated."""
        self.close()
        self._written = min(self._written, position.step)

    def close(self) -> None:
        """Close the file, and ignore errors of the disk."""
        if self._is_open:
            self._is_open = False
            with suppress(OSError):
                self._shut()


class SourceCounts(Callback):
    """Reports how many samples and tokens of each source the run has consumed since its phase began."""

    def __init__(self, context: RunContext) -> None:
        self._stream, self._names = context.corpus.train, [s.path for s in context.run.config.data.sources]

    def after_step(self, record: StepRecord) -> None:
        consumed = record.position.samples - record.position.phase.first_sample
        samples = dict(zip(self._names, self._stream.counts(consumed), strict=True))
        tokens = {name: count * self._stream.seq_len for name, count in samples.items()}
        record.metrics |= {"source_samples": samples, "source_tokens": tokens}


class MetricsFile(RecordFile):
    """Appends a line per step to metrics.jsonl.  A step that is written again, after its evaluation, replaces its line.

    After a resume or a rollback, the lines of steps that will be repeated are removed first.  If the file contains lines of
    another run, a copy of it stays in metrics.jsonl.before-1, -2 and so on.
    """

    _start = 0  # of the last line
    _is_mine = False  # opened before, so that all of it is of this run

    def _open(self, after_step: int) -> None:
        intact_bytes = end = 0
        dropped: list[bytes] = []
        check_regular(self._path)
        if self._path.exists():
            with self._path.open("rb") as lines:
                for line in lines:  # one without an end is of a run that was killed
                    end += len(line)
                    if line.endswith(b"\n") and _step_of(line) <= after_step:
                        intact_bytes, dropped = end, []
                    else:
                        dropped.append(line)
        if not self._is_mine and not all(_is_done_again(line, after_step) for line in dropped):
            self._set_aside(after_step)
        self._is_mine = True
        self._path.touch()
        self._file = self._path.open("r+b", buffering=0)
        self._file.truncate(intact_bytes)

    def _set_aside(self, after_step: int) -> None:
        hint = f"see {copy_aside(self._path)}"
        self._log(f"{self._path} has lines that this run, which begins after step {after_step}, did not write: {hint}")

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
    """Format a step as a line of JSON.  Values that are not finite become null, since JSON has no infinity."""
    return json.dumps({key: _finite(value) for key, value in record.reported().items()})


def numbers_of(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each numeric metric of a step; a metric with several numbers yields name/key for each."""
    for name, value in record.reported().items():
        numbers = value if isinstance(value, Mapping) else {"": value}
        for key, number in numbers.items():
            if name != "step" and not isinstance(number, str | list):
                yield f"{name}/{key}" if key else name, number


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(number) for key, number in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _is_done_again(line: bytes, after_step: int) -> bool:
    """Whether a line belongs to a step that a resumed run repeats, or is the beginning of such a line."""
    if not line.endswith(b"\n"):
        return line.startswith(_LINE) or _LINE.startswith(line)
    return 0 < after_step < _step_of(line) < float("inf")


def _step_of(line: bytes) -> float:
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return float("inf")


class TensorBoard(RecordFile):
    """Writes every numeric metric, the losses also over tokens, and the run's configuration as TensorBoard events.

    TensorBoard purges events after the step at which a file is opened.  The plots over tokens are in a second folder,
    `by_tokens`, because events are purged by step.

    Args:
        folder: folder for the events.
        start: where the run starts, or resumes.
        config: the run's configuration, as TOML.
        log: prints a line on the terminal.
    """

    def __init__(self, folder: Path, start: Position, config: str, log: Log) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(folder, start.step, log)
        self._make_writer = SummaryWriter
        self._config = "\n".join(f"    {line}" for line in config.splitlines())
        self._start, self._tokens = start, array("q")  # after each step since the start

    def _open(self, after_step: int) -> None:
        self._writer = self._make_writer(str(self._path), purge_step=after_step + 1)
        tokens = self._tokens_after(after_step)
        self._by_tokens = self._make_writer(str(self._path / "by_tokens"), purge_step=tokens + 1)
        self._writer.add_text("config", self._config, after_step)

    def _write(self, record: StepRecord) -> None:
        """Add the scalars of one step."""
        for name, number in numbers_of(record):
            self._writer.add_scalar(name, number, record.step)
        for name, loss in (("loss", record.loss), ("val_loss", record.val_loss)):
            if loss is not None:
                self._by_tokens.add_scalar(f"{name}_by_tokens", loss, record.position.tokens)
        missing = record.step - self._start.step - len(self._tokens)
        self._tokens.extend([record.position.tokens] * missing)

    def _tokens_after(self, step: int) -> int:
        index = step - self._start.step - 1
        return self._tokens[index] if index >= 0 else self._start.tokens

    def on_rollback(self, position: Position) -> None:
        super().on_rollback(position)
        del self._tokens[max(0, self._written - self._start.step) :]

    def _shut(self) -> None:
        self._writer.close()
        self._by_tokens.close()


def tensorboard_of(context: RunContext) -> TensorBoard:
    """Return the TensorBoard writer of a run, in its run directory."""
    folder = Path(context.run.config.training.run_dir) / "tensorboard"
    return TensorBoard(folder, context.start, to_toml(context.run), context.log)
