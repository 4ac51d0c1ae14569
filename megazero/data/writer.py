"""Writing token files: the `.bin`/`.idx` pair that `indexed` describes and reads.

Invariant: a pair under its final name is whole.  The writer uses `.partial` names and renames at the end, `.idx` last.
"""

import os
from array import array
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megazero.data.indexed import DTYPE_OF_CODE, HEADER, MAGIC, VERSION, pair_paths

_LARGEST_SEQUENCE: Final = 2**31 - 1  # sizes are int32


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype for ids of a vocabulary: uint16 while every id fits (vocab_size <= 65536), else int32.

    Source: Megatron's `DType.optimal_dtype`, which already changes to int32 at 65,500. The header names the dtype,
    so either reader reads either file.
    """
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")


class IndexedWriter:
    """Writes a `.bin`/`.idx` pair, document by document; a context manager.

    Leaving the block renames the files into place; leaving it by an exception removes them. A process that is killed
    leaves at most `.partial` files, which the next writer overwrites.

    Args:
        prefix: path of the pair without `.bin` or `.idx`; its directory is made when missing.
        dtype: integer dtype of the stored ids (see `token_dtype`).

    Source: Megatron-LM, indexed_dataset.py (`IndexedDatasetBuilder`).
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, name in DTYPE_OF_CODE.items() if np.dtype(name) == self.dtype]
        if not codes:
            raise ValueError(f"dtype {np.dtype(dtype).name} cannot hold token ids here; use uint16 or int32")
        self._code = codes[0]
        self._bin_path, self._idx_path = pair_paths(prefix)
        self._sizes = array("i")
        self._bin: BufferedWriter | None = None

    def __enter__(self) -> Self:
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin = _partial(self._bin_path).open("wb")
        return self

    def add_document(self, tokens: NDArray[Any]) -> None:
        """Append one document, [length] integer ids that `dtype` can hold, at most 2**31 - 1.  Raises: ValueError."""
        if self._bin is None:
            raise RuntimeError("add_document belongs inside the writer's `with` block")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"a document is one row of integer ids, got shape {tokens.shape} of {tokens.dtype}")
        if len(tokens) > _LARGEST_SEQUENCE:
            raise ValueError(f"a document of {len(tokens):,} tokens; the format counts up to {_LARGEST_SEQUENCE:,}")
        if tokens.dtype != self.dtype and len(tokens):
            low, high, fits = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype)
            if low < fits.min or high > fits.max:
                raise ValueError(f"ids {low} to {high} do not fit {self.dtype.name} ({fits.min} to {fits.max})")
        self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._sizes.append(len(tokens))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._bin is not None
        try:
            if kind is None:
                self._publish(self._bin)
        finally:
            self._bin.close()
            self._bin = None
            for path in (self._bin_path, self._idx_path):
                _partial(path).unlink(missing_ok=True)

    def _publish(self, bin_file: BufferedWriter) -> None:
        sizes = np.array(self._sizes, "<i4")
        pointers = np.zeros(len(sizes), "<i8")
        np.cumsum(sizes[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self.dtype.itemsize
        document_indices = np.arange(len(sizes) + 1, dtype="<i8")
        _sync(bin_file)
        with _partial(self._idx_path).open("wb") as idx_file:
            idx_file.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(document_indices)))
            for values in (sizes, pointers, document_indices):
                idx_file.write(values.data)
            _sync(idx_file)
        # An old index must never describe new tokens, so it goes first and the new one comes last.
        self._idx_path.unlink(missing_ok=True)
        _partial(self._bin_path).replace(self._bin_path)
        _partial(self._idx_path).replace(self._idx_path)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _sync(file: BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())
