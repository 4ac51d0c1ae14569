"""TensorBoard events: every metric that is a number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.engine import Position
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Writes every metric that is a number; TensorBoard forgets steps beyond `after_step`."""

    def __init__(self, folder: Path, after_step: int) -> None:
        self._folder = folder
        self._writer = self._open(after_step)

    def _open(self, after_step: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=after_step + 1)

    def after_step(self, record: StepRecord) -> None:
        """Add one step's scalars; a metric of several numbers has a curve for each."""
        for name, value in record.reported().items():
            parts = value if isinstance(value, Mapping) else {"": value}
            for part, number in parts.items():
                if name != "step" and not isinstance(number, str):
                    self._writer.add_scalar(f"{name}/{part}" if part else name, number, record.step)

    def on_rollback(self, position: Position) -> None:
        self._writer.close()
        self._writer = self._open(position.step)

    def close(self) -> None:
        self._writer.close()
