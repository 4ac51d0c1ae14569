"""TensorBoard events: every metric that is a number, the losses against tokens too, and the run's configuration.

A second event folder, `by_tokens`, has tokens in place of steps: what is purged at a resume is found by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megazero.engine import Position
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord


class TensorBoard(Callback):
    """Writes every metric that is a number; TensorBoard forgets what comes after `start`.

    Args:
        folder: of the events.
        start: where the run starts, or resumes.
        config: the run's configuration, as TOML.
    """

    def __init__(self, folder: Path, start: Position, config: str) -> None:
        self._folder = folder
        self._open(start)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()), start.step)

    def _open(self, start: Position) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=start.step + 1)
        self._by_tokens = SummaryWriter(str(self._folder / "by_tokens"), purge_step=start.tokens + 1)

    def after_step(self, record: StepRecord) -> None:
        """Add one step's scalars; a metric of several numbers has a curve for each."""
        for name, value in record.reported().items():
            parts = value if isinstance(value, Mapping) else {"": value}
            for part, number in parts.items():
                if name != "step" and not isinstance(number, str):
                    self._writer.add_scalar(f"{name}/{part}" if part else name, number, record.step)
        for name, loss in (("loss", record.loss), ("val_loss", record.val_loss)):
            if loss is not None:
                self._by_tokens.add_scalar(f"{name}_by_tokens", loss, record.position.tokens)

    def on_rollback(self, position: Position) -> None:
        self.close()
        self._open(position)

    def close(self) -> None:
        self._writer.close()
        self._by_tokens.close()
