"""What an engine of a user's own script holds, and how it is saved and brought back.

    save_dir/tag/   weights, masters and optimizer state as `megazero train` writes them, and beside them
                    client_state.pt, lr_scheduler.pt, buffers.safetensors

The calls and their meanings are DeepSpeed's; see docs/deepspeed.md for what is different.
"""

from __future__ import annotations

import atexit
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from megazero.checkpoint.folder import Folder, folder_at
from megazero.checkpoint.index import (
    LATEST,
    CheckpointError,
    TrainerState,
    is_complete,
    read_trainer_state,
    versions,
)
from megazero.checkpoint.load import fills_weights, load_checkpoint
from megazero.checkpoint.save import save_checkpoint
from megazero.checkpoint.saver import Saver, SaveReport
from megazero.comm.collectives import agree, gather_objects
from megazero.deepspeed.config import DeepSpeedConfig
from megazero.deepspeed.engine_optimizer import EngineOptimizer
from megazero.zero.sharded_model import ShardedModel

CLIENT_STATE, SCHEDULE, BUFFERS = "client_state.pt", "lr_scheduler.pt", "buffers.safetensors"
_SAVING_SECONDS = 3600  # how long a rank may wait for a peer that is writing
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class SavedEngine(nn.Module):
    """The part of `TrainingEngine` that checkpoints hold.

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
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._canonical, self._show = canonical, show if model.state.rank == 0 else lambda _: None
        self._saver: Saver | None = None

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
