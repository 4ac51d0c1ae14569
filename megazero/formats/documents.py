"""Reads the documents of text files, in any of these formats.

    name.jsonl, .ndjson     a document on each line, in one field       cut into ranges by bytes
    name.parquet            a document in each row, in one column       cut into ranges by row groups
    name.arrow              the same, as `datasets` writes it           one range
    any other name          JSON lines if the first line is a JSON      by bytes
                            object, else one document, in UTF-8         one range
    name.jsonl.gz, .zst     the same, compressed                        one range

A file that does not begin like text is refused with a hint.  A line belongs to the range in which it starts.  A document
that cannot be read gives an error in its place, so that the others can be read.
"""

import importlib.util
import io
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import xxhash

from megazero.config.derive import cache_directory
from megazero.config.schema import DataConfig
from megazero.data.sealed import LFS_HINT, LFS_POINTER
from megazero.registry import closest, did_you_mean

_PACKAGE_OF: Final = {".parquet": "pyarrow", ".arrow": "pyarrow", ".zst": "pyarrow"}
_TABLES: Final = ".parquet", ".arrow"
_CHUNK_BYTES: Final = 1 << 20
_COUNTED_BYTES: Final = 1 << 28  # lines are counted so far into a file to name one
_parsed: Final = partial(json.loads, parse_int=len)  # integers stand for any: Python reads no 4,301 digits
_REFUSED: Final = {  # by how it begins
    LFS_POINTER: LFS_HINT,
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text; write it as UTF-8, with iconv -f UTF-16 -t UTF-8"),
    b"WARC/": "a web archive; write its texts as JSON lines, with warcio or trafilatura",
}
_NO_TEXT: Final = "a table is named .parquet, a packed file .gz or .zst; unpack others, or write them as JSON lines"


class FileRange(NamedTuple):
    """A range of an input file.  One worker reads it."""

    path: str
    start: int  # bytes of a `.jsonl`, row groups of a `.parquet`, 0 for others
    stop: int
    bytes: int  # that it takes in the file
    format: str  # of what the file holds, such as ".jsonl": by its name, unless its content decides


class SkippedText(NamedTuple):
    """A file, line or row that was left out, and the reason."""

    path: str
    position: int  # byte of a line, number of a compressed line or of a row, counted from 0; -1 for the whole
    why: str

    def __str__(self) -> str:
        if self.position < 0:
            return f"{self.path}: {self.why}"
        form, packed = format_of(self.path)
        if form in _TABLES or (not packed and self.position > _COUNTED_BYTES):
            return f"{self.path}, {'row' if form in _TABLES else 'byte'} {self.position:,}: {self.why}"
        return f"{self.path}:{(self.position if packed else _lines_before(self.path, self.position)) + 1}: {self.why}"


def find_files(
    inputs: Sequence[str | os.PathLike[str]], without: Collection[Path] = ()
) -> tuple[list[Path], list[SkippedText], int]:
    """Return the files of the inputs, the problems with files that cannot be read, and the number of hidden names.

    Args:
        inputs: files, directories, and URLs that fsspec reads.  A directory stands for its files in sorted order, except
            names that start with a dot and the output of `tokenize_files` (whole pairs with their identity, folders of
            shards).
        without: files to skip.

    Raises:
        FileNotFoundError: an input does not exist, or there are no files.
        ModuleNotFoundError: a file needs a package that is not installed.
    """
    files: list[Path] = []
    problems: list[SkippedText] = []
    hidden = 0
    own = {os.path.abspath(path) for path in without}
    unread: list[OSError] = []
    local = [_fetched(name) if "://" in name else [name] for name in map(str, inputs)]
    for name in chain.from_iterable(local):
        if not (entry := Path(name)).exists():
            beside = [str(other) for other in entry.parent.glob("*")]
            hint = did_you_mean(closest(name, beside), "copy it to this machine")
            raise FileNotFoundError(f"no file or directory {name} to tokenize; {hint}")
        found = [] if entry.is_dir() else [entry]
        for folder, names, inside in os.walk(entry, onerror=unread.append) if entry.is_dir() else ():
            hidden += sum(name.startswith(".") for name in [*names, *inside])
            names[:] = sorted(name for name in names if not name.startswith(".") and not name.endswith(".tokenizing"))
            links = [Path(folder, name) for name in names if Path(folder, name).is_symlink()]
            why = "a link to a directory, which is not followed; name it as an input to read it"
            problems += [SkippedText(str(path), -1, why) for path in links]
            found += [Path(folder, name) for name in _without_pairs(inside) if not name.startswith(".")]
        files += sorted(path for path in found if os.path.abspath(path) not in own)
    problems += [SkippedText(str(error.filename), -1, error.strerror or str(error)) for error in unread]
    if not files and not problems:
        raise FileNotFoundError(f"no files to tokenize in {[os.fspath(entry) for entry in inputs]}")
    for path in files:
        for package in [_PACKAGE_OF[suffix] for suffix in format_of(str(path)) if suffix in _PACKAGE_OF]:
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(f"{path} needs the package {package}: pip install 'megazero[data]'")
    return files, problems, hidden


