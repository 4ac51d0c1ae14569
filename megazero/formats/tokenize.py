"""Tokenizes text files to a `.bin`/`.idx` pair, in several processes.  It can be stopped at any moment and continued.

    files, sorted -> ranges -> shards --workers--> prefix.tokenizing/KEY.zip        --in order--> prefix.bin, .idx
                               a megabyte of       KEY is a hash of everything that decides a     the output depends on
                               text, or more       shard, so the next start finds finished ones   the inputs alone

Every document ends with the tokenizer's end-of-document id.  Empty documents are left out and counted.
"""

import functools
import os
import re
import secrets
import signal
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from zipfile import ZipFile

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter

from megazero.data.identity import identity_path
from megazero.data.indexed import pair_paths
from megazero.data.tokenizer import FileTokenizer, load_tokenizer
from megazero.data.writer import IndexedWriter, flush_to_disk, token_dtype
from megazero.formats.documents import FileRange, SkippedText, cut_files, documents_of, find_files, format_of
from megazero.settings import listed

_SHARDS: Final = 4096  # about so many, whose bytes are between these two powers of two
_SHARD_BITS: Final = (20, 28)
# A shard, as it is written today and as earlier versions wrote it.
_SHARD_FILE: Final = re.compile(r"([0-9a-f]{32})\.(?:zip|bin|lengths|json)(\.[0-9a-f]{8}\.partial)?")
_NAMED: Final = 20  # problems that a message names; the others are counted

T = TypeVar("T")
R = TypeVar("R")


class TokenizeSummary(NamedTuple):
    """The result of `tokenize_files`."""

    documents: int
    tokens: int  # end-of-document ids included
    bytes: int  # of input
    seconds: float
    notes: tuple[str, ...]  # what was decided and what was left out, with numbers and names


@dataclass(frozen=True)
class _Job:
    """The settings that decide the tokens of a text, and the folder for the shards."""

    folder: Path
    tokenizer: str
    eod_token: str | None
    fingerprint: str  # of the tokenizer
    dtype: str
    key: str  # of JSON lines or a `.parquet`

    def path(self, shard: "Shard") -> Path:
        return self.folder / f"{shard.key}.zip"


class Shard(NamedTuple):
    """Ranges of files that a worker tokenizes together."""

    key: str  # a hash: equal for equal text, tokenizer and settings
    ranges: tuple[FileRange, ...]
    states: tuple[tuple[int, int], ...]  # size and time of the file of each range, as they are part of the key

    @property
    def bytes(self) -> int:
        return sum(file_range.bytes for file_range in self.ranges)


@dataclass
class _Tokenized:
    """The result of a shard."""

    documents: int = 0
    tokens: int = 0
    unread: int = 0
    empty: int = 0
    is_final: bool = True  # False after an I/O error, which the next start may not meet
    named_unread: list[SkippedText] = field(default_factory=list)  # the first of them
    named_empty: list[SkippedText] = field(default_factory=list)


