"""The two ends of a GPT, with the vocabulary split over TP: token and position embeddings, and the head with its loss.

The head computes its product and the loss as one operation, a chunk of tokens at a time:

    per chunk of tokens    logits = x W^T                 [chunk, vocab / tp], in fp32
                           peak, sum(exp), target logit   of each rank's rows, gathered over tp: one small collective
                           loss = log(sum) + peak - target

    with a soft cap        logits = cap tanh(logits / cap)
    z-loss                 coefficient (log(sum) + peak)^2 in the gradient; its sum is reported separately from the loss

The logits of a chunk take at most `training.logits_chunk_bytes`.  With several chunks, only two numbers per token are
saved, and the backward computes the logits again.  The logits of a single chunk are saved (fp32 logits as
probabilities), unless several micro-batches would save theirs at the same time (gpipe), or the logits are capped and in
fp32.  The gradients have the same bits whether logits are saved or not.

Source: Chowdhery et al. 2022, section 5 (z-loss); Gemma Team 2024, section 2 (soft cap).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import copy_to_tp, gather_features, gather_sequence, reduce_from_tp, scatter_sequence
from megazero.comm.collectives import all_gather
from megazero.layers.linear import BY_AUTOGRAD, ByAutograd, GradientAccumulator, WeightGradQueue, product_t, unchanged
from megazero.layers.saved_tensors import refuse_second_derivative
from megazero.layers.sequence_shard import TokenLayout
from megazero.layers.spec import ParamSpec, drawn_parameter
from megazero.parallel_state import Axis


def check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    """Check that ids are rows of the vocabulary.  Without the check, an id that no tp rank holds would get a zero
    embedding.

    Args:
        ids: int64, any shape.
        vocab_size: number of rows of the vocabulary.
        what: "token" or "label", for the message.

    Raises:
        IndexError: an id is outside of the vocabulary.  On CUDA nothing is raised: the host does not wait, and the
            device fails with an assertion.
    """
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < vocab_size)).all(), f"a {what} id is outside of the vocabulary")
    elif ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= vocab_size:
            raise IndexError(
                f"{what} id {low if low < 0 else high} is outside of the vocabulary of {vocab_size}; the data was made with "
                "another tokenizer, or model.vocab_size is too small"
            )


class VocabParallelEmbedding(nn.Module):
    """Look up the embeddings of tokens.  tokens: int64 [seq, batch] -> [seq or seq / tp, batch, hidden].

    Source: Shoeybi et al. 2019, section 3.

    Args:
        spec: spec of the weight.
        tp: the tensor-parallel axis.
        sequence_parallel: return this rank's shard of the sequence.
        wgrad_queue: its accumulator takes the gradient, and need not store it as a whole matrix; `BY_AUTOGRAD` returns it
            to autograd.

    Raises:
        IndexError: see `check_ids`.
    """

    def __init__(
        self, spec: ParamSpec, tp: Axis, *, sequence_parallel: bool, wgrad_queue: WeightGradQueue = BY_AUTOGRAD
    ) -> None:
        super().__init__()
        self.tp, self.wgrad_queue = tp, wgrad_queue
        self.reduce = scatter_sequence if sequence_parallel else reduce_from_tp
        self.specs = {"weight": spec}
        self.weight = drawn_parameter(spec, tp.index, tp.size)
        self.first, self.vocab_size = tp.index * self.weight.shape[0], spec.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        check_ids(tokens, self.vocab_size, "token")
        if self.tp.size == 1:
            return self._rows(tokens)
        local = tokens - self.first
        here = (local >= 0) & (local < self.weight.shape[0])
        return self.reduce(self._rows(local.where(here, 0)) * here.unsqueeze(-1), self.tp)

    def _rows(self, ids: Tensor) -> Tensor:
        if isinstance(self.wgrad_queue, ByAutograd):
            return F.embedding(ids, self.weight)
        rows: Tensor = _AccumulatedRows.apply(ids, self.weight, self.wgrad_queue.accumulator)
        return rows


class _AccumulatedRows(torch.autograd.Function):
    """Look up rows of a weight, and add their gradient to an accumulator instead of returning it to autograd.

    ids: int64 [...], weight: [m, n] -> [..., n].
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, accumulator: GradientAccumulator) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.accumulator = weight, accumulator
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.accumulator.add_rows(ctx.parameter, ids.flatten(), grad.reshape(-1, grad.shape[-1]))
        return None, None, None


