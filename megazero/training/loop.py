"""The training run: config -> parallel state -> engine -> data -> loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.comm.collectives import agree
from megazero.config import ResolvedRun, save_config
from megazero.config.derive import micro_batch_multiple
from megazero.data import Corpus
from megazero.engine import Engine, Position, StepStatistics, initialize
from megazero.optim.lr_schedule import learning_rate_factor
from megazero.parallel_state import ParallelState, Traffic
from megazero.schedules.action import Schedule
from megazero.schedules.kind import GivenSchedule
from megazero.schedules.proof import ScheduleError, Timeline, measured_costs, program, simulate
from megazero.schedules.table import read_schedule, write_text
from megazero.tools.draw import chrome_trace, draw_refused
from megazero.tools.draw_svg import draw_svg
from megazero.training.batches import DataError, open_corpus_of, read_batches
from megazero.training.checkpoints import Checkpoints
from megazero.training.collector import Collector
from megazero.training.health import (
    LossSpikes,
    NonFinitePolicy,
    Samples,
    StepDecision,
    Stragglers,
    position_after_going_back,
    steps_passed_over,
)
from megazero.training.heartbeat import SAVING, TRAINING
from megazero.training.metrics import (
    METRICS_FILE,
    JsonLines,
    ProgressLine,
    Sink,
    StepMetrics,
    TensorBoard,
    passed_over,
    peak_memory_bytes,
)
from megazero.training.utilization import Utilization, peak_flops
from megazero.training.watchdog import Watchdog

SAVED_CONFIG = "config.toml"


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Args:
        step: optimizer steps done.
        loss: of the last step, mean nats per token; None when no step was left to train.
        val_loss: of the last evaluation, or None.
        checkpoint: the newest complete step directory, if there is one.
        seconds: duration of the training loop.
        sent_bytes: bytes this rank sent per axis.
        skipped_steps: steps that an overflow left without an update, since the start of the run.
        stopped: the run was asked to stop before its last step; it was saved.
    """

    step: int
    loss: float | None
    val_loss: float | None
    checkpoint: str | None
    seconds: float
    sent_bytes: dict[str, int]
    skipped_steps: int = 0
    stopped: bool = False


def train(
    run: ResolvedRun,
    state: ParallelState,
    show: Callable[[str], None],
    wants_stop: Callable[[], bool] = lambda: False,
) -> RunSummary:
    """Run, or go on with, the training that a configuration describes.  Called on every rank.

    Args:
        run: the resolved run.
        state: this rank's place and groups.
        show: takes lines for the terminal; given lines on rank 0 only.
        wants_stop: asked at the end of every step; where it is true on any rank, all ranks save and leave after that step.

    Raises:
        DataError: the corpus cannot be opened.
        CheckpointError: what `checkpoint.resume` names cannot be used, or a checkpoint cannot be written.
        NonFiniteError, LostPeerError: see `Engine.train_step`.
    """
    config, run_dir = run.config, Path(run.config.training.run_dir)
    say = show if state.rank == 0 else lambda _: None
    with ExitStack() as closing:
        watchdog = closing.enter_context(Watchdog(state, config.parallel.timeout_seconds, run_dir))
        corpus = agree(lambda: open_corpus_of(config), state.world, DataError)
        checkpoints = Checkpoints(config, state, corpus.fingerprint, say)
        resumes = checkpoints.find()
        schedule = agree(_own_schedule(run), state.world, ScheduleError)
        engine = initialize(config, state, init_weights=not resumes, schedule=schedule)
        closing.callback(engine.sharded_model.close)
        closing.enter_context(checkpoints)
        engine.wants_stop = wants_stop
        position = checkpoints.resume(engine)
        open_sinks = (lambda: _open_sinks(run, run_dir, position.step, say)) if state.rank == 0 else list
        sinks = agree(open_sinks, state.world, OSError)
        for sink in sinks:
            closing.callback(sink.close)
        say(_describe(run, engine))
        collector = closing.enter_context(Collector())
        return _Loop(run, engine, corpus, checkpoints, watchdog, sinks, say, collector).finish(position)


@dataclass(frozen=True)
class _Cost:
    """What a step took on this rank: seconds, those without the waiting for others, and the bytes sent by axis."""

    seconds: float
    own_seconds: float
    sent_bytes: dict[str, int]