def _fetched(url: str) -> list[str]:
    """Copy the files of a URL, which may have wildcards, to the cache.  Raises: OSError."""
    import fsspec
    from fsspec.implementations.cache_mapper import BasenameCacheMapper

    folder = cache_directory(DataConfig()) / "inputs" / xxhash.xxh3_64_hexdigest(url.encode())
    how: dict[str, Any] = {"expiry_time": None, "check_files": True, "cache_mapper": BasenameCacheMapper(8)}
    try:
        found = fsspec.open_local(f"filecache::{url}", filecache=how | {"cache_storage": str(folder)})
    except Exception as error:  # each file system has its own
        raise OSError(f"{url} cannot be fetched: {str(error) or repr(error)}") from error
    return [found] if isinstance(found, str) else found


def _without_pairs(names: Sequence[str]) -> list[str]:
    """Drop the names of files that belong to a `.bin`/`.idx` pair of tokens."""
    found = {*names}
    pairs = [name.removesuffix(".idx") for name in names if name.endswith(".idx")]
    pairs = [prefix for prefix in pairs if f"{prefix}.bin" in found]
    ours = {f"{prefix}{suffix}" for prefix in pairs for suffix in (".bin", ".idx", ".identity.json")}
    return [name for name in names if name not in ours]


def cut_files(files: Sequence[Path], range_bytes: int) -> tuple[list[FileRange], list[SkippedText]]:
    """Cut files into ranges of about `range_bytes`, in order, where their format allows it.

    Returns: the ranges; the problems with files that cannot be read.
    """
    ranges: list[FileRange] = []
    problems: list[SkippedText] = []
    for file in files:
        try:
            about = file.stat()
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("neither a file nor a directory")
            with file.open("rb"):
                ranges += _ranges_of(str(file), about.st_size, range_bytes)
        except Exception as error:  # pyarrow raises its own types
            problems.append(SkippedText(str(file), -1, getattr(error, "strerror", None) or str(error)))
    return ranges, problems


