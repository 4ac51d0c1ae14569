"""The training run: config -> parallel state -> engine -> data -> loop.

    position ------> step ------> StepRecord ------> callbacks -----> position
                                                        |
                                                        +-- ROLL_BACK: the position of the newest checkpoint

The loop computes steps.  Whatever else happens in a run is a callback; `callbacks/registry.py` has them in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from megazero.annexes import added
from megazero.comm.collectives import agree
from megazero.config import ResolvedRun, save_config
from megazero.config.derive import micro_batch_multiple
from megazero.data.corpus import repeats, without_borders
from megazero.engine import NonFiniteError, Position, initialize
from megazero.engine.outline import schedule_of
from megazero.engine.phases import learning_rate
from megazero.parallel_state import ParallelState
from megazero.schedules.action import Schedule, read_schedule
from megazero.schedules.kind import GivenSchedule
from megazero.schedules.proof import ScheduleError, draw_refused, program
from megazero.training.batches import fingerprint_of, read_batches, without_trained
from megazero.training.callbacks.base import Callback, RunContext
from megazero.training.callbacks.checkpointing import Checkpointing
from megazero.training.callbacks.progress import describe
from megazero.training.callbacks.registry import CallbackError, RegisteredCallback, callbacks_of, check_names
from megazero.training.heartbeat import BETWEEN, SAVING, TRAINING
from megazero.training.out_of_memory import explained
from megazero.training.ownership import Ownership
from megazero.training.record import RunSummary, SampleRange, StepDecision, StepMeter, StepRecord, peak_memory_bytes
from megazero.training.same_data import open_same_corpus
from megazero.training.watchdog import Watchdog

SAVED_CONFIG = "config.toml"


def train(
    run: ResolvedRun, state: ParallelState, show: Callable[[str], None], wants_stop: Callable[[], bool] = lambda: False
) -> RunSummary:
    """Start or resume the training that a configuration describes.  Called on every rank.

    Args:
        show: prints a line on the terminal; called on rank 0 only.
        wants_stop: asked after every step and evaluation; where any rank says so, all ranks save and end after that step.

    Raises:
        ConfigError: `training.callbacks` names a callback that nobody has registered.
        DataError: the corpus cannot be opened, is not the same on all ranks, or all to be evaluated was trained on.
        OwnerError: another run owns the directories of this one, or has taken them.
        CheckpointError: the checkpoint that `checkpoint.resume` names cannot be used, or none can be written.
        NonFiniteError, LostPeerError: see `Engine.train_step`.
        OutOfMemoryError: on the rank that has no memory left.
    """
    config, run_dir = run.config, Path(run.config.training.run_dir)
    check_names(config.training)
    say = show if state.rank == 0 else lambda _: None
    with ExitStack() as closing:
        watchdog = closing.enter_context(Watchdog(state, config.parallel.timeout_seconds, run_dir))
        corpus = open_same_corpus(config, state.world, say)
        ownership = closing.enter_context(Ownership(config, state, say, wants_stop))
        fingerprint, fingerprint_at = corpus.fingerprint, partial(fingerprint_of, config)
        checkpointing = Checkpointing(
            config, ownership.root, state, fingerprint, say, watchdog, fingerprint_at=fingerprint_at
        )
        resumes = checkpointing.find()
        schedule = agree(lambda: _own_schedule(run), state.world, ScheduleError)
        with explained(run, state):
            engine = initialize(config, state, init_weights=not resumes, schedule=schedule)
        closing.callback(engine.sharded_model.close)
        closing.push(lambda _kind, error, _trace: checkpointing.finish_save(error))
        engine.wants_stop = wants_stop
        start = checkpointing.resume(engine)
        corpus = without_trained(corpus, start.trained, say)
        own, trained = corpus.train.ends(), start.trained
        start = replace(start, trained={**trained, **{key: max(end, trained.get(key, 0)) for key, end in own.items()}})
        context = RunContext(run, engine, corpus, start, say)
        agree(lambda: _prepare_run_dir(run, say) if state.rank == 0 else None, state.world, OSError)
        made: list[Callback] = []  # to be closed, also where making another one fails
        closing.push(lambda _kind, error, _trace: _close(made, error, say))

        def make() -> None:
            for name in config.training.callbacks:
                made.append(RegisteredCallback(name, context))

        agree(make, state.world, CallbackError)
        others = agree(lambda: callbacks_of(context, tuple(made), checkpointing, watchdog), state.world, OSError)
        made[:] = [ownership, *others]
        say(describe(run, engine))
        for line_of in added("start line").values() if state.rank == 0 else ():
            try:
                say(line_of(run, schedule or schedule_of(run), state.device))
            except Exception as error:  # what is told of a run does not end it
                say(f"a line about the start is missing: {error!r}")
        samples = start.samples - start.phase.first_sample  # of this phase
        samples += (config.training.steps - start.step) * run.global_batch_size
        for line in repeats([source.path for source in config.data.sources], corpus.train, samples):
            say(line)
        if config.data.document_mask and state.rank == 0:
            for line in without_borders(corpus.train.first_documents()):
                say(line)
        with explained(run, state, engine):
            return _Loop(context, made, checkpointing, watchdog).run_to_end()


def _close(callbacks: Sequence[Callback], error: BaseException | None, say: Callable[[str], None]) -> None:
    """Close callbacks, the last first; if the run ends with an error, that error is the one to raise, else their first."""
    first = error
    for callback in reversed(callbacks):
        try:
            callback.close()
        except Exception as failure:
            if first is not None:
                say(f"{failure}")
            first = first or failure
    if first is not None and first is not error:
        raise first


def _prepare_run_dir(run: ResolvedRun, say: Callable[[str], None]) -> None:
    (run_dir := Path(run.config.training.run_dir)).mkdir(parents=True, exist_ok=True)
    saved = run_dir / SAVED_CONFIG
    try:
        if aside := save_config(run, saved):
            say(f"{saved} was not written by a run: it is kept as {aside}")
    except OSError as error:
        say(f"{saved} could not be written ({error}); the run goes on without it")


def _own_schedule(run: ResolvedRun) -> Schedule | None:
    """Read and prove `parallel.schedule_file`; None where the run has none.  Raises: ScheduleError, OSError."""
    parallel = run.config.parallel
    if parallel.schedule_file is None:
        return None
    try:
        schedule = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
    except OSError as error:
        raise OSError(f"parallel.schedule_file cannot be read: {error}") from error
    GivenSchedule(schedule).build(parallel.pp, run.accumulation, schedule.chunks)
    try:
        program(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{error}\n{draw_refused(schedule, error)}") from error
    return schedule


class _Loop:
    """Does step after step and shows each to the callbacks."""

    def __init__(
        self, context: RunContext, callbacks: Sequence[Callback], checkpointing: Checkpointing, watchdog: Watchdog
    ) -> None:
        self.run, self.engine, self.corpus, self.say = context.run, context.engine, context.corpus, context.say
        self.callbacks, self.checkpointing, self.watchdog = callbacks, checkpointing, watchdog
        self.position = context.start
        self.loss: float | None = None  # of the last step
        self.val_loss: float | None = None  # of the last evaluation

    def run_to_end(self) -> RunSummary:
        """Do the steps that are left, or those until a rank wants to stop."""
        steps, is_done = self.run.config.training.steps, False
        for callback in self.callbacks:
            callback.on_start()
        started = time.perf_counter()
        while self.position.step < steps and not is_done:
            is_done = self._step()
        for callback in self.callbacks:
            callback.on_end(self.position)
        return RunSummary(
            self.position.step,
            self.loss,
            self.val_loss,
            self.checkpointing.newest,
            seconds=time.perf_counter() - started,
            sent_bytes=self.engine.state.traffic.by_axis(),
            skipped_steps=self.engine.sharded_model.skipped_steps,
            stopped=self.position.step < steps,
        )

    def _step(self) -> bool:
        """Do the next step and show it to the callbacks; whether the run ends with it."""
        decisions = [callback.before_step(self.position) for callback in self.callbacks]
        first, count = self.position.samples, self.run.global_batch_size
        position = replace(self.position, step=self.position.step + 1, samples=first + count)
        is_last = position.step == self.run.config.training.steps
        record = StepRecord(position, SampleRange(first, first + count - 1), is_last=is_last)
        if StepDecision.SKIP not in decisions:  # else its samples are consumed, and nothing is computed
            self._compute(record)
        for callback in self.callbacks:
            decision = callback.after_step(record)
            if decision is StepDecision.ROLL_BACK:
                self.position = self._roll_back(record)
                return False  # also where a rank wants to stop: only a later step remembers the samples to leave out
            record.is_last |= decision is StepDecision.STOP
        self.position = record.position
        self.loss = self.loss if record.loss is None else record.loss
        self.val_loss = self.val_loss if record.val_loss is None else record.val_loss
        return record.is_last

    def _compute(self, record: StepRecord) -> None:
        """Train on the samples of a step and note what was measured."""
        run, engine = self.run, self.engine
        model, logging = engine.sharded_model, run.config.logging
        self.watchdog.at(record.step, TRAINING)
        meter = StepMeter(engine.state.traffic)
        first, count, size = record.samples.first, run.global_batch_size, run.micro_batch_size
        phase, multiple = record.position.phase, micro_batch_multiple(run.config.parallel)
        batches = read_batches(
            self.corpus.train, first, count, size, engine.share, multiple=multiple, stream_starts_at=phase.first_sample
        )
        # A step without an update keeps the learning rate and the weights, while its samples are consumed.
        updates = model.optimizer.steps_taken
        lr = learning_rate(run.config.lr_schedule, run.config.optimizer.lr, run.config.training.steps, phase, updates)
        if record.step == logging.pipeline_trace_step:
            statistics, record.timeline = engine.traced_step(batches, lr)
        else:
            statistics = engine.train_step(batches, lr, raises_non_finite=False)
        self.watchdog.at(record.step, BETWEEN)
        record.seconds, record.work_seconds, record.sent_bytes = meter.read()
        record.statistics, record.lr = statistics, lr
        record.position = replace(record.position, tokens=record.position.tokens + statistics.tokens)
        record.memory_bytes = peak_memory_bytes(engine.state.device)
        record.is_last |= statistics.stop
        record.skipped_steps = None if model.scaler is None else model.skipped_steps

    def _roll_back(self, record: StepRecord) -> Position:
        """Load the newest checkpoint, to continue from its step with the samples after those of a bad step."""
        self.watchdog.at(record.step, SAVING)
        loaded = self.checkpointing.roll_back(record.step)
        is_finite = record.statistics is not None and record.statistics.finite
        if loaded is None:
            raise NonFiniteError(
                f"step {record.step}, {record.samples}, is {'rolled back' if is_finite else 'not finite'}, and there is no "
                "checkpoint to roll back to yet; set checkpoint.save_every_steps below that step (and checkpoint.keep_last "
                'to 2 or more), or training.on_non_finite = "skip"'
            )
        position = replace(record.position, step=loaded.step, phases=loaded.phases)
        self.say(
            f"step {record.step} {'is rolled back' if is_finite else 'is not finite'}: {record.samples} are left out; "
            f"back to step {position.step}, continuing with sample {position.samples}"
        )
        for callback in self.callbacks:
            callback.on_rollback(position)
        return position
