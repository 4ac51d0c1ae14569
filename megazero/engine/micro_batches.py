"""The slice of each global batch that a rank reads, in micro-batches.

global batch    [ dp 0 | dp 1 | dp 2 | dp 3 ]   each dp rank's slice is cut into micro-batches
not divisible   [ dp 0 | dp 1 | dp 2 | dp]      samples beyond the end are read, but all labels are masked
one sample      [ cp 0 | cp 1 ]                 its tokens: the sequence shard of this rank of context parallelism
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.comm.collectives import gather_objects
from megazero.data.sampler import Stream
from megazero.layers.sequence_shard import SequenceShard, sequence_shard
from megazero.layers.vocabulary import IGNORED_LABEL
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Axis, ParallelState

_WHOLE = Axis("cp")


@dataclass(frozen=True)
class BatchSlice:
    """The slice of each global batch that a rank needs: the samples of its dp index, and of each sample its sequence
    shard of context parallelism.

    Args:
        dp: the data-parallel axis.
        device: device of the tensors.
        tokens: whether this rank embeds tokens.
        labels: whether this rank computes a loss.
        ulysses, ring: the axes of context parallelism.
        documents: whether attention stays within documents.
        multiple: the number of micro-batches in a step is a multiple of this; the schedule requires it.
    """

    dp: Axis
    device: torch.device
    tokens: bool
    labels: bool
    ulysses: Axis = _WHOLE
    ring: Axis = _WHOLE
    documents: bool = False
    multiple: int = 1

    def sequence_shard(self, lengths: Sequence[Sequence[int]] | None, seq_len: int) -> SequenceShard | None:
        """Return this rank's shard of the samples of a micro-batch; None if it has whole samples of one document each.
        For the arguments see `layers.sequence_shard.sequence_shard`.

        Raises:
            ValueError: `data.document_mask` is set without lengths of documents, or there are lengths without it.
        """
        if (lengths is None) == self.documents:
            raise ValueError("lengths of documents are given where data.document_mask = true, and only there")
        if lengths is None and self.ulysses.size * self.ring.size == 1:
            return None
        return sequence_shard(lengths, seq_len, self.ulysses, self.ring, self.device)

    def cut(self, sample_ids: Tensor, tokens: Tensor, labels: Tensor, shard: SequenceShard | None) -> MicroBatch:
        """Cut this rank's micro-batch out of whole samples.  tokens, labels: [seq, batch]."""
        if shard is not None:
            tokens, labels = shard.cut(tokens), shard.cut(labels)
        return MicroBatch(sample_ids, tokens if self.tokens else None, labels if self.labels else None, shard)


def check_shapes(batches: Sequence[MicroBatch], seq_len: int) -> int:
    """Return the number of samples in each micro-batch.

    Args:
        seq_len: most tokens of a sample on this rank.

    Raises:
        ValueError: micro-batches have different numbers of samples, or the shapes of their tensors do not match.
    """
    for batch in batches:
        samples, shapes = batch.sample_ids.numel(), set[tuple[int, ...]]()
        for name, tensor in (("tokens", batch.tokens), ("labels", batch.labels)):
            if tensor is not None:
                shapes.add(tuple(tensor.shape))
                if tensor.dim() != 2 or tensor.shape[0] > seq_len or tensor.shape[1] != samples or len(shapes) > 1:
                    raise ValueError(
                        f"{name} of a micro-batch are {list(tensor.shape)}: with {samples} sample_ids tokens and labels "
                        f"must be [{seq_len}, {samples}], this rank's shard of [seq, batch] (engine.batch_slice.cut)"
                    )
    sizes = {batch.sample_ids.numel() for batch in batches}
    if len(sizes) != 1:
        raise ValueError(f"micro-batches of a step must have one size; these have {sorted(sizes)} samples")
    return sizes.pop()


def check_same_documents(batches: Sequence[MicroBatch], state: ParallelState) -> None:
    """Check that ranks with the same dp index, which work on the same samples, have the same documents.  A collective
    call.

    Raises: ValueError, on every rank.
    """
    own = [None if batch.shard is None else batch.shard.plan.documents for batch in batches]
    found = set(gather_objects((state.at.dp, tuple(own)), state.world))
    if len(found) > state.dp.size:
        hint = "give `BatchSlice.sequence_shard` the same lengths on all ranks of one dp index. No weight was changed"
        raise ValueError(f"ranks that share the samples of a micro-batch were given different documents; {hint}")


