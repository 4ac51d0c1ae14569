"""What the engines of a user's own script have in common: the end of a step, its report, checkpoints, what a script may ask.

    gradients of one step in the buckets -> norm, clip, step (or skip) -> schedule -> counters -> report

The calls and their meanings are DeepSpeed's; see docs/deepspeed.md for what is different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from megazero.checkpoint.index import CheckpointError
from megazero.comm.collectives import agree, all_reduce, gather_objects
from megazero.deepspeed.config import DeepSpeedConfig
from megazero.deepspeed.data import RepeatingLoader
from megazero.deepspeed.engine_optimizer import EngineOptimizer
from megazero.deepspeed.script_checkpoints import ScriptCheckpoints
from megazero.deepspeed.step_report import StepReport
from megazero.engine.step import StepStatistics, check_finite, sum_over_ranks
from megazero.zero.sharded_model import ShardedModel

T = TypeVar("T")
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class TrainingEngine(nn.Module):
    """Base of `ModuleEngine` and `PipelineEngine`.

    Args:
        module: the user's; its parameters are bound to `model`.
        canonical: of a name in the module, the name in a checkpoint.
        show: prints a line; used on rank 0.

    Attributes:
        optimizer: the torch optimizer that steps the flat shards; its groups are the user's.
        lr_scheduler: stepped after every update that was not skipped, or None.
        training_dataloader: made from `training_data`, or None.
        global_steps, global_samples, micro_steps, skipped_steps: counters, restored from checkpoints.
    """

    def __init__(
        self,
        module: nn.Module,
        model: ShardedModel,
        config: DeepSpeedConfig,
        canonical: Callable[[str], str],
        show: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.module, self.config = module, config
        self.sharded_model, self.parallel_state = model, model.state
        self.optimizer = EngineOptimizer(model.optimizer.torch_optimizer)
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._show = show if model.state.rank == 0 else lambda _: None
        self._checkpoints = ScriptCheckpoints(module, model, config, canonical, self._show)
        self._report = StepReport(config, model, self._show)
        self._last_step: StepStatistics | None = None
        self._repeating: RepeatingLoader | None = None

    # --- The end of a step.

    def _finish_step(self, loss_sum: Tensor, losses: int) -> float:
        """Reduce what is left, step, report; the mean loss.

        Args:
            loss_sum: fp64, of this rank's losses; 0 where another stage computes the loss.
            losses: number of losses in the whole step, over all ranks.

        Raises:
            NonFiniteError: on every rank, without loss scaling, before any weight has changed.
            LossScaleError, StorageError: see `ShardedModel.update`.
        """
        model = self.sharded_model
        with self._report.timed("reduce"):
            model.finish_gradients()
            measured = sum_over_ranks(model, model.square_sum(), loss_sum, losses)
        # A script's loss may be infinite while its gradients are finite; only the gradients decide.
        measured = replace(measured, finite=model.scaler is not None or isfinite(measured.grad_norm))
        try:
            self._last_step = check_finite(measured)
            with self._report.timed("step"):
                changed = model.update(measured.grad_norm, self.config.grad_clip)
        except Exception:
            model.begin_step(self.config.accumulation)
            raise
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size
        if not changed:
            self.skipped_steps += 1
            self._show(
                f"step {self.global_steps}: skipped, gradients overflow at loss scale {measured.loss_scale:g}; "
                f"the next has {self.loss_scale:g}"
            )
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
        """Forget the gradients since the last step."""
        self.sharded_model.begin_step(self.config.accumulation)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """In evaluation mode, without gradients."""
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(was_training)

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Micro-batches to train on: the script's, or those of `training_data`, again and again."""
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise ValueError("train_batch needs data_iter, or training_data given to initialize")
        if self._repeating is None:
            self._repeating = RepeatingLoader(self.training_dataloader)
        return self._repeating

    def _on_every_rank(self, read: Callable[[], T]) -> T:
        """The result of `read`; if it fails on one rank, all raise before a step begins, and no rank waits for another.

        Unlike `agree`, it gathers no objects while nothing fails, a rank that failed raises its own error, and the others
        StopIteration where data ended and nothing else failed.
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
        found = [one for one in gather_objects(own, world) if one is not None]
        if failure is not None:
            raise failure
        kind = StopIteration if all(ended for _, ended in found) else ValueError
        raise kind("\n".join(dict.fromkeys(text for text, _ in found)))

    def _mean_over_ranks(self, loss: Tensor) -> Tensor:
        """The mean over dp of a loss that every rank of a replica has."""
        all_reduce(loss, self.parallel_state.dp).wait()
        return loss.float() / self.dp_world_size

    def close(self) -> None:
        """Give back files and writers, once an asynchronous checkpoint is durable.  The engine cannot be used afterwards."""
        self._checkpoints.wait()
        self.sharded_model.close()
        self._report.close()

    # --- Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        asynchronous: bool = False,
    ) -> bool:
        """Write everything to `save_dir/tag`.  Called on every rank with the same arguments.

        Args:
            save_dir: a directory that all ranks share, or a URL such as s3://bucket/run.
            tag: `global_step<n>` when None.
            client_state: the script's own: numbers, strings, tensors and containers of them.  Rank 0's is saved.
            save_latest: let `latest` name it.
            asynchronous: return once the state is copied to host memory; see `finish_saving`.

        Raises:
            CheckpointError: on every rank; older checkpoints are untouched.  Also if the call comes within a step.
        """
        agree(self._check_between_steps, self.parallel_state.world, CheckpointError)
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        counters = {name: getattr(self, name) for name in _COUNTERS}
        self._checkpoints.save(
            save_dir,
            tag,
            counters,
            self.lr_scheduler,
            client_state,
            moves_latest=save_latest,
            asynchronous=asynchronous,
        )
        return True

    def finish_saving(self) -> None:
        """Wait until the last asynchronous checkpoint is durable, as a script's end does.  Raises: CheckpointError."""
        self._checkpoints.finish_saving()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint that any number of ranks, at any stage and precision, has written.

        Args:
            load_dir, tag: as given to `save_checkpoint`; without a tag, the one that `latest` names.
            load_optimizer_states: load the optimizer's state and its groups' settings; otherwise they start anew.
            load_lr_scheduler_states: load the schedule's step.
            load_module_only: load the weights and buffers alone.

        Returns: the checkpoint's directory and the `client_state` that was saved; (None, {}) where there is none yet.

        Raises:
            CheckpointError: on every rank, and nothing has changed: it is damaged, or of another model.
        """
        loaded = self._checkpoints.load(
            load_dir,
            tag,
            self.lr_scheduler,
            with_optimizer=load_optimizer_states and not load_module_only,
            with_schedule=load_lr_scheduler_states and not load_module_only,
            with_loss_scale=not load_module_only,
        )
        if loaded is None:
            return None, {}
        directory, client_state, counters = loaded
        if not load_module_only:
            for name, value in counters.items():
                setattr(self, name, value)
        self.zero_grad()
        return directory, client_state

    def _check_between_steps(self) -> None:
        """Refuse to save where gradients of a step that has begun would be lost.  Raises: CheckpointError."""

    # --- What a script asks.

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.parallel_state.device

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return self.parallel_state.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.parallel_state.world.size

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.parallel_state.dp.size

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; 1 without fp16."""
        scaler = self.sharded_model.scaler
        return 1.0 if scaler is None else scaler.scale

    def get_lr(self) -> list[float]:
        """Learning rate of each optimizer group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each optimizer group."""
        return [group.get("momentum", group.get("betas")) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients over the whole model, before clipping; None before the first step."""
        return None if self._last_step is None else self._last_step.grad_norm

    def train_batch_size(self) -> int:
        """Samples in an optimizer step."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a forward pass."""
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in an optimizer step on each rank."""
        return self.config.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.config.train_batch_size, self.config.micro_batch_size, self.config.accumulation

    def gradient_clipping(self) -> float:
        """Largest global gradient norm; 0 where it is off."""
        return self.config.grad_clip

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.config.zero.stage

    def zero_optimization(self) -> bool:
        """Whether any state is sharded."""
        return self.config.zero.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self.config.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self.config.precision.dtype == "bf16"

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights."""
        return self._last_step is not None and isfinite(self._last_step.grad_norm)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state on this rank, by kind; kinds off the device name where they are."""
        return self.sharded_model.memory_bytes()

    def module_state_dict(self) -> dict[str, Tensor]:
        """Whole weights and buffers by name, on every rank: a collective call under stage 3."""
        return self.module.state_dict()
