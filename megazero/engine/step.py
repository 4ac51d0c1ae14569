"""Begin and end of a step, for a GPT and for a script's own module: its part of each global batch, and the reduction.

    global batch    [ dp 0 | dp 1 ]     its samples: the slice of this rank of dp, cut into micro-batches
    one sample      [ cp 0 | cp 1 ]     its tokens: the sequence shard of this rank of context parallelism

    buckets hold the gradients -> one all-reduce over the world: (squared norm, loss, tokens, z-loss, stop)
        -> not finite, no loss scale:     no update; NonFiniteError, or `StepStatistics.finite` is False
        -> overflow under a loss scale:   no update, a smaller scale
        -> otherwise:                     unscale, clip, sharded optimizer step, start of the weights' all-gather

Every rank takes the same branch, because every rank decides by the same reduced numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce, gather_objects, numbers_of
from megazero.layers.sample_part import SamplePart, part_of
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.sharded_model import ShardedModel

_WHOLE = Axis("cp")


@dataclass(frozen=True)
class BatchShare:
    """The part of each global batch that a rank needs: its slice over `dp`, and its sequence shard of context
    parallelism.

    Args:
        dp: the data-parallel axis.
        device: where the tensors are.
        tokens: whether this rank embeds tokens.
        labels: whether this rank computes a loss.
        ulysses, ring: the axes of context parallelism.
        documents: whether attention stays within documents.
        multiple: a step has a multiple of so many micro-batches, as the schedule asks.
    """

    dp: Axis
    device: torch.device
    tokens: bool
    labels: bool
    ulysses: Axis = _WHOLE
    ring: Axis = _WHOLE
    documents: bool = False
    multiple: int = 1

    def part_of(self, lengths: Sequence[Sequence[int]] | None, seq_len: int) -> SamplePart | None:
        """Return this rank's shard of the samples of a micro-batch; None if it has whole samples of one document each.
        For the arguments see `layers.sample_part.part_of`.

        Raises:
            ValueError: `data.document_mask` is set without lengths of documents, or there are lengths without it.
        """
        if (lengths is None) == self.documents:
            raise ValueError("lengths of documents are given where data.document_mask = true, and only there")
        if lengths is None and self.ulysses.size * self.ring.size == 1:
            return None
        return part_of(lengths, seq_len, self.ulysses, self.ring, self.device)

    def cut(self, sample_ids: Tensor, tokens: Tensor, labels: Tensor, part: SamplePart | None) -> MicroBatch:
        """Cut this rank's micro-batch out of whole samples.  tokens, labels: [seq, batch]."""
        if part is not None:
            tokens, labels = part.cut(tokens), part.cut(labels)
        return MicroBatch(sample_ids, tokens if self.tokens else None, labels if self.labels else None, part)


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
                        f"must be [{seq_len}, {samples}], this rank's part of [seq, batch] (engine.share.cut)"
                    )
    sizes = {batch.sample_ids.numel() for batch in batches}
    if len(sizes) != 1:
        raise ValueError(f"micro-batches of a step must have one size; these have {sorted(sizes)} samples")
    return sizes.pop()


def check_same_documents(batches: Sequence[MicroBatch], state: ParallelState) -> None:
    """Check that all ranks with the same index in dp, which share samples, have the same documents.  A collective call.

    Raises: ValueError, on every rank.
    """
    own = [None if batch.part is None else batch.part.plan.documents for batch in batches]
    found = set(gather_objects((state.at.dp, tuple(own)), state.world))
    if len(found) > state.dp.size:
        hint = "on all ranks of one index of dp, give `BatchShare.part_of` the same lengths. No weight was changed"
        raise ValueError(f"ranks that share the samples of a micro-batch were given other documents; {hint}")


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not finite, or there is no loss.  No weight has changed."""


@dataclass(frozen=True)
class StepStatistics:
    """Results of a step over the whole global batch.

    Args:
        loss: mean nats per counted token, nan if none is counted; for a script's own module, its mean loss.
        grad_norm: global L2 norm before clipping; 0 in evaluation, not finite after an overflow under fp16.
        tokens: counted (unmasked) tokens; for a script's own module, the number of losses.
        loss_scale: factor on the loss, under fp16.
        skipped: the weights did not change, because of an overflow or a number that is not finite.
        finite: there is a loss, and loss and norm are finite.  Under fp16 it is True whenever there is a loss, since
            the loss scale handles overflows.
        stop: a rank wants the run to end after this step; the same on all ranks.
        z_loss: mean over counted tokens, with its coefficient; not part of `loss`.
    """

    loss: float
    grad_norm: float
    tokens: int
    loss_scale: float = 1.0
    skipped: bool = False
    finite: bool = True
    stop: bool = False
    z_loss: float = 0.0

    @property
    def problem(self) -> str:
        """A sentence that explains why the step is not finite."""
        if not self.tokens:
            return (
                "no token is counted, so there is no loss (with data.document_mask a document of one token has none); the "
                "weights were not changed. "
            )
        return f"loss={self.loss} and grad_norm={self.grad_norm} must be finite; the weights were not changed. "


def sum_over_ranks(
    model: ShardedModel,
    square_sum: Tensor,
    loss_sum: Tensor,
    count: Tensor,
    z_sum: float | Tensor = 0.0,
    *,
    stop: bool = False,
) -> StepStatistics:
    """Run the one collective at the end of a step.

    Args:
        square_sum: this rank's part of the squared norm of the scaled gradients, fp64 scalar.
        loss_sum: sum of this rank's losses, fp64 scalar; 0 if another stage computes the loss.
        count: this rank's counted tokens, fp64 scalar.
        z_sum: sum of this rank's z-losses; 0 if there are none.
        stop: this rank wants the run to end.
    """
    total = torch.stack([square_sum, loss_sum, count, z_sum + torch.zeros_like(count), torch.full_like(count, stop)])
    if model.state.at.tp:  # all tp ranks have the same losses and tokens, so only the first one counts
        total[1:4].zero_()
    all_reduce(total, model.state.world).wait()
    squared, loss, tokens, z_sum, stops = numbers_of(total, model.state.world)
    loss, norm = loss / tokens if tokens else nan, model.norm_of(squared)
    finite = tokens > 0 and (model.scaler is not None or (isfinite(loss) and isfinite(norm)))
    return StepStatistics(
        loss, norm, int(tokens), model.scale, finite=finite, stop=stops > 0, z_loss=z_sum / max(tokens, 1)
    )


def check_finite(statistics: StepStatistics) -> StepStatistics:
    """Return the statistics unchanged.  Raises: NonFiniteError, they are not finite."""
    if not statistics.finite:
        raise NonFiniteError(
            f"{statistics.problem}Resume from the last checkpoint with "
            f"{'a lower learning rate or ' if statistics.tokens else ''}other data"
        )
    return statistics