def read_on_host(
    stream: Stream, first: int, count: int, micro_batch_size: int, batch_slice: BatchSlice, stream_starts_at: int = 0
) -> list[MicroBatch]:
    """Read this rank's micro-batches of the samples [first, first + count) of a stream, `micro_batch_size` samples each.

    Every dp rank gets the same number of micro-batches, in multiples of `batch_slice.multiple`.  Labels beyond the last
    sample are masked.  If attention stays within documents, a label in another document than its token is masked, too.
    The stream's first sample is sample `stream_starts_at` of the run.  The tensors are on the CPU: any thread may read.
    """
    batch_slice, end = replace(batch_slice, device=torch.device("cpu")), first + count
    samples_each = samples_per_rank(count, micro_batch_size, batch_slice)
    own = first + batch_slice.dp.index * samples_each
    indices = np.arange(own, own + samples_each, dtype=np.int64)
    sample_ids = torch.from_numpy(indices)
    read = np.minimum(indices, end - 1) - stream_starts_at
    samples = stream.batch(read) if batch_slice.tokens or batch_slice.labels else None
    documents = stream.documents(read) if batch_slice.documents else []
    # Where the next token is of another document.
    crossing = [np.cumsum(each[:-1] if goes_on else each, dtype=np.int64) - 1 for each, goes_on in documents]

    def cut(start: int) -> MicroBatch:
        which = slice(start, start + micro_batch_size)
        lengths = [each for each, _ in documents[which]] if batch_slice.documents else None
        shard = batch_slice.sequence_shard(lengths, stream.seq_len)
        if samples is None:
            return MicroBatch(sample_ids[which], shard=shard)
        whole = np.ascontiguousarray(samples[which].T)
        tokens, labels = whole[:-1], whole[1:]
        real = max(end - (own + start), 0)
        if real < micro_batch_size or lengths is not None:
            labels = labels.copy()
            labels[:, real:] = IGNORED_LABEL
            for sample, places in enumerate(crossing[which]):
                labels[places, sample] = IGNORED_LABEL
        return batch_slice.cut(sample_ids[which], torch.from_numpy(tokens), torch.from_numpy(labels), shard)

    return [cut(start) for start in range(0, samples_each, micro_batch_size)]


def placed(batches: list[MicroBatch], batch_slice: BatchSlice, seq_len: int) -> list[MicroBatch]:
    """Copy a step's micro-batches from the host to the device of `batch_slice`.  `seq_len`: tokens of a whole sample."""
    device, documents = batch_slice.device, batch_slice.documents
    if device.type == "cpu":
        return batches
    ids, tokens, labels = (
        _copied([getattr(batch, name) for batch in batches], device) for name in ("sample_ids", "tokens", "labels")
    )
    whole = None if documents else batch_slice.sequence_shard(None, seq_len)
    shards: Sequence[SequenceShard | None] = [whole] * len(batches)
    if documents:
        own = [batch.shard for batch in batches if batch.shard is not None]
        rows, positions = (_copied([getattr(p, name) for p in own], device) for name in ("rows", "positions"))
        shards = [replace(shard, rows=r, positions=p) for shard, r, p in zip(own, rows, positions, strict=True)]
    return list(map(MicroBatch, ids, tokens, labels, shards))


def _copied(tensors: Sequence[Tensor | None], device: torch.device) -> Sequence[Any]:
    """Copy tensors of equal shape to a device, in a single copy for which the host does not wait.  None stays None."""
    found = [tensor for tensor in tensors if tensor is not None]
    if not found:
        return tensors
    host = torch.empty((len(found), *found[0].shape), dtype=found[0].dtype, pin_memory=device.type == "cuda")
    return torch.stack(found, out=host).to(device, non_blocking=True).unbind()


def samples_per_rank(count: int, micro_batch_size: int, batch_slice: BatchSlice) -> int:
    """Return the number of samples per dp rank: its slice of `count`, rounded up to whole micro-batches."""
    size = micro_batch_size * batch_slice.multiple
    return -(-count // (batch_slice.dp.size * size)) * size


class ReadAhead:
    """Reads the next step's samples in a thread while the current step computes.

        thread    | read(2)         | read(3)
        step      | 1 . . . . . . . | 2 . . . . . . . | 3

    At most one result is read ahead.  If a step needs other samples, after a roll-back or a skipped step, it reads them
    itself, and the result that was read ahead is discarded, even if it is an error.

    Args:
        read: reads the samples of a step; its arguments identify them.
    """

    def __init__(self, read: Callable[..., list[MicroBatch]]) -> None:
        self._read, self._thread = read, ThreadPoolExecutor(1, "read-ahead")
        self._next: tuple[object, Future[list[MicroBatch]]] | None = None

    def take(self, wanted: tuple[int, ...], following: tuple[int, ...] | None) -> list[MicroBatch]:
        """Return the result of `read(*wanted)`, and start `read(*following)`.  Raises: the errors of `read(*wanted)`."""
        ahead, self._next = self._next, None
        result = ahead[1].result() if ahead is not None and ahead[0] == wanted else self._read(*wanted)
        if following is not None:
            self._next = following, self._thread.submit(self._read, *following)
        return result

    def close(self) -> None:
        """Wait until the thread has ended."""
        self._thread.shutdown(cancel_futures=True)
