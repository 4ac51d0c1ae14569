"""Files that get a line or a point for every step: what cannot be written is dropped, and never ends the training.

step        1    2    3         4         5         6    7
file        line line no space  no space  no space  line line
terminal              cannot be written             written again from step 6
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megazero.engine import Position
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord

_PROBE_BYTES = 1 << 16


class RecordFile(Callback):
    """Writes every step into a file or a folder at `path`.  The steps after `after_step` will be done again.

    A subclass opens, writes and closes; where one of them raises OSError, the step is left out and the next one is tried.
    """

    def __init__(self, path: Path, after_step: int, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._written = after_step  # the last step that counts
        self._is_open = self._is_failing = False

    @abstractmethod
    def _open(self, after_step: int) -> None:
        """Open for the steps after this one; what a run has written beyond it is dropped."""

    @abstractmethod
    def _write(self, record: StepRecord) -> None:
        """Write one step."""

    @abstractmethod
    def _shut(self) -> None:
        """Close what `_open` has opened."""

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
                self._say(
                    f"{self._path} cannot be written ({error}): steps are missing in it until it can, the run goes on"
                )
            self._is_failing = True
            return
        if self._is_failing:
            self._say(f"{self._path} is written again from step {record.step}")
        self._written, self._is_failing = record.step, False

    def _probe(self) -> None:
        """Find out whether a file can be written, without leaving one behind each time.  Raises: OSError."""
        probe = self._path.with_name(f".{self._path.name}.probe")
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def on_rollback(self, position: Position) -> None:
        """Forget the steps that will be done again."""
        self.close()
        self._written = min(self._written, position.step)

    def close(self) -> None:
        """Close the file; what the disk refuses is lost."""
        if self._is_open:
            self._is_open = False
            with suppress(OSError):
                self._shut()
