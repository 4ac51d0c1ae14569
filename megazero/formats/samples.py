"""Shows training samples as text: their source, the borders of documents, and how many tokens count in the loss.

sample 3: data/books, window 17, 512 tokens
  document of 200 tokens, 199 count: 'Call me Ishmael. ...'
  document of 312 tokens: '...'
"""

from collections.abc import Iterator

import torch

from megazero.config import RunConfig
from megazero.data.corpus import tokenizer_of
from megazero.engine import BatchSlice
from megazero.engine.micro_batches import read_on_host
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.parallel_state import Axis
from megazero.training.batches import open_corpus_of


def describe_samples(config: RunConfig, first: int, count: int) -> Iterator[str]:
    """Describe the training samples [first, first + count).  A token counts if the loss contains a prediction from it.

    Raises: FileNotFoundError, ValueError, OSError: see `open_corpus`.
    """
    data, stream = config.data, open_corpus_of(config).train
    names = [source.path for source in data.sources]
    tokenizer = tokenizer_of(names, data.tokenizer, data.eod_token)
    batch_slice = BatchSlice(Axis("dp"), torch.device("cpu"), tokens=True, labels=True, documents=data.document_mask)
    indices = range(first, first + count)
    sources, windows = stream.locate(indices)
    for index in range(count):
        (batch,) = read_on_host(stream, first + index, 1, 1, batch_slice)
        assert batch.tokens is not None and batch.labels is not None  # noqa: PT018
        ((lengths, _),) = stream.documents([first + index])
        yield f"sample {first + index}: {names[sources[index]]}, window {windows[index]:,}, {stream.seq_len:,} tokens"
        for tokens, labels in zip(batch.tokens[:, 0].split(lengths), batch.labels[:, 0].split(lengths), strict=True):
            counted = int((labels != IGNORED_LABEL).sum())
            some = "" if counted == len(tokens) else f", {counted:,} count"
            yield f"  document of {len(tokens):,} tokens{some}: {tokenizer.decode(tokens.numpy())!r}"
