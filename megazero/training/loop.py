"""The training run: config -> parallel state -> engine -> data -> loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.comm.collectives import agree
from megazero.config import ResolvedRun, save_config
from megazero.data import Corpus
from megazero.engine import Engine, Position, initialize
from megazero.parallel_state import ParallelState
from megazero.schedules.action import Schedule
from megazero.schedules.draw import chrome_trace, draw_refused
from megazero.schedules.draw_svg import draw_svg
from megazero.schedules.generators import family_of
from megazero.schedules.simulate import ScheduleError, Timeline, measured_costs, program, simulate
from megazero.schedules.table import read_schedule, write_text
from megazero.training.batches import DataError, open_corpus_of, read_batches
from megazero.training.checkpoints import Checkpoints
from megazero.training.lr_schedule import learning_rate_factor
from megazero.training.metrics import (
    METRICS_FILE,
    JsonLines,
    ProgressLine,
    Sink,
    StepMetrics,
    TensorBoard,
    peak_memory_bytes,
)

SAVED_CONFIG = "config.toml"


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Args:
        step: optimizer steps done.
        loss: of the last step, mean nats per token; None when there was nothing left to do.
        val_loss: of the last evaluation, or None.
        checkpoint: the newest complete step directory, if there is one.
        seconds: duration of the training loop.
        sent_bytes: bytes this rank sent per axis.
        skipped_steps: steps that an overflow left without an update, since the start of the run.
    """

    step: int
    loss: float | None
    val_loss: float | None
    checkpoint: str | None
    seconds: float
    sent_bytes: dict[str, int]
    skipped_steps: int = 0


def train(run: ResolvedRun, state: ParallelState, show: Callable[[str], None]) -> RunSummary:
    """Run, or go on with, the training that a configuration describes.  Called on every rank.

    Args:
        run: the resolved run.
        state: this rank's place and groups.
        show: takes lines for the terminal; given lines on rank 0 only.

    Raises:
        DataError: the corpus cannot be opened.
        CheckpointError: what `checkpoint.resume` names cannot be used, or a checkpoint cannot be written.
        NonFiniteError, LostPeerError: see `Engine.train_step`.
    """
    config, run_dir = run.config, Path(run.config.training.run_dir)
    say = show if state.rank == 0 else lambda _: None
    corpus = agree(lambda: open_corpus_of(config), state.world, DataError)
    checkpoints = Checkpoints(config, state, corpus.fingerprint, say)
    resumes = checkpoints.find()
    schedule = agree(_own_schedule(run), state.world, ScheduleError)
    engine = initialize(config, state, draw=not resumes, schedule=schedule)
    position = checkpoints.resume(engine)
    open_sinks = (lambda: _open_sinks(run, run_dir, position.step, say)) if state.rank == 0 else list
    sinks = agree(open_sinks, state.world, OSError)
    say(_describe(run, engine))
    try:
        return _Loop(run, engine, corpus, checkpoints, sinks, say).finish(position)
    finally:
        for sink in sinks:
            sink.close()
        engine.sharded_model.close()


