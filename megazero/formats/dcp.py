"""Reads checkpoints of torch.distributed.checkpoint, such as torchtitan's: tensors and AdamW's state, by name.

    .metadata                                  shapes, dtypes, and the file and bytes of each chunk of each tensor
    __0_0.distcp ...                           chunks, each written by torch.save
    tok_embeddings.weight, model.lm_head...    weights, perhaps behind a prefix
    optimizer.state.NAME.exp_avg, .step        state of AdamW
    optimizer.param_groups.NAME.lr             its settings, by name or by group
    train_state, lr_scheduler, dataloader      the position of the run

    pytorch_model_fsdp_0/, optimizer_0/        two such folders, written by accelerate

Source: torch/distributed/checkpoint (metadata.py, filesystem.py); torchtitan/components/checkpointer, optimizer.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import _check_box_bounds
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megazero.checkpoint.folder import LocalFolder, ReadBytes
from megazero.checkpoint.index import CheckpointError
from megazero.formats.foreign import ADAM, ForeignCheckpoint, LazyTensor, foreign_errors
from megazero.formats.pickles import load_metadata, load_tensors
from megazero.formats.tables import data_beside
from megazero.models.config import ModelConfig
from megazero.zero.state import MODEL

METADATA = ".metadata"
_STATE = re.compile(r"(?:.+\.)?state\.(?P<name>.+)\.(?P<kind>\w+)")
_GROUP = re.compile(r"(?:.+\.)?param_groups\.(?:.+\.)?(?P<key>\w+)")
_STEP = re.compile(r"(?:(?:.+\.)?train_state\.)?step")
_NOT_TAKEN = data_beside(__file__)["not_taken"]


@dataclass(frozen=True)
class DcpFolder:
    """A folder of torch.distributed.checkpoint.  A tensor is assembled from its chunks when it is read.

    Raises: CheckpointError: the folder is damaged; also raised by every method and by the returned readers.
    """

    folder: LocalFolder
    _files: dict[str, tuple[ReadBytes, int]] = field(default_factory=dict)  # how to read a file, and its size
    _tiled: dict[str, TensorStorageMetadata] = field(default_factory=dict)  # those whose chunks are checked

    @cached_property
    def _loaded(self) -> tuple[Metadata, list[str]]:
        path = f"{self.folder}/{METADATA}"
        with foreign_errors(path):
            loaded, unknown = load_metadata(self.folder.read(METADATA))
        if not isinstance(loaded, Metadata) or not isinstance(loaded.storage_data, dict):
            named = f"; it names {', '.join(unknown)}, which was not run" if unknown else ""
            raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint{named}")
        return loaded, unknown

    @property
    def unknown(self) -> list[str]:
        """The names in the metadata that torch.distributed.checkpoint does not use."""
        return self._loaded[1]

    @cached_property
    def _chunks(self) -> dict[str, dict[tuple[int, ...], Any]]:
        """Where each chunk is stored, by tensor name and offset."""
        found: dict[str, dict[tuple[int, ...], Any]] = {}
        with foreign_errors(f"{self.folder}/{METADATA}"):
            for index, info in self._loaded[0].storage_data.items():
                found.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
        return found

    def tensors(self) -> dict[str, LazyTensor]:
        """Return all tensors by name."""
        listed = self._loaded[0].state_dict_metadata.items()
        found = {name: stored for name, stored in listed if isinstance(stored, TensorStorageMetadata)}
        with foreign_errors(f"{self.folder}/{METADATA}"):
            return {
                name: LazyTensor(tuple(stored.size), stored.properties.dtype, partial(self._tensor, name, stored))
                for name, stored in found.items()
            }

    def values(self) -> dict[str, Callable[[], Any]]:
        """Return a reader for each entry that is no tensor, by name.  A reader returns plain values only."""
        listed = self._loaded[0].state_dict_metadata.items()
        others = [name for name, stored in listed if not isinstance(stored, TensorStorageMetadata)]
        return {name: partial(self._read, name, ()) for name in others}

    def slices(self, name: str) -> list[LazyTensor]:
        """Return the slices of a stacked tensor along dimension 0.  A slice reads only the chunks that contain it."""
        about: Any = self._loaded[0].state_dict_metadata[name]
        if not self._tiles(name, about).chunks:  # their bytes are there, so the list is not longer than these
            raise CheckpointError(f"{self.folder}/{METADATA}: {name} has no elements")
        shape, dtype = tuple(about.size[1:]), about.properties.dtype
        reads = (partial(self.rows, name, row) for row in range(about.size[0]))
        return [LazyTensor(shape, dtype, read) for read in reads]

    def rows(self, name: str, start: int, stop: int | None = None) -> Tensor:
        """Read rows `start` to `stop` of a tensor; without `stop`, the row `start`.  Only their chunks are read."""
        about: Any = self._loaded[0].state_dict_metadata[name]
        found = self._tensor(name, about, (start, start + 1 if stop is None else stop))
        return found[0] if stop is None else found

    def _tiles(self, name: str, about: TensorStorageMetadata) -> TensorStorageMetadata:
        """Drop empty chunks, and check that the others cover the tensor once and that their bytes exist."""
        if name in self._tiled:
            return self._tiled[name]
        tiles = replace(about, chunks=[chunk for chunk in about.chunks if prod(chunk.sizes)])
        with foreign_errors(f"{self.folder}/{METADATA}: {name}"):
            for chunk in tiles.chunks:
                _, start, stop = self._place(name, tuple(chunk.offsets))
                is_there = prod(chunk.sizes) * about.properties.dtype.itemsize <= stop - start
                if not (is_there and _check_box_bounds(about.size, chunk)):
                    raise ValueError(f"its chunk at {list(chunk.offsets)} lies outside it, or its bytes are too few")
            met = create_read_items_for_chunk_list(name, tiles, tiles.chunks)  # each meets itself
            if len(met) != len(tiles.chunks) or sum(prod(chunk.sizes) for chunk in tiles.chunks) != prod(about.size):
                raise ValueError("its chunks overlap, or leave out elements")
        self._tiled[name] = tiles
        return tiles

    def _tensor(self, name: str, about: TensorStorageMetadata, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or some of its rows.  No copy is made if a single chunk holds them."""
        tiles = self._tiles(name, about)
        first, last = rows or (0, about.size[0] if about.size else 0)
        offsets = torch.Size((first, *(0 for _ in about.size[1:])) if about.size else ())
        shape = torch.Size((last - first, *about.size[1:]) if about.size else ())
        whole: Tensor | None = None
        for item in create_read_items_for_chunk_list(name, tiles, [ChunkStorageMetadata(offsets, shape)]):
            tile = tiles.chunks[item.storage_index.index or 0]
            chunk = self._read(name, tuple(tile.offsets))
            if not isinstance(chunk, Tensor) or chunk.shape != tile.sizes or chunk.dtype != about.properties.dtype:
                raise CheckpointError(f"{self.folder}: {name} at {list(tile.offsets)} is not what {METADATA} says")
            with foreign_errors(f"{self.folder}: {name}"):
                chunk = narrow_tensor_by_index(chunk.detach(), item.storage_offsets, item.lengths)
                if chunk.shape == shape and chunk.layout == torch.strided and chunk.device.type == "cpu":
                    return chunk
                whole = torch.empty(shape, dtype=chunk.dtype) if whole is None else whole
                narrow_tensor_by_index(whole, item.dest_offsets, item.lengths).copy_(chunk)
            del chunk
        return torch.empty(shape, dtype=about.properties.dtype) if whole is None else whole

    def _place(self, name: str, offset: tuple[int, ...]) -> tuple[str, int, int]:
        """Return the file of a chunk or value, and its first and last byte, which exist."""
        info: Any = self._chunks.get(name, {}).get(offset)
        file = getattr(info, "relative_path", None)
        # It must be that of a file directly within the folder, on any system.
        if not isinstance(file, str) or file in ("", ".", "..") or any(letter in file for letter in "/\\\0"):
            raise CheckpointError(f"{self.folder}/{METADATA} does not name a file of that folder for {name}: {file!r}")
        path = f"{self.folder}/{file}"
        with foreign_errors(path):
            if info.transform_descriptors:
                raise CheckpointError(f"{path} is written with {info.transform_descriptors}, which is not supported")
            if file not in self._files:
                self._files[file] = self.folder.open(file), self.folder.size(file) or 0
            start, stop = int(info.offset), int(info.offset + info.length)
            if not 0 <= start <= stop <= self._files[file][1]:
                raise ValueError(f"it begins after byte {start}, or ends before byte {stop}")
        return file, start, stop

    def _read(self, name: str, offset: tuple[int, ...]) -> Any:
        file, start, stop = self._place(name, offset)
        path = f"{self.folder}/{file}"
        with foreign_errors(f"{path}: {name}"):
            loaded, unknown = load_tensors(self._files[file][0](start, stop).numpy().data)
        if unknown:
            raise CheckpointError(f"{path}: {name} is made of {', '.join(unknown)}, which is not read")
        return loaded


