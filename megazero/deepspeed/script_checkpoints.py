"""Checkpoints of a script's own module, under DeepSpeed's calls; see docs/deepspeed.md for what is different.

save_dir/tag/   weights, masters and optimizer state as `megazero train` writes them, and beside them
                client_state.pt, lr_scheduler.pt, buffers.safetensors
"""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from megazero.checkpoint import index
from megazero.checkpoint.folder import Folder, folder_at
from megazero.checkpoint.index import CheckpointError, TrainerState
from megazero.checkpoint.load import open_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.checkpoint.saver import Saver, snapshot_of
from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_objects
from megazero.deepspeed.config import DeepSpeedConfig
from megazero.deepspeed.script_units import BoundParameters, ScriptModel
from megazero.engine.phases import Position, trainer_state
from megazero.terminal import drain, warn

CLIENT_STATE, SCHEDULE, BUFFERS = "client_state.pt", "lr_scheduler.pt", "buffers.safetensors"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SAVING_SECONDS = 3600  # how long a rank may wait for a peer that is writing


def refuses(text: str) -> Any:
    """Return a method that raises RuntimeError with this text."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(text)

    return refuse


class EngineOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as scripts see it, for schedules and for reading; it shares groups and state with `inner`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.__dict__.update({key: vars(inner)[key] for key in vars(inner).keys() - {"step", "profile_hook_step"}})

    step = refuses("call engine.step(): it reduces, unscales and clips the gradients before the optimizer steps")
    load_state_dict = refuses("the state is cut over ranks; engine.load_checkpoint(dir) reads it, on any number")
    add_param_group = refuses("the parameters are in buckets already; give every group to megazero.initialize")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """No-op: the engine clears gradients at the end of a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards, like DeepSpeed's ZeRO optimizers.  Read it, but do not load it."""
        warn("optimizer.state_dict() is this rank's shard, to look at; engine.save_checkpoint(dir) writes all of it")
        return self.inner.state_dict()

    def count_step(self) -> None:
        """Count a step of the engine; torch's schedules check this."""
        self._opt_called = True

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.inner!r})"