class PositionEmbedding(nn.Module):
    """Learned positions, added to the embeddings.  x: [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        spec: spec of the weight, with `sum_over_tp` if x is this rank's shard of the sequence.
        tp: the tensor-parallel axis.
    """

    def __init__(self, spec: ParamSpec, tp: Axis) -> None:
        super().__init__()
        self.specs = {"weight": spec}
        self.weight = drawn_parameter(spec)
        self.seq_shard = tp.index if spec.sum_over_tp else 0

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        first = self.seq_shard * x.shape[0]
        if layout.shard is None:
            return x + self.weight[first : first + x.shape[0]].unsqueeze(1)
        return x + F.embedding(layout.shard.positions[first : first + x.shape[0]], self.weight)


#: Label of a token that does not count towards the loss (torch's convention).
IGNORED_LABEL = -100

#: Default for the largest size of one chunk's logits on a rank, in the dtype of the weights.
LOGITS_BYTES = 2**32

_TILE = 128  # rows of a tile in a GPU's matrix product

#: Size of the fp32 copy of a block of 16-bit logits.  Small enough for a CPU's cache; large enough for few GPU kernels.
BLOCK_BYTES, _CPU_BLOCK_BYTES = 2**26, 2**22

_LEAST = torch.finfo(torch.float32).min


