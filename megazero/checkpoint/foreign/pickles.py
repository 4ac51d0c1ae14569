"""Pickles of other programs, read without running anything of theirs.

    .metadata           a plain pickle      classes of DCP's metadata are made; for others a stand-in that does nothing
    *.distcp, *.pt      torch.save          torch's loader of tensors and plain values; again with stand-ins

A pickle can only name what to call.  Here a name is looked up in a short list, and what is not on it is never imported: its
calls make a `StandIn`, and its name is told to the caller.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from collections import OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout, get_unsafe_globals_in_checkpoint, safe_globals

# Classes that hold values and do nothing when they are made.  torch's own list for torch.save is `weights_only`.
_METADATA = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    OrderedDict,
)
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED: dict[str, Any] = {f"{one.__module__}.{one.__qualname__}": one for one in _METADATA} | {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _get_layout,
    f"{_MEGATRON}.MCoreMetadata": metadata.Metadata,  # of its releases up to 0.15
    "pathlib.PosixPath": PurePosixPath,
    "pathlib.WindowsPath": PurePosixPath,
    "pathlib._local.PosixPath": PurePosixPath,
    **{f"builtins.{one.__name__}": one for one in (set, frozenset, list, dict, tuple)},
}
# Plain containers that torch's list lacks.
_PLAIN: dict[str, Any] = {
    "argparse.Namespace": Namespace,
    "collections.defaultdict": defaultdict,
    "pathlib.PosixPath": PosixPath,
    "types.SimpleNamespace": Namespace,
}


class StandIn:
    """In place of an object whose class is not admitted; it keeps its plain state, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, *_: Any) -> None: ...

    def extend(self, *_: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.unknown: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _ALLOWED:
            return _ALLOWED[full]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        self.unknown.add(full)
        return type("StandIn", (StandIn,), {})


def load_metadata(data: bytes) -> tuple[Any, list[str]]:
    """The value of a plain pickle, and the names in it that were not admitted.  Raises: ValueError: it is damaged."""
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        return unpickler.load(), sorted(unpickler.unknown)
    except Exception as error:  # anything can be in the file
        named = f"; it names {', '.join(sorted(unpickler.unknown))}, which was not run" if unpickler.unknown else ""
        raise ValueError(f"{str(error) or type(error).__name__}{named}") from error


def load_tensors(file: Path | bytes) -> tuple[Any, list[str]]:
    """The value of a file of `torch.save`, and the names in it that were not admitted; tensors of a path are mapped.

    Raises:
        FileNotFoundError.
        ValueError: it is damaged, or names what torch refuses to read at all.
    """

    def source() -> Any:
        return io.BytesIO(file) if isinstance(file, bytes) else file

    try:
        unknown = sorted(set(get_unsafe_globals_in_checkpoint(source())) - _PLAIN.keys())
        stand_ins = [(type("StandIn", (StandIn,), {}), name) for name in unknown]
        plain = [(one, name) for name, one in _PLAIN.items()]
        with safe_globals([*plain, *stand_ins]):
            loaded = torch.load(source(), map_location="cpu", weights_only=True, mmap=isinstance(file, Path) or None)
    except FileNotFoundError:
        raise
    except Exception as error:  # of pickle, of zip, of torch
        text = str(error) or type(error).__name__
        with suppress(Exception):
            text = f"{text.splitlines()[0]}; it names {', '.join(get_unsafe_globals_in_checkpoint(source()))}"
        raise ValueError(text.splitlines()[0]) from error
    return loaded, unknown
