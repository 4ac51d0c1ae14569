"""Writes token files: the `.bin`/`.idx` pair that `indexed` describes and reads, and its identity file.

Invariant: a pair under its final name is complete.  The writer uses its own `.partial` names and renames the files at
the end, `.idx` last.  A lock on `.idx.partial`, which stays empty, refuses a second writer.  On a file system without
locks, both write, each to its own files.
"""

import glob
import os
import secrets
from array import array
from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import DTypeLike, NDArray

from megazero.data.identity import identity_path, read_identity, write_identity
from megazero.data.indexed import DTYPE_OF_CODE, HEADER, MAGIC, VERSION, pair_paths


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest dtype for ids of a vocabulary: uint16 if every id fits (vocab_size <= 65536), else int32.

    Source: Megatron's `DType.optimal_dtype`, which already changes to int32 at 65,500. The header names the dtype, so
    either reader reads either file.
    """
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")


class IndexedWriter:
    """Writes a `.bin`/`.idx` pair, document by document; a context manager.

    Leaving the block renames the files to their final names; leaving it by an exception removes them.  A killed process
    leaves at most `.partial` files, which the next writer removes.

    Args:
        prefix: path of the pair without `.bin` or `.idx`; its directory is created if missing.
        dtype: integer dtype of the stored ids (see `token_dtype`).
        tokenizer: fingerprint of the tokenizer of the ids, if known.

    Raises:
        FileExistsError: another process is writing this pair.

    Attributes:
        paths: every file that it writes, under its final and its partial names.

    Source: Megatron-LM, indexed_dataset.py (`IndexedDatasetBuilder`).
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike, tokenizer: str = "") -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, name in DTYPE_OF_CODE.items() if np.dtype(name) == self.dtype]
        if not codes:
            raise ValueError(f"dtype {np.dtype(dtype).name} cannot hold token ids here; use uint16 or int32")
        self._code, self._tokenizer = codes[0], tokenizer
        self._bin_path, self._idx_path = pair_paths(prefix)
        self._identity_path = identity_path(prefix)
        finals = (self._bin_path, self._identity_path, self._idx_path)  # in the order in which they are renamed
        own = secrets.token_hex(4)
        self._partials = {path: path.with_name(f"{path.name}.{own}.partial") for path in finals}
        self._lock_path = self._idx_path.with_name(f"{self._idx_path.name}.partial")
        self.paths = (*self._partials, *self._partials.values(), self._lock_path)
        self._sizes = array("i")
        self._bin: BufferedWriter | None = None
        self._lock: FileLock | None = None

    def __enter__(self) -> Self:
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._lock_path)
        for path in self._partials if self._lock else ():  # left by a writer that was killed
            for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"):
                left.unlink(missing_ok=True)
        self._bin = self._partials[self._bin_path].open("wb")
        return self

    def add_documents(self, tokens: NDArray[Any], lengths: Sequence[int]) -> None:
        """Append documents that lie end to end: ids [sum of `lengths`] of the writer's own dtype.  Raises: ValueError."""
        assert self._bin is not None, "add_documents belongs inside the writer's `with` block"
        if tokens.dtype != self.dtype or tokens.shape != (sum(lengths),):
            got = f"{list(tokens.shape)} of {tokens.dtype}"
            raise ValueError(f"documents of {sum(lengths):,} ids of {self.dtype}, got {got}")
        self._bin.write(np.ascontiguousarray(tokens).data)
        self._sizes.extend(lengths)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        assert self._bin is not None
        try:
            with self._bin as bin_file:
                if error is None:
                    self._publish(bin_file)
        finally:
            self._bin = None
            for path in (*self._partials.values(), self._lock_path):  # still locked
                path.unlink(missing_ok=True)
            if self._lock is not None:
                self._lock.release()

    def _publish(self, bin_file: BufferedWriter) -> None:
        sizes = np.array(self._sizes, "<i4")
        pointers = np.zeros(len(sizes), "<i8")
        np.cumsum(sizes[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self.dtype.itemsize
        document_indices = np.arange(len(sizes) + 1, dtype="<i8")
        flush_to_disk(bin_file)
        bin_path, own_identity, idx_path = self._partials.values()
        with idx_path.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(document_indices)))
            for values in (sizes, pointers, document_indices):
                file.write(values.data)
            flush_to_disk(file)
        write_identity(own_identity, read_identity(bin_path, idx_path, self.dtype, self._tokenizer))
        # An old index or identity must never describe new tokens, so they go first, and the new index comes last.
        self._idx_path.unlink(missing_ok=True)
        self._identity_path.unlink(missing_ok=True)
        for path, partial in self._partials.items():
            partial.replace(path)


def _locked(path: Path) -> FileLock | None:
    """Lock a file until the process ends; None if the file system has no locks.  Raises: FileExistsError: it is locked."""
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        hint = "wait until it ends, or name another output"
        raise FileExistsError(f"another process is writing {path}; {hint}") from None
    except (OSError, NotImplementedError):
        return None
    return lock


def flush_to_disk(file: BufferedWriter) -> None:
    """Make sure that everything written so far survives a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())
