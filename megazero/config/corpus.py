"""Opens the data that a run file names: its keys as arguments of `data.open_corpus`."""

from collections.abc import Callable, Sequence

from megazero.config.derive import cache_directory
from megazero.config.schema import RunConfig
from megazero.data import Corpus, open_corpus


def open_sources(
    config: RunConfig,
    sources: Sequence[tuple[str, float]],
    validation_fraction: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """Open sources with the tokenizer, sample length and vocabulary of a resolved run.

    Args:
        sources: (source, weight) pairs.
        validation_fraction: None for that of the run.
        say: takes a line before much is read.

    Raises: as `open_corpus`.
    """
    return open_corpus(
        sources,
        tokenizer=config.data.tokenizer,
        seq_len=config.model.seq_len,
        seed=config.training.seed,
        validation_fraction=config.data.validation_fraction if validation_fraction is None else validation_fraction,
        cache_dir=cache_directory(config.data),
        vocab_size=config.model.vocab_size,
        eod_token=config.data.eod_token,
        ends_as=[source.path for source in config.data.sources],
        say=say,
    )