def statistics_of(logits: Tensor, local: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the statistics from which the loss is computed, over this rank's rows of the vocabulary.

    Args:
        logits: [tokens, rows]; fp32 logits are overwritten with exp(logit - peak).
        local: int64 [tokens], the row of the label.
        here: bool [tokens], whether the label is one of this rank's rows.

    Returns:
        The largest logit (peak), the sum of exp(logit - peak), and the label's logit, 0 if it is not here; each fp32
        [tokens].
    """
    scores = logits.float()
    target = scores.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(here, 0.0)
    peak = scores.amax(-1).clamp_(min=_LEAST)  # a rank that has only padding would have -inf
    return peak, scores.sub_(peak.unsqueeze(-1)).exp_().sum(-1), target


def grad_logits_of(
    scores: Tensor,
    shift: Tensor,
    of_label: Tensor,
    local: Tensor,
    here: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    are_logits: bool,
    cap: float | None = None,
) -> Tensor:
    """Compute the gradient of the loss with respect to the logits: (weight * probability - 1 at the label) * scale.

    With a cap, this is multiplied by the derivative of the soft cap.

    Args:
        scores: [tokens, rows], logits as returned by `soft_cap`, or probabilities, which are overwritten.
        shift: fp32 [tokens], log(sum(exp(logits))).
        of_label: fp32 [tokens], the label's probability.
        local, here: see `statistics_of`.
        scale: fp32 [tokens].
        weight: fp32 [tokens], 1 + 2 * coefficient * shift; the coefficient is that of the z-loss, 0 without one.
        are_logits: whether `scores` are logits; always true with a cap.
        cap: the soft cap of the logits; None for no cap.

    Returns: [tokens, rows], in the dtype of `scores`.
    """
    wide = scores.float()
    # The cap's derivative; 0 for padding, where it would be -inf.
    grad_cap = None if cap is None else (1 - (wide / cap).square()).clamp_(min=0)
    if are_logits:
        wide = wide.sub_(shift.unsqueeze(-1)).exp_()
    grad_logits = wide.mul_((scale * weight).unsqueeze(-1))
    at = local.unsqueeze(-1)
    of_labels = ((of_label * weight - 1) * scale).unsqueeze(-1)
    grad_logits.scatter_(-1, at, of_labels.where(here.unsqueeze(-1), grad_logits.gather(-1, at)))
    return (grad_logits if grad_cap is None else grad_logits.mul_(grad_cap)).to(scores.dtype)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Overwrite logits with cap * tanh(logits / cap), computed in fp32.  [tokens, vocabulary of this rank], returned."""
    for (block,) in _blocks(None, logits):
        block.copy_(block.float().div_(cap).tanh_().mul_(cap))
    return logits


def _blocks(nbytes: int | None, logits: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors [tokens, ...] into blocks of tokens.  nbytes: of a block in fp32; None for the size that suits the
    device.
    """
    nbytes = nbytes or (_CPU_BLOCK_BYTES if logits.device.type == "cpu" else BLOCK_BYTES)
    tokens = max(1, nbytes // (4 * logits.shape[-1]))
    if tokens >= logits.shape[0]:
        return [(logits, *others)]
    return list(zip(*(tensor.split(tokens) for tensor in (logits, *others)), strict=True))


def statistics_by_blocks(
    logits: Tensor, local: Tensor, here: Tensor, *, nbytes: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `statistics_of`, a block of tokens at a time."""
    found = [statistics_of(*block) for block in _blocks(nbytes, logits, local, here)]
    if len(found) == 1:
        return found[0]
    peak, total, target = map(torch.cat, zip(*found, strict=True))
    return peak, total, target


def grad_logits_by_blocks(
    scores: Tensor, *others: Tensor, are_logits: bool, cap: float | None = None, nbytes: int | None = None
) -> Tensor:
    """Compute `grad_logits_of`, a block of tokens at a time, and overwrite the logits with it."""
    for block, *rest in _blocks(nbytes, scores, *others):
        block.copy_(grad_logits_of(block, *rest, are_logits=are_logits, cap=cap))
    return scores


def token_chunks(tokens: int, token_bytes: int, most_bytes: int) -> list[slice]:
    """Split tokens into as few chunks as possible, each with at most `most_bytes` of logits.

    If all tokens fit, there is one chunk.  Otherwise chunks are whole tiles of 128 tokens, except for the end of the
    last chunk, and differ by at most one tile.  If a single tile does not fit, chunks differ by at most one token.

    Args:
        tokens: number of tokens.
        token_bytes: bytes of the logits of one token.
        most_bytes: maximum for the logits of a chunk.
    """
    most = max(1, most_bytes // token_bytes)
    unit = _TILE if most >= _TILE else 1
    units = -(-tokens // unit)
    count = 1 if tokens <= most else -(-units // (most // unit))
    borders = [min(unit * (units * number // count), tokens) for number in range(count + 1)]
    return [slice(*pair) for pair in pairwise(borders)]


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(x W^T)[label].  x: [tokens, hidden], labels: int64 [tokens] -> fp32 scalar."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, head: VocabParallelHead) -> Tensor:
        first = head.logits.tp.index * weight.shape[0]
        counted = labels != IGNORED_LABEL
        local = labels - first
        here = counted & (local >= 0) & (local < weight.shape[0])
        local = local.where(here, 0)
        loss = x.new_zeros((), dtype=torch.float32)
        sums, label_logits, saved_logits = [], [], None
        chunks = head.logits.chunks(x, weight)
        for chunk in chunks:
            logits = head.logits.compute(x[chunk], weight)
            peak, total, target = head.statistics_of(logits, local[chunk], here[chunk])
            log_sum, target = _over_vocabulary(peak, total, target, head.logits.tp)
            loss += (log_sum - target).where(counted[chunk], 0.0).sum()
            sums.append(log_sum)
            label_logits.append(target)
            if head.z_loss_coef:
                head.z_sum += head.z_loss_coef * log_sum.square().where(counted[chunk], 0.0).sum().double()
            if head.saves_logits and len(chunks) == 1 and not (head.logits.cap and logits.dtype == torch.float32):
                saved_logits = _saved_form(logits, peak, log_sum)
            del logits  # free them before the next chunk's logits
        ctx.save_for_backward(x, weight, local, here, counted, torch.cat(sums), torch.cat(label_logits), saved_logits)
        ctx.head, ctx.parameter = head, weight
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the loss")
        saved = ctx.saved_tensors  # read only once: under recomputation, every access computes them again
        x, weight, *_ = saved
        grad_x = torch.empty_like(x)
        factors: Iterable[tuple[Tensor, Tensor]] = _grad_logits_by_chunk(ctx.head, saved, grad, grad_x)
        # A weight in several bucket chunks uses the pair more than once.
        if len(ctx.head.logits.chunks(x, weight)) == 1:
            factors = list(factors)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.head.wgrad_queue.add_now(ctx.parameter, factors)
        else:
            grad_weight = None
            for _ in factors:
                pass
        return grad_x, grad_weight, None, None


def _saved_form(logits: Tensor, peak: Tensor, log_sum: Tensor) -> Tensor:
    """Convert logits to the form that is saved for the backward: fp32 logits become probabilities."""
    return logits if logits.dtype != torch.float32 else logits.mul_((peak - log_sum).exp_().unsqueeze(-1))


def _grad_logits_by_chunk(
    head: VocabParallelHead, saved: Sequence[Any], grad: Tensor, grad_x: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Write the gradient of the input, and yield for each chunk the two factors of the weight's gradient."""
    x, weight, local, here, counted, log_sum, target, saved_logits = saved
    scale, of_label = counted * grad, (target - log_sum).exp_()
    weight_of = 1 + 2 * head.z_loss_coef * log_sum
    chunks = head.logits.chunks(x, weight)
    for chunk in chunks:
        # Saved logits may be overwritten, because autograd frees them after this.
        scores = head.logits.compute(x[chunk], weight) if saved_logits is None else saved_logits
        recomputed = saved_logits is None and (len(chunks) > 1 or head.logits.cap is not None)
        are_logits = scores.dtype != torch.float32 or recomputed
        if saved_logits is None and not are_logits:
            scores = _saved_form(scores, head.statistics_of(scores, local, here)[0], log_sum)
        of_tokens = [tensor[chunk] for tensor in (log_sum, of_label, local, here, scale, weight_of)]
        grad_logits = head.grad_logits_of(scores, *of_tokens, are_logits=are_logits, cap=head.logits.cap)
        del scores
        grad_x[chunk] = product_t(grad_logits, weight.t())
        yield grad_logits, x[chunk]
        del grad_logits  # free it before the next chunk's logits


def _over_vocabulary(peak: Tensor, total: Tensor, target: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """Combine the results of `statistics_of` from all ranks in one collective.

    Returns log(sum(exp(logits))) and the label's logit over the whole vocabulary.
    """
    mine = torch.stack([peak, total, target])
    every = mine.new_empty(tp.size, *mine.shape)
    all_gather(every, mine.unsqueeze(0), tp).wait()
    peaks, totals, targets = every.unbind(1)
    highest = peaks.amax(0)
    return highest + ((peaks - highest).exp_() * totals).sum(0).log_(), targets.sum(0)


@dataclass(frozen=True)
class Logits:
    """How a rank computes the logits of its rows of the vocabulary.

    Args:
        spec: spec of the weight.
        tp: the tensor-parallel axis.
        cap: see `soft_cap`; None for no cap.
        most_bytes: maximum for the logits of one chunk.
    """

    spec: ParamSpec
    tp: Axis
    cap: float | None = None
    most_bytes: int = LOGITS_BYTES

    def chunks(self, x: Tensor, weight: Tensor) -> list[slice]:
        """Split the tokens of x, [tokens, hidden], into chunks.  The same on every TP rank."""
        return token_chunks(x.shape[0], weight.shape[0] * weight.element_size(), self.most_bytes)

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits of this rank's rows, without autograd; padded rows get probability 0.  [tokens, hidden] ->
        [tokens, rows].
        """
        logits = product_t(x, weight)
        if self.cap is not None:
            logits = soft_cap(logits, self.cap)
        real_rows = max(0, min(weight.shape[0], self.spec.shape[0] - self.tp.index * weight.shape[0]))
        if real_rows < weight.shape[0]:
            logits[:, real_rows:] = float("-inf")
        return logits


class VocabParallelHead(nn.Module):
    """Logits over the vocabulary and their cross-entropy.

    Args:
        logits: computes the logits.
        tied: the embedding's parameter, if this rank holds it and the weights are tied; None creates a parameter.
        wgrad_queue: takes the gradient of a weight that is not `tied`; `BY_AUTOGRAD` returns it to autograd.
        sequence_parallel: the input is [seq / tp, batch, hidden].

    Attributes:
        z_loss_coef: coefficient of the z-loss, which the backward adds to the gradient.
        z_sum: sum of coefficient * logsumexp^2 over counted tokens since it was last set to 0.
        saves_logits: save the logits of a single chunk for the backward; otherwise the backward repeats the product.
    """

    def __init__(
        self,
        logits: Logits,
        tied: nn.Parameter | None = None,
        wgrad_queue: WeightGradQueue = BY_AUTOGRAD,
        *,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.logits, tp = logits, logits.tp
        self.saves_logits = True
        self.z_loss_coef = 0.0
        self.z_sum: float | Tensor = 0.0
        # The two passes over logits.  `models/wrappers.py` replaces them by compiled ones, which need no blocks.
        self.statistics_of: Any = statistics_by_blocks
        self.grad_logits_of: Any = grad_logits_by_blocks
        self.enter = unchanged if tp.size == 1 else gather_sequence if sequence_parallel else copy_to_tp
        self.specs = {"weight": logits.spec}
        self.weight = drawn_parameter(logits.spec, tp.index, tp.size) if tied is None else tied
        self.wgrad_queue = wgrad_queue if tied is None else BY_AUTOGRAD

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Compute the loss, summed over counted tokens (fp32), or without labels the logits, [seq, batch, vocab].

        The result is the same on every TP rank.

        Args:
            x: [seq or seq / tp, batch, hidden].
            labels: int64 [seq, batch], `IGNORED_LABEL` where a token does not count.

        Raises: IndexError: a label is outside of the vocabulary; see `check_ids`.
        """
        tp, cap, vocab_size = self.logits.tp, self.logits.cap, self.logits.spec.shape[0]
        x = self.enter(x, tp)
        if labels is None:
            logits = gather_features(F.linear(x, self.weight), tp)[..., :vocab_size]
            return logits if cap is None else (logits.float() / cap).tanh().mul(cap).to(logits.dtype)
        check_ids(labels.where(labels != IGNORED_LABEL, 0), vocab_size, "label")
        return _LinearCrossEntropy.apply(x.flatten(0, 1), self.weight, labels.flatten(), self)
