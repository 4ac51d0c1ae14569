"""Collectives that autograd differentiates through: each is the other's backward.

    forward                         backward
    copy_to_tp          identity    all-reduce            "f" of Shoeybi et al. 2019
    reduce_from_tp      all-reduce  identity              "g" of Shoeybi et al. 2019
    gather_sequence     all-gather  reduce-scatter        sequence parallelism, Korthikanti et al. 2022
    scatter_sequence    reduce-     all-gather
                        scatter
    gather_features     all-gather  slice                 last dimension, for a column-parallel output
    split_features      slice       all-gather

The sequence is dimension 0 of [seq, batch, hidden], so that a rank's part of it is contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather, all_reduce, reduce_scatter
from megazero.parallel_state import Axis


def start_gather_sequence(x: Tensor, tp: Axis) -> tuple[Tensor, Pending]:
    """Begin gathering [seq / tp, ...] -> [seq, ...]."""
    full = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    return full, all_gather(full, x.contiguous(), tp)


def start_scatter_sequence(x: Tensor, tp: Axis) -> tuple[Tensor, Pending]:
    """Begin summing [seq, ...] over tp and keeping this rank's [seq / tp, ...]."""
    part = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    return part, reduce_scatter(part, x.contiguous(), tp)


def _done(started: tuple[Tensor, Pending]) -> Tensor:
    result, pending = started
    pending.wait()
    return result


def _gather_last(x: Tensor, tp: Axis) -> Tensor:
    """[..., n / tp] -> [..., n]."""
    return torch.cat(_done(start_gather_sequence(x, tp)).chunk(tp.size), dim=-1)


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(grad, ctx.tp).wait()
        return grad, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.mark_dirty(x)
        all_reduce(x, tp).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return _done(start_gather_sequence(x, tp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _done(start_scatter_sequence(grad, ctx.tp)), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return _done(start_scatter_sequence(x, tp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _done(start_gather_sequence(grad, ctx.tp)), None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return _gather_last(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tp.size, dim=-1)[ctx.tp.index].contiguous(), None


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.chunk(tp.size, dim=-1)[tp.index].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_last(grad, ctx.tp), None


def copy_to_tp(x: Tensor, tp: Axis) -> Tensor:
    """Hand a replicated tensor to tensor-parallel work; its gradients are summed over tp."""
    return _CopyToTP.apply(x, tp) if tp.size > 1 else x


def reduce_from_tp(x: Tensor, tp: Axis) -> Tensor:
    """Sum partial results over tp, in place; the gradient passes unchanged."""
    return _ReduceFromTP.apply(x.contiguous(), tp) if tp.size > 1 else x


def gather_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[seq / tp, ...] -> [seq, ...]; gradients are summed and scattered."""
    return _GatherSequence.apply(x, tp) if tp.size > 1 else x


def scatter_sequence(x: Tensor, tp: Axis) -> Tensor:
    """Sum partial [seq, ...] over tp and keep [seq / tp, ...]; gradients are gathered."""
    return _ScatterSequence.apply(x, tp) if tp.size > 1 else x


def gather_features(x: Tensor, tp: Axis) -> Tensor:
    """[..., out / tp] -> [..., out] on every rank."""
    return _GatherFeatures.apply(x, tp) if tp.size > 1 else x


def split_features(x: Tensor, tp: Axis) -> Tensor:
    """[..., in] -> this rank's [..., in / tp]."""
    return _SplitFeatures.apply(x, tp) if tp.size > 1 else x
