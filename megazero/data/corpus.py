"""Opens the data of a run: finds and checks its sources, and builds their two streams of samples.

    "python-stdlib" --find in the cache, or build--> prefix --IndexedDataset--> tokens --split--> training windows
    path/to/prefix  ------------------------------->                                         '--> validation windows

Errors raised here are usually mistakes of the user, so each message names the source and the numbers.
"""

import os
import platform
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megazero.data.identity import Identity, fingerprint_of, identity_path, locked, stored_identity, verified_identity
from megazero.data.indexed import IndexedDataset
from megazero.data.sampler import Blend, SampleStream, Stream, UnfitDataError, Windows, sample_indices
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.registry import added
from megazero.settings import Log

#: About twelve megabytes of real text that every machine has: enough for a first run, a smoke test or a benchmark.
PYTHON_STDLIB: Final = "python-stdlib"
_LEFT_OUT: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class ValidationStream(Stream):
    """Validation samples for indices in [0, len): each window of each source exactly once, in order.

    The sources are interleaved by their size, so the first samples represent all of them fairly.
    """

    def __init__(self, sources: Sequence[Windows]) -> None:
        super().__init__(sources)
        self._blend = Blend([windows.count for windows in self.sources])

    def __len__(self) -> int:
        return self.num_windows

    def behind(self, ends: Mapping[str, int]) -> "ValidationStream | None":
        """Return the windows after the given end of each source; None if none is left.

        `ends`: in tokens, by the hash of the source's content.
        """
        left = [source.behind(ends.get(source.content, 0)) for source in self.sources]
        left = [source for source in left if source.count]
        return ValidationStream(left) if left else None

    def locate(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        checked = sample_indices(indices)
        if checked.size and int(checked.max()) >= len(self):
            raise IndexError(f"validation sample {checked.max()} of {len(self):,}")
        return self._blend.locate(checked)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The training and validation data of a run."""

    train: SampleStream
    validation: ValidationStream | None  # None if no data is held out
    fingerprint: str  # equal if tokens, tokenizer, order and split are equal; see `identity`
    contents: Mapping[str, str]  # hash of the tokens, by source
    named_validation: Mapping[str, ValidationStream] = field(default_factory=dict)  # `data.validation_sources`, by name


def open_corpus(
    sources: Sequence[tuple[str, float]],
    *,
    tokenizer: str,
    seq_len: int,
    seed: int,
    validation_fraction: float,
    cache_dir: str | os.PathLike[str],
    vocab_size: int,
    eod_token: str | None = None,
    ends_as: Sequence[str] = (),
    log: Log = lambda _: None,
) -> Corpus:
    """Open the sources of a run, check them against the model, and give each sample an index.

    Args:
        sources: (source, weight) pairs; a source is "python-stdlib", the prefix of a pair, or a raw token file.
        tokenizer, eod_token: arguments of `load_tokenizer`.
        ends_as: sources that determine the end-of-document token if none is given; empty for `sources`.
        seq_len: tokens that a sample predicts.
        validation_fraction: fraction of each source's windows that is held out, from the end; 0 for none.
        cache_dir: directory for "python-stdlib" and for records of what has been verified.
        vocab_size: rows of the model's embedding.
        log: called with a line of text before a long read.

    Raises:
        FileNotFoundError: a source or the tokenizer is missing.
        ValueError: a source is damaged, was made with another tokenizer, or is too short for `seq_len` or for the
            split; a weight is invalid; or the model has no embedding for some ids.
        OSError: a source cannot be read, or `cache_dir` cannot be written.
    """
    own = tokenizer_of(ends_as or [name for name, _ in sources], tokenizer, eod_token)
    if own.vocab_size > vocab_size:
        hint = f"raise model.vocab_size={vocab_size:,} to that"
        raise UnfitDataError(f"tokenizer {tokenizer!r} has {own.vocab_size:,} ids; {hint}")
    training: list[Windows] = []
    validation: list[Windows] = []
    contents: list[str] = []
    weights = Blend([weight for _, weight in sources]).weights
    for name, _ in sources:
        prefix = Path(name)
        if name == PYTHON_STDLIB:
            prefix = build_python_stdlib(cache_dir, tokenizer, own.eod_token, log)
        elif is_raw(prefix):
            prefix = added("token file")[prefix.suffix](prefix, cache_dir, own, log)
        dataset = IndexedDataset(prefix)
        windows = Windows.over(dataset.tokens, seq_len, name, dataset.borders)
        identity = verified_identity(dataset, cache_dir, log)
        windows = replace(windows, content=identity.content)
        _check_fits(name, identity, tokenizer, own, vocab_size)
        contents.append(identity.content)
        trained, last = split(windows, validation_fraction, name)
        training.append(trained)
        validation += [] if last is None else [last]
    fingerprint = fingerprint_of((seq_len, int(seed), float(validation_fraction), weights), own.fingerprint, contents)
    by_source = dict(zip((name for name, _ in sources), contents, strict=True))
    held_out = ValidationStream(validation) if validation else None
    return Corpus(SampleStream(training, weights, seed), held_out, fingerprint, by_source)


def split(windows: Windows, validation_fraction: float, name: str = "the source") -> tuple[Windows, Windows | None]:
    """Split the windows of a source into (training, validation): the last `validation_fraction`, rounded down,
    validate.

    No target token is on both sides.  A fraction of 0 means no validation.  The fraction is taken as the decimal that
    it is written as.

    Raises: ValueError: one side would be empty.
    """
    if validation_fraction == 0:
        return windows, None
    held_out = int(windows.count * Fraction(str(validation_fraction)))
    trained = windows.count - held_out
    if not (held_out and trained):
        side = "training" if held_out else "validation"
        fix = f"it takes at least 1/{windows.count} = {1 / windows.count:.2g}, or 0 for no validation"
        if windows.count < 2:
            fix = "it takes two windows at least: use more data, a shorter seq_len, or 0"
        found = f"{name}'s {windows.count:,} windows"
        raise UnfitDataError(f"{validation_fraction=} leaves none of {found} for {side}; {fix}")
    return replace(windows, count=trained), replace(windows, first=windows.first + trained, count=held_out)


def is_raw(path: Path) -> bool:
    """Whether a source is a file of token ids that an annex reads, instead of the prefix of a pair."""
    return path.suffix in added("token file") and path.is_file() and not path.with_suffix(".idx").is_file()


def tokenizer_of(sources: Sequence[str], tokenizer: str, eod_token: str | None = None) -> Tokenizer:
    """Return the tokenizer of a run.  Without `eod_token`, documents end as in the sources, if these specify it."""
    stored = [path.read_text("utf-8", "replace") for path in map(identity_path, sources) if path.is_file()]
    return load_tokenizer(tokenizer, eod_token, "".join(stored))


def without_borders(samples: Sequence[Sequence[int]]) -> list[str]:
    """Return a warning if a document mask would change nothing or mask everything.

    `samples`: document lengths of a few samples.
    """
    first, see = f"in the first {len(samples)} samples", 'is the .idx right? See "Documents" in docs/data.md'
    if samples and all(len(lengths) == 1 for lengths in samples):
        return [f"data.document_mask = true changes nothing {first}, each of which is one document: {see}"]
    if samples and all(max(lengths) == 1 for lengths in samples):
        return [f"data.document_mask = true leaves nothing to predict {first}, of documents of one token: {see}"]
    return []


def repeats(names: Sequence[str], stream: SampleStream, samples: int) -> list[str]:
    """Return a line for each source that a run of `samples` samples reads more than once."""
    read = zip(names, stream.epochs(samples), strict=True)
    how = f"by the run's {samples:,} samples, each time in another order"
    return [f"data.sources: {name} is read {epochs:,.1f} times {how}" for name, epochs in read if epochs > 1]


def check_source(name: str, tokenizer: str, own: Tokenizer | None, vocab_size: int) -> None:
    """Check the metadata of a source against the run.  No token is read.

    Args:
        name: path prefix of the source.
        tokenizer: name of the run's tokenizer.
        own: the run's tokenizer; None if it cannot be loaded, so that it is not compared.
        vocab_size: rows of the model's embedding.

    Raises: see `open_corpus`.
    """
    if name != PYTHON_STDLIB and not is_raw(Path(name)):
        IndexedDataset(name)
        if own is not None and (stored := stored_identity(name)) is not None:
            _check_fits(name, stored, tokenizer, own, vocab_size)


def _check_fits(name: str, identity: Identity, tokenizer: str, own: Tokenizer, vocab_size: int) -> None:
    """Raises: ValueError: the source was written by another tokenizer, or has ids without an embedding."""
    if identity.tokenizer not in ("", own.fingerprint):
        raise UnfitDataError(
            f"{name} was tokenized with a tokenizer of fingerprint {identity.tokenizer}, and data.tokenizer="
            f"{tokenizer!r} has {own.fingerprint}; name the tokenizer of the source (and its data.eod_token, if it was "
            f"given one), or tokenize again: megazero data tokenize TEXT --out {name} --tokenizer {tokenizer}"
        )
    if identity.smallest_id < 0 or identity.largest_id >= vocab_size:
        ids = f"ids from {identity.smallest_id:,} to {identity.largest_id:,}"
        hint = "raise vocab_size, or tokenize the source with this run's tokenizer"
        raise UnfitDataError(f"{name} has {ids}, and the model's vocab_size is {vocab_size:,}; {hint}")


def stdlib_files() -> list[Path]:
    """List the `.py` files of the standard library, sorted by their path within it.

    Excluded are installed packages, test suites, and `_sysconfigdata*`, which differs between builds.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        sources = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found += [Path(directory, name) for name in sources]
    if not found:
        raise FileNotFoundError(f"no standard-library sources in {root}; name a .bin/.idx prefix as the data source")
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def build_python_stdlib(
    cache_dir: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    eod_token: str | None = None,
    log: Log = lambda _: None,
) -> Path:
    """Return the prefix of the tokenized standard library.  Build it first if `cache_dir` does not have it.

    Any number of processes of a node may call this at the same time: one builds it, in about a second with the byte
    tokenizer, and the others wait.  Files that are not UTF-8 are left out.  The pair's name contains the Python version
    and the tokenizer's fingerprint.

    Raises: OSError: `cache_dir` cannot be written.
    """
    encoder = load_tokenizer(os.fspath(tokenizer), eod_token)
    prefix = Path(cache_dir) / f"python-stdlib-{platform.python_version()}-{encoder.fingerprint}"
    if _is_complete(prefix):
        return prefix
    with locked(prefix, "python-stdlib is kept", log):
        if not _is_complete(prefix):  # another process may have built it meanwhile
            _tokenize(stdlib_files(), prefix, encoder)
    return prefix


def _tokenize(files: Sequence[Path], prefix: Path, encoder: Tokenizer) -> None:
    """Write a pair in which every non-empty UTF-8 file is a document."""
    from megazero.data.writer import IndexedWriter, token_dtype  # only imported if data must be built

    dtype = token_dtype(encoder.vocab_size)
    with IndexedWriter(prefix, dtype, encoder.fingerprint) as writer:
        for path in files:
            with suppress(UnicodeDecodeError):
                if len(ids := encoder.encode(path.read_bytes().decode("utf-8-sig"))):
                    writer.add_documents(np.append(ids, encoder.eod_id).astype(dtype), [len(ids) + 1])


def _is_complete(prefix: Path) -> bool:
    try:
        verified_identity(IndexedDataset(prefix), prefix.parent)
    except (FileNotFoundError, ValueError):  # a damaged cache is rebuilt
        return False
    return True
