"""The callbacks of a run in their order, and the names of those that scripts add with `CALLBACKS.register`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from megazero.comm.collectives import LostPeerError
from megazero.config import ConfigError, to_toml
from megazero.config.schema import TrainingConfig
from megazero.registry import Registry
from megazero.settings import Problem
from megazero.training.callbacks.base import Callback, RunContext
from megazero.training.callbacks.evaluation import Evaluation
from megazero.training.callbacks.garbage_collection import GarbageCollection
from megazero.training.callbacks.health import LossSpikes, NonFinitePolicy, SkipSteps
from megazero.training.callbacks.metrics import METRICS_FILE, MetricsFile
from megazero.training.callbacks.pipeline_trace import PipelineTrace
from megazero.training.callbacks.progress import ProgressLine
from megazero.training.callbacks.stragglers import Stragglers
from megazero.training.callbacks.tensorboard import TensorBoard
from megazero.training.callbacks.utilization import Utilization

P = ParamSpec("P")
T = TypeVar("T")

CALLBACKS: Registry[Callable[[RunContext], Callback]] = Registry("callback", {})


class CallbackError(RuntimeError):
    """A callback that a script registered has raised; its own error is the cause."""


def check_names(training: TrainingConfig) -> None:
    """Make sure that every callback of `training.callbacks` is registered.  Raises: ConfigError."""
    if problems := name_problems(training):
        raise ConfigError(problems)


def name_problems(training: TrainingConfig) -> list[Problem]:
    """Find the names in `training.callbacks` that are not registered, or there twice."""
    twice = {name for name in training.callbacks if training.callbacks.count(name) > 1}
    problems = [Problem("training.callbacks", name, "must be named once") for name in sorted(twice)]
    known = f"registered are {', '.join(CALLBACKS)}" if list(CALLBACKS) else "no callback is registered"
    hint, rule = (
        f"{known}; list the file that registers it in launch.extensions",
        "must be the name of a registered callback",
    )
    unknown = [name for name in training.callbacks if name not in CALLBACKS]
    return problems + [Problem("training.callbacks", name, rule, hint) for name in unknown]


def registered_callback(name: str, context: RunContext) -> Callback:
    """The callback of this name.  An error of its factory or of a hook becomes a `CallbackError` that says the name."""

    def named(function: Callable[P, T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except LostPeerError:  # the watchdog explains it
                raise
            except (Exception, SystemExit) as error:
                raise CallbackError(f"callback {name!r} (training.callbacks) failed: {error!r}") from error

        return call

    callback, with_name = named(CALLBACKS[name])(context), Callback()
    for hook in vars(Callback):
        if not hook.startswith("_"):
            setattr(with_name, hook, named(getattr(callback, hook)))
    return with_name


def callbacks_of(context: RunContext, registered: Sequence[Callback]) -> list[Callback]:
    """The callbacks of a run, in the order in which they see a step; the loop adds checkpointing at the end.

    Those that only print or write exist on rank 0 alone and make no collective call.
    """
    run, engine, say, is_first = context.run, context.engine, context.say, context.engine.state.rank == 0
    training, logging, run_dir = run.config.training, run.config.logging, Path(run.config.training.run_dir)
    writers: list[Callback] = []
    if is_first:
        writers.append(MetricsFile(run_dir / METRICS_FILE, context.start.step))
        writers.append(ProgressLine(training.steps, logging.every_steps, say))
        if logging.tensorboard:
            writers.append(TensorBoard(run_dir / "tensorboard", context.start, to_toml(run)))
    return [
        SkipSteps(run, say),
        *([PipelineTrace(run_dir, say)] if is_first else []),
        NonFinitePolicy(training, say),
        Stragglers(logging, engine.state, say),
        LossSpikes(logging.loss_spike_sigmas, training.skip_steps, say),
        Utilization(run, engine.state.device, engine.dtype),
        Evaluation(context),
        *registered,
        *writers,
        GarbageCollection(),
    ]
