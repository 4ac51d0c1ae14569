"""Opening the data of a run: its sources, checked, and their two streams of samples.

    "python-stdlib" --find in the cache, or build--> prefix --IndexedDataset--> tokens --split--> training windows
    path/to/prefix  ------------------------------->                                         '--> validation windows

Errors here are the user's, so each names the source and the numbers.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from megazero.data.blend import Blend
from megazero.data.indexed import IndexedDataset, pair_paths
from megazero.data.sampler import SampleStream, ValidationStream, Windows, split
from megazero.data.stdlib import build_python_stdlib
from megazero.data.tokenizer import load_tokenizer

PYTHON_STDLIB: Final = "python-stdlib"

# The fingerprint reads this many evenly spaced blocks of a source, the first and the last among them: about half a megabyte.
_SAMPLE_BLOCKS: Final = 64
_SAMPLE_BLOCK_TOKENS: Final = 4096


@dataclass(frozen=True, eq=False)
class Corpus:
    """The data of a run."""

    train: SampleStream
    validation: ValidationStream | None  # None if the run holds none out
    fingerprint: str  # hex; equal if the tokens, their order and the split are equal
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
) -> Corpus:
    """Open the sources of a run, check them against the model, and give each sample an index.

    Args:
        sources: (source, weight) pairs; a source is "python-stdlib" or the prefix of a `.bin`/`.idx` pair.
        tokenizer, eod_token: arguments of `load_tokenizer`.
        seq_len: tokens that a sample predicts.
        validation_fraction: part of each source's windows, the last ones, that is held out; 0 for none.
        cache_dir: a directory of this node for "python-stdlib".
        vocab_size: rows of the model's embedding.

    Raises:
        FileNotFoundError: a source or the tokenizer is missing.
        ValueError: a damaged source, one too short for `seq_len` or for the split, a bad weight, or ids that the
            model has no embedding for.
    """
    if not sources:
        raise ValueError(f'no data sources; name "{PYTHON_STDLIB}" or the prefix of a .bin/.idx pair')
    vocab = load_tokenizer(tokenizer, eod_token).vocab_size
    if vocab > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer!r} has {vocab:,} ids and the model's vocab_size is {vocab_size:,}; "
            f"set vocab_size to {vocab:,} or more"
        )
    training: list[Windows] = []
    validation: list[Windows] = []
    weights = Blend([weight for _, weight in sources]).weights
    digest = xxhash.xxh3_128(repr(("corpus 1", seq_len, int(seed), float(validation_fraction), weights)).encode())
    for name, _ in sources:
        prefix = build_python_stdlib(cache_dir, tokenizer, eod_token) if name == PYTHON_STDLIB else Path(name)
        dataset = IndexedDataset(prefix)
        windows = Windows.over(dataset.tokens, seq_len, name)  # first: an empty source has no blocks to check
        for start, block in _sampled_blocks(dataset.tokens):
            _check_ids(name, start, block, vocab_size)
            digest.update(block.tobytes())
        digest.update(repr((dataset.dtype.str, len(dataset.tokens))).encode())
        digest.update(np.memmap(pair_paths(prefix)[1], mode="r").data)
        kept, last = split(windows, validation_fraction, name)
        training.append(kept)
        validation += [] if last is None else [last]
    held_out = ValidationStream(validation) if validation else None
    return Corpus(SampleStream(training, weights, seed), held_out, digest.hexdigest())


def repeats(names: Sequence[str], stream: SampleStream, samples: int) -> list[str]:
    """A line for each named source that a run of so many samples reads more than once."""
    read = zip(names, stream.epochs(samples), strict=True)
    return [
        f"data.sources: {name} is read {epochs:,.1f} times by the run's {samples:,} samples, each time in another order"
        for name, epochs in read
        if epochs > 1
    ]


def _sampled_blocks(tokens: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """(start, block) of evenly spaced blocks; of a short source, all of it."""
    if len(tokens) <= _SAMPLE_BLOCKS * _SAMPLE_BLOCK_TOKENS:
        yield 0, tokens
        return
    last = len(tokens) - _SAMPLE_BLOCK_TOKENS
    for number in range(_SAMPLE_BLOCKS):
        start = number * last // (_SAMPLE_BLOCKS - 1)
        yield start, tokens[start : start + _SAMPLE_BLOCK_TOKENS]


def _check_ids(name: str, start: int, block: NDArray[Any], vocab_size: int) -> None:
    outside = np.flatnonzero((block >= vocab_size) | (block < 0))
    if outside.size:
        at = int(outside[0])
        raise ValueError(
            f"{name} has id {int(block[at])} at token {start + at:,}, and the model's vocab_size is {vocab_size:,}; "
            "raise vocab_size, or tokenize the source with this run's tokenizer"
        )
