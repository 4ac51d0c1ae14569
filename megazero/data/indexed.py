"""Token files on disk: Megatron's `.bin`/`.idx` pair, memory-mapped.

    prefix.bin   | sequence 0 | sequence 1 | sequence 2 | ...        ids end to end, nothing between them
    prefix.idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | document indices u64
                 | sizes int32[sequences] | pointers int64[sequences] | document indices int64[documents + 1]

A size counts tokens, a pointer counts bytes, a document index counts sequences (the first is 0, the last is the
number of sequences). All numbers are little-endian. Here every document is one sequence; files from elsewhere may
hold several sequences to a document, and multimodal ones end with a byte per sequence, which is not read.

Invariant: a pair under its final name is whole. The writer works beside it and renames at the end, `.idx` last.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py (`_IndexWriter`, `_IndexReader`).
"""

import os
import struct
from array import array
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices: 34 bytes

# Codes 6 and 7 are float64 and float32 in the source: no ids are stored so.
_DTYPE_OF_CODE: Final = MappingProxyType({1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_LARGEST_SEQUENCE: Final = 2**31 - 1  # sizes are int32


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype for ids of a vocabulary: uint16 while every id fits (vocab_size <= 65536), else int32.

    Args:
        vocab_size: number of ids, which run from 0 to vocab_size - 1.

    Source: Megatron's `DType.optimal_dtype`, which already changes to int32 at 65,500. The header names the dtype,
    so either reader reads either file.
    """
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")


def pair_paths(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The `.bin` and `.idx` paths of a prefix."""
    name = os.fspath(prefix)
    return Path(f"{name}.bin"), Path(f"{name}.idx")


@dataclass(frozen=True)
class _Index:
    dtype: np.dtype[Any]
    sizes: NDArray[np.int32]
    pointers: NDArray[np.int64]
    document_indices: NDArray[np.int64]

    @property
    def bin_bytes(self) -> int:
        """Where the last sequence ends."""
        if not len(self.sizes):
            return 0
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize


class IndexedDataset:
    """The sequences of one `.bin`/`.idx` pair, read through a memory map.

    Args:
        prefix: path of the pair without `.bin` or `.idx`.

    Attributes:
        sizes: int32 [sequences], tokens of each sequence.
        document_indices: int64 [documents + 1], the sequence at which each document starts, then the end.
        tokens: [total tokens] of `dtype`, all sequences end to end, read-only.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: not an index of this format, or a file is shorter or longer than the index says.

    Source: Megatron-LM, indexed_dataset.py (`IndexedDataset`).
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        bin_path, idx_path = pair_paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise FileNotFoundError(_missing(self.prefix, path))
        self._index = _read_index(idx_path)
        expected, found = self._index.bin_bytes, bin_path.stat().st_size
        if found != expected:
            fault = "truncated" if found < expected else "longer than its index says"
            raise ValueError(
                f"{bin_path} is {fault}: expected {expected:,} bytes for {len(self):,} sequences of "
                f"{self.dtype.name}, found {found:,}; copy the pair again or tokenize again"
            )
        # An empty file cannot be mapped.
        self.tokens: NDArray[Any] = (
            np.asarray(np.memmap(bin_path, dtype=self.dtype, mode="r")) if found else np.empty(0, self.dtype)
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored ids."""
        return self._index.dtype

    @property
    def sizes(self) -> NDArray[np.int32]:
        """Tokens of each sequence: int32 [sequences]."""
        return self._index.sizes

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """The sequence at which each document starts, then the number of sequences: int64 [documents + 1]."""
        return self._index.document_indices

    def __len__(self) -> int:
        return len(self._index.sizes)

    def __getitem__(self, i: int) -> NDArray[Any]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {self.prefix}, which has {len(self):,}")
        start = int(self._index.pointers[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[i])]


def _missing(prefix: str, path: Path) -> str:
    message = f"no {path}: a token source is a pair {prefix}.bin and {prefix}.idx"
    if prefix.endswith((".bin", ".idx")):
        message += f"; name it by its prefix, {prefix[:-4]}"
    return message


def _read_index(path: Path) -> _Index:
    found = path.stat().st_size
    if found < HEADER.size:
        raise ValueError(f"{path} is truncated: the header takes {HEADER.size} bytes, found {found}")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, sequences, documents = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise ValueError(f"{path} is no token index: expected it to start with {MAGIC!r}, found {magic!r}")
    if version != VERSION:
        raise ValueError(f"{path} has index version {version}; this reader knows version {VERSION}")
    if code not in _DTYPE_OF_CODE:
        known = ", ".join(f"{k} ({np.dtype(v).name})" for k, v in _DTYPE_OF_CODE.items())
        raise ValueError(f"{path} has dtype code {code}; token ids have one of {known}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if found not in (expected, expected + sequences):  # the latter: one multimodal mode byte for each sequence
        raise ValueError(
            f"{path} is damaged: {sequences:,} sequences and {documents:,} document indices take {expected:,} bytes, "
            f"found {found:,}"
        )
    # The arrays start at byte 34 and so are unaligned, which numpy reads as they are.
    sizes = np.ndarray(sequences, "<i4", raw.data, HEADER.size)
    pointers = np.ndarray(sequences, "<i8", raw.data, HEADER.size + 4 * sequences)
    document_indices = np.ndarray(documents, "<i8", raw.data, HEADER.size + 12 * sequences)
    if not documents or document_indices[-1] != sequences:
        last = int(document_indices[-1]) if documents else "none"
        raise ValueError(f"{path} is damaged: its documents end at sequence {last}, its sequences at {sequences}")
    return _Index(np.dtype(_DTYPE_OF_CODE[code]), sizes, pointers, document_indices)


class IndexedWriter:
    """Writes a `.bin`/`.idx` pair, document by document; a context manager.

    The files grow under `.partial` names. Leaving the block renames them into place; leaving it by an exception
    removes them. A process that is killed leaves at most `.partial` files, which the next writer overwrites.

    Args:
        prefix: path of the pair without `.bin` or `.idx`; its directory is made when missing.
        dtype: integer dtype of the stored ids (see `token_dtype`).

    Raises:
        ValueError: the format has no code for `dtype`.

    Source: Megatron-LM, indexed_dataset.py (`IndexedDatasetBuilder`).
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, name in _DTYPE_OF_CODE.items() if np.dtype(name) == self.dtype]
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
        """Append one document.

        Args:
            tokens: [length] integer ids.

        Raises:
            ValueError: not one row of integers, an id that `dtype` cannot hold, or more than 2**31 - 1 tokens.
            RuntimeError: called outside the `with` block.
        """
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
        _sync(bin_file)
        with _partial(self._idx_path).open("wb") as idx_file:
            self._write_index(idx_file)
            _sync(idx_file)
        # An old index must never describe new tokens, so it goes first and the new one comes last.
        self._idx_path.unlink(missing_ok=True)
        _partial(self._bin_path).replace(self._bin_path)
        _partial(self._idx_path).replace(self._idx_path)

    def _write_index(self, idx_file: BufferedWriter) -> None:
        sizes = np.array(self._sizes, "<i4")
        pointers = np.zeros(len(sizes), "<i8")
        np.cumsum(sizes[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self.dtype.itemsize
        document_indices = np.arange(len(sizes) + 1, dtype="<i8")
        idx_file.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(document_indices)))
        for values in (sizes, pointers, document_indices):
            idx_file.write(values.tobytes())


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _sync(file: BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())
