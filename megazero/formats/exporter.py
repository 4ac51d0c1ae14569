"""Exports a checkpoint to torch.distributed.checkpoint: model and AdamW's state, under the names of torchtitan.

    step-00000300/                   out/
      master or model         ->       tok_embeddings.weight, ...             fp32 masters where there are any
      exp_avg, exp_avg_sq     ->       optimizer.state.NAME.exp_avg, .exp_avg_sq, .step
      trainer_state.json      ->       optimizer.param_groups.NAME.lr, ...; train_state.step; lr_scheduler.last_epoch

torch's own writer is used.  Each tensor is read when it is written, and released before the next.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from megazero.checkpoint.folder import Folder, Location
from megazero.checkpoint.hugging_face.config import logical_shapes
from megazero.checkpoint.hugging_face.exporter import Exported, intact_model
from megazero.checkpoint.index import CheckpointError, TrainerState, read_manifest, state_kinds_of
from megazero.checkpoint.load import reading
from megazero.checkpoint.shards import new_folder
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.formats.foreign import ADAM
from megazero.formats.tables import NameTable, Theirs, tables_of
from megazero.models.config import ModelConfig
from megazero.optim.config import OptimizerConfig
from megazero.settings import toml_value
from megazero.zero.sharding import DTYPE_NAMES, DTYPES
from megazero.zero.state import AVERAGE, MASTER, MODEL

_WRITTEN = re.compile(r"__\d+_\d+\.distcp|\.metadata(?:\.tmp)?")  # what torch's writer names so


class _Planner(DefaultSavePlanner):
    """torch's save plan for a state of meta tensors.  Each tensor is read only when it is written."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]], on_bytes: Callable[[int, int], None]) -> None:
        super().__init__()
        self.reads, self.on_bytes = reads, on_bytes

    def lookup_object(self, index: MetadataIndex) -> Any:
        if (read := self.reads.get(index.fqn)) is None:
            return super().lookup_object(index)
        tensor = read()
        self.on_bytes(0, tensor.nbytes)
        return tensor


def export_dcp(path: Location, out: Location, *, dtype: str | None = None, names: str | None = None) -> Exported:
    """Write a checkpoint in the format that torch.distributed.checkpoint.load reads.

    Args:
        path: a step directory.
        out: a local directory, new or empty.
        dtype: dtype of the written weights: "fp32", "bf16" or "fp16"; None for that of the masters.
        names: name of the table of names; None for the family's first table.

    Raises:
        CheckpointError: the checkpoint is damaged or not of a supported model, or files cannot be read or written; nothing
            is left in `out`.
        ValueError: there is no table `names`.
    """
    if "://" in str(out):
        raise ValueError(f"{out} is a URL; torch.distributed.checkpoint is written to a directory")
    with reading(path) as folder:
        trainer, model = intact_model(folder)
        table = _table(model.family, names)
        state, reads, elements = _state(folder, trainer, model, table, DTYPES[dtype] if dtype else None)
        with new_folder(out) as target, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group, which is meant
            target.on_bytes(elements, 0)
            try:
                writer = FileSystemWriter(str(out), overwrite=False)
                save(state, storage_writer=writer, planner=_Planner(reads, target.on_bytes), no_dist=True)
            except BaseException as error:
                target.remove(*filter(_WRITTEN.fullmatch, target.files()))
                if not isinstance(error, CheckpointException):
                    raise
                failed = next(iter(error.failures.values()))[0]
                if not isinstance(failed, Exception):  # such as Ctrl-C
                    raise failed from error
                raise CheckpointError(f"{out} could not be written ({failed}); nothing was left there") from error
    dtype_written = next(tensor.dtype for name, tensor in state.items() if isinstance(tensor, Tensor))
    moments = "with AdamW's moments" if len(reads) > len(logical_shapes(model)) + 1 else "without moments"
    about = f"names of {table.name}, {moments}{_not_shown(model, table)}"
    return Exported(DTYPE_NAMES[dtype_written], 1, elements, about)


