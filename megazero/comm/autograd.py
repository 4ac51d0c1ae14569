"""Collectives that autograd differentiates through: each is the other's backward.

    forward                         backward
    copy_to_tp          identity    all-reduce            "f" of Shoeybi et al. 2019
    reduce_from_tp      all-reduce  identity              "g" of Shoeybi et al. 2019
    gather_sequence     all-gather  reduce-scatter        sequence parallelism, Korthikanti et al. 2022
    scatter_sequence    reduce-     all-gather
                        scatter
    gather_features     all-gather  slice                 last dimension, for a column-parallel output
    split_features      slice       all-gather
    heads_for_sequence  all-to-all  all-to-all            sequence of some heads, Jacobs et al. 2023 (DeepSpeed-Ulysses)
    sequence_for_heads  all-to-all  all-to-all

The sequence is dimension 0 of [seq, batch, hidden], so that a rank's part of it is contiguous.  Attention's
[batch, heads, seq, size] is a view of [seq, batch, heads, size], and remains one here:

    heads_for_sequence     rank 0's sequence | rank 1's             rank 0's sequence | rank 1's
                  rank 0:  all heads         |             rank 0:  its heads         | its heads
                  rank 1:                    | all heads   rank 1:  its heads         | its heads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather, all_reduce, all_to_all, reduce_scatter
from megazero.parallel_state import Axis

Collective: TypeAlias = Callable[[Tensor, Axis], Tensor]
Started: TypeAlias = Callable[[Tensor, Axis], tuple[Tensor, Pending]]


def start_gather_sequence(x: Tensor, tp: Axis) -> tuple[Tensor, Pending]:
    """Begin gathering [seq / tp, ...] -> [seq, ...]."""
    full = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    return full, all_gather(full, x.contiguous(), tp)


def start_scatter_sequence(x: Tensor, tp: Axis) -> tuple[Tensor, Pending]:
    """Begin summing [seq, ...] over tp; the result is this rank's [seq / tp, ...]."""
    part = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    return part, reduce_scatter(part, x.contiguous(), tp)


def _gather_first(x: Tensor, tp: Axis) -> Tensor:
    full, pending = start_gather_sequence(x, tp)
    pending.wait()
    return full


def _scatter_first(x: Tensor, tp: Axis) -> Tensor:
    part, pending = start_scatter_sequence(x, tp)
    pending.wait()
    return part


def _gather_last(x: Tensor, tp: Axis) -> Tensor:
    return torch.cat(_gather_first(x, tp).chunk(tp.size), dim=-1)


def _slice_last(x: Tensor, tp: Axis) -> Tensor:
    return x.chunk(tp.size, dim=-1)[tp.index].contiguous()


def _sum_in_place(x: Tensor, tp: Axis) -> Tensor:
    x = x.contiguous()
    all_reduce(x, tp).wait()
    return x


def _sum(x: Tensor, tp: Axis) -> Tensor:
    return _sum_in_place(x.clone(memory_format=torch.contiguous_format), tp)


class _Differentiable(torch.autograd.Function):
    """One collective forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, forward: Collective, backward: Collective) -> Tensor:
        ctx.tp, ctx.collective = tp, backward
        result = forward(x, tp)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.collective(grad, ctx.tp), None, None, None


def copy_to_tp(x: Tensor, tp: Axis) -> Tensor:
    """Pass a replicated tensor to tensor-parallel work; its gradients are summed over tp."""
    return _Differentiable.apply(x, tp, lambda x, _: x.view_as(x), _sum) if tp.size > 1 else x


def reduce_from_tp(x: Tensor, tp: Axis) -> Tensor:
    """Sum partial results over tp, in place if contiguous; the gradient passes unchanged."""
    return _Differentiable.apply(x, tp, _sum_in_place, lambda grad, _: grad) if tp.size > 1 else x


def gather_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[seq / tp, ...] -> [seq, ...]; gradients are summed and scattered."""
    return _Differentiable.apply(x, tp, _gather_first, _scatter_first) if tp.size > 1 else x


