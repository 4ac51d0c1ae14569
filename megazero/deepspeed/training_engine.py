"""The common base of the engines for scripts: the end of a step, its report, and the calls for information.

    gradients of one step in the buckets -> norm, clip, step (or skip) -> schedule -> counters -> report

The calls and their meanings are DeepSpeed's; docs/deepspeed.md lists the differences.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from megazero.comm.collectives import all_reduce, gather_objects
from megazero.deepspeed.config import DeepSpeedConfig
from megazero.deepspeed.names import NAMES
from megazero.deepspeed.script_checkpoints import CheckpointedEngine, refuses
from megazero.deepspeed.script_units import ScriptModel
from megazero.deepspeed.ungathered_parameter import real
from megazero.engine.step import StepStatistics, check_finite, sum_over_ranks
from megazero.zero.sharding import DTYPES

T = TypeVar("T")

_TABLE = NAMES["engine"]
_DTYPES_OF = attrgetter("config.precision.dtype", "config.precision.accumulate_dtype")
#: Methods without arguments that return a value of the configuration or a coordinate of this rank.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    **{name: attrgetter(path) for name, path in _TABLE["settings"].items()},
    "bfloat16_enabled": lambda engine: engine.config.precision.dtype == "bf16",
    "dynamic_loss_scale": lambda engine: bool(engine.sharded_model.scaler) and not engine.config.json.fp16.loss_scale,
    "fp16_enabled": lambda engine: engine.config.precision.dtype == "fp16",
    "get_batch_info": attrgetter("config.train_batch_size", "config.micro_batch_size", "config.accumulation"),
    "get_data_types": lambda engine: tuple(map(DTYPES.get, _DTYPES_OF(engine))),
    "optimizer_name": lambda engine: engine.config.json.optimizer.type or type(engine.optimizer.inner).__name__,
    "zero_cpu_offload": lambda engine: engine.config.zero.offload.optimizer == "cpu",
    "zero_gather_16bit_weights_on_model_save": lambda _: True,
    "zero_optimization": lambda engine: engine.config.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.config.zero.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.config.zero.stage >= 3,
}

#: Methods that ask for features that do not exist here; they return False.
NEVER = frozenset(_TABLE["never"].split())

#: The engines of this process, in the order of construction: used to find a parameter's engine and running backwards.
ENGINES: WeakValueDictionary[int, TrainingEngine] = WeakValueDictionary()


class RepeatingLoader:
    """Iterates over a loader forever, in a new order each epoch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._epoch = loader, 0
        self._items = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._epoch += 1
            sampler = getattr(self._loader, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(self._epoch)
            self._items = iter(self._loader)
            return next(self._items)


class StepReport:
    """Reports the steps of an engine on rank 0: a line in the terminal, TensorBoard scalars, the time of each phase."""

    def __init__(self, config: DeepSpeedConfig, model: ScriptModel, show: Callable[[str], None]) -> None:
        self._config, self._model, self._show = config, model, show
        self._shown_at = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._writer: Any = None
        if (block := config.json.tensorboard).enabled and model.state.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(Path(block.output_path or ".").expanduser() / block.job_name))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measure a phase of the step, if the configuration asks for a breakdown."""
        if not self._config.wall_clock_breakdown:
            yield
            return
        device = self._model.state.device
        synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
        synchronize()
        started = time.perf_counter()
        yield
        synchronize()
        self._seconds[phase] += time.perf_counter() - started

    def step(self, number: int, samples: int, statistics: StepStatistics, lrs: Sequence[float]) -> None:
        """Report a step that has ended.

        Args:
            number: number of the step, from 1 on.
            samples: samples so far.
            statistics: loss and norm of the step.
            lrs: learning rate of each group in the next step.
        """
        config, scaler = self._config, self._model.scaler
        every = config.json.steps_per_print or (1 if config.wall_clock_breakdown else None)
        if every is not None and number % every == 0:
            rates = ", ".join(f"{lr:.4g}" for lr in lrs)
            seconds, self._shown_at = time.perf_counter() - self._shown_at, time.perf_counter()
            speed = every * config.train_batch_size / seconds
            texts = [f"step {number}", f"loss {statistics.loss:.4f}", f"lr {rates}"]
            texts += [f"grad norm {statistics.grad_norm:.3g}", f"{speed:,.1f} samples/s"]
            if scaler is not None:
                texts.append(f"loss scale {scaler.scale:g}, {scaler.skipped_steps} skipped")
            texts += [f"{phase} {1e3 * seconds / every:.1f} ms" for phase, seconds in self._seconds.items()]
            self._seconds.clear()
            self._show(", ".join(texts))
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


class TrainingEngine(CheckpointedEngine):
    """Base of `ModuleEngine` and `PipelineEngine`.

    Args:
        module: the user's module, whose parameters are bound to `model`.
        show: prints a line on rank 0.

    Attributes:
        optimizer: the torch optimizer of the flat shards, with the user's groups.
        lr_scheduler: the schedule, which advances after every update that was not skipped; None without one.
        training_dataloader: the loader of `training_data`; None without data.
        global_steps, global_samples, micro_steps, skipped_steps: counters, restored from checkpoints.
        device, global_rank, local_rank, world_size, dp_world_size, mp_world_size: this rank's place in the grid.
    """

    def _prepare(self) -> None:
        self._report = StepReport(self.config, self.sharded_model, self._show)
        self._last_step: StepStatistics | None = None
        self._repeating: RepeatingLoader | None = None
        self._thaw: Callable[[], object] = lambda: None
        self.runs_backward = self._is_closed = self._step_applied = False
        ENGINES[id(self)] = self
        # an engine that is dropped takes no gradients either
        weakref.finalize(self, self.sharded_model.detach).atexit = False

    # --- The end of a step.

    def _finish_step(self, loss_sum: Tensor, losses: int) -> float:
        """Reduce the rest, step, report; return the mean loss, by this rank's fp64 loss sum and all ranks' count of losses.

        Raises: NonFiniteError (on every rank, before any weight has changed), LossScaleError, StorageError; RuntimeError,
        the engine is closed.
        """
        model, self._step_applied = self.sharded_model, False
        if self._is_closed:
            raise RuntimeError("the engine is closed and takes no gradients; make another one by initialize")
        try:
            with self._report.timed("reduce"):
                self.bound.check()
                model.finish_gradients()
                count = torch.full_like(loss_sum, losses if self.global_rank == 0 else 0)
                measured = sum_over_ranks(model, model.square_sum(), loss_sum, count)
            # A script's loss may be infinite while its gradients are finite; only the gradients decide.
            measured = replace(measured, finite=model.scaler is not None or isfinite(measured.grad_norm))
            self._last_step = check_finite(measured)
            with self._report.timed("step"):
                self._step_applied = model.update(measured.grad_norm, self.config.json.gradient_clipping)
        except BaseException:  # an interrupt, too
            model.begin_step(self.config.accumulation)
            raise
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size
        if not self._step_applied:
            self.skipped_steps += 1
            self._show(f"step {self.global_steps}: skipped, gradients overflow at loss scale {measured.loss_scale:g}")
        else:
            self.optimizer.count_step()
            if isinstance(self.lr_scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step(measured.loss)
            elif self.lr_scheduler is not None:
                self.lr_scheduler.step()
        model.begin_step(self.config.accumulation)
        self._report.step(self.global_steps, self.global_samples, measured, self.get_lr())
        return measured.loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  as torch has it
        """Discard the gradients since the last step."""
        self.sharded_model.begin_step(self.config.accumulation)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluate without gradients in a `with` block."""
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(was_training)

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Return the iterator to train on: the script's, or an endless one over `training_data`."""
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise ValueError("train_batch needs data_iter, or training_data given to initialize")
        if self._repeating is None:
            self._repeating = RepeatingLoader(self.training_dataloader)
        return self._repeating

    def _on_every_rank(self, read: Callable[[], T]) -> T:
        """Return `read()`; if it fails on one rank, raise on every rank before a step begins.

        Unlike `agree`, it gathers objects only after a failure; a rank that failed raises its own error, the others
        StopIteration where nothing but data ended.
        """
        failure: Exception | None = None
        try:
            result = read()
        except Exception as error:
            failure = error
        world = self.parallel_state.world
        failed = torch.tensor(float(failure is not None), device=self.device)
        all_reduce(failed, world, "max").wait()
        if not failed:
            return result
        own = None if failure is None else (str(failure) or repr(failure), isinstance(failure, StopIteration))
        found = [problem for problem in gather_objects(own, world) if problem is not None]
        if failure is not None:
            raise failure
        error_type = StopIteration if all(ended for _, ended in found) else ValueError
        raise error_type("\n".join(dict.fromkeys(text for text, _ in found)))

    def _mean_over_ranks(self, loss: Tensor) -> Tensor:
        """Average a loss over the data-parallel ranks."""
        all_reduce(loss, self.parallel_state.dp).wait()
        return loss.float() / self.dp_world_size

    def close(self) -> None:
        """Turn the module back into a plain one with whole weights, and release files and writers.  Collective.

        Waits until an asynchronous checkpoint is durable.  Afterwards the engine cannot be used, but another engine may take
        the module.  While an error is handled, at the interpreter's exit, and after `destroy_process_group`, peers may be
        gone; then weights that stage 3 has sharded stay sharded.
        """
        if self._is_closed:
            return
        self._is_closed = True
        ENGINES.pop(id(self), None)
        self._wait_for_saver()
        groups_exist = self.world_size == 1 or dist.is_initialized()
        is_running = sys.exc_info()[0] is None and not hasattr(sys, "last_value") and threading.main_thread().is_alive()
        if groups_exist and is_running:
            if not self.sharded_model.restore():
                self._show("note: the whole weights do not fit into memory; the module's parameters stay cut")
        else:
            self.sharded_model.detach()
            self.parallel_state.groups.is_reusable = False  # operations may be under way
        self.sharded_model.close()
        self._report.close()

        self._thaw()

    def only_evaluate(self, requires_grad: Mapping[str, bool]) -> None:
        """Let every call that would train raise an error, since there is no optimizer.

        Args:
            requires_grad: the flags that parameters get back after `close`, or when the engine is dropped, by name.
        """
        self.has_optimizer = False
        self._thaw = thaw = weakref.finalize(self, _thaw, self.module, requires_grad)
        thaw.atexit = False
        refusal = refuses('the engine has no optimizer: give one to initialize, or "optimizer" in the configuration')
        self.__dict__.update(dict.fromkeys(("backward", "step", "train_batch", "save_checkpoint"), refusal))

    destroy = close
    compile = refuses("compile the module with torch.compile, and give that to initialize")

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of a step, by changing its number of micro-batches.

        Raises:
            ValueError: the number is no multiple of a micro-batch on all ranks.
            RuntimeError: a step has begun.
        """
        micro_batches = self.config.micro_batch_size * self.dp_world_size
        if train_batch_size < micro_batches or train_batch_size % micro_batches:
            raise ValueError(f"{train_batch_size=} must be a multiple of {micro_batches}, one micro-batch on each rank")
        self._set_sizes(self.config.micro_batch_size, train_batch_size // micro_batches)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples of a micro-batch, and so those of a step.  The script's data must match."""
        self._set_sizes(micro_batch_size, self.config.accumulation)

    def _set_sizes(self, micro: int, accumulation: int) -> None:
        if begun := self._begun():
            raise RuntimeError(f"{begun}: the sizes of a step cannot change within it; set them after it has ended")
        whole = micro * accumulation * self.dp_world_size
        self.config = replace(self.config, micro_batch_size=micro, accumulation=accumulation, train_batch_size=whole)

    def allreduce_gradients(self) -> None:
        """No-op: the backward reduces gradients as they are computed."""

    def empty_partition_cache(self) -> None:
        """No-op: gathered weights are in buffers of a fixed size."""

    # --- What a script asks.

    def __getattr__(self, name: str) -> Any:
        """Look up a name of DeepSpeed that is no method here, then an attribute of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules or "config" not in self.__dict__:
                raise
        if name in SETTINGS:
            return partial(SETTINGS[name], self)
        if name in NEVER:
            return bool
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(f"neither the engine nor its module has {name!r}: see docs/deepspeed.md") from error

    @property
    def data_parallel_group(self) -> Any:
        """Return the process group of the data-parallel ranks."""
        return self.parallel_state.dp.process_group

    @property
    def loss_scale(self) -> float:
        """Return the loss scale; 1 without fp16."""
        scaler = self.sharded_model.scaler
        return 1.0 if scaler is None else scaler.scale

    def get_lr(self) -> list[float]:
        """Return the learning rate of each optimizer group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the momentum, or betas, of each optimizer group."""
        return [group.get("momentum", group.get("betas")) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients over the whole model, before clipping; None before a step."""
        return None if self._last_step is None else self._last_step.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last `step()` or `train_batch()` changed the weights, instead of only ending a micro-batch."""
        return self._step_applied

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of model state on this rank, by kind.  A kind off the device names its place."""
        return self.sharded_model.memory_bytes()

    def module_state_dict(self) -> dict[str, Tensor]:
        """Return whole weights and buffers by name, on every rank.  Collective under stage 3."""
        return self.module.state_dict()


def _thaw(module: nn.Module, requires_grad: Mapping[str, bool]) -> None:
    for name, trains in requires_grad.items():
        real(module.get_parameter(name)).requires_grad_(trains)
