"""Builds the callbacks of a run in their order; scripts add their own with `CALLBACKS.register`."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TypeVar

from megazero.comm.agreement import CallThread, agree
from megazero.comm.messages import LostPeerError
from megazero.config import ConfigError, RunConfig
from megazero.engine import Position
from megazero.registry import Registry, added, closest
from megazero.settings import Log, Problem
from megazero.training.callbacks.base import Callback, RunContext, StepDecision, StepRecord
from megazero.training.callbacks.checkpointing import Checkpointing
from megazero.training.callbacks.progress import ProgressDisplay, ProgressLine, on_terminal
from megazero.training.watchdog import Watchdog

T = TypeVar("T")

_LAST_SECONDS = 60.0  # a run that has ended waits so long for its loggers
CALLBACKS: Registry[Callable[[RunContext], Callback]] = Registry("callback", {})
_SERVICES = {name: f"megazero.training.callbacks.loggers:{name.upper()}" for name in ("wandb", "mlflow", "trackio")}
LOGGERS: Registry[Callable[[RunContext], Callback]] = Registry(
    "logger", {"tensorboard": "megazero.training.callbacks.metrics:tensorboard_of"} | _SERVICES
)


class CallbackError(RuntimeError):
    """A script's callback has raised an error, which is the cause of this error."""


def check_names(config: RunConfig) -> None:
    """Check that every callback and logger that a run names is registered.  Raises: ConfigError."""
    if problems := name_problems(config):
        raise ConfigError(problems)


def name_problems(config: RunConfig) -> list[Problem]:
    """Yield the names in `training.callbacks` and `logging.loggers` that are not registered or occur twice."""
    callbacks = _problems_of("training.callbacks", config.training.callbacks, CALLBACKS)
    return callbacks + _problems_of("logging.loggers", config.logging.loggers, LOGGERS)


def _problems_of(key: str, names: Sequence[str], registry: Registry[Callable[[RunContext], Callback]]) -> list[Problem]:
    twice, what = {name for name in names if names.count(name) > 1}, registry.what
    problems = [Problem(key, name, "must be named once") for name in sorted(twice)]
    known = f"registered are {', '.join(registry)}" if list(registry) else f"no {what} is registered"
    hint = f"{known}; list the file that registers it in launch.extensions"
    rule = f"must be the name of a registered {what}"
    unknown = [name for name in names if name not in registry]
    problems += [Problem(key, name, rule, hint) for name in unknown]
    for name in sorted(set(names) - set(unknown)):
        if registry.is_built_in(name) and find_spec(name) is None:
            problems.append(Problem(key, name, "must be installed", f"pip install 'megazero[{name}]'"))
            continue
        try:
            signature(registry[name]).bind(None)
        except (TypeError, ValueError) as error:
            rule = f"must be made of the run's context, as {name}(context): {error}"
            problems.append(Problem(key, name, rule, "give its class an __init__(self, context)"))
    return problems


