"""What the engines of a user's own script have in common: the end of a step, its report, checkpoints.

    gradients of one step in the buckets -> norm over the world -> clip, step (or skip) -> schedule -> counters -> report

The calls and their meanings are DeepSpeed's; see docs/deepspeed.md for what is different.
"""

from __future__ import annotations

import atexit
import io
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from megazero.api.data import RepeatingLoader
from megazero.api.optimizer import EngineOptimizer
from megazero.checkpoint.folder import Folder, folder_at
from megazero.checkpoint.index import LATEST, CheckpointError, TrainerState, is_complete, read_trainer_state
from megazero.checkpoint.load import fills_weights, load_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.checkpoint.saver import Saver, SaveReport
from megazero.comm.collectives import agree, all_reduce, gather_objects
from megazero.config.deepspeed import DeepSpeedConfig
from megazero.engine.gpt import NonFiniteError, versions
from megazero.zero.sharded_model import ShardedModel

T = TypeVar("T")
CLIENT_STATE, SCHEDULE, BUFFERS = "client_state.pt", "lr_scheduler.pt", "buffers.safetensors"
_SAVING_SECONDS = 3600  # how long a rank may wait for a peer that is writing
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class TrainingEngine(nn.Module):
    """Base of `ModuleEngine` and `PipelineEngine`.

    Args:
        module: the model; its parameters are bound to `model` already.
        model: its parameters, gradients and optimizer under ZeRO.
        config: the resolved configuration.
        canonical: of a name in the module, the name in a checkpoint.
        show: takes lines for the terminal, on rank 0.

    Attributes:
        module: the user's.
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
        self._canonical, self._show = canonical, show if model.state.rank == 0 else lambda _: None
        self._grad_norm: float | None = None
        self._reported = time.perf_counter()
        self._repeating: RepeatingLoader | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._saver: Saver | None = None
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
            tag: name of the checkpoint; `global_step<n>` when None.
            client_state: what the script wants back: numbers, strings, tensors and containers of them.  Rank 0's is kept.
            save_latest: let `latest` name it.
            asynchronous: go on once the state is copied to host memory; see `finish_saving`.

        Raises:
            CheckpointError: on every rank; older checkpoints are untouched.  Also where the call comes within a step.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        agree(self._check_between_steps, self.parallel_state.world, CheckpointError)
        self._check_tag(tag)
        optimizer = self.sharded_model.optimizer
        scaler = self.sharded_model.scaler
        grid = self.parallel_state.grid
        script = {
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "groups": [_plain(group) for group in self.optimizer.param_groups],
        }
        trainer = TrainerState(
            step=self.global_steps,
            consumed_samples=self.global_samples,
            consumed_tokens=0,
            optimizer_steps=optimizer.steps_taken,
            data_fingerprint="",
            model={"module": type(self.module).__name__},
            config={"zero_stage": self.config.zero.stage, "dtype": self.config.precision.dtype},
            shape={"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "zero_stage": self.config.zero.stage},
            versions=versions(),
            optimizer_scalars=optimizer.scalars(),
            loss_scaler=None if scaler is None else scaler.state_dict(),
            script=script,
        )
        buffers = self._gather_buffers()
        files = agree(lambda: self._files(buffers, client_state), self.parallel_state.world, CheckpointError)
        folder, state = folder_at(save_dir).child(tag), self.sharded_model.sharded_state
        if asynchronous:
            if self._saver is None:
                self._saver = Saver(
                    state,
                    self.parallel_state,
                    host_memory_bytes=None,
                    timeout_seconds=_SAVING_SECONDS,
                    report=self._tell_saved,
                )
                atexit.register(_finish_at_exit, self._saver)
            self._saver.save(folder, trainer, files, moves_latest=save_latest)
        else:
            self._wait_for_saver()
            save_checkpoint(folder, state, self.parallel_state, trainer, files, moves_latest=save_latest)
        return True

    def finish_saving(self) -> None:
        """Wait until the last asynchronous checkpoint is durable; the end of the script waits for it, too.

        Raises:
            CheckpointError: on every rank, it could not be written.
        """
        if self._saver is not None:
            self._saver.finish()

    def _wait_for_saver(self) -> None:
        """Let the last asynchronous checkpoint end; where it failed, that has been told."""
        with suppress(CheckpointError):
            self.finish_saving()

    def _tell_saved(self, report: SaveReport) -> None:
        if report.error is not None:
            self._show(report.error)

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
            load_dir: as given to `save_checkpoint`.
            tag: which one; the one that `latest` names when None.
            load_optimizer_states: take the optimizer's state and its groups' settings; otherwise they start anew.
            load_lr_scheduler_states: take the schedule's position.
            load_module_only: take the weights and buffers alone.

        Returns: the checkpoint's directory and the `client_state` that was saved; (None, {}) where there is none yet.

        Raises:
            CheckpointError: on every rank, and nothing has changed: it is damaged, or of another model.
        """
        self._wait_for_saver()
        name = agree(
            lambda: _newest_tag(folder_at(load_dir)) if tag is None else str(tag),
            self.parallel_state.world,
            CheckpointError,
        )
        if name is None:
            self._show(f"{load_dir} holds no checkpoint: it has no file {LATEST!r}; starting anew")
            return None, {}
        directory = folder_at(load_dir).child(name)
        takes_optimizer = load_optimizer_states and not load_module_only
        read = agree(lambda: self._read_script(directory), self.parallel_state.world, CheckpointError)
        trainer, client_state, schedule, buffers = read
        model = self.sharded_model
        groups = trainer.script["groups"] if takes_optimizer else None
        if not load_lr_scheduler_states or load_module_only:
            schedule = None
        elif schedule is None and self.lr_scheduler is not None:
            self._show("note: the checkpoint has no schedule; this run's starts anew")
        elif schedule is not None and self.lr_scheduler is None:
            self._show("note: the checkpoint's schedule is left out; this run has none")
        agree(lambda: self._check_fits(groups, schedule, buffers), self.parallel_state.world, CheckpointError)
        load_checkpoint(directory, model.sharded_state, self.parallel_state, with_optimizer=takes_optimizer)
        gathers = not fills_weights(directory, self.parallel_state)
        model.loaded(None if load_module_only else trainer.loss_scaler, gathers=gathers)
        self._take_buffers(buffers)
        if not load_module_only:
            for counter, value in trainer.script["counters"].items():
                setattr(self, counter, value)
        if takes_optimizer:
            self._take_groups(trainer.script["groups"])
        if schedule is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(schedule)
        self._forget_micro_batches()
        return str(directory), client_state

    def _forget_micro_batches(self) -> None:
        """Begin a whole step."""

    def _check_between_steps(self) -> None:
        """Refuse to save where gradients of a step that has begun would be lost.  Raises: CheckpointError."""

    def _check_tag(self, tag: str) -> None:
        tags = gather_objects(tag, self.parallel_state.world)
        if tag in ("", ".", "..", LATEST) or Path(tag).name != tag:
            raise CheckpointError(f"tag={tag!r} must be the name of one directory, not a path; it is made in save_dir")
        if len(set(tags)) > 1:
            raise CheckpointError(f"every rank must save under one tag; there are {', '.join(sorted(set(tags)))}")

    def _files(self, buffers: dict[str, Tensor], client_state: Mapping[str, Any] | None) -> dict[str, bytes]:
        """What a checkpoint holds beside the sharded state; rank 0 writes it."""
        if self.parallel_state.rank != 0:
            return {}
        files = {BUFFERS: save(buffers)} if buffers else {}
        if self.lr_scheduler is not None:
            files[SCHEDULE] = _to_bytes(self.lr_scheduler.state_dict(), "the schedule's state_dict()")
        return files | {CLIENT_STATE: _to_bytes(dict(client_state or {}), "client_state")}

    def _check_fits(
        self, groups: Sequence[Any] | None, schedule: Mapping[str, Any] | None, buffers: Mapping[str, Tensor]
    ) -> None:
        """Refuse what could not be taken over whole, before anything has changed."""
        have = len(self.optimizer.param_groups)
        if groups is not None and len(groups) != have:
            raise CheckpointError(f"the checkpoint has {len(groups)} optimizer groups, this optimizer has {have}")
        if schedule is not None and self.lr_scheduler is not None:
            differ = sorted(map(str, schedule.keys() ^ self.lr_scheduler.state_dict().keys()))
            if differ:
                raise CheckpointError(
                    f"the checkpoint's schedule is of another kind than this run's {type(self.lr_scheduler).__name__}: only "
                    f"one of them has {', '.join(differ)}. Give the same schedule, or load_lr_scheduler_states=False"
                )
        for name, buffer in self._named_buffers():
            saved = buffers.get(self._canonical(name))
            if saved is None or saved.shape != buffer.shape:
                found = "none" if saved is None else f"one of shape {list(saved.shape)}"
                raise CheckpointError(
                    f"buffer {self._canonical(name)} has shape {list(buffer.shape)}, the checkpoint has {found}: it is of "
                    "another model"
                )

    def _read_script(
        self, directory: Folder
    ) -> tuple[TrainerState, dict[str, Any], dict[str, Any] | None, dict[str, Tensor]]:
        if not is_complete(directory):
            raise CheckpointError(f"{directory} is not a complete checkpoint")
        trainer = read_trainer_state(directory)
        if not trainer.script:
            raise CheckpointError(f"{directory} was written by `megazero train`, not by an engine of a script")
        client: dict[str, Any] = _from_bytes(directory.read(CLIENT_STATE))
        buffers = load(directory.read(BUFFERS)) if directory.has(BUFFERS) else {}
        schedule = _from_bytes(directory.read(SCHEDULE)) if directory.has(SCHEDULE) else None
        return trainer, client, schedule, buffers

    def _take_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        for group, settings in zip(self.optimizer.param_groups, saved, strict=True):
            for key, value in settings.items():
                # how a step is computed belongs to this machine, not to the run
                if key in group and key not in ("fused", "foreach", "capturable"):
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value

    def _named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        persistent = self.module.state_dict(keep_vars=True).keys() if self._has_buffers() else ()
        return [(name, buffer) for name, buffer in self.module.named_buffers() if name in persistent]

    def _has_buffers(self) -> bool:
        return next(self.module.buffers(), None) is not None

    def _gather_buffers(self) -> dict[str, Tensor]:
        """The buffers of all stages, as their first rank has them, on every rank."""
        at = self.parallel_state.at
        mine = {}
        if at.tp == at.dp == at.cp == 0:
            mine = {self._canonical(name): buffer.detach().cpu().contiguous() for name, buffer in self._named_buffers()}
        return {
            name: buffer for part in gather_objects(mine, self.parallel_state.world) for name, buffer in part.items()
        }

    def _take_buffers(self, saved: Mapping[str, Tensor]) -> None:
        for name, buffer in self._named_buffers():
            buffer.copy_(saved[self._canonical(name)])


def _finish_at_exit(saver: Saver) -> None:
    """Before the process groups go; after a failure nothing is waited for, since peers may be gone."""
    if not hasattr(sys, "last_value"):
        saver.finish()


def _newest_tag(directory: Folder) -> str | None:
    return directory.read(LATEST).decode().strip() if directory.has(LATEST) else None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group or a schedule that can be written down: numbers, strings, lists of them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item()
        if isinstance(value, tuple | list):
            return [plain(one) for one in value]
        if isinstance(value, Mapping):
            return {str(key): plain(one) for key, one in value.items()}
        return value

    return {
        key: plain(value)
        for key, value in values.items()
        if key != "params" and isinstance(plain(value), int | float | str | list | dict | None)
    }


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _to_bytes(values: dict[str, Any], what: str) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(values, file)
        data = file.getvalue()
        _from_bytes(data)
    except Exception as error:
        raise CheckpointError(
            f"{what} holds something that cannot be read back safely ({str(error).splitlines()[0]}); "
            "give numbers, strings, tensors, and lists and dicts of them"
        ) from error
    return data
