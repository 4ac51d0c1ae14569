"""Reads texts with the model during a run, through the engine itself, on any shape; and shows how it continues prompts.

    rank 0       texts, as tokens  ->  all ranks  ->  engine  ->  logits where a label is  ->  numbers of each text
    the others   wait for texts until there are no more

Only rank 0 tokenizes.  What goes wrong there is a line, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce, from_first
from megazero.config.derive import micro_batch_multiple
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.models.gpt import MicroBatch
from megazero.training.batches import share_of_each
from megazero.training.callbacks.base import Callback, RunContext, StepRecord

#: Tokens, and how many of them, the last, are labels.
Text: TypeAlias = tuple[list[int], int]

#: (fp32 logits [n, vocab], labels [n]) -> [n, 2], which is summed over the labels of a text; picklable.
Reader: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-likelihood of each label, and 1 where another token is likelier."""
    target = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.stack([target, (logits.argmax(-1) != labels).float()], -1)


def likeliest(logits: Tensor, _: Tensor) -> Tensor:
    """The likeliest token, twice."""
    return logits.argmax(-1, keepdim=True).expand(-1, 2)


def read_texts(context: RunContext, texts: Sequence[Text], read: Reader) -> list[list[float]]:
    """The numbers of each text.  Called on every rank.  A text longer than a sample loses its first tokens."""
    run, share, state = context.run, context.engine.share, context.engine.state
    seq_len, size = run.config.model.seq_len, run.micro_batch_size
    each = share_of_each(len(texts), share.dp.size, size, micro_batch_multiple(run.config.parallel))
    whole = torch.zeros(2, seq_len, each * share.dp.size, dtype=torch.int64)  # tokens and labels
    whole[1] = IGNORED_LABEL
    for row, (text, asked) in enumerate(texts):
        ids = torch.tensor(text[-seq_len - 1 :])
        end = len(ids) - 1
        whole[0, :end, row] = ids[:-1]
        whole[1, max(end - asked, 0) : end, row] = ids[1:][-asked:]
    whole, part = whole.to(share.device), share.part_of([[seq_len]] * size if share.documents else None, seq_len)
    numbers = torch.zeros(whole.shape[-1], 2, dtype=torch.float64, device=share.device)

    def cut(first: int) -> MicroBatch:
        samples = torch.arange(first, first + size, device=share.device)
        return share.cut(samples, whole[0, :, samples], whole[1, :, samples], part)

    def collect(batch: MicroBatch, logits: Tensor) -> None:
        if batch.labels is not None and not state.at.tp:  # all ranks of tp have the same logits
            counted = batch.labels != IGNORED_LABEL
            found = read(logits[counted].float(), batch.labels[counted])
            numbers.index_add_(0, batch.sample_ids.expand_as(counted)[counted], found.double())

    own = share.dp.index * each
    context.engine.read_logits([cut(first) for first in range(own, own + each, size)], collect)
    all_reduce(numbers, state.world).wait()
    return numbers[: len(texts)].tolist()


class TextCallback(Callback):
    """Something that reads texts every so many steps, and after the last one."""

    what: str  # for a message

    def __init__(self, context: RunContext, every_steps: int) -> None:
        self._context, self._every, self._is_reading = context, every_steps, False

    def after_step(self, record: StepRecord) -> None:
        world, last = self._context.engine.state.world, self._context.run.config.training.steps
        if record.step != last and not (self._every and record.step % self._every == 0):
            return
        if world.index:
            while asked := from_first(None, world):
                read_texts(self._context, *asked)  # type: ignore[unreachable]  # the first rank's is one
            return
        try:
            self.work(record)
        except Exception as error:
            if self._is_reading:  # of the engine, which the other ranks have met, too
                raise
            self._context.say(f"step {record.step}: no {self.what}: {error!r}; the run goes on")
        from_first(None, world)

    def work(self, record: StepRecord) -> None:
        """Called on rank 0 alone; may call `ask`, and no collective."""
        raise NotImplementedError

    def ask(self, texts: list[Text], read: Reader) -> list[list[float]]:
        """`read_texts` on all ranks."""
        self._is_reading = True
        from_first((texts, read), self._context.engine.state.world)
        found = read_texts(self._context, texts, read)
        self._is_reading = False
        return found

    def tokenizer(self) -> Tokenizer:
        """That of the run.  Raises: OSError, ValueError: it is not here."""
        data = self._context.run.config.data
        return load_tokenizer(data.tokenizer, data.eod_token, self._context.corpus.fingerprint)


class Samples(TextCallback):
    """Shows how the model continues `logging.sample_prompts`, by its likeliest tokens."""

    what = "samples"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context, context.run.config.logging.sample_every_steps)

    def work(self, record: StepRecord) -> None:
        tokenizer, logging = self.tokenizer(), self._context.run.config.logging
        begun = [tokenizer.encode(prompt).tolist() for prompt in logging.sample_prompts]
        texts = [list(ids) for ids in begun]
        for _ in range(logging.sample_tokens):
            for ids, (token, _) in zip(texts, self.ask([([*ids, 0], 1) for ids in texts], likeliest), strict=True):
                ids.append(int(token))
        for prompt, ids, text in zip(logging.sample_prompts, begun, texts, strict=True):
            self._context.say(f"step {record.step} | {prompt!r} goes on {tokenizer.decode(text[len(ids) :])!r}")