def _ranges_of(path: str, size: int, range_bytes: int) -> Iterator[FileRange]:
    form, packed = _held_by(path), format_of(path)[1]
    length = size  # in row groups, if it has them
    if packed or form not in (".jsonl", ".parquet"):
        yield FileRange(path, 0, 0, size, form)
        return
    if form == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as table:
            length = table.num_row_groups
    step = max(1, length * range_bytes // max(1, size))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield FileRange(path, start, stop, size * stop // length - size * start // length, form)


def _held_by(path: str) -> str:
    """Return the format of a file: ".jsonl" if its first line parses as a JSON object, else its suffix.

    Raises: ValueError: neither text nor a table that can be read.
    """
    form, packed = format_of(path)
    raw = _first_line(path, "")
    is_named = form in (".jsonl", *_TABLES)
    start = _first_line(path, packed) if packed and not (is_named or raw.startswith(LFS_POINTER)) else raw
    for magic, what in _REFUSED.items():
        if start.startswith(magic):
            raise ValueError(f"it is {what}")
    if is_named:
        return form
    if start.startswith(b"{") and isinstance(_attempt(_parsed, start), dict):
        return ".jsonl"
    if (start and form in (".json", ".csv", ".tsv")) or re.match(rb'(\[\s*)?\{\s*"', start):
        raise ValueError(
            "neither a table that is read nor JSON lines: its first line is no JSON object. Write a record a line, as jq -c "
            "'.[]' and pandas' to_json(orient='records', lines=True) do; name it .txt if it is text and begins with none"
        )
    return form


def _first_line(path: str, packed: str) -> bytes:
    """Read the first line that is not blank.  At most a megabyte if it is not JSON; nothing if the archive is damaged.

    Raises: OSError.
    """
    try:
        with _opened(path, packed) as file:
            while line := file.readline(_CHUNK_BYTES):
                if start := line.removeprefix(b"\xef\xbb\xbf").lstrip():
                    is_whole = line.endswith(b"\n") or not start.startswith(b"{")
                    return start if is_whole else start + file.readline(64 * _CHUNK_BYTES)
    except Exception as error:  # a damaged archive is reported when it is read, with what it still holds
        if getattr(error, "errno", None) is not None:
            raise
    return b""


def documents_of(file_range: FileRange, key: str) -> Iterator[tuple[int, str | Exception]]:
    """Yield (position, text) for each document of a range.  An error takes the place of a text that cannot be read.

    Args:
        key: the field of a JSON line, or the column of a table, that holds the text.

    Raises: any error of reading the file; the rest of the range is lost.
    """
    packed = format_of(file_range.path)[1]
    if file_range.format in _TABLES:
        for first, column in (_parquet if file_range.format == ".parquet" else _arrow)(file_range, key):
            for row, text in enumerate(column.to_pylist(), first):
                yield row, text if isinstance(text, str) else ValueError(_no_string(key, text))
        return
    with _opened(file_range.path, packed) as file:
        if file_range.format != ".jsonl":
            yield -1, _attempt(_text_of_file, file.read())
            return
        lines = enumerate(file) if packed else _lines_within(file, file_range)
        for position, line in lines:
            if line.strip():
                yield position, _attempt(_text_of_line, line, key)


def _attempt(read: Any, *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except Exception as error:  # even JSON that is nested too deeply
        return error


def _parquet(file_range: FileRange, key: str) -> Iterator[tuple[int, Any]]:
    """Yield chunks of the text column of a range, each with the number of its first row."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file_range.path) as table:
        _check_column(table.schema_arrow.names, key)
        row = sum(table.metadata.row_group(number).num_rows for number in range(file_range.start))
        for batch in table.iter_batches(1024, list(range(file_range.start, file_range.stop)), [key], use_threads=False):
            yield row, batch.column(0)
            row += len(batch)


def _arrow(file_range: FileRange, key: str) -> Iterator[tuple[int, Any]]:
    """Yield the same for an Arrow stream or file."""
    from pyarrow import ArrowInvalid, ipc, memory_map

    file = memory_map(file_range.path)
    try:
        table = ipc.open_stream(file).read_all()
    except ArrowInvalid:
        table = ipc.open_file(file).read_all()
    _check_column(table.column_names, key)
    chunks = table.column(key).chunks
    yield from zip(accumulate(map(len, chunks), initial=0), chunks, strict=False)


def _check_column(names: Sequence[str], key: str) -> None:
    if (count := names.count(key)) != 1:
        raise ValueError(f"{count} columns are named {key!r}, found {names}; name a single column with --jsonl-key")


def format_of(path: str) -> tuple[str, str]:
    """Return the format and the compression of a file by its name, such as (".jsonl", ".gz")."""
    name, last = os.path.splitext(path.lower())
    form, packed = (os.path.splitext(name)[1], last) if last in (".gz", ".zst") else (last, "")
    return ".jsonl" if form in (".ndjson", ".jsonlines") else form, packed


@contextmanager
def _opened(path: str, packed: str) -> Iterator[IO[bytes]]:
    with open(path, "rb") as file:
        if packed == ".gz":
            import gzip

            with gzip.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]  # it reads bytes
        elif packed == ".zst":
            import pyarrow

            yield io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
        else:
            yield file


def _lines_within(file: IO[bytes], file_range: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) for the lines that start in a range."""
    if file_range.start:
        # From one byte before: a line that starts exactly at `start` is this range's own.
        file.seek(file_range.start - 1)
        file.readline()
    while (offset := file.tell()) < file_range.stop and (line := file.readline()):
        yield offset, line


def _lines_before(path: str, offset: int) -> int:
    with open(path, "rb") as file:
        return file.read(offset).count(b"\n")


def _text_of_file(content: bytes) -> str:
    if b"\0" in content:
        raise ValueError(f"not a text file: it has zero bytes; {_NO_TEXT}")
    try:
        return content.decode("utf-8-sig")  # without a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"not a UTF-8 text file: {error}; {_NO_TEXT}") from None


def _text_of_line(content: bytes, key: str) -> str:
    try:
        record = _parsed(content)
    except ValueError as error:  # also covers bytes that are no UTF-8
        raise ValueError(f"not a line of JSON: {error}") from None
    for name in [key] if isinstance(record, dict) and key in record else key.split("."):
        if not isinstance(record, dict) or name not in record:
            raise ValueError(f"no {name!r} in it; name the field with --jsonl-key")
        record = record[name]
    if not isinstance(record, str):
        raise ValueError(_no_string(key, record))
    return record


def _no_string(key: str, value: Any) -> str:
    return f"{key!r} must be a string, found a {type(value).__name__}"
