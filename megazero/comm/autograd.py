"""Collectives that autograd differentiates through: the backward of each is another collective.

    forward                         backward
    copy_to_tp          identity    all-reduce            "f" of Shoeybi et al. 2019
    reduce_from_tp      all-reduce  identity              "g" of Shoeybi et al. 2019
    gather_sequence     all-gather  reduce-scatter        sequence parallelism, Korthikanti et al. 2022
    scatter_sequence    reduce-     all-gather
                        scatter
    gather_features     all-gather  slice                 last dimension, for a column-parallel output
    exchange_rows       all-to-all  all-to-all            of uneven size: tokens to their experts, and back

The sequence is dimension 0 of [seq, batch, hidden], so that a rank's shard of it is contiguous.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather, all_reduce, all_to_all_rows, reduce_scatter
from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Counts

Collective: TypeAlias = Callable[[Tensor, Axis], Tensor]


def start_gather_sequence(x: Tensor, tp: Axis) -> tuple[Tensor, Pending]:
    """Start to gather [seq / tp, ...] -> [seq, ...]."""
    full = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    return full, all_gather(full, x.contiguous(), tp)


def start_scatter_sequence(x: Tensor, tp: Axis) -> tuple[Tensor, Pending]:
    """Start to sum [seq, ...] over tp.  The result is this rank's [seq / tp, ...]."""
    shard = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    return shard, reduce_scatter(shard, x.contiguous(), tp)


def _gather_first(x: Tensor, tp: Axis) -> Tensor:
    full, pending = start_gather_sequence(x, tp)
    pending.wait()
    return full


def _scatter_first(x: Tensor, tp: Axis) -> Tensor:
    shard, pending = start_scatter_sequence(x, tp)
    pending.wait()
    return shard


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
    """A differentiable operation with one collective in the forward and another one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, forward: Collective, backward: Collective) -> Tensor:
        ctx.tp, ctx.collective = tp, backward
        result = forward(x, tp)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # autograd would treat this backward as a constant
            raise RuntimeError("a collective has no second derivative: do not use create_graph with it")
        return ctx.collective(grad, ctx.tp), None, None, None


def copy_to_tp(x: Tensor, tp: Axis) -> Tensor:
    """Return x for a computation that tp splits.  Gradients are summed over tp."""
    return _Differentiable.apply(x, tp, lambda x, _: x.view_as(x), _sum) if tp.size > 1 else x


def reduce_from_tp(x: Tensor, tp: Axis) -> Tensor:
    """Sum partial results over tp, in place if contiguous.  Gradients pass unchanged."""
    return _Differentiable.apply(x, tp, _sum_in_place, lambda grad, _: grad) if tp.size > 1 else x


def gather_sequence(x: Tensor, tp: Axis) -> Tensor:
    """Gather [seq / tp, ...] -> [seq, ...].  Gradients are summed over tp and scattered."""
    return _Differentiable.apply(x, tp, _gather_first, _scatter_first) if tp.size > 1 else x


def scatter_sequence(x: Tensor, tp: Axis) -> Tensor:
    """Sum partial [seq, ...] over tp and return this rank's [seq / tp, ...].  Gradients are gathered."""
    return _Differentiable.apply(x, tp, _scatter_first, _gather_first) if tp.size > 1 else x


def gather_features(x: Tensor, tp: Axis) -> Tensor:
    """Gather [..., out / tp] -> [..., out] on every rank.  Each rank takes its slice of the gradient."""
    return _Differentiable.apply(x, tp, _gather_last, _slice_last) if tp.size > 1 else x


def _exchange_rows(rows: Tensor, axis: Axis, sends: Counts, receives: Counts) -> Tensor:
    arriving = rows.new_empty((sum(receives), *rows.shape[1:]))
    pending = all_to_all_rows(arriving, rows.contiguous(), axis, sends, receives)
    axis.traffic.pass_on()
    pending.wait()
    return arriving


def exchange_rows(rows: Tensor, sends: Counts, receives: Counts, axis: Axis) -> Tensor:
    """Send `sends[i]` rows to rank i of the axis, in rank order, and receive `receives[i]` rows from it.  Gradients are
    sent back.

    Args:
        rows: [sum of sends, ...].

    Returns: [sum of receives, ...].
    """
    there, back = (partial(_exchange_rows, sends=s, receives=r) for s, r in ((sends, receives), (receives, sends)))
    return _Differentiable.apply(rows, axis, there, back) if axis.size > 1 else rows
