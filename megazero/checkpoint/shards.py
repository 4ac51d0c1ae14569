"""Writing whole tensors into safetensors files of a bounded size, with one tensor in memory at a time."""

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.folder import FileRecord, Folder, Location, folder_at
from megazero.checkpoint.index import UNFINISHED, CheckpointError, to_index, to_json
from megazero.checkpoint.tensor_file import SafetensorsWriter
from megazero.zero.sharding import DTYPE_NAMES
from megazero.zero.state import MODEL

Layout: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]

CHUNK_ELEMENTS = 1 << 22  # compared or checked at a time

_REMEDY = "choose another name, or remove it"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class ModelFiles:
    """The files that hold the tensors of one state kind."""

    records: dict[str, FileRecord]
    index: bytes  # what stock tools read
    tensor_bytes: int


def parse_size(text: str) -> int:
    """5_000_000_000 for "5GB", 2**30 for "1GiB", 100 for "100".  Raises: ValueError."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ") if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size above 0; write it as 5GB, 500MB or 1GiB")
    return int(size)


def cut(tensors: Layout, limit: int) -> list[Layout]:
    """Spread tensors over files, in their order: each holds up to `limit` bytes, or one tensor that is larger."""
    files: list[Layout] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = dtype.itemsize * prod(shape)
        if files[-1] and filled + size > limit:
            files.append({})
            filled = 0
        files[-1][name] = dtype, shape
        filled += size
    return files


def write_shards(
    folder: Folder,
    tensors: Layout,
    read: Callable[[str], Tensor],
    limit: int,
    *,
    state_kind: str = MODEL,
    single: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> ModelFiles:
    """Write the tensors of one state kind as `model-00001-of-0000n.safetensors`.

    Args:
        tensors: dtype and shape of each tensor in the file.
        read: returns a tensor; it is converted, and released before the next is read.
        limit: bytes of tensors in a file.
        state_kind: the first word of the file names.
        single: name of the file if one is enough; None numbers it all the same.

    Raises:
        OSError: the storage refuses.
        CheckpointError: a tensor has values that the dtype cannot hold.
    """
    files = cut(tensors, limit)
    records: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    tensor_bytes = sum(dtype.itemsize * prod(shape) for dtype, shape in tensors.values())
    folder.on_bytes(tensor_bytes, 0)
    for number, held in enumerate(files, 1):
        file = single if single and len(files) == 1 else f"{state_kind}-{number:05d}-of-{len(files):05d}.safetensors"
        writer = SafetensorsWriter(folder, file, held, metadata)
        try:
            for name, (dtype, shape) in held.items():
                writer.write(name, _converted(name, read(name), dtype))
                folder.on_bytes(0, dtype.itemsize * prod(shape))
            records[file] = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        weight_map |= dict.fromkeys(held, file)
    return ModelFiles(records, to_index(weight_map, tensor_bytes), tensor_bytes)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    def is_finite(values: Tensor) -> bool:  # block by block, because the test copies
        return all(bool(block.isfinite().all()) for block in values.reshape(-1).split(CHUNK_ELEMENTS))

    converted = tensor.contiguous().to(dtype)
    if not is_finite(converted):
        if not is_finite(tensor):
            raise CheckpointError(f"{name} holds values that are not numbers, or infinite ones")
        largest = max(float(block.abs().max()) for block in tensor.reshape(-1).split(CHUNK_ELEMENTS))
        hint = "choose another dtype"
        raise CheckpointError(f"{name} has a value of {largest:g}, which {DTYPE_NAMES[dtype]} cannot hold; {hint}")
    return converted


@contextmanager
def new_folder(location: Location) -> Iterator[Folder]:
    """An empty folder to be filled within the block.  If the block raises, the files that it began are removed.

    `unfinished.json` reserves it until the block ends, so no other process fills it.

    Raises: CheckpointError: it is not empty, or the storage refuses.
    """
    folder, created = folder_at(location), list[str]()
    try:
        _check_empty(folder)
        folder.make()
        marker = to_json({"writer": uuid.uuid4().hex})
        if not folder.create_new(UNFINISHED, marker):
            raise CheckpointError(f"{folder} is being written by another process, or was left unfinished; {_REMEDY}")
        created.append(UNFINISHED)
        _check_empty(folder)  # another process may have filled it between the check above and the marker
        yield folder.noting(created)
    except BaseException as error:
        with suppress(OSError):  # the error that led here says more
            folder.remove(*created)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder} could not be written ({error}); nothing was left there") from error
        raise
    with suppress(OSError):  # it is whole
        folder.remove(UNFINISHED)


def _check_empty(folder: Folder) -> None:
    names = [name for name in folder.files() + folder.folders() if name != UNFINISHED]
    if names:
        raise CheckpointError(f"{folder} is not empty: it holds {names[0]}; {_REMEDY}")