def scatter_sequence(x: Tensor, tp: Axis) -> Tensor:
    """Sum partial [seq, ...] over tp and keep [seq / tp, ...]; gradients are gathered."""
    return _Differentiable.apply(x, tp, _scatter_first, _gather_first) if tp.size > 1 else x


def gather_features(x: Tensor, tp: Axis) -> Tensor:
    """[..., out / tp] -> [..., out] on every rank; each keeps its slice of the gradient."""
    return _Differentiable.apply(x, tp, _gather_last, _slice_last) if tp.size > 1 else x


def split_features(x: Tensor, tp: Axis) -> Tensor:
    """[..., in] -> this rank's [..., in / tp]; gradients are gathered."""
    return _Differentiable.apply(x, tp, _slice_last, _gather_last) if tp.size > 1 else x


def start_heads_for_sequence(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin exchanging [batch, heads, seq, size] -> [batch, heads / n, seq * n, size]."""
    _check_divides("heads", x.shape[1], axis)
    parts = x.unflatten(1, (axis.size, x.shape[1] // axis.size)).permute(
        1, 3, 0, 2, 4
    )  # [n, seq, batch, heads / n, size]
    whole = x.new_empty(parts.shape)
    return whole.flatten(0, 1).permute(1, 2, 0, 3), all_to_all(whole, parts, axis)


def start_sequence_for_heads(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Begin exchanging [batch, heads, seq, size] -> [batch, heads * n, seq / n, size]."""
    _check_divides("positions", x.shape[2], axis)
    parts = x.unflatten(2, (axis.size, x.shape[2] // axis.size)).permute(
        2, 3, 0, 1, 4
    )  # [n, seq / n, batch, heads, size]
    whole = x.new_empty((*parts.shape[1:3], axis.size, *parts.shape[3:]))
    return whole.flatten(2, 3).permute(1, 2, 0, 3), all_to_all(whole.movedim(2, 0), parts, axis)


def _check_divides(what: str, number: int, axis: Axis) -> None:
    if number % axis.size:
        raise ValueError(f"{number} {what} cannot be divided among the {axis.size} ranks of {axis.name}")


class _Exchanged(torch.autograd.Function):
    """Exchanges of several tensors, all under way at once, and others backward."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, forward: Started, backward: Started, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.start = axis, backward
        return _finished([forward(x, axis) for x in xs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_finished([ctx.start(grad, ctx.axis) for grad in grads])


def _finished(started: Sequence[tuple[Tensor, Pending]]) -> tuple[Tensor, ...]:
    for _, pending in started:
        pending.wait()
    return tuple(result for result, _ in started)


def all_heads_for_sequence(xs: Sequence[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """`heads_for_sequence` of several tensors, whose numbers of heads may differ."""
    if axis.size == 1:
        return tuple(xs)
    return _Exchanged.apply(axis, start_heads_for_sequence, start_sequence_for_heads, *xs)


def heads_for_sequence(x: Tensor, axis: Axis) -> Tensor:
    """All heads of a part of the sequence for a part of the heads of all of it; gradients go the other way.

    Args:
        x: [batch, heads, seq, size] -> [batch, heads / n, seq * n, size]; of any strides. Rank i has the i-th piece of the
            sequence and gets the i-th group of heads. The result is a view of [seq * n, batch, heads / n, size].

    Source: Jacobs et al. 2023, section 3.
    """
    return all_heads_for_sequence((x,), axis)[0]


def sequence_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """The inverse of `heads_for_sequence`: [batch, heads, seq, size] -> [batch, heads * n, seq / n, size].

    The result is a view of [seq / n, batch, heads * n, size], so that flattening its heads copies nothing.
    """
    if axis.size == 1:
        return x
    return _Exchanged.apply(axis, start_sequence_for_heads, start_heads_for_sequence, x)[0]