def _value(entry: LazyTensor | Callable[[], Any]) -> Any:
    return entry.read() if isinstance(entry, LazyTensor) else entry()


class _Entries(ForeignCheckpoint):
    """Collects the entries of a checkpoint one by one."""

    def add(self, name: str, entry: LazyTensor | Callable[[], Any]) -> None:
        """Sort an entry into tensors, state or settings, or list it as unknown."""
        if state := _STATE.fullmatch(name):
            if state["kind"] == "step":
                self.updates.add(int(_value(entry)))
            elif state["kind"] in ADAM and isinstance(entry, LazyTensor):
                self.add_tensor(state["kind"], state["name"], entry, entry=name)
            else:
                self.unknown.append(name)
        elif group := _GROUP.fullmatch(name):
            self.add_setting(name, group["key"], _value(entry))
        elif name.endswith("param_groups") and callable(entry):  # as releases of torch before 2.4 wrote them
            for key, value in (item for group in entry() for item in group.items()):
                self.add_setting(name, key, value)
        elif _STEP.fullmatch(name):
            self.add_step(int(_value(entry)), entry=name)
        elif self.is_not_taken(name, _NOT_TAKEN):
            pass
        elif isinstance(entry, LazyTensor):
            self.tensors[MODEL][name] = entry
        else:
            self.unknown.append(name)


def dcp_folders(folder: LocalFolder) -> list[LocalFolder]:
    """Return the folder if it holds such a checkpoint, or the two folders of accelerate's `save_state` under FSDP."""
    below = [folder.child(name) for name in ("pytorch_model_fsdp_0", "optimizer_0")]
    return [folder] if folder.has(METADATA) else [child for child in below if child.has(METADATA)]


def read_dcp(folder: LocalFolder, _: ModelConfig) -> ForeignCheckpoint:
    """Read a checkpoint of torch.distributed.checkpoint, or the two folders of accelerate.  Raises: CheckpointError."""
    sources = [DcpFolder(source) for source in dcp_folders(folder)]
    unknown = [f"{name} (named in {METADATA})" for source in sources for name in source.unknown]
    found = _Entries(str(folder), unknown=unknown)
    for entries in (entries for source in sources for entries in (source.tensors(), source.values())):
        for name, entry in entries.items():
            with foreign_errors(f"{folder}: {name}"):
                found.add(name, entry)
    return found.finished()
