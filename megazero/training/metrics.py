"""What a run reports: a line on the terminal, an object in metrics.jsonl, scalars in TensorBoard."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step over the whole global batch.

    Args:
        step: steps done, counting this one.
        loss: mean nats per counted token, before the step.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of the step.
        tokens: counted tokens since the start of the run.
        tokens_per_second: of this step, all ranks together.
        step_seconds: duration of this step.
        memory_bytes: peak memory of the reporting rank so far: allocated on CUDA, resident on the CPU.
        val_loss: mean nats per token of the validation samples, where evaluated.
        sent_bytes: what the reporting rank sent in this step, by axis; without what evaluations and checkpoints send.
        loss_scale: what the loss was multiplied by, under fp16.
        skipped_steps: steps since the start of the run that an overflow left without an update, under fp16.
        skipped: this step was one of them.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    memory_bytes: int
    val_loss: float | None = None
    sent_bytes: dict[str, int] = field(default_factory=dict)
    loss_scale: float | None = None
    skipped_steps: int | None = None
    skipped: bool = False

    def values(self) -> dict[str, Any]:
        """What there is to report of this step, by key; `skipped_steps` tells of skipping."""
        return {key: value for key, value in asdict(self).items() if value is not None and key != "skipped"}

    def as_json(self) -> str:
        """One line.  JSON knows no infinity: what an overflow left without a value is null."""
        return json.dumps({key: _finite(value) for key, value in self.values().items()})


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


class Sink(Protocol):
    """Where metrics go."""

    def write(self, metrics: StepMetrics) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """No more will come."""


class JsonLines:
    """metrics.jsonl: one object per step.  A resumed run drops the steps that it will do again.

    Args:
        path: the file.
        after_step: steps beyond this one are dropped.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        if path.exists():
            # a line that a killed run left half written is dropped with the steps that follow it
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= after_step]
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(path)
        self._file = path.open("a", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        """Append one line."""
        self._file.write(metrics.as_json() + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class TensorBoard:
    """Scalars by step, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Add one step's scalars."""
        values = metrics.values()
        step = values.pop("step")
        by_axis = {f"sent_bytes/{axis}": sent for axis, sent in values.pop("sent_bytes").items()}
        for name, value in (values | by_axis).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class ProgressLine:
    """A line per step on the terminal.

    Args:
        steps: steps of the whole run.
        every_steps: how often to print.
        show: takes the line.
    """

    def __init__(self, steps: int, every_steps: int, show: Callable[[str], None]) -> None:
        self._steps, self._every, self._show = steps, every_steps, show
        self._seconds_per_step = 0.0

    def write(self, metrics: StepMetrics) -> None:
        """Print one step."""
        smooth = self._seconds_per_step or metrics.step_seconds
        self._seconds_per_step = 0.9 * smooth + 0.1 * metrics.step_seconds
        is_due = metrics.step % self._every == 0 or metrics.step == self._steps
        if not (is_due or metrics.skipped or metrics.val_loss is not None):
            return
        left = (self._steps - metrics.step) * self._seconds_per_step
        width = len(str(self._steps))
        line = (
            f"step {metrics.step:>{width}}/{self._steps} | loss {metrics.loss:.4f} | grad norm {metrics.grad_norm:.3f}"
            f" | lr {metrics.lr:.2e} | {metrics.tokens_per_second:,.0f} tokens/s | ETA {readable_seconds(left)}"
        )
        if metrics.skipped:
            line += f" | skipped (overflow, loss scale {metrics.loss_scale:g})"
        self._show(line if metrics.val_loss is None else f"{line} | validation loss {metrics.val_loss:.4f}")

    def close(self) -> None:
        """Nothing to do."""


def readable_seconds(seconds: float) -> str:
    """45s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held so far: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
