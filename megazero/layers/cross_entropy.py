"""The output head and its loss as one operation, over a vocabulary cut over TP, a chunk of tokens at a time.

    per chunk of tokens    logits = x W^T                 [chunk, vocab / tp], fp32
                           peak, sum(exp), target logit   of each rank's part, gathered over tp: one small collective
                           loss = log(sum) + peak - target

Logits of a long sequence never exist whole: with more than one chunk only the log-sum-exp of each token is kept and the
backward computes a chunk's logits again.  A single chunk keeps its probabilities and computes nothing twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import copy_to_tp, gather_features, gather_sequence
from megazero.comm.collectives import all_gather
from megazero.layers.gemm import product_t
from megazero.layers.linear import WeightGradients
from megazero.layers.spec import Init, ParamSpec, Section, drawn_parameter
from megazero.parallel_state import Axis

IGNORED_LABEL = -100
"""Label of a token that does not count (torch's convention)."""

CHUNK_TOKENS = 2048

_LEAST = torch.finfo(torch.float32).min


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(x W^T)[label].  x: [tokens, hidden], labels: int64 [tokens] -> fp32 scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        tp: Axis,
        vocab_size: int,
        chunk: int,
        gradients: WeightGradients | None,
    ) -> Tensor:
        first = tp.index * weight.shape[0]
        real_rows = max(0, min(weight.shape[0], vocab_size - first))
        counted = labels != IGNORED_LABEL
        local = labels - first
        here = counted & (local >= 0) & (local < weight.shape[0])
        local = local.where(here, 0)
        loss = x.new_zeros((), dtype=torch.float32)
        log_sums, kept = [], None
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _masked_logits(x[part], weight, real_rows)
            target = logits.gather(-1, local[part].unsqueeze(-1)).squeeze(-1).where(here[part], 0.0)
            peak = logits.amax(-1).clamp_(min=_LEAST)  # where a rank has nothing but padding
            probabilities = logits.sub_(peak.unsqueeze(-1)).exp_()
            log_sum, target = _over_vocabulary(peak, probabilities.sum(-1), target, tp)
            loss += (log_sum - target).where(counted[part], 0.0).sum()
            log_sums.append(log_sum)
            if chunk >= x.shape[0]:
                kept = probabilities.mul_((peak - log_sum).exp_().unsqueeze(-1))
        ctx.save_for_backward(x, weight, local, here, counted, torch.cat(log_sums), kept)
        ctx.chunk, ctx.real_rows, ctx.gradients = chunk, real_rows, gradients
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, local, here, counted, log_sum, kept = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = None
        for start in range(0, x.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            if kept is not None:
                slope = kept  # overwritten: autograd frees it after this
            else:
                slope = _masked_logits(x[part], weight, ctx.real_rows).sub_(log_sum[part].unsqueeze(-1)).exp_()
            slope.scatter_add_(-1, local[part].unsqueeze(-1), -here[part].unsqueeze(-1).to(slope.dtype))
            slope *= (counted[part] * grad).unsqueeze(-1)
            slope = slope.to(x.dtype)
            grad_x[part] = product_t(slope, weight.t())
            if ctx.gradients is not None and ctx.chunk >= x.shape[0] and ctx.needs_input_grad[1]:
                grad_weight = ctx.gradients.submit(weight, slope, x, can_wait=False)  # slopes are large
                break
            piece = product_t(slope.t(), x[part].t())
            if grad_weight is None:
                # bf16 pieces are summed in fp32: their number grows with the sequence.
                grad_weight = piece if ctx.chunk >= x.shape[0] else piece.float()
            else:
                grad_weight += piece
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 6


def _over_vocabulary(peak: Tensor, total: Tensor, target: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """log(sum(exp(logits))) and the target's logit over all ranks' parts, in one collective.

    Args:
        peak: largest logit of this rank's part, [tokens].
        total: sum of exp(logit - peak) of it.
        target: the label's logit where it is in this part, else 0.
        tp: the ranks that hold the parts.
    """
    mine = torch.stack([peak, total, target])
    every = mine.new_empty(tp.size, *mine.shape)
    all_gather(every, mine.unsqueeze(0), tp).wait()
    peaks, totals, targets = every.unbind(1)
    highest = peaks.amax(0)
    return highest + ((peaks - highest).exp_() * totals).sum(0).log_(), targets.sum(0)


def _masked_logits(x: Tensor, weight: Tensor, real_rows: int) -> Tensor:
    """fp32 logits of this rank's rows; padded vocabulary rows can never be chosen."""
    logits = product_t(x, weight).float()
    if real_rows < weight.shape[0]:
        logits[:, real_rows:] = float("-inf")
    return logits


class VocabParallelHead(nn.Module):
    """Logits over the vocabulary and their cross-entropy.

    Args:
        name: canonical name of the weight.
        vocab_size: tokens of the vocabulary; need not divide by tp.
        hidden_size: size of the input.
        tp: the tensor-parallel axis.
        sequence_parallel: x arrives as [seq / tp, batch, hidden].
        tied: the weight is the input embedding's.
        init: how the weight starts.
        weight: the embedding's parameter when this rank holds both; None makes one.
        gradients: takes the weight gradient where it comes from here alone; None returns it to autograd.
        chunk_tokens: tokens whose logits exist at a time.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tp: Axis,
        *,
        sequence_parallel: bool,
        tied: bool,
        init: Init,
        weight: nn.Parameter | None = None,
        gradients: WeightGradients | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        self.tp, self.vocab_size, self.chunk_tokens = tp, vocab_size, chunk_tokens
        self.enter = gather_sequence if sequence_parallel else copy_to_tp
        spec = ParamSpec((Section(name, vocab_size),), hidden_size, 0, init, tied=tied)
        self.specs = {"weight": spec}
        self.weight = drawn_parameter(spec, tp.index, tp.size) if weight is None else weight
        self.gradients = gradients if weight is None else None

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Loss summed over counted tokens, or the logits where there are no labels.

        Args:
            x: [seq or seq / tp, batch, hidden].
            labels: int64 [seq, batch], `IGNORED_LABEL` where a token does not count; or None.

        Returns: fp32 scalar, or [seq, batch, vocab]; equal on every TP rank.
        """
        x = self.enter(x, self.tp)
        if labels is None:
            return gather_features(F.linear(x, self.weight), self.tp)[..., : self.vocab_size]
        return _LinearCrossEntropy.apply(
            x.flatten(0, 1), self.weight, labels.flatten(), self.tp, self.vocab_size, self.chunk_tokens, self.gradients
        )
