"""Opening the data of a run on every rank, and making sure that all ranks read the same.

A source is a path, and each host has files of its own under it.  With other files on the hosts of one pipeline, tokens would
come from one corpus and labels from another, and the run would train on that without an error.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import xxhash

from megazero.comm.collectives import agree, gather_objects
from megazero.config import RunConfig
from megazero.data import Corpus
from megazero.data.identity import parts_of
from megazero.parallel_state import Axis
from megazero.training.batches import DataError, open_corpus_of

T = TypeVar("T")

_MEET_SECONDS: Final = (
    20.0  # between two meetings of ranks that wait; below any `timeout_seconds` that a run can live with
)


def open_same_corpus(config: RunConfig, world: Axis, say: Callable[[str], None] = lambda _: None) -> Corpus:
    """The data that a resolved configuration names.  Called on every rank, before the first step.

    Args:
        world: all ranks of the run.
        say: takes a line before much is read.

    Raises:
        DataError: on every rank: some rank cannot open its data, or ranks have different data.
    """
    seconds = min(_MEET_SECONDS, config.parallel.timeout_seconds / 4)
    corpus = _agree_in_time(lambda: open_corpus_of(config, say), world, DataError, seconds)
    own = repr((corpus.fingerprint, *corpus.contents.items()))  # long, where there are many sources
    if len(set(gather_objects(xxhash.xxh3_128_digest(own.encode()), world))) > 1:
        order, tokenizer, _ = parts_of(corpus.fingerprint).items()
        parts = dict([order, tokenizer, *corpus.contents.items()])
        raise DataError(_differences(gather_objects((socket.gethostname(), parts), world)))
    return corpus


def _agree_in_time(action: Callable[[], T], axis: Axis, raises: type[Exception], seconds: float) -> T:
    """`agree` on an action that may take longer than a collective may wait: the ranks meet every few seconds meanwhile."""
    if axis.size == 1:
        return agree(action, axis, raises)
    answers: list[T] = []
    failures: list[BaseException] = []

    def act() -> None:
        try:
            answers.append(action())
        except BaseException as error:  # also a panic of a library: the others wait for an answer
            failures.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    is_over = False
    while not is_over:
        thread.join(seconds)
        now = gather_objects((bool(answers), bool(failures)), axis)
        is_over = any(failed for _, failed in now) or all(answered for answered, _ in now)

    def outcome() -> T | None:
        for error in failures:
            raise error if isinstance(error, Exception) else raises(repr(error)) from error
        return answers[0] if answers else None  # None only where another rank has failed

    answer = agree(outcome, axis, raises)
    assert answer is not None
    return answer


def _differences(ranks: list[tuple[str, dict[str, str]]]) -> str:
    """Which ranks have what, for each part of the data in which they differ; `ranks` has the host and the parts of each."""
    lines = ["the ranks do not read the same data:"]
    for name in dict.fromkeys(name for _, parts in ranks for name in parts):
        holders: dict[str, list[int]] = {}
        for rank, (_, parts) in enumerate(ranks):
            holders.setdefault(parts.get(name, "none"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"  {name}")
            lines += [
                f"    {value} on {_shown(own, [ranks[rank][0] for rank in own])}" for value, own in holders.items()
            ]
    return "\n".join([*lines, "copy the same files to every host, or put them on a file system that all hosts share"])


def _shown(ranks: list[int], hosts: list[str]) -> str:
    different = list(dict.fromkeys(hosts))
    first = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{', '.join(different[:4])}{', ...' if len(different) > 4 else ''} (rank {first})"
