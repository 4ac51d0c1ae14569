"""Reads texts with the model during a run, through the engine itself, on any shape; and lets it continue prompts.

    rank 0       thread: tokens of texts  ->  all ranks  ->  engine  ->  logits at the labels  ->  numbers of each text
    the others   wait for texts from rank 0 and read them, until there are no more

Only rank 0 tokenizes, and no collective waits while it does.  If it fails there, it prints a line, and the run continues.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megazero.comm.agreement import in_thread, seconds_between_meetings
from megazero.comm.collectives import all_reduce, from_first, largest
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.engine.micro_batches import samples_per_rank
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.models.gpt import MicroBatch
from megazero.training.callbacks.base import Callback, RunContext, StepDecision, StepRecord

#: Tokens, and how many of them, the last, are labels.
Text: TypeAlias = tuple[list[int], int]


class Reader(NamedTuple):
    """Computes numbers from the logits at the labels.  Picklable.

    Attributes:
        width: how many numbers each label gives.
        read: (fp32 logits [n, vocab], labels [n]) -> [n, width]; the sum over the labels of a text is its result.
    """

    width: int
    read: Callable[[Tensor, Tensor], Tensor]


class Ended(NamedTuple):
    """The message of rank 0 that there are no more texts."""

    problem: str | None  # what went wrong
    stop: bool = False  # a rank wants the run to end, so the rest is left out


def _likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    target = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.stack([target, (logits.argmax(-1) != labels).float()], -1)


def _likeliest(logits: Tensor, _: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


#: Texts, and what is read of them.
Request: TypeAlias = tuple[list[Text], Reader]

#: The log-likelihood of each label, and 1 where another token is likelier.
LIKELIHOOD = Reader(2, _likelihood)
#: The likeliest token.
LIKELIEST = Reader(1, _likeliest)


def read_texts(context: RunContext, texts: Sequence[Text], reader: Reader) -> list[list[float]]:
    """Return the numbers of each text.  Every rank calls this.  A text longer than a sample loses its first tokens."""
    run, batch_slice, state = context.run, context.engine.batch_slice, context.engine.state
    seq_len, size = run.config.model.seq_len, run.micro_batch_size
    each = samples_per_rank(len(texts), size, batch_slice)
    first = batch_slice.dp.index * each  # of this rank's texts
    whole = torch.zeros(2, seq_len, each, dtype=torch.int64)  # their tokens and labels
    whole[1] = IGNORED_LABEL
    for row, (text, asked) in enumerate(texts[first : first + each]):
        ids = torch.tensor(text[-seq_len - 1 :])
        end = len(ids) - 1
        whole[0, :end, row] = ids[:-1]
        whole[1, max(end - asked, 0) : end, row] = ids[1:][-asked:]
    shard = batch_slice.sequence_shard([[seq_len]] * size if batch_slice.documents else None, seq_len)
    whole = whole.to(batch_slice.device)
    numbers = torch.zeros(each * batch_slice.dp.size, reader.width, dtype=torch.float64, device=batch_slice.device)

    def cut(at: int) -> MicroBatch:
        samples = torch.arange(at, at + size, device=batch_slice.device)
        return batch_slice.cut(first + samples, whole[0, :, samples], whole[1, :, samples], shard)

    def collect(batch: MicroBatch, logits: Tensor) -> None:
        if batch.labels is not None and not state.at.tp:  # all ranks of tp have the same logits
            counted = batch.labels != IGNORED_LABEL
            found = reader.read(logits[counted].float(), batch.labels[counted])
            numbers.index_add_(0, batch.sample_ids.expand_as(counted)[counted], found.double())

    context.engine.read_logits([cut(at) for at in range(0, each, size)], collect)
    all_reduce(numbers, state.world).wait()
    return numbers[: len(texts)].tolist()


def _ended(work: Callable[[], object]) -> Ended:
    try:
        work()
    except Exception as error:
        return Ended(f"{type(error).__name__}: {error}")
    return Ended(None)


class TextCallback(Callback):
    """Base class of callbacks that read texts every so many steps and after the last step.  `before`: see `Evaluation`."""

    what: str  # for a message

    def __init__(self, context: RunContext, before: Sequence[Callback], every_steps: int) -> None:
        self._context, self._before, self._every = context, before, every_steps
        # on rank 0: what its thread asks for, and the answers
        self._asked, self._answers = SimpleQueue[Request | Ended](), SimpleQueue[list[list[float]]]()

    def after_step(self, record: StepRecord) -> StepDecision | None:
        last = self._context.run.config.training.steps
        if record.step != last and not (self._every and record.step % self._every == 0):
            return None
        for callback in self._before:
            callback.after_step(record)
        ended = self.do_on_first(lambda: self.work(record))
        if ended.problem:
            self._context.log(f"step {record.step}: no {self.what}: {ended.problem}; the run goes on")
        return StepDecision.STOP if ended.stop else None

    def do_on_first(self, work: Callable[[], object]) -> Ended:
        """Run `work` on rank 0; it may call `ask` but no collective.  A stop aborts it.  Every rank calls this."""
        world, parallel = self._context.engine.state.world, self._context.run.config.parallel
        seconds = seconds_between_meetings(parallel.timeout_seconds)
        if world.index == 0:
            in_thread(lambda: self._asked.put(_ended(work)))
        while True:
            asked = from_first(self._next(seconds) if world.index == 0 else None, world)
            if isinstance(asked, Ended):
                return asked
            if any(largest([self._context.engine.wants_stop()], world)):
                return Ended(None, stop=True)
            if asked is not None:
                found = read_texts(self._context, *asked)
                if world.index == 0:
                    self._answers.put(found)

    def _next(self, seconds: float) -> Request | Ended | None:
        with suppress(Empty):
            return self._asked.get(timeout=seconds)
        return None

    def work(self, record: StepRecord) -> None:
        """The work of a step.  Called on rank 0 alone; may call `ask`, but no collective."""
        raise NotImplementedError

    def ask(self, texts: list[Text], reader: Reader) -> list[list[float]]:
        """Run `read_texts` on all ranks; return its result."""
        self._asked.put((texts, reader))
        return self._answers.get()

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer.  Raises: OSError, ValueError: it cannot be loaded on this machine."""
        data = self._context.run.config.data
        return load_tokenizer(data.tokenizer, data.eod_token, self._context.corpus.fingerprint)


class Samples(TextCallback):
    """Prints how the model continues `logging.sample_prompts` with its likeliest tokens."""

    what = "samples"

    def __init__(self, context: RunContext, before: Sequence[Callback]) -> None:
        super().__init__(context, before, context.run.config.logging.sample_every_steps)

    def work(self, record: StepRecord) -> None:
        tokenizer, logging = self.tokenizer(), self._context.run.config.logging
        begun = [tokenizer.encode(prompt).tolist() for prompt in logging.sample_prompts]
        texts = [list(ids) for ids in begun]
        for _ in range(logging.sample_tokens):
            for ids, (token,) in zip(texts, self.ask([([*ids, 0], 1) for ids in texts], LIKELIEST), strict=True):
                ids.append(int(token))
        for prompt, ids, text in zip(logging.sample_prompts, begun, texts, strict=True):
            self._context.log(f"step {record.step} | {prompt!r} goes on {tokenizer.decode(text[len(ids) :])!r}")
