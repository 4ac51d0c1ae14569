"""Tokenizing text files into one `.bin`/`.idx` pair, in several processes.

    files, sorted  ->  pieces (path, start, stop)  ->  workers tokenize  ->  one writer, in the order of the pieces
                       a text file is one piece        any of them           so the output does not depend on the
                       a .jsonl is cut by bytes                              number of workers

A line of a `.jsonl` belongs to the piece in which it starts. Every document ends with the tokenizer's
end-of-document id; an empty document is left out.
"""

import functools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megazero.data.tokenizer import load_tokenizer
from megazero.data.writer import IndexedWriter, token_dtype

_PIECE_BYTES: Final = 4 << 20
_PENDING_PER_WORKER: Final = 4  # bounds memory if the first piece is slow


_Tokenized: TypeAlias = tuple[NDArray[Any], list[int]]  # documents end to end, and the tokens of each


class TokenizeSummary(NamedTuple):
    """What `tokenize_files` wrote: documents, tokens (end-of-document ids included), input bytes, wall seconds."""

    documents: int
    tokens: int
    bytes: int
    seconds: float


class Piece(NamedTuple):
    """A part of one input file that one worker reads: bytes `start` to `stop`."""

    path: str
    start: int
    stop: int


def tokenize_files(
    inputs: Sequence[str | os.PathLike[str]],
    out_prefix: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *,
    workers: int = 1,
    jsonl_key: str = "text",
    eod_token: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TokenizeSummary:
    """Tokenize text and `.jsonl` files into `out_prefix`.bin and .idx.

    Args:
        inputs: files and directories, in the order of the output; directories are walked in sorted order, without names
            that start with a dot. A `.jsonl` holds a document on each line, any other file is one document in UTF-8.
        out_prefix: path of the pair to write; it appears, or is replaced, when all is done.
        tokenizer, eod_token: arguments of `load_tokenizer`; every worker loads its own.
        workers: processes that tokenize; 1 works in this one.
        jsonl_key: the field of a line that holds its text.
        on_progress: called in this process with (input bytes done, all input bytes) after each piece.

    Raises:
        FileNotFoundError: an input does not exist.
        ValueError: a file that is not UTF-8, a bad line (`file:line: why`), or nothing to write.
        RuntimeError: a worker died.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}; at least 1 process has to do the work")
    began = time.monotonic()
    pieces = cut_into_pieces(find_files(inputs))
    bytes_total = sum(piece.stop - piece.start for piece in pieces)
    dtype = token_dtype(load_tokenizer(os.fspath(tokenizer), eod_token).vocab_size)
    work = functools.partial(
        _tokenize_piece, tokenizer=os.fspath(tokenizer), eod_token=eod_token, jsonl_key=jsonl_key, dtype=dtype.str
    )
    documents = tokens = bytes_done = 0
    with closing(_in_order(work, pieces, workers)) as results, IndexedWriter(out_prefix, dtype) as writer:
        for piece, (ids, lengths) in zip(pieces, results, strict=True):
            for document in np.split(ids, np.cumsum(lengths)[:-1]) if lengths else ():
                writer.add_document(document)
            documents += len(lengths)
            tokens += len(ids)
            bytes_done += piece.stop - piece.start
            if on_progress is not None:
                on_progress(bytes_done, bytes_total)
        if not documents:
            raise ValueError(f"no text in {len(pieces):,} files under {[os.fspath(i) for i in inputs]}")
    return TokenizeSummary(documents, tokens, bytes_total, time.monotonic() - began)


def find_files(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of `inputs`; a directory stands for its files in sorted order.  Raises: FileNotFoundError."""
    files: list[Path] = []
    for entry in map(Path, inputs):
        if entry.is_dir():
            found = []
            for directory, names, inside in os.walk(entry):
                names[:] = [name for name in names if not name.startswith(".")]
                found += [Path(directory, name) for name in inside if not name.startswith(".")]
            files += sorted(found)
        elif entry.exists():
            files.append(entry)
        else:
            raise FileNotFoundError(f"no file or directory {entry} to tokenize")
    if not files:
        raise FileNotFoundError(f"no files to tokenize in {[os.fspath(entry) for entry in inputs]}")
    return files


def cut_into_pieces(files: Sequence[Path], piece_bytes: int = _PIECE_BYTES) -> list[Piece]:
    """Cut each `.jsonl` into ranges of `piece_bytes`; other files stay whole. Their order is the output's order."""
    pieces = []
    for file in files:
        size = file.stat().st_size
        step = piece_bytes if file.suffix == ".jsonl" else max(size, 1)
        pieces += [Piece(str(file), start, min(start + step, size)) for start in range(0, size, step)]
    return pieces


def _in_order(
    work: Callable[[Piece], _Tokenized], pieces: Sequence[Piece], workers: int
) -> Generator[_Tokenized, None, None]:
    """`map(work, pieces)` over processes: results in the order of the pieces, a bounded number at a time."""
    if workers == 1:
        yield from map(work, pieces)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Spawned, because the caller may have threads; and no multiprocessing.Pool, which hangs when a worker is killed.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = deque(pool.submit(work, piece) for piece in pieces[: workers * _PENDING_PER_WORKER])
        try:
            for following in [*pieces[len(pending) :], *[None] * len(pending)]:
                yield pending.popleft().result()
                if following is not None:
                    pending.append(pool.submit(work, following))
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"one of {workers} tokenizing processes died, perhaps for lack of memory; nothing was written; "
                "try again with fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_tokenizer_of_process = functools.cache(load_tokenizer)


def _tokenize_piece(piece: Piece, tokenizer: str, eod_token: str | None, jsonl_key: str, dtype: str) -> _Tokenized:
    encoder = _tokenizer_of_process(tokenizer, eod_token)
    end = np.array([encoder.eod_id], np.int32)
    parts: list[NDArray[np.int32]] = [end[:0]]
    lengths: list[int] = []
    key = jsonl_key if piece.path.endswith(".jsonl") else None
    for offset, content in [(0, Path(piece.path).read_bytes())] if key is None else _lines(piece):
        try:
            text = _text_of(content, key)
            if not text:
                continue
            ids = encoder.encode(text)
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise ValueError(f"{_where(piece, offset)}: text that UTF-8 cannot hold: {error}") from None
        except ValueError as error:
            raise ValueError(f"{_where(piece, offset)}: {error}") from error
        parts += [ids, end]
        lengths.append(len(ids) + 1)
    return np.concatenate(parts).astype(dtype), lengths


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that start in a piece, blank ones left out."""
    with open(piece.path, "rb") as file:
        if piece.start:
            # From one byte before: a line that starts exactly at `start` is this piece's own.
            file.seek(piece.start - 1)
            file.readline()
        while (offset := file.tell()) < piece.stop and (line := file.readline()):
            if line.strip():
                yield offset, line


def _where(piece: Piece, offset: int) -> str:
    """The name of a document in errors."""
    if not piece.path.endswith(".jsonl"):
        return piece.path
    with open(piece.path, "rb") as file:
        lines_before = file.read(offset).count(b"\n")
    return f"{piece.path}:{lines_before + 1}"


def _text_of(content: bytes, key: str | None) -> str:
    """The text of a line of JSON, in its field `key`, or of a whole file without a key."""
    if key is None:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not a UTF-8 text file: {error}") from None
    try:
        record = json.loads(content)
    except ValueError as error:  # also covers bytes that are no UTF-8
        raise ValueError(f"not a line of JSON: {error}") from None
    if not isinstance(record, dict) or key not in record:
        found = f"the keys {sorted(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ValueError(f"no {key!r} in it, found {found}; name the field with jsonl_key")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{key!r} must be a string, found a {type(text).__name__}")
    return text
