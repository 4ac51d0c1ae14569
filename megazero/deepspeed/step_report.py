"""What an engine of a script shows of its steps: a line for the terminal, TensorBoard's scalars, the time of each phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megazero.deepspeed.config import DeepSpeedConfig
from megazero.engine.step import StepStatistics
from megazero.zero.sharded_model import ShardedModel


class StepReport:
    """Reports the steps of one engine, on rank 0."""

    def __init__(self, config: DeepSpeedConfig, model: ShardedModel, show: Callable[[str], None]) -> None:
        self._config, self._model, self._show = config, model, show
        self._shown_at = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._writer: Any = None
        if config.tensorboard is not None and model.state.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(Path(config.tensorboard.output_path or ".") / config.tensorboard.job_name))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measure a phase of the step, if the configuration asks for a breakdown."""
        if not self._config.wall_clock_breakdown:
            yield
            return
        self._synchronize()
        started = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[phase] += time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._model.state.device.type == "cuda":
            torch.cuda.synchronize(self._model.state.device)

    def step(self, number: int, samples: int, statistics: StepStatistics, lrs: Sequence[float]) -> None:
        """Report a step that has ended: its number from 1 on, the samples so far, each group's rate in the next step."""
        config, scaler = self._config, self._model.scaler
        every = config.steps_per_print or (1 if config.wall_clock_breakdown else None)
        if every is not None and number % every == 0:
            rates = ", ".join(f"{lr:.4g}" for lr in lrs)
            seconds, self._shown_at = time.perf_counter() - self._shown_at, time.perf_counter()
            speed = every * config.train_batch_size / seconds
            parts = [f"step {number}", f"loss {statistics.loss:.4f}", f"lr {rates}"]
            parts += [f"grad norm {statistics.grad_norm:.3g}", f"{speed:,.1f} samples/s"]
            if scaler is not None:
                parts.append(f"loss scale {scaler.scale:g}, {scaler.skipped_steps} skipped")
            parts += [f"{phase} {1e3 * seconds / every:.1f} ms" for phase, seconds in self._seconds.items()]
            self._seconds.clear()
            self._show(", ".join(parts))
        if self._writer is not None:
            scalars = {"Train/Samples/train_loss": statistics.loss, "Train/Samples/lr": lrs[0]}
            if scaler is not None:
                scalars["Train/Samples/loss_scale"] = scaler.scale
            scalars |= {f"sent_bytes/{axis}": sent for axis, sent in self._model.state.traffic.by_axis().items()}
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        """Close TensorBoard's writer."""
        if self._writer is not None:
            self._writer.close()
