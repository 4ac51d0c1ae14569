"""The callbacks of a run in their order, and the names of those that scripts add.

CALLBACKS.register("mine", MyCallback)      then, in the run file:  training.callbacks = ["mine"]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megazero.config import ConfigError
from megazero.config.schema import TrainingConfig
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

CALLBACKS: Registry[Callable[[RunContext], Callback]] = Registry("callback", {})


def check_names(training: TrainingConfig) -> None:
    """Make sure that every callback of `training.callbacks` is registered.  Raises: ConfigError."""
    unknown = [name for name in training.callbacks if name not in CALLBACKS]
    if unknown:
        known = f"registered are {', '.join(CALLBACKS)}" if list(CALLBACKS) else "no callback is registered"
        hint = f"{known}; list the file that registers it in launch.extensions"
        rule = "must be the name of a registered callback"
        raise ConfigError([Problem("training.callbacks", name, rule, hint) for name in unknown])


def callbacks_of(context: RunContext) -> list[Callback]:
    """The callbacks of a run before checkpointing, in order.

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
        Utilization.of_run(context),
        Evaluation(context),
        *(CALLBACKS[name](context) for name in training.callbacks),
    ]
    if is_first:
        callbacks.append(MetricsFile(run_dir / METRICS_FILE, context.start.step))
        callbacks.append(ProgressLine(training.steps, logging.every_steps, say))
        if logging.tensorboard:
            callbacks.append(TensorBoard(run_dir / "tensorboard", context.start.step))
    return [*callbacks, GarbageCollection()]
