"""Token and position embeddings: the vocabulary is cut over TP, the sequence over TP under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import reduce_from_tp, scatter_sequence
from megazero.layers.linear import GradientAccumulator, WeightGradQueue
from megazero.layers.sample_part import TokenLayout
from megazero.layers.spec import Initializer, NamedRows, ParamSpec, drawn_parameter
from megazero.parallel_state import Axis


def check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    """Make sure that ids are rows of the vocabulary: an id that no tp rank holds would be an embedding of zeros.

    Args:
        ids: int64, any shape.
        what: "token" or "label", for the message.

    Raises:
        IndexError: with an id that is none.  On CUDA the host does not wait: the device fails with an assertion.
    """
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < vocab_size)).all(), f"a {what} id is outside of the vocabulary")
    elif ids.numel():
        low, high = (int(one) for one in torch.aminmax(ids))
        if low < 0 or high >= vocab_size:
            raise IndexError(
                f"{what} id {low if low < 0 else high} is outside of the vocabulary of {vocab_size}; the data was made with "
                "another tokenizer, or model.vocab_size is too small"
            )


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding for the tokens.  tokens: int64 [seq, batch] -> [seq or seq / tp, batch, hidden].

    `sequence_parallel` returns this rank's part of the sequence.  Source: Shoeybi et al. 2019, section 3.

    Raises:
        IndexError: see `check_ids`.

    `wgrad_queue`: the gradient goes to its accumulator, which need not make it whole; None returns it to autograd.
    """

    def __init__(
        self, spec: ParamSpec, tp: Axis, *, sequence_parallel: bool, wgrad_queue: WeightGradQueue | None = None
    ) -> None:
        super().__init__()
        self.tp, self.wgrad_queue = tp, wgrad_queue
        self.reduce = scatter_sequence if sequence_parallel else reduce_from_tp
        self.specs = {"weight": spec}
        self.weight = drawn_parameter(spec, tp.index, tp.size)
        self.first, self.vocab_size = tp.index * self.weight.shape[0], spec.sections[0].rows

    def forward(self, tokens: Tensor) -> Tensor:
        check_ids(tokens, self.vocab_size, "token")
        if self.tp.size == 1:
            return self._rows(tokens)
        local = tokens - self.first
        here = (local >= 0) & (local < self.weight.shape[0])
        return self.reduce(self._rows(local.where(here, 0)) * here.unsqueeze(-1), self.tp)

    def _rows(self, ids: Tensor) -> Tensor:
        if self.wgrad_queue is None or self.wgrad_queue.accumulator is None:
            return F.embedding(ids, self.weight)
        rows: Tensor = _AccumulatedRows.apply(ids, self.weight, self.wgrad_queue.accumulator)
        return rows


class _AccumulatedRows(torch.autograd.Function):
    """Rows of a weight, whose gradient goes past autograd.  ids: int64 [...], weight: [m, n] -> [..., n]."""

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

    Under sequence parallelism x is this rank's part of the sequence.
    """

    def __init__(
        self, name: str, seq_len: int, hidden_size: int, tp: Axis, *, sequence_parallel: bool, init: Initializer
    ) -> None:
        super().__init__()
        cut = sequence_parallel and tp.size > 1
        self.specs = {"weight": ParamSpec((NamedRows(name, seq_len),), hidden_size, None, init, sum_over_tp=cut)}
        self.weight = drawn_parameter(self.specs["weight"])
        self.part = tp.index if cut else 0

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        first = self.part * x.shape[0]
        if layout.part is None:
            return x + self.weight[first : first + x.shape[0]].unsqueeze(1)
        return x + F.embedding(layout.part.positions[first : first + x.shape[0]], self.weight)
