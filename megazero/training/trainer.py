"""A run on one rank.

    position ------> step ------> StepRecord ------> callbacks -----> position
                                                        |
                                                        +-- ROLL_BACK: the position of the newest checkpoint

The trainer computes steps.  Whatever else happens in a run is a callback; `callbacks/registry.py` has them in order.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megazero.checkpoint.lock import Ownership
from megazero.comm.agreement import agree, on_first
from megazero.comm.messages import lacks_memory
from megazero.config import ResolvedRun
from megazero.engine import Engine, NonFiniteError, Position, initialize
from megazero.engine.micro_batches import ReadAhead, placed, read_on_host
from megazero.engine.outline import read_own_schedule
from megazero.engine.phases import learning_rates
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState
from megazero.registry import added
from megazero.schedules.proof import ScheduleError
from megazero.settings import Log
from megazero.training.batches import fingerprint_of, open_same_corpus, without_trained
from megazero.training.callbacks import base
from megazero.training.callbacks.checkpointing import Checkpointing
from megazero.training.callbacks.progress import announce, recompile_limit_in_a_line
from megazero.training.callbacks.registry import check_names, make_callbacks
from megazero.training.heartbeat import BETWEEN, SAVING, TRAINING
from megazero.training.watchdog import Watchdog


def train(
    run: ResolvedRun, state: ParallelState, show: Log, wants_stop: Callable[[], bool] = lambda: False
) -> base.RunSummary:
    """Start or resume the training that a configuration describes.  Called on every rank.

    Args:
        show: prints a line on the terminal; called on rank 0 only.
        wants_stop: asked after every step and evaluation; where any rank says so, all ranks save and end after that step.

    Raises:
        ConfigError: `training.callbacks` or `logging.loggers` has a name that nobody has registered.
        DataError: the corpus cannot be opened, is not the same on all ranks, or all to be evaluated was trained on.
        OwnerError: another run owns the directories of this one, or has taken them.
        CheckpointError: the checkpoint that `checkpoint.resume` names cannot be used, or none can be written.
        NonFiniteError, LostPeerError: see `Engine.train_step`.
        OutOfMemoryError: on the rank that has no memory left.
    """
    check_names(run.config)
    return Trainer(run, state, show if state.rank == 0 else lambda _: None, wants_stop).run()


class Trainer:
    """The parts of a run, put together on one rank; `run` does its steps and closes them.  Arguments as `train`."""

    def __init__(self, run: ResolvedRun, state: ParallelState, log: Log, wants_stop: Callable[[], bool]) -> None:
        config, run_dir = run.config, Path(run.config.training.run_dir)
        self.resolved, self.state, self.log = run, state, log
        with ExitStack() as closing:  # closes what has been made where making the rest fails
            self.watchdog = closing.enter_context(Watchdog(state, config.parallel.timeout_seconds, run_dir))
            corpus = open_same_corpus(config, state.world, log)
            self._ownership = closing.enter_context(Ownership(config, state, log, wants_stop))
            self.checkpointing = Checkpointing(config, self._ownership.root, self.watchdog, log)
            is_new = not self.checkpointing.find()
            schedule = agree(lambda: read_own_schedule(run), state.world, ScheduleError)
            with explained(run, state):
                self.engine = initialize(config, state, init_weights=is_new, schedule=schedule)
            closing.callback(self.engine.sharded_model.close)
            closing.enter_context(recompile_limit_in_a_line(log))
            closing.push(lambda _kind, error, _trace: self.checkpointing.finish_save(error))
            self.engine.wants_stop = wants_stop
            start = self.checkpointing.resume(self.engine, corpus.fingerprint, partial(fingerprint_of, config))
            corpus = without_trained(corpus, start.trained, log)
            ends = {key: max(end, start.trained.get(key, 0)) for key, end in corpus.train.ends().items()}
            self.position = replace(start, trained={**start.trained, **ends})
            self._begin_phase()
            self.context = base.RunContext(run, self.engine, corpus, self.position, log)
            self._batches = ReadAhead(self._read)
            closing.callback(self._batches.close)
            on_first(self._prepare_run_dir, state.world, OSError)
            self.callbacks = make_callbacks(self.context, self.checkpointing, self.watchdog, closing)
            announce(self.context)
            self._closing = closing.pop_all()
        self.loss: float | None = None  # of the last step
        self.val_loss: float | None = None  # of the last evaluation

    def run(self) -> base.RunSummary:
        """Do the steps that are left, or those until a rank wants to stop."""
        steps, is_done = self.resolved.config.training.steps, False
        run, config = self.resolved, self.resolved.config
        with self._closing, explained(run, self.state, self.engine):
            evaluates = bool(config.training.eval_every_steps or config.data.validation_sources)
            self.engine.compile_ahead(run.micro_batch_size, run.accumulation, evaluates=evaluates)
            for callback in self.callbacks:
                callback.on_start()
            started = time.perf_counter()
            while self.position.step < steps and not is_done:
                is_done = self._step()
            for callback in self.callbacks:
                callback.on_end(self.position)
            return base.RunSummary(
                self.position.step,
                self.loss,
                self.val_loss,
                self.checkpointing.newest,
                seconds=time.perf_counter() - started,
                sent_bytes=self.state.traffic.by_axis(),
                skipped_steps=self.engine.sharded_model.skipped_steps,
                stopped=self.position.step < steps,
            )

    def _step(self) -> bool:
        """Do the next step and call the callbacks; return whether the run ends with it."""
        decisions = [callback.before_step(self.position) for callback in self.callbacks]
        first, end = self.position.samples, self.resolved.samples_after(self.position.samples)
        position = replace(self.position, step=self.position.step + 1, samples=end)
        is_last = position.step == self.resolved.config.training.steps
        record = base.StepRecord(position, base.SampleRange(first, end - 1), is_last=is_last)
        if self.resolved.config.training.batch_ramp:
            record.metrics["global_batch_size"] = len(record.samples)
        if base.StepDecision.SKIP not in decisions:  # else its samples are consumed, and nothing is computed
            # On a CPU the thread would take the step's cores.
            reads_ahead = self.state.device.type == "cuda" and not is_last
            ahead = self._range(end, self.resolved.samples_after(end)) if reads_ahead else None
            self._reading = self._range(first, end), ahead
            self.watchdog.at(position.step, TRAINING)
            self._compute(record)
            self.watchdog.at(position.step, BETWEEN)
        self._ownership.check()
        for callback in self.callbacks:
            decision = callback.after_step(record)
            if decision is base.StepDecision.ROLL_BACK:
                self.position = self._roll_back(record)
                self._begin_phase()
                return False  # also where a rank wants to stop: only a later step remembers the samples to leave out
            record.is_last |= decision is base.StepDecision.STOP
        self.position = record.position
        self.loss = self.loss if record.loss is None else record.loss
        self.val_loss = self.val_loss if record.val_loss is None else record.val_loss
        return record.is_last

    def _compute(self, record: base.StepRecord) -> None:
        """Train on the samples of a step and note what was measured."""
        engine, model, traffic = self.engine, self.engine.sharded_model, self.state.traffic
        sent, waited, started = Counter(traffic.by_axis()), traffic.waited_seconds, time.perf_counter()
        batches = placed(self._batches.take(*self._reading), engine.batch_slice, self.resolved.config.model.seq_len)
        # A step without an update keeps the learning rate and the weights, while its samples are consumed.
        lr = self._learning_rate(model.optimizer.steps_taken)
        statistics = engine.train_step(batches, lr, raises_non_finite=False)
        record.seconds = time.perf_counter() - started
        record.work_seconds = record.seconds - (traffic.waited_seconds - waited)
        record.sent_bytes = dict(sorted((Counter(traffic.by_axis()) - sent).items()))
        record.statistics, record.lr = statistics, lr
        record.position = replace(record.position, tokens=record.position.tokens + statistics.tokens)
        record.memory_bytes = peak_memory_bytes(self.state.device)
        record.is_last |= statistics.stop
        record.skipped_steps = None if model.scaler is None else model.skipped_steps

    def _begin_phase(self) -> None:
        """Compute what stays the same through the current phase."""
        config, phase = self.resolved.config, self.position.phase
        self._stream_start = phase.first_sample
        self._learning_rate = learning_rates(config.lr_schedule, config.optimizer.lr, config.training.steps, phase)

    def _range(self, first: int, end: int) -> tuple[int, int, int]:
        """Return the arguments of `_read` for the samples [first, end)."""
        return first, end - first, self._stream_start

    def _read(self, first: int, count: int, stream_starts_at: int) -> list[MicroBatch]:
        """Read a step's micro-batches into the host's memory; see `read_on_host`."""
        size, stream = self.resolved.micro_batch_size, self.context.corpus.train
        return read_on_host(stream, first, count, size, self.engine.batch_slice, stream_starts_at)

    def _roll_back(self, record: base.StepRecord) -> Position:
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
        hint = f"{record.samples} are left out; back to step {position.step}, continuing with sample {position.samples}"
        self.log(f"step {record.step} {'is rolled back' if is_finite else 'is not finite'}: {hint}")
        for callback in self.callbacks:
            callback.on_rollback(position)
        return position

    def _prepare_run_dir(self) -> None:
        from megazero.config.document import save_config

        (run_dir := Path(self.resolved.config.training.run_dir)).mkdir(parents=True, exist_ok=True)
        saved = run_dir / "config.toml"
        try:
            if aside := save_config(self.resolved, saved):
                self.log(f"{saved} was not written by a run: it is kept as {aside}")
        except OSError as error:
            self.log(f"{saved} could not be written ({error}); the run goes on without it")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class OutOfMemoryError(RuntimeError):
    """This rank's device, or its host, has no memory left."""


@contextmanager
def explained(run: ResolvedRun, state: ParallelState, engine: Engine | None = None) -> Iterator[None]:
    """Explain an out-of-memory error: what holds the memory, and which settings would fit.

    Args:
        engine: None while it is being built.

    Raises: OutOfMemoryError.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        of_the_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if not (of_the_host or isinstance(error, torch.OutOfMemoryError) or lacks_memory(error)):
            raise
        text = str(error)
        for explain in added("out of memory").values():
            try:
                text = explain(text, run, state, engine)
            except Exception as failure:  # what is known must not hide behind it
                text = f"{text} (not explained: {failure!r})"
        raise OutOfMemoryError(text) from error
