"""Folders of files: a directory of a local or shared file system, or a prefix of an object store.

    folder_at("runs/a/checkpoints")      LocalFolder     written under another name, flushed, renamed; read by mapping
    folder_at("s3://bucket/run")         RemoteFolder    any fsspec URL; an object appears when it has been uploaded

In both cases a file appears under its name with all its bytes or not at all, and nothing relies on renaming a
directory. (fsspec's memory:// shows files while they grow, but there too the manifest is written last.)  Until then, a
file has a name that only its writer knows.  If a folder is locked, a check runs before anything in the folder changes,
and raises if this process may not change it (`lock`).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import shutil
import stat
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
import xxhash
from torch import Tensor

_READ_BYTES = 1 << 22
_WRITE_BYTES = 1 << 23  # written at a time; the disk starts to write after each
_PART_BYTES = 1 << 26  # objects are uploaded in at most 10,000 parts of this size, with one part in memory
_PARTIAL = ".partial"
_URL = re.compile(r"([A-Za-z](?:::|[A-Za-z0-9+.-])+):/")  # as pathlib leaves it, also simplecache::s3:/
_NOTHING = torch.empty(0, dtype=torch.uint8)

ReadBytes: TypeAlias = Callable[[int, int], Tensor]  # bytes [start, stop) of a file as uint8; read-only; raises OSError
CheckLock: TypeAlias = Callable[[], None]  # raises if this process may not write


def _unlocked() -> None:
    """Allow every process to write."""


def _unwatched(more: int, done: int) -> None:
    """Ignore the progress."""


def partial_of(name: str) -> str:
    """Return the final name of a partially written file; any other name unchanged."""
    words = name.rsplit(".", 2)
    return words[0] if len(words) == 3 and name.endswith(_PARTIAL) else name


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the xxh3-128 hash of a file."""

    bytes: int
    xxh3: str


