"""TensorBoard events: every metric that is a number, the losses against tokens too, and the run's configuration.

A second event folder, `by_tokens`, has tokens in place of steps: what is purged at a resume is found by step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

from megazero.engine import Position
from megazero.training.callbacks.record_file import RecordFile
from megazero.training.record import StepRecord


class TensorBoard(RecordFile):
    """Writes every metric that is a number; TensorBoard forgets what comes after the step at which a file is opened.

    Args:
        folder: of the events.
        start: where the run starts, or resumes.
        config: the run's configuration, as TOML.
        say: takes lines for the terminal.
    """

    def __init__(self, folder: Path, start: Position, config: str, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(folder, start.step, say)
        self._writer_class = SummaryWriter
        self._config = "\n".join(f"    {line}" for line in config.splitlines())
        self._start, self._tokens = start, array("q")  # after each step since the start

    def _open(self, after_step: int) -> None:
        self._writer = self._writer_class(str(self._path), purge_step=after_step + 1)
        self._by_tokens = self._writer_class(
            str(self._path / "by_tokens"), purge_step=self._tokens_after(after_step) + 1
        )
        self._writer.add_text("config", self._config, after_step)

    def _write(self, record: StepRecord) -> None:
        """Add one step's scalars; a metric of several numbers has a curve for each."""
        for name, value in record.reported().items():
            parts = value if isinstance(value, Mapping) else {"": value}
            for part, number in parts.items():
                if name != "step" and not isinstance(number, str):
                    self._writer.add_scalar(f"{name}/{part}" if part else name, number, record.step)
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
