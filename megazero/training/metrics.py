"""What a run reports: a line on the terminal, an object in metrics.jsonl, scalars in TensorBoard."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

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

    def as_json(self) -> str:
        """One line; val_loss only where evaluated."""
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})


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
        values = asdict(metrics)
        step = values.pop("step")
        for name, value in values.items():
            if value is not None:
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
        if metrics.step % self._every and metrics.step != self._steps and metrics.val_loss is None:
            return
        left = (self._steps - metrics.step) * self._seconds_per_step
        width = len(str(self._steps))
        line = (
            f"step {metrics.step:>{width}}/{self._steps} | loss {metrics.loss:.4f} | grad norm {metrics.grad_norm:.3f}"
            f" | lr {metrics.lr:.2e} | {metrics.tokens_per_second:,.0f} tokens/s | ETA {readable_seconds(left)}"
        )
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
