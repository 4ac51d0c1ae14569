"""Checkpoints of torch.distributed.checkpoint, as torchtitan and scripts write them: tensors by name, AdamW's state by name.

    .metadata                                  shapes, dtypes, and the file and bytes of each part of each tensor
    __0_0.distcp ...                           parts, each written by torch.save
    tok_embeddings.weight, model.lm_head...    weights, perhaps behind a prefix
    optimizer.state.NAME.exp_avg, .step        state of AdamW
    optimizer.param_groups.NAME.lr             its settings, by name or by group
    train_state, lr_scheduler, dataloader      where the run stands

Source: torch/distributed/checkpoint (metadata.py, filesystem.py); torchtitan/components/checkpointer, optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megazero.checkpoint.folder import LocalFolder, ReadBytes
from megazero.checkpoint.foreign.found import ADAM, Found
from megazero.checkpoint.foreign.pickles import load_metadata, load_tensors
from megazero.checkpoint.foreign.source import ForeignCheckpoint, ForeignTensor
from megazero.checkpoint.index import CheckpointError, read_errors
from megazero.models.config import ModelConfig
from megazero.zero.state import MODEL

METADATA = ".metadata"
_STATE = re.compile(r"(?:.+\.)?state\.(?P<name>.+)\.(?P<kind>\w+)")
_GROUP = re.compile(r"(?:.+\.)?param_groups\.(?:.+\.)?(?P<key>\w+)")
_STEP = re.compile(r"(?:(?:.+\.)?train_state\.)?step")
_NOT_TAKEN = {
    r"((?:.+\.)?lr_scheduler)\..+": "the schedule is that of the run file, at the same update",
    r"((?:.+\.)?dataloader)\..+": "samples come in the order of the run file, see --samples",
    r"((?:.+\.)?train_state\.ntokens_seen)": "it counts the tokens of one rank",
}


@dataclass(frozen=True)
class DcpFolder:
    """A folder of torch.distributed.checkpoint, whose tensors are put together from their parts when they are read."""

    folder: LocalFolder

    @cached_property
    def _loaded(self) -> tuple[Metadata, list[str]]:
        path = f"{self.folder}/{METADATA}"
        with read_errors(path):
            data = self.folder.read(METADATA)
        try:
            loaded, unknown = load_metadata(data)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(loaded, Metadata) or not isinstance(loaded.storage_data, dict):
            named = f"; it names {', '.join(unknown)}, which was not run" if unknown else ""
            raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint{named}")
        return loaded, unknown

    @property
    def unknown(self) -> list[str]:
        """Names in the metadata that are not those of torch.distributed.checkpoint."""
        return self._loaded[1]

    @cached_property
    def _files(self) -> dict[str, ReadBytes]:
        return {}

    @cached_property
    def _parts(self) -> dict[str, dict[tuple[int, ...], Any]]:
        """By name, then by offset in the tensor, where a part lies."""
        found: dict[str, dict[tuple[int, ...], Any]] = {}
        for index, info in self._loaded[0].storage_data.items():
            found.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
        return found

    def tensors(self) -> dict[str, ForeignTensor]:
        """All tensors by name."""
        listed = self._loaded[0].state_dict_metadata.items()
        return {
            name: ForeignTensor(tuple(one.size), one.properties.dtype, partial(self._tensor, name, one))
            for name, one in listed
            if isinstance(one, TensorStorageMetadata)
        }

    def values(self) -> dict[str, Callable[[], Any]]:
        """What is no tensor, by name, read when it is called: plain values only."""
        listed = self._loaded[0].state_dict_metadata.items()
        return {
            name: partial(self._read, name, ()) for name, one in listed if not isinstance(one, TensorStorageMetadata)
        }

    def slices(self, name: str) -> list[ForeignTensor]:
        """The tensors that are stacked along dimension 0 of another one; only the parts that hold one are read for it."""
        about: Any = self._loaded[0].state_dict_metadata[name]
        shape, dtype = tuple(about.size[1:]), about.properties.dtype
        return [ForeignTensor(shape, dtype, partial(self._slice, name, about, index)) for index in range(about.size[0])]

    def _slice(self, name: str, about: TensorStorageMetadata, index: int) -> Tensor:
        return self._tensor(name, about, (index, index + 1))[0]

    def _tensor(self, name: str, about: TensorStorageMetadata, rows: tuple[int, int] | None = None) -> Tensor:
        """All of a tensor, or only some rows."""
        first, last = rows or (0, about.size[0] if about.size else 0)
        shape = (last - first, *about.size[1:]) if about.size else ()
        whole, missing = torch.empty(shape, dtype=about.properties.dtype), torch.ones(shape, dtype=torch.bool)
        for chunk in about.chunks:
            box = [slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            low, high = (max(first, box[0].start), min(last, box[0].stop)) if box else (0, 0)
            if box and low >= high:
                continue
            part = self._read(name, tuple(chunk.offsets))
            if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != whole.dtype:
                raise CheckpointError(f"{self.folder}: {name} at {list(chunk.offsets)} is not what {METADATA} says")
            if box:
                part = part[low - box[0].start : high - box[0].start]
                box[0] = slice(low - first, high - first)
            whole[tuple(box)], missing[tuple(box)] = part, False
        if missing.any():
            raise CheckpointError(
                f"{self.folder}/{METADATA}: the parts of {name} leave out {int(missing.sum())} elements"
            )
        return whole

    def _read(self, name: str, offset: tuple[int, ...]) -> Any:
        info: Any = self._parts.get(name, {}).get(offset)
        file = getattr(info, "relative_path", None)
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{self.folder}/{METADATA} does not name a file of that folder for {name}: {file!r}")
        path = f"{self.folder}/{file}"
        if info.transform_descriptors:
            raise CheckpointError(
                f"{path} is written with {', '.join(info.transform_descriptors)}, which is not supported"
            )
        with read_errors(path):
            if file not in self._files:
                self._files[file] = self.folder.open(file)
            data = self._files[file](info.offset, info.offset + info.length)
            if data.numel() != info.length:
                raise ValueError(f"it ends before byte {info.offset + info.length}")
        try:
            loaded, unknown = load_tensors(data.numpy().tobytes())
        except ValueError as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
        if unknown:
            raise CheckpointError(
                f"{path}: {name} is made of {', '.join(unknown)}; only tensors and plain values are read"
            )
        return loaded


class _Entries(Found):
    """What the entries of a checkpoint say, gathered one by one."""

    def add(self, name: str, entry: ForeignTensor | Callable[[], Any]) -> None:
        """Understand an entry, or note that it is not understood."""
        read = entry.read if isinstance(entry, ForeignTensor) else entry
        if state := _STATE.fullmatch(name):
            if state["kind"] == "step":
                self.updates.add(int(read()))
            elif state["kind"] in ADAM and isinstance(entry, ForeignTensor):
                self.add_tensor(state["kind"], state["name"], entry, entry=name)
            else:
                self.unknown.append(name)
        elif group := _GROUP.fullmatch(name):
            self.add_setting(name, group["key"], read())
        elif _STEP.fullmatch(name):
            self.add_step(int(read()), entry=name)
        elif self.is_not_taken(name, _NOT_TAKEN):
            pass
        elif isinstance(entry, ForeignTensor):
            self.tensors[MODEL][name] = entry
        else:
            self.unknown.append(name)


def read_dcp(folder: LocalFolder, _: ModelConfig) -> ForeignCheckpoint:
    """What a checkpoint of torch.distributed.checkpoint holds.  Raises: CheckpointError."""
    source = DcpFolder(folder)
    found = _Entries(unknown=[f"{name} (named in {METADATA})" for name in source.unknown])
    for entries in (source.tensors(), source.values()):
        for name, entry in entries.items():
            found.add(name, entry)
    return found.checkpoint(str(folder))
