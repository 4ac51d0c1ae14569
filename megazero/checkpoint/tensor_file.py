"""Safetensors files in a folder: streamed out, read back row by row.

    u64 header length | JSON header, padded to 8 bytes | bytes of tensor 0 | bytes of tensor 1 | ...

The header also names the state kind and step, so that a file copied over another is refused even if hashes are not checked.

Source: the safetensors format.  Its own library reads and writes only whole local files.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.folder import FileRecord, Folder, Location, ReadBytes, folder_at
from megazero.checkpoint.index import DamagedError, index_name, read_errors

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
TensorTypes: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the format


class SafetensorsWriter:
    """Streams tensors into one safetensors file, hashing as it writes.

    Args:
        folder, name: of the file, which appears when everything has been written.
        tensors: name -> (dtype, shape), in the order in which they will be written.
        metadata: strings that the header holds.

    Raises: OSError, the storage refuses; also by the methods.  Then call `abandon`, which removes what was written.
    """

    def __init__(
        self, folder: Folder, name: str, tensors: TensorTypes, metadata: Mapping[str, str] | None = None
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
        self._output = folder.create(name)
        self._output.write(len(text).to_bytes(8, "little") + text)
        self.abandon = self._output.abandon

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.  Raises: ValueError when it is not the next."""
        if not self._left or self._left[0] != name:
            following = self._left[0] if self._left else "none"
            raise ValueError(f"{self._name}: {name} is not the next tensor; {following} is")
        if tensor.numel():
            self._output.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._left.popleft()

    def finish(self) -> FileRecord:
        """Make it durable.  Raises: ValueError if a tensor is missing."""
        if self._left:
            raise ValueError(f"{self._name}: {self._left[0]} was not written")
        return self._output.finish()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.  Its rows are read on demand.

    The tensors that it returns may be memory-mapped views of the file: do not write into them.
    Raises: what `read_errors` lists.
    """

    path: str
    read_bytes: ReadBytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first to last, exclusive: [last - first, ...]."""
        width = prod(self.shape[1:])
        return self._read(first * width, last * width).view(last - first, *self.shape[1:])

    def whole(self) -> Tensor:
        """The whole tensor."""
        return self._read(0, prod(self.shape)).view(self.shape)

    def _read(self, first: int, last: int) -> Tensor:
        """Elements [first, last)."""
        start, stop = (self.start + element * self.dtype.itemsize for element in (first, last))
        with read_errors(self.path):
            found = _read(self.read_bytes, start, stop)
        if found.storage_offset() % self.dtype.itemsize:
            found = found.clone()
        return found.view(self.dtype)


def open_tensors(folder: Folder, name: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Open a safetensors file and return its tensors and its metadata.

    Raises: the errors of `read_errors`, also if the file has an unknown dtype.
    """
    path = f"{folder}/{name}"
    with read_errors(path):
        read_bytes = folder.open(name)
        length = int.from_bytes(_read(read_bytes, 0, 8).numpy().tobytes(), "little")
        if not 0 < length <= _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        tensors, header = {}, json.loads(_read(read_bytes, 8, 8 + length).numpy().tobytes())
        metadata: dict[str, str] = header.pop("__metadata__", {})
        for tensor, found in header.items():
            dtype, shape = _DTYPES[found["dtype"]], tuple(int(size) for size in found["shape"])
            start, stop = (int(offset) for offset in found["data_offsets"])
            if start < 0 or stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(f"offsets {start}..{stop} do not hold a {found['dtype']} of shape {list(shape)}")
            tensors[tensor] = StoredTensor(path, read_bytes, dtype, shape, 8 + length + start)
    return tensors, metadata


def _read(read_bytes: ReadBytes, start: int, stop: int) -> Tensor:
    data = read_bytes(start, stop)
    if data.numel() != stop - start:
        raise ValueError(f"it ends before byte {stop}")
    return data


class StoredTensors:
    """The logical tensors of one state kind in a checkpoint, by name; a file is opened when one of its tensors is asked for.

    Args:
        state_kind: "model", "master", "exp_avg", ...
        step: of the checkpoint, if known; files with another one are refused.

    Attributes:
        files: the file that holds each tensor.

    Raises: as `read_errors`, also for a tensor; DamagedError for a file of another state kind or step.
    """

    def __init__(self, location: Location, state_kind: str, step: int | None = None) -> None:
        self.folder, self._index = folder_at(location), index_name(state_kind)
        self._expected = {"kind": state_kind} | ({} if step is None else {"step": str(step)})
        with read_errors(f"{self.folder}/{self._index}"):
            self.files: dict[str, str] = dict(json.loads(self.folder.read(self._index))["weight_map"])
        self._open: dict[str, dict[str, StoredTensor]] = {}

    def __getitem__(self, name: str) -> StoredTensor:
        file = self.files[name]
        if file not in self._open:
            self._open[file], metadata = open_tensors(self.folder, file)
            for key, value in self._expected.items():
                if metadata.get(key, value) != value:
                    raise DamagedError(
                        f"{self.folder}/{file} is of {key} {metadata[key]}, but the file of {key} {value} belongs here: "
                        "one file was copied over another"
                    )
        if name not in self._open[file]:
            raise DamagedError(f"{self.folder}/{file} does not hold {name}, which {self._index} says it does")
        return self._open[file][name]
