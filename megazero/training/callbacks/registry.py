"""The callbacks of a run in their order, and the names of those that scripts add.

CALLBACKS.register("mine", MyCallback)      then, in the run file:  training.callbacks = ["mine"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from megazero.comm.collectives import LostPeerError
from megazero.config import ConfigError
from megazero.config.schema import TrainingConfig
from megazero.engine import Position
from megazero.registry import Registry
from megazero.settings import Problem
from megazero.training.callbacks.base import Callback, RunContext
from megazero.training.callbacks.evaluation import Evaluation
from megazero.training.callbacks.garbage_collection import GarbageCollection
from megazero.training.callbacks.loss_spikes import LossSpikes
from megazero.training.callbacks.metrics_file import METRICS_FILE, MetricsFile
from megazero.training.callbacks.non_finite import NonFinitePolicy
from megazero.training.callbacks.pipeline_trace import PipelineTrace
from megazero.training.callbacks.progress import ProgressLine
from megazero.training.callbacks.skip_steps import SkipSteps
from megazero.training.callbacks.stragglers import Stragglers
from megazero.training.callbacks.tensorboard import TensorBoard
from megazero.training.callbacks.utilization import Utilization
from megazero.training.record import StepDecision, StepRecord

P = ParamSpec("P")
T = TypeVar("T")

CALLBACKS: Registry[Callable[[RunContext], Callback]] = Registry("callback", {})


class CallbackError(RuntimeError):
    """A callback that a script registered has raised; its own error is the cause."""


def check_names(training: TrainingConfig) -> None:
    """Make sure that every callback of `training.callbacks` is registered.  Raises: ConfigError."""
    unknown = [name for name in training.callbacks if name not in CALLBACKS]
    if unknown:
        known = f"registered are {', '.join(CALLBACKS)}" if list(CALLBACKS) else "no callback is registered"
        hint = f"{known}; list the file that registers it in launch.extensions"
        rule = "must be the name of a registered callback"
        raise ConfigError([Problem("training.callbacks", name, rule, hint) for name in unknown])


def callbacks_of(context: RunContext, registered: Sequence[Callback]) -> list[Callback]:
    """The callbacks of a run before checkpointing, in order; `registered` are those of `training.callbacks`.

    Those that only print or write exist on rank 0 alone and make no collective call.
    """
    run, say, is_first = context.run, context.say, context.engine.state.rank == 0
    training, logging, run_dir = run.config.training, run.config.logging, Path(run.config.training.run_dir)
    callbacks: list[Callback] = [SkipSteps(run, say)]
    if is_first:
        callbacks.append(PipelineTrace(run_dir, say))
    callbacks += [
        NonFinitePolicy(training, say),
        Stragglers(logging, context.engine.state, say),
        LossSpikes(logging.loss_spike_sigmas, training.skip_steps, say),
        Utilization(run, context.engine.state.device, context.engine.dtype),
        Evaluation(context),
        *registered,
    ]
    if is_first:
        callbacks.append(MetricsFile(run_dir / METRICS_FILE, context.start.step))
        callbacks.append(ProgressLine(training.steps, logging.every_steps, say))
        if logging.tensorboard:
            callbacks.append(TensorBoard(run_dir / "tensorboard", context.start.step))
    return [*callbacks, GarbageCollection()]


class RegisteredCallback(Callback):
    """Makes and calls the callback of a name, so that its errors say the name.  Raises: CallbackError."""

    def __init__(self, name: str, context: RunContext) -> None:
        self._name = name
        self._callback = self._call(CALLBACKS[name], context)

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except LostPeerError:  # no fault of the callback
            raise
        except Exception as error:
            raise CallbackError(f"callback {self._name!r} (training.callbacks) failed: {error!r}") from error

    def on_start(self) -> None:
        self._call(self._callback.on_start)

    def before_step(self, position: Position) -> StepDecision | None:
        return self._call(self._callback.before_step, position)

    def after_step(self, record: StepRecord) -> StepDecision | None:
        return self._call(self._callback.after_step, record)

    def on_rollback(self, position: Position) -> None:
        self._call(self._callback.on_rollback, position)

    def on_end(self, position: Position) -> None:
        self._call(self._callback.on_end, position)

    def close(self) -> None:
        self._call(self._callback.close)