class _Loop:
    """Steps until the run is done, with evaluation and checkpoints on the way."""

    def __init__(
        self,
        run: ResolvedRun,
        engine: Engine,
        corpus: Corpus,
        checkpoints: Checkpoints,
        sinks: Sequence[Sink],
        say: Callable[[str], None],
    ) -> None:
        self.run, self.engine, self.corpus, self.sinks, self.say = run, engine, corpus, sinks, say
        self.checkpoints = checkpoints
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.evaluated: dict[int, float] = {}  # the validation loss of the last step, where it was evaluated

    def finish(self, position: Position) -> RunSummary:
        """Do the steps that are left; the last one is saved."""
        training, every = self.run.config.training, self.run.config.checkpoint.save_every_steps
        started = time.perf_counter()
        while position.step < training.steps:
            position = self._step(position)
            if position.step == training.steps or (every and position.step % every == 0):
                self.checkpoints.save(self.engine, position, self.evaluated.get(position.step))
        self.checkpoints.finish()
        seconds = time.perf_counter() - started
        traffic = self.engine.state.traffic.by_axis()
        skipped = self.engine.sharded_model.skipped_steps
        return RunSummary(position.step, self.loss, self.val_loss, self.checkpoints.newest, seconds, traffic, skipped)

    def _step(self, position: Position) -> Position:
        run, model, traffic = self.run, self.engine.sharded_model, self.engine.state.traffic
        started, sent_before = time.perf_counter(), traffic.by_axis()
        count = run.global_batch_size
        batches = read_batches(self.corpus.train, position.samples, count, run.micro_batch_size, self.engine.share)
        # After an overflow the learning rate stands still with the weights, while samples are consumed.
        updates = model.optimizer.steps_taken
        lr = run.config.optimizer.lr * learning_rate_factor(run.config.lr_schedule, updates, run.config.training.steps)
        if position.step + 1 == run.config.logging.pipeline_trace_step:
            statistics, timeline = self.engine.traced_step(batches, lr)
            self._report_pipeline(timeline, position.step + 1)
        else:
            statistics = self.engine.train_step(batches, lr)
        seconds = time.perf_counter() - started
        sent = {axis: after - sent_before.get(axis, 0) for axis, after in traffic.by_axis().items()}
        done = Position(position.step + 1, position.samples + count, position.tokens + statistics.tokens)
        self.loss = statistics.loss
        every = run.config.training.eval_every_steps
        evaluated = bool(every) and (done.step % every == 0 or done.step == run.config.training.steps)
        if evaluated:
            self.val_loss = self._evaluate()
            self.evaluated = {done.step: self.val_loss}
        metrics = StepMetrics(
            step=done.step,
            loss=statistics.loss,
            grad_norm=statistics.grad_norm,
            lr=lr,
            tokens=done.tokens,
            tokens_per_second=statistics.tokens / seconds,
            step_seconds=seconds,
            memory_bytes=peak_memory_bytes(self.engine.state.device),
            val_loss=self.val_loss if evaluated else None,
            sent_bytes={axis: bytes_ for axis, bytes_ in sorted(sent.items()) if bytes_},
            loss_scale=None if model.scaler is None else statistics.loss_scale,
            skipped_steps=None if model.scaler is None else model.skipped_steps,
            skipped=statistics.skipped,
        )
        for sink in self.sinks:
            sink.write(metrics)
        return done

    def _report_pipeline(self, timeline: Timeline, step: int) -> None:
        """Draw a measured pipeline beside the bubble that the schedule predicts for the same costs."""
        if self.engine.state.rank != 0:
            return
        predicted = simulate(timeline.schedule, measured_costs(timeline))
        name = Path(self.run.config.training.run_dir) / f"pipeline-step-{step:08d}"
        write_text(name.with_suffix(".svg"), draw_svg(timeline))
        write_text(name.with_suffix(".json"), json.dumps(chrome_trace(timeline, unit_us=1e6)))
        self.say(
            f"pipeline of step {step}: bubble {timeline.bubble_fraction:.1%} measured, "
            f"{predicted.bubble_fraction:.1%} predicted for its costs | {name}.svg, {name}.json"
        )

    def _evaluate(self) -> float:
        validation = self.corpus.validation
        if validation is None:
            raise ValueError("training.eval_every_steps needs data.validation_fraction above 0")
        samples = min(self.run.config.training.eval_samples, len(validation))
        parallel = self.run.config.parallel
        # what the schedule can run: interleaved takes micro-batches in multiples of pp
        micro_batches = parallel.pp if parallel.schedule == "interleaved" else 1
        whole = self.run.dp * self.run.micro_batch_size * micro_batches
        count = -(-samples // whole) * whole
        batches = read_batches(validation, 0, count, self.run.micro_batch_size, self.engine.share, available=samples)
        return self.engine.evaluate(batches).loss


def _own_schedule(run: ResolvedRun) -> Callable[[], Schedule | None]:
    """Reads and proves the schedule that the configuration names as a file."""
    parallel = run.config.parallel

    def read() -> Schedule | None:
        if parallel.schedule_file is None:
            return None
        schedule = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
        family_of(schedule).generate(parallel.pp, run.accumulation, schedule.chunks)
        try:
            program(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"{error}\n{draw_refused(schedule, error)}") from error
        return schedule

    return read


def _open_sinks(run: ResolvedRun, run_dir: Path, after_step: int, show: Callable[[str], None]) -> list[Sink]:
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(run, run_dir / SAVED_CONFIG)
    logging = run.config.logging
    sinks: list[Sink] = [
        JsonLines(run_dir / METRICS_FILE, after_step),
        ProgressLine(run.config.training.steps, logging.every_steps, show),
    ]
    if logging.tensorboard:
        sinks.append(TensorBoard(run_dir / "tensorboard", after_step))
    return sinks


def _describe(run: ResolvedRun, engine: Engine) -> str:
    grid, memory = engine.state.grid, engine.memory_bytes()
    shapes: dict[str, Any] = {
        "tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "ZeRO": run.config.zero.stage, "schedule": run.config.parallel.schedule,
    }  # fmt: skip
    return (
        ", ".join(f"{name} {value}" for name, value in shapes.items())
        + f" | global batch {run.global_batch_size} = {run.micro_batch_size} x {run.accumulation} x dp {run.dp}"
        + f" | model state {sum(memory.values()) / 2**20:,.1f} MiB on rank 0"
    )
