"""What a rank takes of each global batch.

global batch    [ dp 0 | dp 1 ]     its samples: the slice of this rank of dp, cut into micro-batches
one sample      [ cp 0 | cp 1 ]     its tokens: the sequence shard of this rank of context parallelism
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.comm.collectives import gather_objects
from megazero.layers.recompute import WHOLE
from megazero.layers.sample_part import SamplePart, part_of
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Axis, ParallelState


@dataclass(frozen=True)
class BatchShare:
    """What a rank needs of each global batch: its slice over `dp`, and its sequence shard over context parallelism.

    Args:
        dp: the data-parallel axis.
        device: of the tensors.
        tokens, labels: whether this rank embeds tokens, and computes a loss.
        ulysses, ring: the axes of context parallelism.
        documents: whether attention stays within documents.
    """

    dp: Axis
    device: torch.device
    tokens: bool
    labels: bool
    ulysses: Axis = WHOLE
    ring: Axis = WHOLE
    documents: bool = False

    def part_of(self, lengths: Sequence[Sequence[int]] | None, seq_len: int) -> SamplePart | None:
        """This rank's shard of the samples of a micro-batch; arguments as in `layers.sample_part.part_of`.

        Raises: ValueError: the lengths of documents are missing under `data.document_mask`, or given without it.
        """
        if (lengths is None) == self.documents:
            raise ValueError(
                "no lengths of documents: data.document_mask = true needs lengths"
                if self.documents
                else "lengths of documents: data.document_mask = false takes no lengths"
            )
        return part_of(lengths, seq_len, self.ulysses, self.ring, self.device)

    def cut(self, sample_ids: Tensor, tokens: Tensor, labels: Tensor, part: SamplePart | None) -> MicroBatch:
        """Cut this rank's micro-batch out of whole samples; tokens, labels: [seq, batch]."""
        if part is not None:
            tokens, labels = part.cut(tokens), part.cut(labels)
        return MicroBatch(sample_ids, tokens if self.tokens else None, labels if self.labels else None, part)


def check_shapes(batches: Sequence[MicroBatch], seq_len: int) -> int:
    """The number of samples in each micro-batch; `seq_len`: tokens of a sample on this rank, at most.

    Raises: ValueError: micro-batches have different numbers of samples, or tensors that do not fit these.
    """
    for batch in batches:
        samples, shapes = batch.sample_ids.numel(), set[tuple[int, ...]]()
        for name, tensor in (("tokens", batch.tokens), ("labels", batch.labels)):
            if tensor is not None:
                shapes.add(tuple(tensor.shape))
                if tensor.dim() != 2 or tensor.shape[0] > seq_len or tensor.shape[1] != samples or len(shapes) > 1:
                    raise ValueError(
                        f"{name} of a micro-batch are {list(tensor.shape)}: with {samples} sample_ids tokens and labels "
                        f"must be [{seq_len}, {samples}], this rank's part of [seq, batch] (engine.share.cut)"
                    )
    sizes = {batch.sample_ids.numel() for batch in batches}
    if len(sizes) != 1:
        raise ValueError(f"micro-batches of a step must have one size; these have {sorted(sizes)} samples")
    return sizes.pop()


def check_same_documents(batches: Sequence[MicroBatch], state: ParallelState) -> None:
    """Make sure that all ranks of one index of dp, which share samples, have the same documents.  A collective call.

    Raises: ValueError, on every rank.
    """
    own = [None if batch.part is None else batch.part.plan.documents for batch in batches]
    found = set(gather_objects((state.at.dp, tuple(own)), state.world))
    if len(found) > state.dp.size:
        raise ValueError(
            "ranks that share the samples of a micro-batch were given other documents; on all ranks of one index of dp, "
            "give `BatchShare.part_of` the same lengths. No weight was changed"
        )