def _not_shown(model: ModelConfig, table: NameTable) -> str:
    """Name the settings of the model that no tensor shows and that the reader's own models do not have."""
    own = {"sliding_window": None, "rope_scaling": None} | dict(table.own)
    other = {key: getattr(model, key) for key, value in own.items() if getattr(model, key) != value}
    shown = ", ".join(f"model.{key} = {toml_value(value) if value else table.unscaled}" for key, value in other.items())
    return f"; the file does not carry {shown}: set it there" if other else ""


def _table(family: str, name: str | None) -> NameTable:
    tables = {table.name: table for table in tables_of(family) if not table.dropped}
    writable = [name for name, table in tables.items() if all(place.give for place in table.tensors.values())]
    if (name or writable[0]) not in writable:
        raise ValueError(f"--names {name} must be one of {', '.join(writable)}, which {family} has")
    return tables[name or writable[0]]


def _state(
    folder: Folder, trainer: TrainerState, model: ModelConfig, table: NameTable, dtype: torch.dtype | None
) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor]], int]:
    """Return the state to save, with meta tensors; a reader for each, by flat name; and the bytes of all tensors."""
    state_kinds = state_kinds_of(read_manifest(folder))
    weights = StoredTensors(folder, MASTER if MASTER in state_kinds else MODEL)
    moments = {state_kind: StoredTensors(folder, state_kind) for state_kind in ADAM if state_kind in state_kinds}
    if other := [state_kind for state_kind in state_kinds if state_kind not in (MODEL, MASTER, AVERAGE, *ADAM)]:
        raise CheckpointError(f"{folder} holds {', '.join(other)}: only AdamW's state is written for others")
    state: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    reads: dict[str, Callable[[], Tensor]] = {}

    def deferred(stored: StoredTensors, ours: str, theirs: Theirs, wanted: torch.dtype | None) -> tuple[Tensor, Any]:
        like = torch.empty(stored[ours].shape, dtype=wanted or stored[ours].dtype, device="meta")
        return like, partial(_given, stored, ours, theirs, model, like.dtype)

    for ours, shape in logical_shapes(model).items():
        theirs = table.theirs(ours)
        state[theirs.name], reads[theirs.name] = deferred(weights, ours, theirs, dtype)
        if ours == table.embedding and model.tie_embeddings:  # modules list a tied weight twice
            state[table.head], reads[table.head] = deferred(weights, ours, theirs, dtype)
        if not moments:
            continue
        for state_kind, stored in moments.items():
            name = f"state.{theirs.name}.{state_kind}"
            optimizer[name], reads[f"optimizer.{name}"] = deferred(stored, ours, theirs, torch.float32)
        optimizer[f"state.{theirs.name}.step"] = torch.tensor(float(trainer.optimizer_steps))
        settings = _settings(trainer, decays=len(shape) > 1)
        optimizer |= {f"param_groups.{theirs.name}.{key}": value for key, value in settings.items()}
    size = sum(x.nbytes for x in (*state.values(), *optimizer.values()) if isinstance(x, Tensor) and x.is_meta)
    if moments:
        state["optimizer"] = optimizer
    state["lr_scheduler"] = {"last_epoch": trainer.optimizer_steps}
    state["train_state"] = {"step": trainer.step, "ntokens_seen": trainer.consumed_tokens}
    return state, reads, size


def _given(stored: StoredTensors, ours: str, theirs: Theirs, model: ModelConfig, dtype: torch.dtype) -> Tensor:
    assert theirs.give is not None  # `_table` has looked
    return theirs.give(stored[ours].whole(), model).to(dtype).contiguous()


def _settings(trainer: TrainerState, *, decays: bool) -> dict[str, Any]:
    """Return a group of torch's AdamW with the settings of the run.  `initial_lr`: the peak of its schedule."""
    given = OptimizerConfig.model_validate(trainer.config.get("optimizer", {}))
    decay = given.weight_decay if decays else 0.0
    like = torch.optim.AdamW([torch.zeros(1)], given.lr, given.betas, given.eps, decay).param_groups[0]
    return {key: value for key, value in like.items() if key != "params"} | {"initial_lr": given.lr}
