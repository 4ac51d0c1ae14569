"""Safetensors files in a folder: streamed out, read back row by row.

    u64 header length | JSON header, padded to 8 bytes | bytes of tensor 0 | bytes of tensor 1 | ...

The header also names the kind and step, so that a file copied over another is refused even if hashes are not checked.

Source: the safetensors format.  Its own library reads and writes only whole local files.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder, Input, Location, Output, folder_at
from megazero.checkpoint.index import DamagedError, FileRecord, index_name, read_errors

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the format


class SafetensorsWriter:
    """Streams tensors into one safetensors file, hashing as it writes.

    Args:
        folder, name: of the file, which appears when everything has been written.
        tensors: name -> (dtype, shape), in the order in which they will be written.
        metadata: strings that the header holds.

    Raises:
        OSError: the storage refuses; also by the methods.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        start = 0
        for tensor, (dtype, shape) in tensors.items():
            stop = start + dtype.itemsize * prod(shape)
            header[tensor] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._name, self._left = name, deque(tensors)
        self._output: Output = folder.create(name)
        self._output.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.  Raises: ValueError when it is not the next."""
        if not self._left or self._left[0] != name:
            raise ValueError(
                f"{self._name}: {name} is not the next tensor; {self._left[0] if self._left else 'none'} is"
            )
        if tensor.numel():
            self._output.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._left.popleft()

    def finish(self) -> FileRecord:
        """Make it durable; returns its size and hash.  Raises: ValueError if a tensor is missing."""
        if self._left:
            raise ValueError(f"{self._name}: {self._left[0]} was not written")
        self._output.finish()
        return FileRecord(self._output.bytes, self._output.xxh3)

    def abandon(self) -> None:
        """Remove what was written; never raises."""
        self._output.abandon()


@dataclass(frozen=True)
class _Entry:
    """A tensor's dtype, shape and bytes [start, stop) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """One safetensors file, read row by row.

    Raises:
        CheckpointError: it cannot be read.
        DamagedError: it is no safetensors file, or holds dtypes that we do not store.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._path = f"{folder}/{name}"
        with read_errors(self._path):
            self._input: Input = folder.open(name)
            length = int.from_bytes(self._bytes(0, 8), "little")
            if not 0 < length <= _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(self._bytes(8, 8 + length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries = {tensor: _entry(described, 8 + length) for tensor, described in header.items()}

    def _bytes(self, start: int, stop: int) -> bytes:
        data = self._input.read(start, stop)
        if data.numel() != stop - start:
            raise ValueError(f"it ends before byte {stop}")
        return data.numpy().tobytes()

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor, [last - first, ...]; not to be written to.

        Raises:
            CheckpointError: the file cannot be read.
            DamagedError: it ends before them.
        """
        entry = self.entries[name]
        width = prod(entry.shape[1:]) * entry.dtype.itemsize
        found = self._read(entry, entry.start + first * width, entry.start + last * width)
        return found.view(last - first, *entry.shape[1:])

    def whole(self, name: str) -> Tensor:
        """All of a tensor; not to be written to.  Raises: as `rows`."""
        entry = self.entries[name]
        return self._read(entry, entry.start, entry.stop).view(entry.shape)

    def _read(self, entry: _Entry, start: int, stop: int) -> Tensor:
        with read_errors(self._path):
            found = self._input.read(start, stop)
        if found.numel() != stop - start:
            raise DamagedError(f"{self._path} ends before byte {stop}")
        if found.storage_offset() % entry.dtype.itemsize:
            found = found.clone()
        return found.view(entry.dtype)


def _entry(described: dict[str, Any], first: int) -> _Entry:
    dtype, shape = _DTYPES[described["dtype"]], tuple(int(size) for size in described["shape"])
    start, stop = (int(offset) for offset in described["data_offsets"])
    if start < 0 or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {start}..{stop} do not hold a {described['dtype']} of shape {list(shape)}")
    return _Entry(dtype, shape, first + start, first + stop)


class StoredTensors:
    """The logical tensors of one kind in a checkpoint, read row by row.

    Args:
        location: a complete checkpoint.
        kind: "model", "master", "exp_avg", ...
        step: of the checkpoint, if known; files with another one are refused.

    Attributes:
        files: the file that holds each tensor.

    Raises:
        CheckpointError: a file cannot be read; also by the methods.
        DamagedError: the kind's index or a file is damaged; also by the methods.
    """

    def __init__(self, location: Location, kind: str, step: int | None = None) -> None:
        self.folder, self._kind = folder_at(location), kind
        self._expected = {"kind": kind} | ({} if step is None else {"step": str(step)})
        with read_errors(f"{self.folder}/{index_name(kind)}"):
            self.files: dict[str, str] = dict(json.loads(self.folder.read(index_name(kind)))["weight_map"])
        self._open: dict[str, TensorFile] = {}

    def _of(self, name: str) -> TensorFile:
        file = self.files[name]
        if file not in self._open:
            self._open[file] = opened = TensorFile(self.folder, file)
            for key, value in self._expected.items():
                if opened.metadata.get(key, value) != value:
                    raise DamagedError(
                        f"{self.folder}/{file} is of {key} {opened.metadata[key]}, but the file of {key} {value} belongs "
                        "here: one file was copied over another"
                    )
        if name not in self._open[file].entries:
            raise DamagedError(
                f"{self.folder}/{file} does not hold {name}, which {index_name(self._kind)} says it does"
            )
        return self._open[file]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._of(name).entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._of(name).entries[name].dtype

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor; not to be written to."""
        return self._of(name).rows(name, first, last)

    def whole(self, name: str) -> Tensor:
        """All of a tensor; not to be written to."""
        return self._of(name).whole(name)
