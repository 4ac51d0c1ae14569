"""The end of a step, for a GPT and for a script's own module alike.

    buckets hold the gradients -> one all-reduce over the world: (squared norm, loss, tokens, stop)
        -> not finite, no loss scale:     no update; NonFiniteError, or `StepStatistics.finite` says so
        -> overflow under a loss scale:   no update, a smaller scale
        -> otherwise:                     unscale, clip, sharded optimizer step, start of the weights' all-gather

Every rank takes the same branch, because every rank decides by the same reduced numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, nan

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce, numbers_of
from megazero.zero.sharded_model import ShardedModel


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not a number, or there is no loss; no weight has changed."""


@dataclass(frozen=True)
class StepStatistics:
    """What a step measured over the whole global batch.

    Args:
        loss: mean nats per counted token, nan where none is counted; for a script's own module, its mean loss.
        grad_norm: global L2 norm before clipping; 0 in evaluation, not finite after an overflow under fp16.
        tokens: counted (unmasked) tokens; for a script's own module, the number of losses.
        loss_scale: what the loss was multiplied by, under fp16.
        skipped: the weights did not change, because of an overflow or a number that is not finite.
        finite: there is a loss, and loss and norm are numbers.  Under fp16 the loss scale handles overflows: where there is
            a loss it is always true.
        stop: a rank wants the run to end after this step; the same on all ranks.
    """

    loss: float
    grad_norm: float
    tokens: int
    loss_scale: float = 1.0
    skipped: bool = False
    finite: bool = True
    stop: bool = False

    @property
    def problem(self) -> str:
        """Why the step is not finite, as a sentence."""
        if not self.tokens:
            return (
                "no token is counted, so there is no loss (with data.document_mask a document of one token has none); the "
                "weights were not changed. "
            )
        return f"loss={self.loss} and grad_norm={self.grad_norm} must be finite; the weights were not changed. "


def sum_over_ranks(
    model: ShardedModel, square_sum: Tensor, loss_sum: Tensor, count: Tensor, *, stop: bool = False
) -> StepStatistics:
    """The one collective at the end of a step.

    Args:
        square_sum: this rank's share of the squared norm of the scaled gradients, fp64 scalar.
        loss_sum: sum of this rank's losses, fp64 scalar; 0 where another stage computes the loss.
        count: this rank's counted tokens, fp64 scalar.
        stop: this rank wants the run to end.
    """
    total = torch.stack([square_sum, loss_sum, count, torch.full_like(count, stop)])
    if model.state.at.tp:  # all tensor-parallel ranks have the same losses and tokens; the first one counts
        total[1:3].zero_()
    all_reduce(total, model.state.world).wait()
    squared, loss, tokens, stops = numbers_of(total, model.state.world)
    loss, norm = loss / tokens if tokens else nan, model.norm_of(squared)
    finite = tokens > 0 and (model.scaler is not None or (isfinite(loss) and isfinite(norm)))
    return StepStatistics(loss, norm, int(tokens), model.scale, finite=finite, stop=stops > 0)


def check_finite(statistics: StepStatistics) -> StepStatistics:
    """Return the statistics unchanged.  Raises: NonFiniteError if they are not finite."""
    if not statistics.finite:
        raise NonFiniteError(
            f"{statistics.problem}Resume from the last checkpoint with "
            f"{'a lower learning rate or ' if statistics.tokens else ''}other data"
        )
    return statistics
