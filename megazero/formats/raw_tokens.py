"""Converts raw files of token ids to pairs in the cache, once.  Documents end where the format or the tokenizer ends them.

    name.bin    nanoGPT: ids alone, 16 bits    llm.c: 1,024 bytes of header, whose first number says how wide ids are
    name.npy    OLMo: ids alone                numpy: a header with the type
    name.ds     datatrove: ids alone, and name.ds.index with the ends of documents

Where the format does not tell, ids have 16 bits if the tokenizer's vocabulary fits, else 32.
Sources: karpathy/nanoGPT, data/openwebtext/prepare.py; karpathy/llm.c, dev/data/data_common.py; allenai/OLMo,
olmo/data/memmap_dataset.py; huggingface/datatrove, pipeline/tokens/tokenizer.py (`TokenizedFile`).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from megazero.data.identity import locked
from megazero.data.tokenizer import Tokenizer
from megazero.data.writer import IndexedWriter, token_dtype

_LLM_C: Final = {20240520: "<u2", 20240801: "<u4"}  # by the first number of the header
_AT_ONCE: Final = 1 << 24  # ids


def pair_of(path: Path, cache_dir: str | os.PathLike[str], tokenizer: Tokenizer, log: Callable[[str], None]) -> Path:
    """Return the prefix of a pair with the tokens of a raw file.  Write the pair if the cache does not have it.

    Args:
        path: the raw file.
        cache_dir: directory for the pair.
        tokenizer: the tokenizer of the tokens, whose end-of-document token separates documents.
        log: prints a line on the terminal.

    Raises:
        ValueError: the file is damaged or has another format.
        OSError: the file cannot be read, or the cache cannot be written.
    """
    files = [file for file in (path, Path(f"{path}.index")) if file.exists()]
    state = path.absolute(), tokenizer.fingerprint, [(stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, files)]
    prefix = Path(cache_dir) / f"{path.name}-{xxhash.xxh3_64_hexdigest(repr(state).encode())}"
    with locked(prefix, "token files are kept as pairs", log):
        if not all(Path(f"{prefix}.{end}").exists() for end in ("bin", "idx")):
            tokens = _ids_of(path, tokenizer)
            log(f"writing {path}, {len(tokens):,} tokens, as {prefix}.bin and .idx, once")
            _write(prefix, tokens, _ends_of(path, tokens, tokenizer.eod_id))
    return prefix


def _ids_of(path: Path, tokenizer: Tokenizer) -> NDArray[Any]:
    with path.open("rb") as file:
        start = file.read(12).ljust(12)
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: it should hold token ids")
    if start.startswith(b"\x93NUMPY"):
        ids: NDArray[Any] = np.load(path, mmap_mode="r").reshape(-1)
    else:
        magic, _, stated = np.frombuffer(start, "<i4").tolist()
        dtype, header = (_LLM_C[magic], 1024) if magic in _LLM_C else (token_dtype(tokenizer.vocab_size).str, 0)
        found = (path.stat().st_size - header) / np.dtype(dtype).itemsize
        if found != (stated if header else int(found)):
            cure = f"its header says {stated:,}" if header else "or name its data.tokenizer"
            raise ValueError(f"{path} is cut: it has {found:,g} tokens of {dtype}; copy it again, {cure}")
        ids = np.memmap(path, dtype, "r", header)
    if ids.dtype not in ("<u2", "<i4", "<u4"):
        raise ValueError(f"{path} holds {ids.dtype}; token ids are uint16, uint32 or int32")
    return ids


def _ends_of(path: Path, tokens: NDArray[Any], eod: int) -> NDArray[np.int64]:
    """Return the end of each document: one past its last token."""
    if (index := Path(f"{path}.index")).exists():
        ends = np.fromfile(index, "<i8")
    else:
        starts = range(0, len(tokens), _AT_ONCE)
        found = [np.flatnonzero(tokens[start : start + _AT_ONCE] == eod) + start + 1 for start in starts]
        ends = np.unique(np.concatenate([*found, [len(tokens)]]))
    lengths = np.diff(ends, prepend=0)
    if [*ends[-1:]] != [len(tokens)] or lengths.min(initial=0) < 0 or lengths.max(initial=0) >= 2**31:
        where = f"the documents of {index}" if index.exists() else f"documents that end with id {eod}"
        raise ValueError(f"{where} do not fit {path} of {len(tokens):,} tokens; is data.tokenizer its own?")
    return ends


def _write(prefix: Path, tokens: NDArray[Any], ends: NDArray[np.int64]) -> None:
    dtype, start = np.dtype("<u2" if tokens.dtype.itemsize == 2 else "<i4"), 0
    with IndexedWriter(prefix, dtype) as writer:
        for some in np.split(ends, np.flatnonzero(np.diff(ends // _AT_ONCE)) + 1):
            lengths = np.diff(some, prepend=start)
            writer.add_documents(tokens[start : some[-1]].astype(dtype), lengths[lengths > 0].tolist())
            start = int(some[-1])
