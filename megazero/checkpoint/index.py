"""The format of a checkpoint: whole logical tensors in safetensors files, an index per kind, and a manifest written last.

    step-00000010/
      model-00001-of-00002.safetensors ...     weights under Hugging Face names, with model.safetensors.index.json
      exp_avg-..., exp_avg_sq-..., master-...  moments and fp32 masters by the same names, each with its index
      config.json                              what `transformers` needs to load the weights
      trainer_state.json                       step, samples consumed, shape of origin, configuration
      manifest.json                            size and xxh3 of every other file; the directory is complete when it exists
    latest                                     the name of the newest complete directory, for people and scripts

A file is written beside its name and renamed into place.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

FORMAT_VERSION = 1
MANIFEST, TRAINER_STATE, LATEST, HF_CONFIG = "manifest.json", "trainer_state.json", "latest", "config.json"
_READ_BYTES = 1 << 22
_STEP = re.compile(r"step-(\d+)")
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or cannot be used; the message names the files and what to do."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and xxh3-128 of one file."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, independent of its shape.

    Args:
        step: optimizer steps done.
        consumed_samples: samples read since the start; the next sample's global index.
        consumed_tokens: counted tokens since the start.
        optimizer_steps: steps that changed the weights, for the bias correction.
        data_fingerprint: of the data that the samples came from.
        model: the model section of the configuration.
        config: the whole resolved configuration, for reading only.
        shape: parallel degrees, ZeRO stage and world size that wrote it, for reading only.
        versions: of megazero and torch, for reading only.
        optimizer_scalars: state of the optimizer that is one number, by group.
        loss_scaler: where the loss scale stands, under fp16.
        script: what the engine of a user's own script keeps: its counters, groups and schedule.
    """

    step: int
    consumed_samples: int
    consumed_tokens: int
    optimizer_steps: int
    data_fingerprint: str
    model: dict[str, Any]
    config: dict[str, Any]
    shape: dict[str, Any]
    versions: dict[str, str]
    optimizer_scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    loss_scaler: dict[str, Any] | None = None
    script: dict[str, Any] = field(default_factory=dict)


def step_directory(root: Path, step: int) -> Path:
    """`root/step-00000010` for step 10."""
    return root / f"step-{step:08d}"


def index_name(kind: str) -> str:
    """Name of the index file of a kind."""
    return f"{kind}.safetensors.index.json"


def kinds_of(files: Iterable[str]) -> list[str]:
    """Kinds that a checkpoint holds, the weights first."""
    suffix = index_name("")
    kinds = sorted(name.removesuffix(suffix) for name in files if name.endswith(suffix))
    return sorted(kinds, key=lambda kind: kind != "model")


def write_atomically(path: Path, data: bytes) -> FileRecord:
    """Write beside `path`, flush to disk, rename into place."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


def to_json(value: Any) -> bytes:
    """Readable JSON."""
    return (json.dumps(value, indent=2) + "\n").encode()


class SafetensorsWriter:
    """Streams tensors into one safetensors file, hashing as it writes; nothing is kept in memory.

    Args:
        path: final name; the file appears there only when everything has been written.
        tensors: name -> (dtype, shape), in the order in which they will be written.

    Source: the safetensors format: u64 header length, JSON header, then the tensors' bytes without gaps.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, (dtype, shape) in tensors.items():
            stop = start + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._waiting = deque(tensors)
        self._hash, self._bytes = xxhash.xxh3_128(), 0
        self._file = self._partial.open("wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.  Raises: ValueError when it is not the next."""
        if not self._waiting or self._waiting[0] != name:
            raise ValueError(
                f"{self._path.name}: {name} is not the next tensor; {self._waiting[0] if self._waiting else 'none'} is"
            )
        self._put(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._waiting.popleft()

    def finish(self) -> FileRecord:
        """Flush to disk and rename into place; size and hash of what was written.  Raises: ValueError, OSError."""
        if self._waiting:
            raise ValueError(f"{self._path.name}: {self._waiting[0]} was not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        return FileRecord(self._bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Remove what was written; never raises."""
        with suppress(OSError):
            self._file.close()  # may try once more to write what the disk refused
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """xxh3-128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _checksum(files: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


def write_manifest(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Declare a directory complete."""
    listed = {name: asdict(record) for name, record in sorted(files.items())}
    manifest = {"format": FORMAT_VERSION, "checksum": _checksum(listed), "files": listed}
    write_atomically(directory / MANIFEST, to_json(manifest))


def is_complete(directory: Path) -> bool:
    """Whether every file of the checkpoint had been written."""
    return (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """Files of a complete checkpoint.  Raises: CheckpointError naming the manifest."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_bytes())
        listed = manifest["files"]
        intact = manifest["format"] == FORMAT_VERSION and manifest["checksum"] == _checksum(listed)
        if intact:
            return {name: FileRecord(**record) for name, record in listed.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); resume from another step directory") from error
    raise CheckpointError(
        f"{path} is damaged or of another format than {FORMAT_VERSION}; resume from another step directory"
    )


def read_trainer_state(directory: Path) -> TrainerState:
    """Where the run stood.  Raises: CheckpointError naming the file."""
    path = directory / TRAINER_STATE
    try:
        stored = json.loads(path.read_bytes())
        known = {one.name: one for one in fields(TrainerState)}
        needed = {name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING}
        return TrainerState(**{name: stored[name] for name in known if name in stored or name in needed})
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}); resume from another step directory") from error


def find_newest(root: Path) -> Path | None:
    """The newest complete step directory, or None.

    The manifests decide, not `latest`: a run may have been stopped between the two.
    """
    complete = [path.parent for path in root.glob(f"step-*/{MANIFEST}") if _STEP.fullmatch(path.parent.name)]
    return max(complete, key=step_of, default=None)


def step_of(directory: Path) -> int:
    """10 for `step-00000010`.  Raises: ValueError for another name."""
    match = _STEP.fullmatch(directory.name)
    if match is None:
        raise ValueError(f"{directory.name} is not the name of a step directory, like step-00000010")
    return int(match[1])


class StoredTensors:
    """The logical tensors of one kind in a checkpoint, read slice by slice.

    Args:
        directory: a complete checkpoint.
        kind: "model", "master", "exp_avg", ...

    Raises:
        CheckpointError: the kind's index is missing or unreadable.
    """

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory, path = directory, directory / index_name(kind)
        try:
            self.files: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read ({error!r}); resume from another step directory") from error
        self._open: dict[str, Any] = {}

    def slice(self, name: str) -> Any:
        """A lazily read tensor: `.get_shape()`, `.get_dtype()`, and indexing."""
        file = self.files[name]
        if file not in self._open:
            # opened once; safetensors maps the file and reads only what is indexed
            self._open[file] = safe_open(self.directory / file, framework="pt")
        return self._open[file].get_slice(name)