class CheckpointedEngine(nn.Module):
    """Base of `TrainingEngine`: holds the model, the optimizer and the counters, saves and loads them."""

    def __init__(
        self, module: nn.Module, model: ScriptModel, config: DeepSpeedConfig, show: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.module, self.config = module, config
        self.sharded_model, self.parallel_state = model, (state := model.state)
        self.device, self.global_rank, self.world_size = state.device, state.rank, state.world.size
        self.dp_world_size, self.mp_world_size = state.dp.size, state.tp.size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # without a launcher there is one
        self.bound, self.has_optimizer = BoundParameters(module, model), True
        self.optimizer = EngineOptimizer(model.optimizer.torch_optimizer)
        self._names: Mapping[str, str] = {}  # in a checkpoint, by name in the module, where they differ
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._show = show if state.rank == 0 else lambda _: None
        self._saver: Saver | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Set the attributes of a subclass at the end of the constructor."""

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool = False,
    ) -> bool:
        """Write weights, optimizer, schedule, counters and buffers to `save_dir/tag`.  Every rank must call this.

        Args:
            save_dir: a directory that all ranks share, or a URL such as s3://bucket/run.
            tag: name of the checkpoint; None for `global_step<n>`.
            client_state: the script's own state: numbers, strings, tensors and containers of them.  Rank 0's is saved.
            save_latest: write the tag to the file `latest`.
            exclude_frozen_parameters: no effect; a checkpoint contains every weight.
            asynchronous: return as soon as host memory has a copy of the state; see `finish_saving`.

        Raises:
            CheckpointError: on every rank: saving failed (older checkpoints are untouched), the call is within a step, or
                the module no longer computes with the weights that are trained.
        """
        if exclude_frozen_parameters:
            self._show("note: exclude_frozen_parameters has no effect: a checkpoint holds every weight")
        if not save_dir:
            raise ValueError(f"save_checkpoint needs a directory, not {save_dir!r}")
        state, source = self.parallel_state, self.sharded_model.sharded_state
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        agree(lambda: self._check_savable(tag), state.world, CheckpointError)
        tags = sorted(set(gather_objects(tag, state.world)))
        if len(tags) > 1:
            raise CheckpointError(f"every rank must save under one tag; there are {', '.join(tags)}")
        trainer, buffers = self._trainer_state(), self._gather_buffers()
        files = agree(lambda: self._files(buffers, client_state), state.world, CheckpointError)
        folder = folder_at(save_dir).child(tag)
        if not asynchronous:
            self._wait_for_saver()
            save_checkpoint(folder, source, state, trainer, files, moves_latest=save_latest)
            return True
        if self._saver is None:
            self._saver = Saver(
                snapshot_of(source, state, None),
                state.saving_axes(_SAVING_SECONDS),
                report=lambda report: None if report.error is None else self._show(report.error),
            )
            atexit.register(_finish_at_exit, self._saver)
        self._saver.save(folder, trainer, files, moves_latest=save_latest)
        return True

    def _trainer_state(self) -> TrainerState:
        """Return the trainer state of every checkpoint, with the engine's counters and the settings of optimizer groups."""
        return trainer_state(
            self.sharded_model,
            Position(self.global_steps, self.global_samples),
            data_fingerprint="",
            model={"module": type(self.module).__name__},
            config={"zero_stage": self.config.zero.stage, "dtype": self.config.precision.dtype},
            script={
                "counters": {name: getattr(self, name) for name in _COUNTERS},
                "groups": [_plain_settings(group) for group in self.optimizer.param_groups],
            },
        )

    def _files(self, buffers: dict[str, Tensor], client_state: Mapping[str, Any] | None) -> dict[str, bytes]:
        """Return the files that rank 0 writes beside the sharded state.  Raises: CheckpointError."""
        if self.global_rank != 0:
            return {}
        files = {BUFFERS: save(buffers)} if buffers else {}
        if self.lr_scheduler is not None:
            files[SCHEDULE] = _to_bytes(self.lr_scheduler.state_dict(), "the schedule's state_dict()")
        return files | {CLIENT_STATE: _to_bytes(dict(client_state or {}), "client_state")}

    def finish_saving(self) -> None:
        """Block until the last asynchronous checkpoint is durable, as the end of a script does.  Raises: CheckpointError."""
        if self._saver is not None:
            self._saver.finish()

    def _wait_for_saver(self) -> None:
        """Wait for the last asynchronous checkpoint; a failure of it has been reported already."""
        with suppress(CheckpointError):
            self.finish_saving()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,  # noqa: ARG002  as DeepSpeed has it
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint that was written on any number of ranks, at any stage and precision.

        Args:
            load_dir, tag: the arguments of `save_checkpoint`; a tag of None is read from the file `latest`.
            load_module_strict: no effect; a checkpoint contains the module's weights and no others.
            custom_load_fn: must be None.
            load_optimizer_states: load the optimizer's state and its groups' settings; otherwise, they start anew.
            load_lr_scheduler_states: load the schedule's step.
            load_module_only: load the weights and buffers alone.

        Returns: the checkpoint's directory and the saved `client_state`; (None, {}) if there is no checkpoint yet.

        Raises:
            CheckpointError: on every rank: the checkpoint is damaged or of another model, and nothing has changed; or the
                storage fails while weights are read.  In the latter case, a forward or a save raises HalfSteppedError until
                a checkpoint is loaded.
            ValueError: an argument is not supported.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is not supported; load a checkpoint's safetensors before initialize")
        world, model = self.parallel_state.world, self.sharded_model
        with_optimizer = load_optimizer_states and not load_module_only and self.has_optimizer
        self._wait_for_saver()
        name = agree(lambda: _newest_tag(load_dir) if tag is None else str(tag), world, CheckpointError)
        if name is None:
            self._show(f"{load_dir} holds no checkpoint: it has no file {index.LATEST!r}; starting anew")
            return None, {}
        directory = folder_at(load_dir).child(name)
        saved = agree(lambda: _read(directory), world, CheckpointError)
        schedule_state = self._schedule_state(saved) if load_lr_scheduler_states and not load_module_only else None
        groups = saved.trainer.script["groups"] if with_optimizer else None
        agree(lambda: self._check_loadable(saved, groups, schedule_state), world, CheckpointError)
        found = open_checkpoint(directory, model.sharded_state, self.parallel_state, with_optimizer=with_optimizer)
        model.load(found.read, None if load_module_only else saved.trainer.loss_scaler)
        for path, buffer in self._named_buffers():
            buffer.copy_(saved.buffers[self._canonical(path)])
        for group, settings in zip(self.optimizer.param_groups, groups or [], strict=False):
            for key, value in settings.items():
                # how a step is computed belongs to this machine, not to the run
                if key in group and key not in ("fused", "foreach", "capturable"):
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value
        if schedule_state is not None:
            self.lr_scheduler.load_state_dict(schedule_state)
        if not load_module_only:
            vars(self).update(saved.trainer.script["counters"])
        self.zero_grad()
        return str(directory), saved.client

    def _schedule_state(self, saved: _Record) -> dict[str, Any] | None:
        """Return the schedule's state, if the checkpoint and this run have one; a note where only one of them has."""
        if self.lr_scheduler is None and saved.schedule is not None:
            self._show("note: the checkpoint's schedule is left out; this run has none")
        elif self.lr_scheduler is not None and saved.schedule is None:
            self._show("note: the checkpoint has no schedule; this run's starts anew")
        return None if self.lr_scheduler is None else saved.schedule

    def _canonical(self, name: str) -> str:
        """Return the name in a checkpoint of a tensor of the module."""
        return self._names.get(name, name)

    def _begun(self) -> str:
        """Describe how much of the current step has run; empty between steps."""
        return ""

    def _check_savable(self, tag: str) -> None:
        """Refuse to save where something would be lost, or overwritten.  Raises: CheckpointError, RuntimeError."""
        if begun := self._begun():
            raise CheckpointError(f"{begun}, whose gradients a checkpoint does not hold; save after the step has ended")
        for path, module in self.module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise CheckpointError(f"module {path or type(module).__name__} has a get_extra_state(): use a buffer")
        self.bound.check()
        if tag in ("", ".", "..", index.LATEST) or Path(tag).name != tag:
            raise CheckpointError(f"tag={tag!r} must be the name of one directory, not a path; it is made in save_dir")

    def _check_loadable(self, saved: _Record, groups: Sequence[Any] | None, schedule: Mapping[str, Any] | None) -> None:
        buffers, own = saved.buffers, len(self.optimizer.param_groups)
        if groups is not None and len(groups) != own:
            raise CheckpointError(f"the checkpoint has {len(groups)} optimizer groups, this optimizer has {own}")
        for path, buffer in self._named_buffers():
            name = self._canonical(path)
            found = f"one of shape {list(buffers[name].shape)}" if name in buffers else "none"
            if name not in buffers or buffers[name].shape != buffer.shape:
                raise CheckpointError(f"buffer {name} has shape {list(buffer.shape)}, the checkpoint has {found}")

        if schedule is None:
            return
        differ = sorted(map(str, schedule.keys() ^ self.lr_scheduler.state_dict().keys()))
        if differ:
            found = f"and this run's {type(self.lr_scheduler).__name__}: only one of them has {', '.join(differ)}"
            raise CheckpointError(f"the checkpoint's schedule differs from {found}; or load_lr_scheduler_states=False")

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the persistent buffers."""
        every = self.module.named_modules()
        left_out = {f"{path}.{key}".lstrip(".") for path, module in every for key in module._non_persistent_buffers_set}
        return [(name, buffer) for name, buffer in self.module.named_buffers() if name not in left_out]

    def _gather_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of all stages, as the first rank of each stage has them, on every rank."""
        at = self.parallel_state.at
        own = {}
        if at.tp == at.dp == at.cp == 0:
            # copies: safetensors writes no tensors that overlap
            own = {
                self._canonical(path): buffer.detach().cpu().clone(memory_format=torch.contiguous_format)
                for path, buffer in self._named_buffers()
            }
        of_all = gather_objects(own, self.parallel_state.world)
        return {name: buffer for of_rank in of_all for name, buffer in of_rank.items()}


def _finish_at_exit(saver: Saver) -> None:
    """Wait for a checkpoint before the process groups end; not after a failure, since peers may have died.

    A script whose last checkpoint failed has failed: an error alone would not change the exit status any more.
    """
    if hasattr(sys, "last_value"):
        return
    try:
        saver.finish()
    except Exception as error:
        warn(f"the last checkpoint was not saved: {error}")
        drain()
        os._exit(1)


def _newest_tag(load_dir: str | Path) -> str | None:
    folder = folder_at(load_dir)
    return folder.read(index.LATEST).decode().strip() if folder.has(index.LATEST) else None


@dataclass(frozen=True)
class _Record:
    """The contents of a checkpoint beside the sharded state."""

    trainer: TrainerState
    client: dict[str, Any]
    schedule: dict[str, Any] | None
    buffers: dict[str, Tensor]


def _read(directory: Folder) -> _Record:
    """Read the contents of a checkpoint beside the sharded state.  Raises: CheckpointError."""
    if not index.is_complete(directory):
        if any(name.endswith("_model_states.pt") for name in directory.files()):
            raise CheckpointError(f"{directory} is a checkpoint of DeepSpeed: docs/deepspeed.md says how it comes in")
        raise CheckpointError(f"{directory} is not a complete checkpoint")
    trainer = index.read_trainer_state(directory)
    if not trainer.script:
        raise CheckpointError(f"{directory} was written by `megazero train`, not by an engine of a script")
    listed = index.read_manifest(directory)
    records = {name: listed[name] for name in (CLIENT_STATE, SCHEDULE, BUFFERS) if name in listed}
    if damage := index.find_damage(directory, records):
        raise index.DamagedError("; ".join(damage))
    files = {name: directory.read(name) for name in records}
    return _Record(
        trainer,
        _from_bytes(files[CLIENT_STATE]) if CLIENT_STATE in files else {},
        _from_bytes(files[SCHEDULE]) if SCHEDULE in files else None,
        load(files[BUFFERS]) if BUFFERS in files else {},
    )


def _plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that JSON can hold: numbers, strings, lists and dicts of them."""
    found = {}
    for key, value in values.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if key != "params" and isinstance(plain, int | float | str | list | tuple | dict | None):
            found[key] = plain
    return found


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _to_bytes(values: dict[str, Any], what: str) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(values, file)
        _from_bytes(file.getvalue())
    except Exception as error:
        raise CheckpointError(f"{what} must hold numbers, strings, tensors, lists and dicts: {error}") from error
    return file.getvalue()