class _Meter:
    """Measures from when it is made until it is read."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic, self._sent, self._waited = traffic, traffic.by_axis(), traffic.waited_seconds
        self._started = time.perf_counter()

    def read(self) -> _Cost:
        seconds = time.perf_counter() - self._started
        sent = {axis: bytes_ - self._sent.get(axis, 0) for axis, bytes_ in sorted(self._traffic.by_axis().items())}
        own = seconds - (self._traffic.waited_seconds - self._waited)
        return _Cost(seconds, own, {axis: bytes_ for axis, bytes_ in sent.items() if bytes_})


class _Loop:
    """Steps until the run is done, with evaluation and checkpoints on the way."""

    def __init__(
        self,
        run: ResolvedRun,
        engine: Engine,
        corpus: Corpus,
        checkpoints: Checkpoints,
        watchdog: Watchdog,
        sinks: Sequence[Sink],
        say: Callable[[str], None],
        collector: Collector,
    ) -> None:
        self.run, self.engine, self.corpus, self.sinks, self.say = run, engine, corpus, sinks, say
        self.checkpoints, self.watchdog, self.collector = checkpoints, watchdog, collector
        self.utilization = _utilization_of(run, engine)
        self.non_finite = NonFinitePolicy(run.config.training)
        self.spikes = LossSpikes(run.config.logging.loss_spike_sigmas)
        self.stragglers = Stragglers(run.config.logging, engine.state)
        self.told_until = 0  # the last step of `training.skip_steps` that was told of
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.evaluated: dict[int, float] = {}  # the validation loss of the last step, where it was evaluated
        self.stops = False  # a rank asked for the end of the run

    def finish(self, position: Position) -> RunSummary:
        """Do the steps that are left, or those until a rank wants to stop; the last one is saved."""
        training, every = self.run.config.training, self.run.config.checkpoint.save_every_steps
        started = time.perf_counter()
        while position.step < training.steps and not self.stops:
            position = self._step(position)
            self.collector.after_step(position.step)
            is_last = position.step == training.steps or self.stops
            if is_last or (every and position.step % every == 0):
                self.watchdog.at(position.step, SAVING)
                self.checkpoints.save(self.engine, position, self.evaluated.get(position.step))
        self.watchdog.at(position.step, SAVING)
        self.checkpoints.finish()
        seconds = time.perf_counter() - started
        traffic = self.engine.state.traffic.by_axis()
        skipped = self.engine.sharded_model.skipped_steps
        stopped = self.stops and position.step < training.steps
        return RunSummary(
            position.step, self.loss, self.val_loss, self.checkpoints.newest, seconds, traffic, skipped, stopped
        )

    def _step(self, position: Position) -> Position:
        """Do the next step; where the run stands afterwards, which may be further back."""
        step = position.step + 1
        samples = Samples(position.samples, position.samples + self.run.global_batch_size - 1)
        if steps_passed_over(step, self.run.config.training.skip_steps):
            return self._pass_over(position)
        self.watchdog.at(step, TRAINING)
        meter = _Meter(self.engine.state.traffic)
        statistics, lr = self._train(position)
        cost = meter.read()
        done = Position(step, samples.last + 1, position.tokens + statistics.tokens)
        turn = self.non_finite.judge(statistics, step, samples)
        if turn is StepDecision.BACK:  # also on a stop: only a later step remembers the samples to leave out
            return self._go_back(done, samples)
        self.loss, self.stops = statistics.loss, statistics.stop
        if turn is StepDecision.SKIP:
            self.say(f"step {step} is not finite: {samples} are left out, no weight has changed")
        self._report(done, samples, statistics, lr, cost)
        return done

    def _report(self, done: Position, samples: Samples, statistics: StepStatistics, lr: float, cost: _Cost) -> None:
        model = self.engine.sharded_model
        own_seconds, lines = self.stragglers.look(done.step, cost.own_seconds)
        spike = self.spikes.look(statistics.loss)
        if spike is not None:
            lines.append(spike.line(done.step, statistics.loss, samples, self.run.config.training.skip_steps))
        for line in lines:
            self.say(line)
        metrics = StepMetrics(
            step=done.step,
            loss=statistics.loss,
            grad_norm=statistics.grad_norm,
            lr=lr,
            tokens=done.tokens,
            tokens_per_second=statistics.tokens / cost.seconds,
            step_seconds=cost.seconds,
            memory_bytes=peak_memory_bytes(self.engine.state.device),
            val_loss=self._evaluate_if_due(done.step),
            sent_bytes=cost.sent_bytes,
            loss_scale=None if model.scaler is None else statistics.loss_scale,
            skipped_steps=None if model.scaler is None else model.skipped_steps,
            skipped=("overflow" if statistics.finite else "not finite") if statistics.skipped else None,
            loss_spike=None if spike is None else spike.sigmas,
            own_seconds=own_seconds,
            mfu=self.utilization.of(cost.seconds),
        )
        for sink in self.sinks:
            sink.write(metrics)

    def _train(self, position: Position) -> tuple[StepStatistics, float]:
        """The next step on the next samples; what it measured, and its learning rate."""
        run, step, share = self.run, position.step + 1, self.engine.share
        batches = read_batches(
            self.corpus.train,
            position.samples,
            run.global_batch_size,
            run.micro_batch_size,
            share,
            multiple=micro_batch_multiple(run.config.parallel),
        )
        # Where an update is left out the learning rate stands still with the weights, while samples are consumed.
        updates = self.engine.sharded_model.optimizer.steps_taken
        lr = run.config.optimizer.lr * learning_rate_factor(run.config.lr_schedule, updates, run.config.training.steps)
        if step != run.config.logging.pipeline_trace_step:
            return self.engine.try_step(batches, lr), lr
        statistics, timeline = self.engine.traced_step(batches, lr)
        self._report_pipeline(timeline, step)
        return statistics, lr

    def _pass_over(self, position: Position) -> Position:
        """Count the next step and its samples as done, without doing it."""
        training, count = self.run.config.training, self.run.global_batch_size
        done = Position(position.step + 1, position.samples + count, position.tokens)
        if done.step > self.told_until:
            steps = min(steps_passed_over(done.step, training.skip_steps), training.steps - position.step)
            self.told_until = position.step + steps
            samples = Samples(position.samples, position.samples + steps * count - 1)
            which = f"step {done.step} is" if steps == 1 else f"steps {done.step} to {self.told_until} are"
            self.say(f"{which} passed over (training.skip_steps): {samples}")
        metrics = passed_over(done.step, done.tokens, self._evaluate_if_due(done.step))
        for sink in self.sinks:
            sink.write(metrics)
        return done

    def _go_back(self, bad: Position, samples: Samples) -> Position:
        """Load the newest checkpoint, to go on from its step behind the samples of a step that was not finite."""
        self.watchdog.at(bad.step, SAVING)
        position = position_after_going_back(self.checkpoints.roll_back(self.engine), bad, samples)
        for sink in self.sinks:
            sink.drop_after(position.step)
        self.evaluated = {}
        self.say(
            f"step {bad.step} is not finite: {samples} are left out; back to step {position.step}, "
            f"on from sample {position.samples}"
        )
        return position

    def _evaluate_if_due(self, step: int) -> float | None:
        training = self.run.config.training
        every = training.eval_every_steps
        if not every or (step % every and step != training.steps):
            return None
        self.val_loss = self._evaluate()
        self.evaluated = {step: self.val_loss}
        return self.val_loss

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
        multiple = micro_batch_multiple(self.run.config.parallel)
        batches = read_batches(validation, 0, samples, self.run.micro_batch_size, self.engine.share, multiple=multiple)
        statistics = self.engine.evaluate(batches)
        # an evaluation may take long, and steps that are passed over ask nobody
        self.stops = self.stops or statistics.stop
        return statistics.loss


def _own_schedule(run: ResolvedRun) -> Callable[[], Schedule | None]:
    """Reads and proves the schedule that the configuration names as a file."""
    parallel = run.config.parallel

    def read() -> Schedule | None:
        if parallel.schedule_file is None:
            return None
        schedule = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
        GivenSchedule(schedule).build(parallel.pp, run.accumulation, schedule.chunks)
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


def _utilization_of(run: ResolvedRun, engine: Engine) -> Utilization:
    peak = peak_flops(engine.state.device, engine.dtype, run.config.logging.peak_flops)
    tokens = run.global_batch_size * run.config.model.seq_len
    return Utilization(run.config.model, tokens, None if peak is None else peak * engine.state.world.size)


def _describe(run: ResolvedRun, engine: Engine) -> str:
    grid, memory = engine.state.grid, engine.memory_bytes()
    room = run.micro_batch_size * run.accumulation * run.dp
    relation = "=" if room == run.global_batch_size else "in"
    shapes: dict[str, Any] = {
        "tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "ZeRO": run.config.zero.stage, "schedule": run.config.parallel.schedule,
    }  # fmt: skip
    return (
        ", ".join(f"{name} {value}" for name, value in shapes.items())
        + f" | global batch {run.global_batch_size} {relation} {run.micro_batch_size} x {run.accumulation} x dp {run.dp}"
        + f" | model state {sum(memory.values()) / 2**20:,.1f} MiB on rank 0"
    )
