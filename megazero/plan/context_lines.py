"""What `megazero check` says of context parallelism, and of documents that attention stays within."""

from collections.abc import Iterator, Sequence

from megazero.config import ResolvedRun
from megazero.config.derive import sent_by_attention
from megazero.data.corpus import without_borders
from megazero.layers.token_layout import balance, shards, work
from megazero.settings import counted


def describe_context(run: ResolvedRun, samples: Sequence[Sequence[int]] | None) -> Iterator[str]:
    """Describe context parallelism, and the documents that attention stays within, a line each.

    Args:
        samples: lengths of the documents of some samples; None where the data is not on this machine.
    """
    config = run.config
    masks, whole = config.data.document_mask, [[config.model.seq_len]]
    if config.parallel.cp > 1:
        yield _sent(run) + _balance(run, samples if masks else whole)
    if masks:
        yield "documents: not known, the data is not on this machine" if samples is None else _documents(run, samples)
        yield from without_borders(samples or ())


def _sent(run: ResolvedRun) -> str:
    parallel, ulysses = run.config.parallel, run.config.parallel.ulysses
    sent = sent_by_attention(run.config, run.micro_batch_size, ulysses)
    parts = " + ".join(f"{operation} {count:,}" for operation, count in sent.items() if count)
    return (
        f"cp {parallel.cp}, {parallel.cp_method}: Ulysses {ulysses} x ring {parallel.cp // ulysses}; for each layer and "
        f"micro-batch a rank sends {sum(sent.values()):,} bytes ({parts}), forward and backward"
    )


def _balance(run: ResolvedRun, samples: Sequence[Sequence[int]] | None) -> str:
    """Load balance of a ring: query-key pairs of the busiest rank over the mean of all ranks, for each sample."""
    ring = run.config.parallel.cp // run.config.parallel.ulysses
    if ring == 1:
        return "; ranks have equal work"
    if samples is None:
        return ""
    found = [balance(lengths, ring, run.config.model.sliding_window) for lengths in samples]
    most = f", {max(found):.3f} at most" if len(found) > 1 else ""
    return f"; pairs on the busiest ring rank over their mean: {sum(found) / len(found):.3f}{most}"


def _documents(run: ResolvedRun, samples: Sequence[Sequence[int]]) -> str:
    model, every = run.config.model, [length for lengths in samples for length in lengths]

    def pairs(lengths: Sequence[int]) -> int:
        return work(shards(lengths, 1)[0], model.sliding_window)

    seen = sum(map(pairs, samples)) / (len(samples) * pairs([model.seq_len]))
    return (
        f"documents: {len(every) / len(samples):.1f} in a sample, of {sum(every) / len(every):,.0f} tokens on average and "
        f"{max(every):,} at most; attention sees {seen:.1%} of the pairs of whole samples "
        f"(the first {counted(len(samples), 'sample')})"
    )
