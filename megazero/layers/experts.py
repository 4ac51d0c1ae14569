"""A mixture of experts in place of an MLP: each token goes to k of E gated MLPs, and none is dropped.

    x [tokens, hidden]
      |  router        scores in fp32 -> k experts of each token, and their gates
      |  dispatch      rows [tokens * k, hidden], sorted by expert:   | expert 0 | expert 2 |   expert 3   |   (1 has none)
      |  up, down      grouped products: each expert multiplies its own rows
      v  combine       of each token the sum of its k rows, weighted by the gates

A pair (token t, choice j) has number t * k + j.  `Routing.order` sorts the pairs by expert, and `Routing.place` says where
in that order each pair stands.  Dispatch, combine and their backwards only read rows by these two, so their sums do not
depend on the order in which threads finish.  Recomputation takes the same `Routing` again and never chooses anew.

Of experts with equal scores a token goes to the first.
Source: Shazeer et al. 2017; Fedus et al. 2021, section 2.1; Gale et al. 2022 (dropless, by grouped products).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import refuse_second_derivative
from megazero.comm.collectives import Pending
from megazero.layers.linear import WeightGradQueue, add_product, product_t
from megazero.layers.mlp import Gated
from megazero.layers.spec import Initializer, NamedRows, drawn_parameter, rows_spec

_ALIGNED = 16  # bytes at which each row must begin for torch's grouped kernel


@dataclass(frozen=True, eq=False)
class Groups:
    """Consecutive rows that belong to one expert after the other.

    Args:
        counts: int64 [experts], rows of each; an expert may have none.
        rows: of all experts together.
    """

    counts: Tensor
    rows: int

    @cached_property
    def ends(self) -> Tensor:
        """int32 [experts]: one past the last row of each, as kernels take it."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The counts as numbers; on a GPU this waits for the device.  A trace, which knows none, takes equal ones."""
        sizes: list[int] = self.counts.tolist()
        if sum(sizes) != self.rows:
            each, rest = divmod(self.rows, len(sizes))
            sizes = [each + (expert < rest) for expert in range(len(sizes))]
        return sizes

    def times(self, x: Tensor, weights: Tensor) -> Tensor:
        """Each row of x times the transposed matrix of its expert.  [rows, k], [experts, n, k] -> [rows, n]."""
        if _has_kernel(x, weights):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=self.ends)
        parts = zip(x.split(self.sizes), weights, strict=True)
        return torch.cat([product_t(rows, weight) for rows, weight in parts])

    def sum_products(self, a: Tensor, b: Tensor) -> Tensor:
        """Of each expert's rows a.T @ b.  [rows, m], [rows, n] -> [experts, m, n]."""
        if _has_kernel(a, b):
            sums = F.grouped_mm(a.t(), b, offs=self.ends)
            return sums.masked_fill_((self.counts == 0).view(-1, 1, 1), 0)
        sums = a.new_empty(len(self.counts), a.shape[1], b.shape[1])
        self.add_products(sums, a, b, is_first=True)
        return sums

    def add_products(self, out: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
        """Add `sum_products` to `out` [experts, m, n], or overwrite it if `is_first`; `out` may be of a wider dtype."""
        if _has_kernel(a, b):
            (out.copy_ if is_first else out.add_)(self.sum_products(a, b))
            return
        for matrix, rows_a, rows_b in zip(out, a.split(self.sizes), b.split(self.sizes), strict=True):
            if len(rows_a):
                add_product(matrix, rows_a, rows_b, is_first=is_first)
            elif is_first:
                matrix.zero_()


def _has_kernel(*factors: Tensor) -> bool:
    """Whether torch multiplies all groups in one kernel; elsewhere a loop over experts is as fast."""
    return all(
        x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] * x.element_size() % _ALIGNED == 0 for x in factors
    )


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts the tokens of a micro-batch go to.

    Args:
        experts: int64 [tokens, k].
        order: int64 [tokens * k], the numbers of all pairs sorted by expert, and by token within one.
        place: int64 [tokens * k], where each pair stands in that order.
        groups: the sorted rows of each expert.
    """

    experts: Tensor
    order: Tensor
    place: Tensor
    groups: Groups

    @staticmethod
    def of(experts: Tensor, count: int) -> Routing:
        """Sort the choices of all tokens; `count`: experts of the layer."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        counts = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
        return Routing(experts, order, place, Groups(counts, len(flat)))

    @cached_property
    def tokens(self) -> Tensor:
        """int64 [tokens * k]: the token of each sorted row."""
        return self.order // self.experts.shape[1]

    def by_token(self, rows: Tensor) -> Tensor:
        """Sorted rows in the order of pairs.  [tokens * k, ...] -> [tokens, k, ...]."""
        return rows[self.place].unflatten(0, self.experts.shape)


