"""What the engines of a user's own script have in common: the end of a step, its report, what a script may ask.

    gradients of one step in the buckets -> norm over the world -> clip, step (or skip) -> schedule -> counters -> report

The calls and their meanings are DeepSpeed's; see docs/deepspeed.md for what is different.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from megazero.comm.collectives import all_reduce, gather_objects
from megazero.deepspeed.config import DeepSpeedConfig
from megazero.deepspeed.data import RepeatingLoader
from megazero.deepspeed.saved_engine import SavedEngine
from megazero.engine.gpt import NonFiniteError
from megazero.zero.sharded_model import ShardedModel

T = TypeVar("T")


class TrainingEngine(SavedEngine):
    """Base of `ModuleEngine` and `PipelineEngine`; arguments as `SavedEngine`.

    Attributes:
        training_dataloader: made from `training_data`, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        model: ShardedModel,
        config: DeepSpeedConfig,
        canonical: Callable[[str], str],
        show: Callable[[str], None],
    ) -> None:
        super().__init__(module, model, config, canonical, show)
        self.training_dataloader: Any = None
        self._grad_norm: float | None = None
        self._reported = time.perf_counter()
        self._repeating: RepeatingLoader | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: Any = None
        if config.tensorboard is not None and model.state.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(config.tensorboard.output_path or ".") / config.tensorboard.job_name
            self._events = SummaryWriter(str(folder))

    # --- The end of a step.

    def _finish_step(self, loss_sum: Tensor, losses: int) -> float:
        """Reduce what is left, step, report.

        Args:
            loss_sum: fp64, of this rank's losses; 0 where the loss is computed elsewhere.
            losses: number of losses in the whole step, over all ranks.

        Returns: the mean loss.

        Raises:
            NonFiniteError: on every rank, without loss scaling, before any weight has changed.
            LossScaleError, StorageError: see `ShardedModel.update`.
        """
        model = self.sharded_model
        with self._timed("reduce"):
            model.finish_gradients()
            share = torch.stack([model.square_sum(), loss_sum])
            all_reduce(share, self.parallel_state.world).wait()
            squared, total = share.tolist()
        norm, loss = model.norm_of(squared), total / losses
        scale = model.scale
        if model.scaler is None and not abs(norm) < float("inf"):
            model.begin_step(self.config.accumulation)
            raise NonFiniteError(
                f"grad_norm={norm} must be finite (loss={loss}); the weights were not changed. "
                "Resume from the last checkpoint with a lower learning rate or other data"
            )
        self._grad_norm = norm
        with self._timed("step"):
            try:
                changed = model.update(norm, self.config.grad_clip)
            except Exception:
                model.begin_step(self.config.accumulation)
                raise
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size
        if changed:
            self.optimizer.note_step()
            if self.lr_scheduler is not None:
                self._step_schedule(loss)
        else:
            self.skipped_steps += 1
            self._show(
                f"step {self.global_steps}: skipped, gradients overflow at loss scale {scale:g}; "
                f"the next has {self.loss_scale:g}"
            )
        model.begin_step(self.config.accumulation)
        self._report(loss)
        return loss

    def _step_schedule(self, loss: float) -> None:
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step(loss)
        else:
            self.lr_scheduler.step()

    def _report(self, loss: float) -> None:
        every = self.config.steps_per_print or (1 if self.config.wall_clock_breakdown else None)
        if every is not None and self.global_steps % every == 0:
            rates = ", ".join(f"{lr:.4g}" for lr in self.get_lr())
            parts = [f"step {self.global_steps}", f"loss {loss:.4f}", f"lr {rates}"]
            if self._grad_norm is not None:
                parts.append(f"grad norm {self._grad_norm:.3g}")
            seconds, self._reported = time.perf_counter() - self._reported, time.perf_counter()
            parts.append(f"{every * self.config.train_batch_size / seconds:,.1f} samples/s")
            if self.sharded_model.scaler is not None:
                parts.append(f"loss scale {self.loss_scale:g}, {self.skipped_steps} skipped")
            if self.config.wall_clock_breakdown:
                parts += [f"{name} {1e3 * seconds / every:.1f} ms" for name, seconds in self._seconds.items()]
                self._seconds.clear()
            self._show(", ".join(parts))
        if self._events is not None:
            values = {"Train/Samples/train_loss": loss, "Train/Samples/lr": self.get_lr()[0]}
            if self.sharded_model.scaler is not None:
                values["Train/Samples/loss_scale"] = self.loss_scale
            values |= {f"sent_bytes/{axis}": sent for axis, sent in self.parallel_state.traffic.by_axis().items()}
            for name, value in values.items():
                self._events.add_scalar(name, value, self.global_samples)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Count the time of a phase, where the configuration asks for a breakdown."""
        if not self.config.wall_clock_breakdown:
            yield
            return
        self._synchronize()
        started = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[name] += time.perf_counter() - started

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

    def _on_every_rank(self, take: Callable[[], T]) -> T:
        """What `take` gives; where it fails on one rank, all raise before a step begins, and none waits for another.

        Raises:
            StopIteration: on ranks that have not failed themselves, data ended elsewhere and nothing else is wrong.
            ValueError: there, with the texts of the failures.
        """
        failure: Exception | None = None
        taken: list[T] = []
        try:
            taken.append(take())
        except Exception as error:
            failure = error
        world = self.parallel_state.world
        failed = torch.tensor(float(failure is not None), device=self.device)
        all_reduce(failed, world, "max").wait()
        if not failed:
            return taken[0]
        mine = None if failure is None else (str(failure) or repr(failure), isinstance(failure, StopIteration))
        found = [one for one in gather_objects(mine, world) if one is not None]
        if failure is not None:
            raise failure
        kind = StopIteration if all(ended for _, ended in found) else ValueError
        raise kind("\n".join(dict.fromkeys(text for text, _ in found)))

    def _mean_over_ranks(self, loss: Tensor) -> Tensor:
        """The mean over dp of a loss that every rank of a replica has."""
        all_reduce(loss, self.parallel_state.dp).wait()
        return loss.float() / self.dp_world_size

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give back files and writers.  The engine cannot be used afterwards.

        An asynchronous checkpoint becomes durable first; where it failed, that has been told.
        """
        self._wait_for_saver()
        self.sharded_model.close()
        if self._events is not None:
            self._events.close()

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
        return self._grad_norm

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
        return self._grad_norm is not None and abs(self._grad_norm) < float("inf")

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state on this rank, by kind and, off the device, place."""
        return self.sharded_model.memory_bytes()

    def module_state_dict(self) -> dict[str, Tensor]:
        """Whole weights and buffers by name, on every rank: a collective call under stage 3."""
        return self.module.state_dict()