def tokenize_files(
    inputs: Sequence[str | os.PathLike[str]],
    out_prefix: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *,
    workers: int = 1,
    jsonl_key: str = "text",
    eod_token: str | None = None,
    overwrite: bool = False,
    skip_bad: bool = False,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> TokenizeSummary:
    """Tokenize text, JSON lines and `.parquet` files, also in `.gz` and `.zst`, into `out_prefix`.bin and .idx.

    Finished shards are kept in `out_prefix`.tokenizing until the pair is complete.  After an error, or if the process was
    killed, the same call tokenizes only the shards that are missing or whose files have changed.

    Args:
        inputs: files and directories, in the order of the output; see `find_files`, and `documents` for the formats.
        out_prefix: path of the pair to write; the pair appears when everything is done.
        tokenizer, eod_token: arguments of `load_tokenizer`; every worker loads the tokenizer.
        workers: number of processes that tokenize; with 1, this process does.
        jsonl_key: the field of a JSON line, or the column of a table, with the text.
        overwrite: replace an existing pair.
        skip_bad: leave out what cannot be read, and name it in the notes.  Otherwise the call ends with an error, before
            the work or before the pair is written.
        on_progress: called in this process with (input bytes done, all input bytes) after each shard.

    Raises:
        FileNotFoundError: an input does not exist.
        FileExistsError: the pair or a file under one of its names exists, or another process is writing it.
        ModuleNotFoundError: a file needs a package that is not installed.
        ValueError: the prefix is invalid, files or documents cannot be read, a file changes meanwhile, or there is no text.
        ChildProcessError: a worker died.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}; at least 1 process has to do the work")
    began, folder = time.monotonic(), _folder_of(os.fspath(out_prefix))
    encoder = load_tokenizer(os.fspath(tokenizer), eod_token)
    dtype = token_dtype(encoder.vocab_size)
    job = _Job(folder, os.fspath(tokenizer), encoder.eod_token, encoder.fingerprint, dtype.str, jsonl_key)
    notes = _Notes(skip_bad, [encoder.about] if isinstance(encoder, FileTokenizer) else [])
    with IndexedWriter(out_prefix, dtype, encoder.fingerprint) as writer:
        check_outputs(out_prefix, overwrite)
        files, unread, hidden = find_files(inputs, {folder, *writer.paths})
        shards, uncut = make_shards(files, job)
        ranges = [file_range for shard in shards for file_range in shard.ranges]
        notes.add_formats(ranges)
        notes.leave_out(len(unread) + len(uncut), [*unread, *uncut], "files or directories")
        done = _tokenize_shards(shards, job, workers, on_progress)
        named = [problem for shard in done for problem in shard.named_unread]
        notes.leave_out(sum(shard.unread for shard in done), named, "documents or parts of files")
        if not (documents := sum(shard.documents for shard in done)):
            raise ValueError(f"no text in {len(files):,} files under {[os.fspath(i) for i in inputs]}")
        for shard in shards:
            ids, lengths = _content(shard, job)
            writer.add_documents(np.frombuffer(ids, dtype), array("i", lengths))
    _remove_shards(folder)
    if jsonl_key != "text" and not {".jsonl", ".parquet"} & {file_range.format for file_range in ranges}:
        notes.lines.append(f"--jsonl-key {jsonl_key} chose nothing: no file holds JSON lines or a table")
    notes.add_empty(done, hidden)
    tokens, read = sum(shard.tokens for shard in done), sum(file_range.bytes for file_range in ranges)
    return TokenizeSummary(documents, tokens, read, time.monotonic() - began, tuple(notes.lines))


class _Notes(NamedTuple):
    """The notes of a summary.  `skip_bad`: what cannot be read is left out with a note, and is no error."""

    skip_bad: bool
    lines: list[str]

    def add_formats(self, ranges: Sequence[FileRange]) -> None:
        found = [*dict.fromkeys(span.path for span in ranges if span.format != format_of(span.path)[0])]
        if found:
            self.lines.append(f"read {len(found):,} files as JSON lines, by their first line: {found[:_NAMED]}")

    def leave_out(self, count: int, named: Sequence[SkippedText], what: str) -> None:
        """Note what is left out because it cannot be read.  Raises: ValueError: it may not be left out."""
        shown = listed([*map(str, named)], _NAMED, "\n  ", count)
        if count and not self.skip_bad:
            cure = "mend them, or leave them out with --skip-bad; what is done is kept"
            raise ValueError("\n".join([f"{count:,} {what} cannot be read:\n  {shown}", *self.lines, cure]))
        if count:
            self.lines.append(f"left out {count:,} {what} that cannot be read:\n  {shown}")

    def add_empty(self, done: Sequence[_Tokenized], hidden: int) -> None:
        empty, named = sum(shard.empty for shard in done), [problem for shard in done for problem in shard.named_empty]
        shown = listed([*map(str, named)], _NAMED, "\n  ", empty)
        counts = {f"empty documents:\n  {shown}": empty, "names that start with a dot": hidden}
        self.lines.extend(f"left out {count:,} {what}" for what, count in counts.items() if count)


def check_outputs(prefix: str | os.PathLike[str], overwrite: bool) -> None:
    """Check that a pair may be written.  Raises: FileExistsError: a pair exists.  ValueError: the prefix is invalid."""
    taken = [path for path in (identity_path(prefix), *pair_paths(prefix)) if path.exists()]
    # Without an index they are of a command that was killed between its renames, if its shards are still there.
    is_ours = _folder_of(os.fspath(prefix)).exists() and not pair_paths(prefix)[-1].exists()
    if taken and not overwrite and not is_ours:
        raise FileExistsError(f"{taken[-1]} exists; name another output, or replace it with --overwrite")


def _folder_of(prefix: str) -> Path:
    """Return the folder for the shards of an output.  Raises: ValueError: the output cannot be written there."""
    if prefix.endswith(("/", ".bin", ".idx")):
        better = f"{prefix}corpus" if prefix.endswith("/") else prefix[:-4]
        raise ValueError(f"{prefix} must be the path of the pair without .bin or .idx; write {better}")
    if (folder := Path(f"{prefix}.tokenizing")).is_symlink():
        raise ValueError(f"{folder} is a link: this command's own files lie there; remove it, or name another output")
    return folder


def _remove_shards(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.iterdir():
            if _SHARD_FILE.fullmatch(path.name):
                path.unlink()
        folder.rmdir()  # unless somebody else has put a file there


def make_shards(files: Sequence[Path], job: _Job) -> tuple[list[Shard], list[SkippedText]]:
    """Group the files into shards, in order.  Returns: the shards; the problems with files that cannot be read."""
    states: dict[str, tuple[int, int]] = {}
    for path in files:
        with suppress(OSError):  # which `cut_files` reports
            states[str(path)] = _state_of(path)
    total = sum(size for size, _ in states.values())
    low, high = _SHARD_BITS
    limit = 1 << max(low, min(high, (total // _SHARDS).bit_length()))
    ranges, unread = cut_files(files, limit)
    groups: list[list[FileRange]] = []
    room = 0
    for file_range in ranges:
        if not groups or file_range.bytes > room:
            groups.append([])
            room = limit
        groups[-1].append(file_range)
        room -= file_range.bytes
    settings = (3, job.fingerprint, job.dtype, job.key)

    def shard(group: list[FileRange]) -> Shard:
        found = [(os.path.abspath(p.path), *states[p.path], *p[1:]) for p in group]
        key = xxhash.xxh3_128_hexdigest(repr((settings, found)).encode())
        return Shard(key, tuple(group), tuple(states[p.path] for p in group))

    return [shard(group) for group in groups], unread


def _state_of(path: str | Path) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns


def _tokenize_shards(
    shards: Sequence[Shard], job: _Job, workers: int, on_progress: Callable[[int, int], None]
) -> list[_Tokenized]:
    """Tokenize the shards that are not finished; return the result of every shard."""
    job.folder.mkdir(exist_ok=True)
    missing = [shard for shard in shards if not _is_done(shard, job)]
    total = sum(shard.bytes for shard in shards)
    finished = total - sum(shard.bytes for shard in missing)
    missing.sort(key=lambda shard: -shard.bytes)  # nobody waits for a large one at the end
    on_progress(finished, total)
    with closing(_over_processes(functools.partial(_tokenize_shard, job=job), missing, workers)) as results:
        for count in results:
            finished += count
            on_progress(finished, total)
    return [_read_tokenized(job.path(shard)) for shard in shards]


def _over_processes(work: Callable[[T], R], items: Sequence[T], workers: int) -> Generator[R, None, None]:
    """Run `work` over processes, and yield each result when it is done."""
    if workers == 1 or len(items) < 2:
        yield from map(work, items)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Spawned, because the caller may have threads; and no multiprocessing.Pool, which hangs when a worker is killed.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(items)), mp_context=context, initializer=_end_with_parent) as pool:
        try:
            for future in as_completed([pool.submit(work, item) for item in items]):
                yield future.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(f"one of {workers} processes died: try fewer; what is done is kept") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Make this worker end at once on Ctrl-C, and when the command that started it has been killed."""
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


_tokenizer_of_process = functools.cache(load_tokenizer)


def _tokenize_shard(shard: Shard, job: _Job) -> int:
    """Tokenize a shard into a zip file, whose checksums are compared when it is read.  Return its bytes of input."""
    done, lengths = _Tokenized(), array("i")
    # its own: a worker whose command was killed may still be writing
    partial = job.path(shard).with_suffix(f".zip.{secrets.token_hex(4)}.partial")
    with partial.open("wb") as file:
        with ZipFile(file, "w") as content:
            with content.open("ids", "w", force_zip64=True) as written:
                for ids in _encoded(shard, job, done):
                    written.write(ids.astype(job.dtype).data)
                    lengths.append(len(ids))
            done.documents, done.tokens = len(lengths), sum(lengths)
            content.writestr("lengths", lengths.tobytes())
            content.writestr("tokenized", TypeAdapter(_Tokenized).dump_json(done))
        flush_to_disk(file)
    for file_range, state in zip(shard.ranges, shard.states, strict=True):
        if _state_of(file_range.path) != state:  # two versions of it would be in one pair
            raise ValueError(f"{file_range.path} changed while it was read; start again when it is complete")
    partial.replace(job.path(shard))
    return shard.bytes


def _encoded(shard: Shard, job: _Job, done: _Tokenized) -> Iterator[NDArray[np.int32]]:
    """Yield the ids of each document.  Record in `done` the documents and files that are left out."""
    encoder = _tokenizer_of_process(job.tokenizer, job.eod_token)

    def unread(file_range: FileRange, position: int, error: Exception) -> None:
        done.unread += 1
        if len(done.named_unread) < _NAMED:
            done.named_unread.append(SkippedText(file_range.path, position, str(error) or repr(error)))

    for file_range in shard.ranges:
        count = 0
        try:
            for position, text in documents_of(file_range, job.key):
                count += 1
                try:
                    if isinstance(text, Exception):
                        raise text
                    ids = encoder.encode(text)
                # the tokenizers library raises nothing narrower; JSON can spell half of a surrogate pair
                except Exception as error:
                    unread(file_range, position, error)
                    continue
                if len(ids):
                    yield np.append(ids, np.int32(encoder.eod_id))
                    continue
                done.empty += 1
                if len(done.named_empty) < _NAMED:
                    done.named_empty.append(SkippedText(file_range.path, position, "empty"))
        except Exception as error:  # of reading: whoever takes the ids raises nothing here
            unread(file_range, -1, ValueError(f"{error}; only {count:,} documents before it were read"))
            done.is_final &= not isinstance(error, OSError)


def _is_done(shard: Shard, job: _Job) -> bool:
    """Return whether an earlier command has tokenized a shard.  `_content` checks what it holds."""
    with suppress(ValueError):
        return _read_tokenized(job.path(shard)).is_final
    return False


def _content(shard: Shard, job: _Job) -> tuple[bytes, bytes]:
    """Read the ids and lengths of a shard.  Tokenize it again if the file is not what was written."""
    for _ in range(2):
        with suppress(Exception), ZipFile(job.path(shard)) as content:  # of damage zipfile raises errors of many kinds
            return content.read("ids"), content.read("lengths")
        _tokenize_shard(shard, job)
    raise OSError(f"{job.path(shard)} is not what was written, twice: does the disk fail?")


def _read_tokenized(path: Path) -> _Tokenized:
    try:
        with ZipFile(path) as content:
            return TypeAdapter(_Tokenized).validate_json(content.read("tokenized"))
    except Exception as error:  # as in `_content`
        raise ValueError(f"{path} is damaged ({error}); the same command writes it again") from None