class _Logits(torch.autograd.Function):
    """x @ weight.T in fp32.  [tokens, hidden], [experts, hidden] -> fp32 [tokens, experts].  It saves x as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wgrad_queue: WeightGradQueue | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wgrad_queue, ctx.parameter = wgrad_queue, None if wgrad_queue is None else weight
        return product_t(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a router")
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_x = product_t(grad, weight.float().t()).to(x.dtype)
        queue: WeightGradQueue | None = ctx.wgrad_queue
        if queue is None:
            return grad_x, product_t(grad.t(), x.float().t()).to(weight.dtype), None
        if queue.defers:
            queue.defer_product(ctx.parameter, grad, lambda: (x.float(), Pending()))
            return grad_x, None, None
        return grad_x, queue.add_now(ctx.parameter, [(grad, x.float())]), None


class _Dispatch(torch.autograd.Function):
    """[tokens, hidden] -> [tokens * k, hidden], sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return x[routing.tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("a dispatch to experts")
        return ctx.routing.by_token(grad).sum(1), None


class _Combine(torch.autograd.Function):
    """[tokens * k, hidden], fp32 gates [tokens, k] -> [tokens, hidden]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(rows, gates)
        ctx.routing = routing
        return torch.bmm(gates.to(rows.dtype).unsqueeze(1), routing.by_token(rows)).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative("a sum over experts")
        rows, gates = ctx.saved_tensors
        routing: Routing = ctx.routing
        by_pair = grad[routing.tokens]
        dots = (by_pair * rows).sum(-1, dtype=gates.dtype)
        by_pair *= gates.to(grad.dtype).flatten()[routing.order].unsqueeze(1)
        return by_pair, routing.by_token(dots), None


class _GroupedProduct(torch.autograd.Function):
    """Each row times the matrix of its expert.  [rows, k], [experts * n, k] -> [rows, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups, wgrad_queue: WeightGradQueue | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.wgrad_queue = groups, wgrad_queue
        ctx.parameter = None if wgrad_queue is None else weight
        return groups.times(x, _stack(weight, groups))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("an expert")
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        groups: Groups = ctx.groups
        grad = grad.contiguous()
        grad_x = groups.times(grad, _stack(weight, groups).transpose(1, 2))
        if ctx.wgrad_queue is None:
            return grad_x, groups.sum_products(grad, x).view_as(weight), None, None
        return grad_x, ctx.wgrad_queue.take_stacked(ctx.parameter, grad, x, groups), None, None


def _stack(weight: Tensor, groups: Groups) -> Tensor:
    return weight.unflatten(0, (len(groups.counts), -1))


class Router(nn.Module):
    """Chooses k experts for each token.  [tokens, hidden] -> gates, fp32 [tokens, k], and the `Routing`.

    Args:
        name: canonical name of the weight.
        sizes: hidden size, experts of the layer, experts of each token.
        renormalize: a token's gates are divided by their sum.
        sum_over_tp: each TP rank sees some of the tokens, so the weight's gradient is partial.
        init: of the weight.
        wgrad_queue: takes its gradient; None returns it to autograd.
    """

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int, int],
        *,
        renormalize: bool,
        sum_over_tp: bool,
        init: Initializer,
        wgrad_queue: WeightGradQueue | None = None,
    ) -> None:
        super().__init__()
        hidden, self.experts, self.k = sizes
        self.renormalize, self.wgrad_queue = renormalize, wgrad_queue
        spec = rows_spec((NamedRows(name, self.experts),), hidden, init=init, sum_over_tp=sum_over_tp)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        scores = _Logits.apply(x, self.weight, self.wgrad_queue).softmax(-1)
        chosen = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.k]
        gates = scores.gather(1, chosen)
        if self.renormalize:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates, Routing.of(chosen, self.experts)


class Dispatch(nn.Module):
    """A row for each choice of each token, sorted by expert.  [tokens, hidden] -> [tokens * k, hidden]."""

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        rows: Tensor = _Dispatch.apply(x, routing)
        return rows


class ExpertLinear(nn.Module):
    """Each row times the matrix of its expert.  [rows, in], sorted by expert -> [rows, out].

    Args:
        sections: rows of the matrices: all of the first expert, then all of the second, ...
        in_features: columns of each matrix.
        sum_over_tp, init, wgrad_queue: see `Router`.
    """

    def __init__(
        self,
        sections: tuple[NamedRows, ...],
        in_features: int,
        *,
        sum_over_tp: bool,
        init: Initializer,
        wgrad_queue: WeightGradQueue | None = None,
    ) -> None:
        super().__init__()
        self.wgrad_queue = wgrad_queue
        spec = rows_spec(sections, in_features, init=init, sum_over_tp=sum_over_tp, matrix=True)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)

    def forward(self, rows: Tensor, routing: Routing) -> Tensor:
        result: Tensor = _GroupedProduct.apply(rows, self.weight, routing.groups, self.wgrad_queue)
        return result


class Combine(nn.Module):
    """Of each token the sum of its experts' rows, weighted by the gates.  [tokens * k, hidden] -> [tokens, hidden]."""

    def forward(self, rows: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        result: Tensor = _Combine.apply(rows, gates, routing)
        return result


class MixtureOfExperts(nn.Module):
    """The sum of k experts' MLPs, weighted by a router.  [seq or seq / tp, batch, hidden], unchanged in shape.

    Each expert is down(silu(gate(x)) * up(x)) (Shazeer 2020), with gate | up fused.
    """

    compiles = False  # the rows of an expert are others in every step, and compiled code is of one size

    def __init__(self, router: Router, gate_up: ExpertLinear, down: ExpertLinear) -> None:
        super().__init__()
        self.router, self.dispatch, self.combine = router, Dispatch(), Combine()
        self.up, self.activation, self.down = gate_up, Gated(), down

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates, routing = self.router(tokens)
        rows = self.activation(self.up(self.dispatch(tokens, routing), routing))
        return self.combine(self.down(rows, routing), gates, routing).view_as(x)

    def parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """What recomputation may run again: not the router, whose choice must stay, and not the last sum."""
        return [self.dispatch, self.up, self.activation, self.down], []
