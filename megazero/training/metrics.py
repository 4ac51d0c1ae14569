"""What a run reports: a line on the terminal, an object in metrics.jsonl, scalars in TensorBoard."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
        skipped: why this step has changed no weight: "overflow" (fp16), "not finite", "passed over"; None where it has.
        loss_spike: by how many deviations the loss exceeds the recent mean, where that is reported.
        own_seconds: min, median and max over the ranks of what their own work took per step, and the slowest rank, where
            it was looked at.
        mfu: model FLOP/s of this step as a share of the devices' peak; see `utilization`; where that is known.

    What a step has not, for one whose samples were passed over all but step and tokens, is None.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens: int
    tokens_per_second: float | None
    step_seconds: float | None
    memory_bytes: int | None
    val_loss: float | None = None
    sent_bytes: dict[str, int] = field(default_factory=dict)
    loss_scale: float | None = None
    skipped_steps: int | None = None
    skipped: str | None = None
    loss_spike: float | None = None
    own_seconds: dict[str, float] | None = None
    mfu: float | None = None

    def values(self) -> dict[str, Any]:
        """What there is to report of this step, by key."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def as_json(self) -> str:
        """One line.  JSON knows no infinity: what an overflow left without a value is null."""
        return json.dumps({key: _finite(value) for key, value in self.values().items()})


def passed_over(step: int, tokens: int, val_loss: float | None) -> StepMetrics:
    """Of a step whose samples were passed over: there is no more to tell of it."""
    return StepMetrics(step, None, None, None, tokens, None, None, None, val_loss, skipped="passed over")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


class Sink(Protocol):
    """Where metrics go."""

    def write(self, metrics: StepMetrics) -> None:
        """Take one step's metrics."""

    def drop_after(self, step: int) -> None:
        """Forget the steps beyond this one: the run has gone back and will do them again."""

    def close(self) -> None:
        """No more will come."""


class JsonLines:
    """metrics.jsonl: one object per step.  A run that resumes or goes back drops the steps that it will do again.

    Args:
        path: the file.
        after_step: steps beyond this one are dropped.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        self._path = path
        self._file = self._open(after_step)

    def _open(self, after_step: int) -> TextIO:
        path = self._path
        if path.exists():
            # a line that a killed run left half written is dropped with the steps that follow it
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= after_step]
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(path)
        return path.open("a", buffering=1)

    def drop_after(self, step: int) -> None:
        """Take lines out of the file."""
        self._file.close()
        self._file = self._open(step)

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
        self._folder = folder
        self._writer = self._open(after_step)

    def _open(self, after_step: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=after_step + 1)

    def drop_after(self, step: int) -> None:
        """Begin another file, which tells TensorBoard to forget later steps."""
        self._writer.close()
        self._writer = self._open(step)

    def write(self, metrics: StepMetrics) -> None:
        """Add one step's scalars."""
        values = metrics.values()
        step, _ = values.pop("step"), values.pop("skipped", None)
        for name, value in values.items():
            curves = (
                {f"{name}/{part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
            )
            for curve, one in curves.items():
                self._writer.add_scalar(curve, one, step)

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
        """Print one step; not one whose samples were passed over."""
        if metrics.loss is None or metrics.step_seconds is None:
            return
        smooth = self._seconds_per_step or metrics.step_seconds
        self._seconds_per_step = 0.9 * smooth + 0.1 * metrics.step_seconds
        is_due = metrics.step % self._every == 0 or metrics.step == self._steps
        if not (is_due or metrics.skipped or metrics.val_loss is not None):
            return
        left = (self._steps - metrics.step) * self._seconds_per_step
        width = len(str(self._steps))
        mfu = "" if metrics.mfu is None else f" | MFU {metrics.mfu:.1%}"
        line = (
            f"step {metrics.step:>{width}}/{self._steps} | loss {metrics.loss:.4f} | grad norm {metrics.grad_norm or 0:.3f}"
            f" | lr {metrics.lr or 0:.2e} | {metrics.tokens_per_second or 0:,.0f} tokens/s{mfu}"
            f" | ETA {readable_seconds(left)}"
        )
        if metrics.skipped:
            scale = "" if metrics.loss_scale is None else f", loss scale {metrics.loss_scale:g}"
            line += f" | skipped ({metrics.skipped}{scale})"
        self._show(line if metrics.val_loss is None else f"{line} | validation loss {metrics.val_loss:.4f}")

    def drop_after(self, step: int) -> None:
        """Nothing to do: what was printed stays."""

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
