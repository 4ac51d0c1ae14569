"""The data of a run: opened on every rank, and compared between ranks.

A source is a path, and each host has files of its own under it.  With other files on the hosts of one pipeline, tokens would
come from one corpus and labels from another, and the run would train on that without an error.
"""

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import xxhash

from megazero.comm.agreement import agree_in_time, seconds_between_meetings
from megazero.comm.collectives import gather_objects
from megazero.config import RunConfig
from megazero.config.derive import cache_directory
from megazero.data import Corpus, open_corpus
from megazero.data.corpus import ValidationStream
from megazero.data.identity import hashes_in
from megazero.data.sampler import DataError, Stream, UnfitDataError
from megazero.engine.micro_batches import BatchSlice, placed, read_on_host
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Axis
from megazero.settings import Log, listed


def open_sources(
    config: RunConfig,
    sources: Sequence[tuple[str, float]] | None = None,
    validation_fraction: float | None = None,
    log: Log = lambda _: None,
) -> Corpus:
    """Open sources with the tokenizer, sample length and vocabulary of a resolved run.

    Args:
        sources: (source, weight) pairs; None for the sources that the run trains on.
        validation_fraction: None for the fraction that the run configures.
        log: prints a line before a long read.

    Raises: as `open_corpus`.
    """
    trained = [(source.path, source.weight) for source in config.data.sources]
    return open_corpus(
        trained if sources is None else sources,
        tokenizer=config.data.tokenizer,
        seq_len=config.model.seq_len,
        seed=config.training.seed,
        validation_fraction=config.data.validation_fraction if validation_fraction is None else validation_fraction,
        cache_dir=cache_directory(config.data),
        vocab_size=config.model.vocab_size,
        eod_token=config.data.eod_token,
        ends_as=[path for path, _ in trained],
        log=log,
    )


def open_corpus_of(config: RunConfig, log: Log = lambda _: None) -> Corpus:
    """Open the training and validation data of a resolved run on this rank; see `open_corpus` for `log` and the errors."""
    corpus = open_sources(config, log=log)
    trained_on = set(corpus.contents.values())  # by content: a source may have several paths
    named: dict[str, ValidationStream] = {}
    contents = dict(corpus.contents)
    for source in config.data.validation_sources:
        alone = open_validation_source(config, source.path, trained_on, log)
        contents |= alone.contents
        named[source.label] = alone.validation or ValidationStream(alone.train.sources)
    return replace(corpus, contents=contents, named_validation=named)


def open_validation_source(config: RunConfig, path: str, trained_on: Collection[str], log: Log) -> Corpus:
    """Open a validation source by itself.  Of a source that a run trains on, only what is held out is `validation`.

    Args:
        trained_on: contents of the sources that the run trains on.

    Raises: as `open_corpus`; UnfitDataError: the run trains on all of the source.
    """
    alone, held_out = open_sources(config, [(path, 1.0)], 0.0, log), config.data.validation_fraction
    if alone.contents[path] not in trained_on:
        return alone
    if not held_out:
        found = f"{path} holds the same tokens as one of data.sources"
        hint = "set it, or leave the source out of data.validation_sources"
        raise UnfitDataError(f"{found}, and data.validation_fraction = 0 holds nothing of it out; {hint}")
    return open_sources(config, [(path, 1.0)], held_out, log)


def open_same_corpus(config: RunConfig, world: Axis, log: Log = lambda _: None) -> Corpus:
    """Open the data of a run and check that all ranks read the same data.  Called on every rank, before the first step.

    Args:
        world: all ranks of the run.
        log: prints a line before a long read.

    Raises:
        DataError: on every rank: some rank cannot open its data, or ranks have different data.
    """
    seconds = seconds_between_meetings(config.parallel.timeout_seconds)
    corpus = agree_in_time(lambda: open_corpus_of(config, log), world, DataError, seconds)
    own = repr((corpus.fingerprint, *corpus.contents.items()))  # long, where there are many sources
    if len(set(gather_objects(xxhash.xxh3_128_digest(own.encode()), world))) > 1:
        order, tokenizer, _ = hashes_in(corpus.fingerprint).items()
        hashes = dict([order, tokenizer, *corpus.contents.items()])
        raise DataError(_differences(gather_objects((socket.gethostname(), hashes), world)))
    return corpus


def _differences(ranks: list[tuple[str, dict[str, str]]]) -> str:
    """Describe the data in which ranks differ.  `ranks`: the host of each rank, and the hashes of its data by name."""
    lines = ["the ranks do not read the same data:"]
    for name in dict.fromkeys(name for _, hashes in ranks for name in hashes):
        holders: dict[str, list[int]] = {}
        for rank, (_, hashes) in enumerate(ranks):
            holders.setdefault(hashes.get(name, "none"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"  {name}")
            for value, own in holders.items():
                hosts = [*dict.fromkeys(ranks[rank][0] for rank in own)]
                lines.append(f"    {value} on {listed(hosts, 4)} (rank {listed([*map(str, own)])})")
    return "\n".join([*lines, "copy the same files to every host, or put them on a file system that all hosts share"])


def without_trained(corpus: Corpus, ends: Mapping[str, int], log: Log) -> Corpus:
    """Remove from the validation data the windows that an earlier phase has trained on.

    Args:
        ends: the token up to which the run has trained on a source, by content.

    Raises: DataError: no validation data is left.
    """

    def left(key: str, stream: ValidationStream) -> ValidationStream:
        found = stream.behind(ends)
        if found is None:
            raise DataError(
                f"{key}: an earlier phase of the run has trained on all {len(stream):,} samples that are to be evaluated; "
                "leave it out, or name data that the run has not trained on in data.validation_sources"
            )
        if len(found) < len(stream):
            hint = "an earlier phase trained on the others"
            log(f"{key}: {len(found):,} of {len(stream):,} samples are evaluated; {hint}")
        return found

    named = {name: left(f"data.validation_sources: {name}", source) for name, source in corpus.named_validation.items()}
    held_out = None if corpus.validation is None else left("data.validation_fraction", corpus.validation)
    return replace(corpus, validation=held_out, named_validation=named)


def fingerprint_of(config: RunConfig, seq_len: int) -> str:
    """Return the fingerprint of a run's training data, cut into samples of `seq_len` tokens.  Raises: as
    `open_corpus_of`.
    """
    model = config.model.model_copy(update={"seq_len": seq_len})
    return open_sources(config.model_copy(update={"model": model})).fingerprint


def read_batches(
    stream: Stream, first: int, count: int, micro_batch_size: int, batch_slice: BatchSlice
) -> list[MicroBatch]:
    """Read micro-batches as `read_on_host` does, and copy them to the device of `batch_slice`."""
    return placed(read_on_host(stream, first, count, micro_batch_size, batch_slice), batch_slice, stream.seq_len)
