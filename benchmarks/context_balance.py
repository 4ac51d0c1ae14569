"""How evenly ring ranks share the attention of samples of documents: the busiest rank's pairs over the mean.

    python -m benchmarks.context_balance > benchmarks/results/context_balance.md

Arithmetic, no timing.  "contiguous": rank i has the i-th part of the sample.  "zigzag": the sample is cut into 2 * cp chunks
whatever its documents, and rank i has chunks i and 2 * cp - 1 - i.  "ours": every document is cut so.  Each figure is the
mean over samples, and for ours the worst of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from megazero.layers.token_layout import balance

RANKS, SAMPLES = (2, 4, 8, 16, 32, 64), 4
Ints = NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], NDArray[np.number]]


def lognormal(mean: int, sigma: float = 1.0) -> Draw:
    """Lengths of this mean."""
    return lambda rng, count: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


DISTRIBUTIONS: dict[str, Draw] = {
    **{f"lognormal, mean {mean}": lognormal(mean) for mean in (1024, 2048, 4096, 8192)},
    "lognormal, mean 2048, sigma 1.5": lognormal(2048, 1.5),
    "uniform 1 to 4096": lambda rng, count: rng.integers(1, 4097, count),
    "uniform 1 to 100": lambda rng, count: rng.integers(1, 101, count),
    "uniform 1 to 20": lambda rng, count: rng.integers(1, 21, count),
    "all of 1000": lambda rng, count: np.full(count, 1000),
    "all of 13": lambda rng, count: np.full(count, 13),
    "all of 1": lambda rng, count: np.ones(count),
    "one document": lambda rng, count: np.full(count, 2**40),
    "half one, half lognormal 512": lambda rng, count: np.append(count // 2, lognormal(512)(rng, count)),
}


def sample(draw: Draw, rng: np.random.Generator, total: int) -> Ints:
    """Documents until the sample is full; the last one is cut."""
    stops = np.minimum(np.maximum(draw(rng, total).astype(np.int64), 1)[:total].cumsum(), total)
    return np.diff(stops[: np.searchsorted(stops, total) + 1], prepend=0)


def by_chunk(lengths: Ints, chunks: int) -> Ints:
    """Pairs of each of `chunks` equal parts of a sample."""
    seen = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths) + 1
    return seen.reshape(chunks, -1).sum(1)


def contiguous(lengths: Ints, ranks: int) -> float:
    work = by_chunk(lengths, ranks)
    return float(work.max() / work.mean())


def zigzag(lengths: Ints, ranks: int) -> float:
    work = by_chunk(lengths, 2 * ranks)
    work = work[:ranks] + work[::-1][:ranks]
    return float(work.max() / work.mean())


def rows(total: int) -> Iterator[list[str]]:
    """A row for each distribution and way."""
    for name, draw in DISTRIBUTIONS.items():
        samples = [sample(draw, np.random.default_rng(seed), total) for seed in range(SAMPLES)]
        for way, of in (("contiguous", contiguous), ("zigzag", zigzag), ("ours", balance)):
            found = [[of(lengths, ranks) for lengths in samples] for ranks in RANKS]
            figures = [f"{np.mean(each):.3f}" for each in found]
            worst = [f" ({max(each):.3f})" if way == "ours" else "" for each in found]
            yield [name, way, *(figure + most for figure, most in zip(figures, worst, strict=True))]


def main() -> None:
    """Print the page."""
    print("# Attention pairs of the busiest ring rank over the mean\n")
    print("`python -m benchmarks.context_balance`; what the rows mean is at the head of the file.\n")
    for total in (8192, 131072):
        heads = ["documents", "tokens", *(f"cp {ranks}" for ranks in RANKS)]
        print(f"## Samples of {total} tokens\n")
        for cells in (heads, ["---"] * len(heads), *rows(total)):
            print("| " + " | ".join(cells) + " |")
        print()


if __name__ == "__main__":
    main()
