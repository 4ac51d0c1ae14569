"""Token files on disk: Megatron's `.bin`/`.idx` pair, memory-mapped.

    prefix.bin   | sequence 0 | sequence 1 | sequence 2 | ...        ids end to end, nothing between them
    prefix.idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | document indices u64
                 | sizes int32[sequences] | pointers int64[sequences] | document indices int64[documents + 1]

Sizes are in tokens, pointers in bytes, document indices in sequences (the last one is the number of sequences).  All
are little-endian.  Our `writer` writes each document as one sequence.  Multimodal files end with one byte per sequence,
which is not read.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py (`_IndexWriter`, `_IndexReader`).
"""

import os
import struct
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megazero.data.sealed import LFS_HINT, LFS_POINTER

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices: 34 bytes

# Codes 6 and 7 are float64 and float32 in the source, which hold no ids.
DTYPE_OF_CODE: Final = MappingProxyType({1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_CHECKED_AT_ONCE: Final = 1 << 20  # sequences or documents


def pair_paths(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the `.bin` and `.idx` paths of a prefix."""
    name = os.fspath(prefix)
    return Path(f"{name}.bin"), Path(f"{name}.idx")


@dataclass(frozen=True, eq=False)
class DocumentBorders:
    """Where the documents of a token stream start.

    Looked up in the memory-mapped arrays of an index, which are never read as a whole.

        documents     0        1    2 (empty)  3
        indices       0        2    3          3        the first sequence of each; the last index is their number
        sequences     |  s0 s1 | s2 |          | s3 |

    Results are correct for every index that passes `IndexedDataset.check_layout`.
    """

    pointers: NDArray[np.int64]  # [sequences], bytes
    document_indices: NDArray[np.int64]  # [documents + 1], sequences
    token_bytes: int
    tokens: int  # of the whole stream

    def __len__(self) -> int:
        return len(self.document_indices) - 1

    def start(self, document: int) -> int:
        """Return the token at which a document starts.  An empty document starts where the next one does."""
        sequence = int(self.document_indices[document])
        return int(self.pointers[sequence]) // self.token_bytes if sequence < len(self.pointers) else self.tokens

    def lengths(self, start: int, stop: int) -> list[int]:
        """Return the lengths of the documents, or parts of documents, within tokens [start, stop).  All are > 0.

        Reads O(log documents) entries of the index, and the entries of the documents that start in between.
        """
        first = bisect_right(range(len(self)), start, key=self.start)
        last = bisect_left(range(len(self)), stop, lo=first, key=self.start)
        # An empty document at the end has no sequence, but does not start before `stop`.
        starts = self.pointers[self.document_indices[first:last]] // self.token_bytes
        lengths = np.diff(starts, prepend=start, append=stop)
        return [length for length in lengths.tolist() if length]  # without empty documents


class IndexedDataset:
    """The sequences of one `.bin`/`.idx` pair, read through a memory map.  `prefix` is its path without `.bin` or
    `.idx`.

    Attributes:
        dtype: of the stored ids.
        sizes: int32 [sequences], tokens of each sequence.
        document_indices: int64 [documents + 1], the sequence at which each document starts, then the number of
            sequences.
        tokens: [total tokens] of `dtype`, all sequences end to end, read-only.
        borders: of the documents in `tokens`.
        stats: file status of the mapped `.bin` and `.idx`; the files under these names may have been replaced since.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: the index has another format, or a file is shorter or longer than the index says.

    Source: Megatron-LM, indexed_dataset.py (`IndexedDataset`).
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        bin_path, idx_path = pair_paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                name, suffix = os.path.splitext(self.prefix)
                is_file = suffix in (".bin", ".idx")
                hint = f"; name it by its prefix, {name}" if is_file and os.path.exists(f"{name}.idx") else ""
                name, missing = (name, self.prefix) if is_file else (self.prefix, path)
                rule = f"a token source is a pair {name}.bin and {name}.idx, which `megazero data "
                rule += f"tokenize TEXT --out {name} --tokenizer FILE` writes, or a file of token ids"
                raise FileNotFoundError(f"no {missing}: {rule}{hint}")
        with bin_path.open("rb") as bin_file, idx_path.open("rb") as idx_file:
            for file in (bin_file, idx_file):
                if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
                    raise ValueError(f"{file.name} is {LFS_HINT}")
            self.stats = (os.fstat(bin_file.fileno()), os.fstat(idx_file.fileno()))
            self._map(bin_file, idx_file)

    def _map(self, bin_file: BufferedReader, idx_file: BufferedReader) -> None:
        bin_path = bin_file.name
        self.dtype, self.sizes, self._pointers, self.document_indices = _read_index(idx_file)
        # Where the last sequence ends.
        expected = int(self._pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0
        found = self.stats[0].st_size
        if len(self) and found != expected:
            # The pointers of a tool that counts in int32 wrap at 2^31.  The lengths reveal this, and are correct in
            # these files alone.
            ends = np.cumsum(self.sizes, dtype=np.int64) * self.dtype.itemsize
            if ends[-1] == found and not np.any((ends[:-1] - self._pointers[1:]) % 2**32):
                self._pointers, expected = np.concatenate([[0], ends[:-1]]), found
        if found != expected:
            fault = "truncated" if found < expected else "longer than its index says"
            sizes = f"{expected:,} bytes for {len(self):,} sequences of {self.dtype.name}, found {found:,}"
            raise ValueError(f"{bin_path} is {fault}: expected {sizes}; copy the pair again or tokenize again")
        # An empty file cannot be mapped.
        ids = np.memmap(bin_file, dtype=self.dtype, mode="r") if found else np.empty(0, self.dtype)
        self.tokens: NDArray[Any] = np.asarray(ids)
        self.borders = DocumentBorders(self._pointers, self.document_indices, self.dtype.itemsize, len(self.tokens))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> NDArray[Any]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {self.prefix}, which has {len(self):,}")
        start = int(self._pointers[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[i])]

    def check_layout(self) -> None:
        """Check that the sequences lie end to end and the documents are in order.  Reads the whole index.

        Raises: ValueError: they are not.
        """
        faults = f"{self.prefix}.idx is damaged:"
        if len(self) and self._pointers[0] != 0:
            raise ValueError(f"{faults} its sequences start at byte {self._pointers[0]:,} instead of 0")
        for at in range(0, len(self), _CHECKED_AT_ONCE):
            sizes = self.sizes[at : at + _CHECKED_AT_ONCE].astype(np.int64)
            pointers = self._pointers[at : at + len(sizes) + 1]
            ends = pointers[: len(sizes)] + sizes * self.dtype.itemsize
            if np.any(sizes < 0) or np.any(pointers[1:] != ends[: len(pointers) - 1]):
                where = f"sequences {at:,} to {at + len(sizes):,}"
                raise ValueError(f"{faults} {where} do not lie end to end; tokenize again, or copy the pair again")
        if self.document_indices[0] != 0:
            raise ValueError(f"{faults} its documents start at sequence {self.document_indices[0]:,} instead of 0")
        for at in range(0, len(self.document_indices), _CHECKED_AT_ONCE):
            documents = self.document_indices[at : at + _CHECKED_AT_ONCE + 1]
            if np.any(documents[1:] < documents[:-1]):
                where = f"documents {at:,} to {at + len(documents):,}"
                raise ValueError(f"{faults} {where} are not in the order of their sequences; tokenize again")


def _read_index(file: BufferedReader) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Read (dtype, sizes, pointers, document indices).  Raises: ValueError: they contradict each other."""
    path, found = file.name, os.fstat(file.fileno()).st_size
    if found < HEADER.size:
        raise ValueError(f"{path} is truncated: the header takes {HEADER.size} bytes, found {found}")
    raw = np.memmap(file, dtype=np.uint8, mode="r")
    magic, version, code, sequences, documents = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise ValueError(f"{path} is no token index: expected it to start with {MAGIC!r}, found {magic!r}")
    if version != VERSION:
        raise ValueError(f"{path} has index version {version}; this reader knows version {VERSION}")
    if code not in DTYPE_OF_CODE:
        known = ", ".join(f"{k} ({np.dtype(v).name})" for k, v in DTYPE_OF_CODE.items())
        raise ValueError(f"{path} has dtype code {code}; token ids have one of {known}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if found not in (expected, expected + sequences):  # multimodal files have one mode byte per sequence
        counted = f"{sequences:,} sequences and {documents:,} document indices"
        raise ValueError(f"{path} is damaged: {counted} take {expected:,} bytes, found {found:,}")
    # The arrays start at byte 34, so they are unaligned, which numpy supports.
    sizes = np.ndarray(sequences, "<i4", raw.data, HEADER.size)
    pointers = np.ndarray(sequences, "<i8", raw.data, HEADER.size + 4 * sequences)
    document_indices = np.ndarray(documents, "<i8", raw.data, HEADER.size + 12 * sequences)
    if not documents or document_indices[-1] != sequences:
        ends = f"documents end at sequence {document_indices[-1]:,}" if documents else "documents have no borders"
        raise ValueError(f"{path} is damaged: its {ends}, its sequences end at {sequences:,}")
    return np.dtype(DTYPE_OF_CODE[code]), sizes, pointers, document_indices