class RegisteredCallback(Callback):
    """Wraps a callback that a script has registered.  Errors of its factory and hooks become `CallbackError`s.

    Before a hook is called, pending gathers of the last step's weights complete, since a hook may hold references to them.
    """

    _registry = CALLBACKS

    def __init__(self, name: str, context: RunContext) -> None:
        self._name, self._gathers = name, context.engine.sharded_model.parameters.gathers
        self._own = Callback()

        def make() -> None:
            self._own = _made(self._registry, name, context)

        self._call(make)

    def _call(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except LostPeerError:  # the watchdog explains it
            raise
        except (Exception, SystemExit) as error:
            raise CallbackError(f"callback {self._name!r} (training.callbacks) failed: {error!r}") from error

    def _hook(self, call: Callable[[], T]) -> T | None:
        self._gathers.wait()
        return self._call(call)

    def on_start(self) -> None:
        self._hook(lambda: self._own.on_start())  # noqa: PLW0108  a logger is made in its thread

    def before_step(self, position: Position) -> StepDecision | None:
        return self._hook(lambda: _decided(self._own.before_step(position), "before_step", StepDecision.SKIP))

    def after_step(self, record: StepRecord) -> StepDecision | None:
        def call() -> StepDecision | None:
            decision = _decided(self._own.after_step(record), "after_step", StepDecision.STOP, StepDecision.ROLL_BACK)
            for key, value in record.metrics.items():  # None: this step has none
                values = value.values() if isinstance(value, Mapping) else [] if value is None else [value]
                if not all(isinstance(item, float | int | str | list) for item in values):
                    rule = "must be a number, a text or a table of numbers"
                    raise TypeError(f"record.metrics[{key!r}] {rule}, got {value!r}")
            return decision

        return self._hook(call)

    def on_rollback(self, position: Position) -> None:
        self._hook(lambda: self._own.on_rollback(position))

    def on_end(self, position: Position) -> None:
        self._hook(lambda: self._own.on_end(position))

    def close(self) -> None:
        self._call(lambda: self._own.close())  # noqa: PLW0108


class SafeLogger(RegisteredCallback):
    """Calls a logger in its own thread, so that a slow or hanging logger delays no step and no other rank.

    If the logger fails, a line is printed once, and the run continues without it.
    """

    _registry = LOGGERS

    def __init__(self, name: str, context: RunContext) -> None:
        self._log, self._thread = context.log, CallThread()
        self._last_seconds = min(_LAST_SECONDS, context.run.config.parallel.timeout_seconds / 4)
        super().__init__(name, context)

    def _call(self, call: Callable[[], T]) -> None:
        def safely() -> None:
            try:
                call()
            except (Exception, SystemExit) as error:
                self._log(f"logger {self._name!r} failed ({error!r}): the run goes on without it")
                self._own = Callback()

        self._last = self._thread.begin(safely)

    def _hook(self, call: Callable[[], T]) -> None:
        self._call(call)  # on rank 0 alone: it decides nothing, and reads no weight

    def after_step(self, record: StepRecord) -> None:
        super().after_step(replace(record, metrics=dict(record.metrics)))  # later callbacks add to it

    def close(self) -> None:
        """Wait for a while until everything is written or sent."""
        super().close()
        self._thread.end()
        if not wait([self._last], self._last_seconds).done:
            found = f"was not done within {self._last_seconds:g} s"
            self._log(f"logger {self._name!r} {found}: its last steps may be missing")


def _made(registry: Registry[Callable[[RunContext], Callback]], name: str, context: RunContext) -> Callback:
    made = registry[name](context)
    if not isinstance(made, Callback):
        raise TypeError(f"it made {made!r}; its class must derive from megazero.training.callbacks.base.Callback")
    for method in sorted(set(dir(made)) - set(dir(Callback))):
        if method.startswith(("on_", "before_", "after_")) and (meant := closest(method, dir(Callback))):
            context.log(f"note: callback {name!r} has {method}, which a run never calls; did you mean {meant[0]}?")
    return made


def _decided(decision: StepDecision | None, hook: str, *allowed: StepDecision) -> StepDecision | None:
    if decision is not None and not any(decision is choice for choice in allowed):
        choices = " or ".join(["None", *map(str, allowed)])
        raise TypeError(f"{hook} returned {decision!r}; it must return {choices}")
    return decision


def make_callbacks(
    context: RunContext, checkpointing: Checkpointing, watchdog: Watchdog, closing: ExitStack
) -> list[Callback]:
    """Return the callbacks of a run; see `_in_order`.  Called on every rank.

    Args:
        closing: closes them, the last first, also if making another one fails.

    Raises: CallbackError, OSError.
    """
    world, names = context.engine.state.world, context.run.config.training.callbacks

    def closed_at_end(callback: Callback) -> Callback:
        closing.push(partial(_close, callback, context.log))
        return callback

    registered = agree(
        lambda: [closed_at_end(RegisteredCallback(name, context)) for name in names], world, CallbackError
    )
    every = agree(lambda: _in_order(context, registered, checkpointing, watchdog), world, OSError)
    return [callback if callback in registered else closed_at_end(callback) for callback in every]


def _close(callback: Callback, log: Log, _kind: object, error: BaseException | None, _trace: object) -> None:
    """Close a callback.  If the run ends with an error, that error is raised, not one from closing."""
    try:
        callback.close()
    except Exception as failure:
        if error is None:
            raise
        log(f"{failure}")


def _in_order(
    context: RunContext, registered: Sequence[Callback], checkpointing: Checkpointing, watchdog: Watchdog
) -> list[Callback]:
    """Return the callbacks of a run, in the order in which they see a step.

    Callbacks that only print or write exist on rank 0 alone, and call no collectives.  Checkpointing is last, so that a step
    that was rolled back is not saved.  A callback that reads the model has metrics and checkpoint of the step written first.
    """
    # Imported here: who only asks which names there are, as a command that starts ranks does, needs none of them.
    from megazero.training.callbacks.evaluation import Averages, Evaluation
    from megazero.training.callbacks.health import LossSpikes, NonFinitePolicy, SkipSteps
    from megazero.training.callbacks.metrics import METRICS_FILE, MetricsFile, SourceCounts
    from megazero.training.callbacks.speed import ExpertLoads, GarbageCollection, Stragglers, Utilization

    run, engine, log, is_first = context.run, context.engine, context.log, context.engine.state.rank == 0
    training, logging, run_dir = run.config.training, run.config.logging, Path(run.config.training.run_dir)
    metrics: list[Callback] = [MetricsFile(run_dir / METRICS_FILE, context.start.step, log)] if is_first else []
    before, writers = [*metrics, checkpointing], [*metrics]
    if is_first:
        progress = ProgressDisplay if on_terminal() else ProgressLine
        writers.append(progress(run, log, engine.state.device))
        names = dict.fromkeys([*["tensorboard"] * logging.tensorboard, *logging.loggers])
        writers += [SafeLogger(name, context) for name in names]
    return [
        SkipSteps(context),
        NonFinitePolicy(training, log),
        Stragglers(logging, engine.state, watchdog.open_store(), log),
        LossSpikes(logging.loss_spike_sigmas, training.skip_steps, log),
        *([] if engine.routers is None else [ExpertLoads(engine, logging.every_steps)]),
        *([SourceCounts(context)] if is_first else []),
        Utilization(run, engine.state.device, engine.dtype, context.corpus.train),
        *([] if engine.sharded_model.average is None else [Averages(run.config, engine.sharded_model.average)]),
        Evaluation(context, before, watchdog),
        *_of_texts(context, before),
        *registered,
        *writers,
        *(make(context) for make in added("callback").values()),
        GarbageCollection(),
        checkpointing,
    ]


def _of_texts(context: RunContext, before: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that read texts with the model.  Runs without such callbacks do not import their modules."""
    found: list[Callback] = []
    if context.run.config.evaluation.tasks:
        try:
            from megazero.training.callbacks.tasks import Tasks
        except ImportError as error:
            raise ValueError(f"evaluation.tasks needs lm-evaluation-harness ({error}): pip install lm_eval") from error
        found.append(Tasks(context, before))
    if context.run.config.logging.sample_prompts:
        from megazero.training.callbacks.samples import Samples

        found.append(Samples(context, before))
    return found
