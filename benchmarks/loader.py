"""How fast samples come off the disk's page cache: the loader of a run beside nanoGPT's `get_batch`.

    python -m benchmarks.loader [--tokens 50000000] [--batch 32] [--rounds 7]

    ours           corpus -> blend, shuffle -> memory map -> `read_batches`: the micro-batches that a step takes, sequence
                   first, labels masked where a batch has no sample
    ours, blend    three sources, 60 : 30 : 10
    plain          one memory map, random starts, `torch.from_numpy` of each slice, `torch.stack`: no epochs, no
                   blend, no order that could be resumed
    step           what a step of one dp rank takes: `batch` samples in micro-batches of 8

All take turns within a round, in one process with one thread.  Tokens count once, as what a step trains on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import markdown, middle_of, spread
from benchmarks.setting import positive
from megazero.data import Corpus, open_corpus
from megazero.data.writer import IndexedWriter
from megazero.engine import BatchShare
from megazero.parallel_state import Axis
from megazero.training.batches import read_batches

MICRO_BATCH, VOCABULARY, MEAN_DOCUMENT = 8, 50304, 1000
SEQUENCES = (1024, 4096)
SHARES = {"first": 0.6, "second": 0.3, "third": 0.1}
SECONDS_EACH = 0.3  # of a turn


def write_sources(folder: Path, tokens: int) -> dict[str, Path]:
    """Pairs of random ids whose documents are about a thousand tokens long: all of it, and three parts of it."""
    generator = np.random.default_rng(0)
    found = {}
    for name, share in {"whole": 1.0, **SHARES}.items():
        found[name] = folder / name
        with IndexedWriter(found[name], np.uint16) as writer:
            left = int(tokens * share)
            while left > 0:
                length = min(left, int(generator.integers(1, 2 * MEAN_DOCUMENT)))
                writer.add_documents(generator.integers(0, VOCABULARY, length, dtype=np.uint16), [length])
                left -= length
    return found


def ours(sources: list[tuple[str, float]], seq_len: int, batch: int, cache: Path) -> Callable[[int], object]:
    """The next step's micro-batches, by step."""
    corpus: Corpus = open_corpus(
        sources,
        tokenizer="byte",
        seq_len=seq_len,
        seed=1,
        validation_fraction=0.0,
        cache_dir=cache,
        vocab_size=VOCABULARY,
    )
    share = BatchShare(Axis("dp"), torch.device("cpu"), tokens=True, labels=True)
    return lambda step: read_batches(corpus.train, step * batch, batch, MICRO_BATCH, share)


def plain(file: Path, seq_len: int, batch: int) -> Callable[[int], object]:
    """nanoGPT's `get_batch`, once for each micro-batch.  Source: github.com/karpathy/nanoGPT, train.py."""

    def micro_batch() -> tuple[Tensor, Tensor]:
        data = np.memmap(file, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - seq_len, (MICRO_BATCH,))
        x = torch.stack([torch.from_numpy(data[at : at + seq_len].astype(np.int64)) for at in starts])
        y = torch.stack([torch.from_numpy(data[at + 1 : at + 1 + seq_len].astype(np.int64)) for at in starts])
        return x, y

    return lambda _: [micro_batch() for _ in range(batch // MICRO_BATCH)]


def seconds_of(step_of: Callable[[int], object], first: int) -> tuple[float, int]:
    """Seconds of a step over a turn, and the step after the last."""
    begin, step = time.perf_counter(), first
    while time.perf_counter() - begin < SECONDS_EACH:
        step_of(step)
        step += 1
    return (time.perf_counter() - begin) / (step - first), step


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 50_000_000), ("batch", 32), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="megazero-loader-") as folder:
        files = write_sources(Path(folder), given.tokens)
        for seq_len in SEQUENCES:
            blend = [(str(files[name]), share) for name, share in SHARES.items()]
            readers = {
                "ours": ours([(str(files["whole"]), 1.0)], seq_len, given.batch, Path(folder)),
                "ours, blend of 3": ours(blend, seq_len, given.batch, Path(folder)),
                "plain": plain(files["whole"].with_name("whole.bin"), seq_len, given.batch),
            }
            found: dict[str, list[float]] = {name: [] for name in readers}
            position = dict.fromkeys(readers, 0)
            for number in range(-1, given.rounds):  # the first warms up
                for name in list(readers)[:: -1 if number % 2 else 1]:
                    seconds, position[name] = seconds_of(readers[name], position[name])
                    if number >= 0:
                        found[name].append(seconds)
            for name, values in found.items():
                ratios = [mine / peer for mine, peer in zip(values, found["plain"], strict=True)]
                speed, sample = given.batch * seq_len / median(values), median(values) / given.batch
                over = spread(middle_of(ratios), 2)
                rows.append([name, str(seq_len), f"{speed / 1e6:.1f}", f"{sample * 1e6:.1f}", over])
    print(markdown(("loader", "sequence", "million tokens/s", "us per sample", "time over plain"), rows))


if __name__ == "__main__":
    main()