class Output(ABC):
    """A file that is being written, and hashed while it is written.  It appears under its name only after `finish`."""

    def __init__(self, file: BinaryIO, check_lock: CheckLock) -> None:
        self._file, self._check_lock, self._hash, self.bytes = file, check_lock, xxhash.xxh3_128(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Append data.  Raises: OSError."""
        for start in range(0, len(data), _WRITE_BYTES):
            self._append(data[start : start + _WRITE_BYTES])

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def finish(self) -> FileRecord:
        """Make the file durable under its name.  Raises: OSError."""
        self._flush()
        self._check_lock()
        self._publish()
        return FileRecord(self.bytes, self._hash.hexdigest())

    @abstractmethod
    def _flush(self) -> None:
        """Make the written data durable."""

    @abstractmethod
    def _publish(self) -> None:
        """Make the file appear under its name."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove the unfinished file.  Never raises."""


@dataclass(frozen=True, kw_only=True)
class Folder(ABC):
    """Files and folders by name.  Every method raises OSError if the storage refuses."""

    check_lock: CheckLock = field(default=_unlocked, compare=False, repr=False)
    created: list[str] | None = field(default=None, compare=False, repr=False)  # receives the name of each new file
    on_bytes: Callable[[int, int], None] = field(default=_unwatched, compare=False, repr=False)  # see `watched`

    def locked(self, check: CheckLock) -> Folder:
        """Return this folder with a check that runs before anything in it, or in its children, changes."""
        return replace(self, check_lock=check)

    def noting(self, created: list[str]) -> Folder:
        """Return this folder in a form that appends the name of every file that it creates to a list."""
        return replace(self, created=created)

    def watched(self, on_bytes: Callable[[int, int], None]) -> Folder:
        """Return this folder in a form that reports progress in checking and writing files: (bytes added to the work,
        bytes done).
        """
        return replace(self, on_bytes=on_bytes)

    def _note(self, name: str) -> None:
        if self.created is not None:
            self.created.append(name)

    @abstractmethod
    def __str__(self) -> str:
        """The path or URL."""

    @property
    def name(self) -> str:
        """Last component of the path."""
        return str(self).rsplit("/", 1)[-1]

    @abstractmethod
    def child(self, name: str) -> Folder:
        """Return the folder of that name within this one.  It need not exist."""

    @property
    @abstractmethod
    def parent(self) -> Folder:
        """Return the folder that contains this one."""

    @abstractmethod
    def make(self) -> None:
        """Create the folder and its parents, if they do not exist."""

    @abstractmethod
    def _entries(self) -> list[tuple[str, bool]]:
        """Return (name, whether it is a folder) of all direct entries; empty if the folder does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""

    @abstractmethod
    def create(self, name: str) -> Output:
        """Begin to write a file.  An existing file is replaced when the new one is finished."""

    @abstractmethod
    def open(self, name: str) -> ReadBytes:
        """Open a file for reading ranges of bytes.  Raises: FileNotFoundError."""

    @abstractmethod
    def _stream(self, name: str) -> BinaryIO:
        """Open a file for reading from its beginning, unbuffered."""

    @abstractmethod
    def create_new(self, name: str, data: bytes) -> bool:
        """Create a small file if it does not exist.  If several processes try, one succeeds.

        On a disk, others may see the file while it is written.

        Returns: whether the file holds `data`.
        """

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> None:
        """Remove files.  Some of them may not exist."""

    @abstractmethod
    def remove_empty(self) -> None:
        """Remove the folder itself if it is empty."""

    def remove(self, *names: str) -> None:
        """Remove files, if they exist."""
        self.check_lock()
        self._remove(names)

    @property
    def is_link(self) -> bool:
        """Whether this is a symbolic link, so that its files belong to another directory."""
        return False

    def write(self, name: str, data: bytes) -> FileRecord:
        """Write a small file in one call."""
        output = self.create(name)
        try:
            output.write(data)
            return output.finish()
        except BaseException:
            output.abandon()
            raise

    def files(self) -> list[str]:
        """Return the names of the files directly in the folder, sorted; empty if the folder does not exist."""
        return sorted(name for name, is_folder in self._entries() if not is_folder)

    def folders(self) -> list[str]:
        """Return the names of the folders directly in the folder, sorted; empty if the folder does not exist."""
        return sorted(name for name, is_folder in self._entries() if is_folder)

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        return self.size(name) is not None

    def read(self, name: str) -> bytes:
        """Read a whole file.  Raises: FileNotFoundError."""
        with self._stream(name) as file:
            return file.read()

    def read_if_there(self, name: str) -> bytes:
        """Read a whole file; b"" if it does not exist."""
        with suppress(FileNotFoundError):
            return self.read(name)
        return b""

    def hash(self, name: str) -> str:
        """Compute the xxh3-128 of a file.  Raises: FileNotFoundError."""
        digest = xxhash.xxh3_128()
        with self._stream(name) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                self.on_bytes(0, len(block))
        return digest.hexdigest()

    def free_bytes(self) -> int | None:
        """Return the free space; None if the storage does not report it."""
        return None


Location: TypeAlias = "str | Path | Folder"


def folder_at(location: Location) -> Folder:
    """Return the folder of a path, or of an fsspec URL such as s3://bucket/run.

    Raises: ValueError: the protocol is unknown, or its package is not installed; the message says which.
    """
    if isinstance(location, Folder):
        return location
    if "://" not in str(location):
        return LocalFolder(Path(location))
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(str(location))
    except (ValueError, ImportError, TypeError) as error:  # TypeError: without the host that its system needs
        raise ValueError(f"{location} cannot be used: {error}") from error
    if type(system).__name__ == "LocalFileSystem":  # file://
        return LocalFolder(Path(path))
    return RemoteFolder(_Library(system), path.rstrip("/"))


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A directory of a file system.  Raises: ValueError: the path is a URL."""

    path: Path

    def __post_init__(self) -> None:
        if found := _URL.match(str(self.path)):  # show only this part: the rest may contain a password
            raise ValueError(f"copy it here first: only local directories are read here, not a URL of {found[1]}://")

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        return replace(self, path=self.path / name)

    @property
    def parent(self) -> LocalFolder:
        return replace(self, path=self.path.parent)

    @property
    def is_link(self) -> bool:
        return self.path.is_symlink()

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def _entries(self) -> list[tuple[str, bool]]:
        try:
            with os.scandir(self.path) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(entry.name, entry.is_dir()) for entry in found]  # an error of one entry is not an empty folder

    def size(self, name: str) -> int | None:
        try:
            found = (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):  # other errors do not mean that the file is missing
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def create(self, name: str) -> Output:
        self._note(name)
        return _LocalOutput(self.path / name, self.check_lock)

    def create_new(self, name: str, data: bytes) -> bool:
        with suppress(FileExistsError), (self.path / name).open("xb") as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:  # such as of a full disk
                (self.path / name).unlink(missing_ok=True)
                raise
        return self.read_if_there(name) == data  # it may have been removed since

    def open(self, name: str) -> ReadBytes:
        path = self.path / name
        mapped = _NOTHING
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size:
                mapped = _read_only(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return lambda start, stop: mapped[start:stop]

    def _stream(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb", buffering=0)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_empty(self) -> None:
        with suppress(OSError):  # it is not empty
            self.path.rmdir()

    def free_bytes(self) -> int | None:
        with suppress(OSError):
            return shutil.disk_usage(self.path).free
        return None


def _read_only(data: mmap.mmap) -> Tensor:
    """Map bytes as a tensor.  Linux refuses writable mappings larger than memory, even private ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)


class _LocalOutput(Output):
    def __init__(self, path: Path, check_lock: CheckLock) -> None:
        self._path, self._started = path, 0
        self._partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
        super().__init__(self._partial.open("xb"), check_lock)

    def _append(self, data: bytes | memoryview) -> None:
        super()._append(data)
        grown = self.bytes - self._started
        if grown >= _WRITE_BYTES and hasattr(os, "posix_fadvise"):
            # The advice that pages are not needed lets the disk begin to write now, not when `finish` waits for it.
            self._file.flush()
            with suppress(OSError):  # a file system may not support the advice
                os.posix_fadvise(self._file.fileno(), self._started, grown, os.POSIX_FADV_DONTNEED)
            self._started = self.bytes

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _publish(self) -> None:
        self._partial.replace(self._path)
        with suppress(OSError):  # makes the rename durable, if the system can
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def abandon(self) -> None:
        with suppress(OSError):
            self._file.close()  # may try once more to write what the disk refused
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Library:
    """A file system or file of fsspec.  Its libraries have their own errors; here every method raises only OSError."""

    wrapped: Any

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # copy and pickle ask an object that has no attributes yet
            raise AttributeError(name)
        method = getattr(self.wrapped, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except OSError:
                raise
            except Exception as error:  # such as botocore's NoCredentialsError
                raise OSError(f"the storage refuses: {error} ({type(error).__name__})") from error

        return call


@dataclass(frozen=True)
class RemoteFolder(Folder):
    """A prefix of an fsspec file system."""

    system: _Library
    path: str  # without the protocol

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    def child(self, name: str) -> RemoteFolder:
        return replace(self, path=self._at(name))

    @property
    def parent(self) -> RemoteFolder:
        return replace(self, path=self.path.rpartition("/")[0])

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def make(self) -> None:
        """Create the folders, if the storage has folders.  Object stores have none, and their paths begin with a
        bucket's name.

        The bucket is never created, because that would hide a typo in its name.
        """
        if self.path.startswith("/"):
            with suppress(FileExistsError):
                self.system.makedirs(self.path, exist_ok=True)

    def _entries(self) -> list[tuple[str, bool]]:
        self.system.invalidate_cache(self.path)
        try:
            entries = self.system.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        paths = {entry["name"].rstrip("/"): entry["type"] == "directory" for entry in entries}
        own = self.path.lstrip("/")  # some stores list the folder itself
        return [(path.rsplit("/", 1)[-1], is_folder) for path, is_folder in paths.items() if path.lstrip("/") != own]

    def size(self, name: str) -> int | None:
        self.system.invalidate_cache(self.path)
        try:
            found = self.system.info(self._at(name))
        except FileNotFoundError:
            return None
        return None if found["type"] == "directory" else int(found["size"])

    def create(self, name: str) -> Output:
        self._note(name)
        file = self.system.open(self._at(name), "wb", autocommit=False, block_size=_PART_BYTES)
        return _RemoteOutput(_Library(file), self.check_lock)  # type: ignore[arg-type]

    def create_new(self, name: str, data: bytes) -> bool:
        with suppress(FileExistsError):  # also where a repeated request finds what the first one wrote
            self.system.pipe_file(self._at(name), data, mode="create")
        return self.read_if_there(name) == data  # it may have been removed since

    def open(self, name: str) -> ReadBytes:
        path = self._at(name)
        if not self.has(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

        def read(start: int, stop: int) -> Tensor:
            data = self.system.cat_file(path, start=start, end=stop) if start < stop else b""
            return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING

        return read

    def read(self, name: str) -> bytes:
        return bytes(self.system.cat_file(self._at(name)))

    def _stream(self, name: str) -> BinaryIO:
        file: BinaryIO = self.system.open(self._at(name), "rb", block_size=_READ_BYTES)
        return file

    def _remove(self, names: Sequence[str]) -> None:
        there = names if len(names) < 2 else sorted(set(names).intersection(self.files()))
        if there:
            with suppress(FileNotFoundError):
                self.system.rm([self._at(name) for name in there])

    def remove_empty(self) -> None:
        with suppress(Exception):  # it is not empty, or the storage has only files
            self.system.rmdir(self.path)


class _RemoteOutput(Output):
    _file: Any  # a `_Library`

    def _flush(self) -> None:
        self._file.close()

    def _publish(self) -> None:
        self._file.commit()

    def abandon(self) -> None:
        with suppress(Exception):  # errors of abandoning an upload do not matter
            self._file.discard()
        with suppress(Exception):
            self._file.wrapped.closed = True  # otherwise its destructor would try to finish it
