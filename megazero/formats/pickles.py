"""Reads the pickles of other programs without running any of their code.

    .metadata           a plain pickle      classes of DCP's metadata are made; for others a stand-in that does nothing
    *.distcp, *.pt      torch.save          torch's loader of tensors and plain values; again with stand-ins

A pickle names the functions to call.  Here, only names on a short list are imported.  Calls of any other name make a
`StandIn`, and the name is returned to the caller.  A pickle can also set attributes; here, only attributes of objects that
it has made, never those of a class.  The checksums of a zip file, which torch ignores, are compared.
"""

import io
import pickle
import zipfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, BinaryIO, ClassVar

import torch
from torch.distributed.checkpoint import metadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.utils._pytree import tree_leaves

from megazero.formats.tables import data_beside

_LISTS = data_beside(__file__)
_RECORDS = tuple(map(resolve_name, _LISTS["records"]))
_MADE = (*_RECORDS, *map(resolve_name, _LISTS["values"]))


def _memory_format(owner: Any, name: Any) -> Any:
    """Return a member of an enumeration, for which some releases of Python 3.11 call `getattr`."""
    if owner is metadata._MEM_FORMAT_ENCODING and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it reads {name!r} of {owner!r}, which was refused")


_ALLOWED: dict[str, Any] = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in _MADE} | {
    "builtins.getattr": _memory_format,
    **{name: resolve_name(place) for name, place in _LISTS["names"].items()},
}
_PLAIN: dict[str, Any] = {name: resolve_name(place) for name, place in _LISTS["plain"].items()}


class StandIn:
    """Replaces an object whose class is not on the list.  It holds the object's plain state, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, *_: Any) -> None: ...

    def extend(self, *_: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...


# Types whose instances a pickle makes itself, so that it may fill them.
_FILLED = (*_RECORDS, StandIn)


class _Unpickler(pickle._Unpickler):  # the one in Python, whose steps can be refused
    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.unknown: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _ALLOWED:
            return _ALLOWED[full]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if not full.startswith(tuple(_LISTS["plans"])):
            self.unknown.add(full)
        return type("StandIn", (StandIn,), {})

    def _load_build(self) -> None:
        made = self.stack[-2]  # type: ignore[attr-defined]
        if not isinstance(made, _FILLED):
            raise pickle.UnpicklingError(f"it sets attributes of a {type(made).__name__}, which was refused")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = _load_build  # type: ignore[assignment]


def load_metadata(data: bytes) -> tuple[Any, list[str]]:
    """Read a plain pickle; return its value and the names that are not on the list.  Raises: ValueError: it is damaged."""
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        return unpickler.load(), sorted(unpickler.unknown)
    except Exception as error:  # anything can be in the file
        named = f"; it names {', '.join(sorted(unpickler.unknown))}, which was not run" if unpickler.unknown else ""
        raise ValueError(f"{str(error) or type(error).__name__}{named}") from error


def load_tensors(file: Path | memoryview) -> tuple[Any, list[str]]:
    """Read a file of `torch.save`; return its value and the names in it that are not on the list.  Files are mapped.

    Raises:
        FileNotFoundError.
        ValueError: it is damaged, or names what torch refuses to read at all.
    """

    copy = None if isinstance(file, Path) else io.BytesIO(file)

    def source() -> Any:
        if copy is not None:
            copy.seek(0)
        return file if copy is None else copy

    def load(*stand_ins: tuple[Any, str]) -> Any:
        with safe_globals([*((cls, name) for name, cls in _PLAIN.items()), *stand_ins]):
            value = torch.load(source(), map_location="cpu", weights_only=True, mmap=is_mapped or None)
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
            raise ValueError("it holds tensors without values, of device meta")
        return value

    unknown: list[str] = []
    try:
        if is_zip := zipfile.is_zipfile(source()):
            if isinstance(file, Path):
                _check_path(file, (about := file.stat()).st_size, about.st_mtime_ns)
            else:
                _check_sums(source())
        is_mapped = is_zip and isinstance(file, Path)
        with suppress(pickle.UnpicklingError):
            return load(), []
        unknown = sorted(set(get_unsafe_globals_in_checkpoint(source())) - _PLAIN.keys()) if is_zip else []
        return load(*((type("StandIn", (StandIn,), {}), name) for name in unknown)), unknown
    except FileNotFoundError:
        raise
    except Exception as error:  # of pickle, of zip, of torch
        text = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError | KeyError) or "weights_only" in text:  # torch advises to run it
            text = "it is damaged, or more than tensors and plain values"
        named = f"; it names {', '.join(unknown)}, which was not run" if unknown else ""
        raise ValueError(text + named) from error


@lru_cache(maxsize=4096)  # a file of many tensors is opened more than once
def _check_path(path: Path, size: int, changed: int) -> None:
    _check_sums(path)


def _check_sums(file: Path | BinaryIO) -> None:
    """Check the sums of all members.  Raises: zipfile.BadZipFile, ValueError: a member is not what was written."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename} is compressed, which torch.save does not do")
            if info.CRC:  # torch can be told to write none
                with archive.open(info) as member:
                    while member.read(1 << 20):
                        pass
