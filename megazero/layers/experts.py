"""A mixture of experts in place of an MLP: each token goes to k of E gated MLPs, and no token is dropped.

    x [tokens, hidden]
      |  router        scores in fp32 -> k experts of each token, and their gates
      |  dispatch      rows [tokens * k, hidden], sorted by expert:   | expert 0 | expert 2 |   expert 3   |   (1 has none)
      |                with ep > 1, rows are sent to the ranks of their experts
      |  up, down      grouped products: each expert multiplies its own rows
      v  combine       rows are sent back; each token gets the sum of its k rows, weighted by the gates

A pair (token t, choice j) has the index t * k + j.  `Routing.order` sorts the pairs by expert, and `Routing.place` is
the position of each pair in that order.  Dispatch, combine and their backwards only gather rows by these two index
tensors, so their sums do not depend on the order in which threads finish.  Recomputation reuses the same `Routing` and
never chooses experts again.

Among experts with equal scores, a token goes to the first.  Shared experts are one more MLP, for every token.
Source: Shazeer et al. 2017; Fedus et al. 2021, section 2.1; Gale et al. 2022 (dropless, by grouped products).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import exchange_rows
from megazero.comm.collectives import Pending, all_reduce, all_to_all
from megazero.layers.linear import BY_AUTOGRAD, WeightGradQueue, add_product, product_t
from megazero.layers.mlp import MLP, Gated
from megazero.layers.saved_tensors import refuse_second_derivative
from megazero.layers.sequence_shard import TokenLayout
from megazero.layers.spec import ParamSpec, buffer_spec, drawn_parameter
from megazero.parallel_state import Axis

_ALIGNED = 16  # bytes: torch's grouped kernel needs rows that begin at multiples of this


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Rows sorted by expert: consecutive rows belong to the same expert.

    Args:
        counts: int64 [experts], number of rows of each expert; may be 0.
        rows: number of rows of all experts together.
    """

    counts: Tensor
    rows: int

    @cached_property
    def ends(self) -> Tensor:
        """One past the last row of each expert, int32 [experts], as kernels expect it."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The row count of each expert as a Python integer."""
        return row_counts(self.counts, self.rows)

    def times(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply each row of x by the transposed matrix of its expert.  [rows, k], [experts, n, k] -> [rows, n]."""
        if has_kernel(x, weights):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=self.ends)
        of_experts = zip(x.split(self.sizes), weights, strict=True)
        return torch.cat([product_t(rows, weight) for rows, weight in of_experts])

    def sum_products(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a.T @ b over the rows of each expert.  [rows, m], [rows, n] -> [experts, m, n]."""
        if has_kernel(a, b):
            sums = F.grouped_mm(a.t(), b, offs=self.ends)
            return sums.masked_fill_((self.counts == 0).view(-1, 1, 1), 0)
        sums = a.new_empty(len(self.counts), a.shape[1], b.shape[1])
        self.add_products(sums, a, b, is_first=True)
        return sums

    def add_products(self, out: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
        """Add `sum_products` to `out` [experts, m, n], or overwrite it if `is_first`.  `out` may have a wider dtype."""
        if has_kernel(a, b):
            (out.copy_ if is_first else out.add_)(self.sum_products(a, b))
            return
        for matrix, rows_a, rows_b in zip(out, a.split(self.sizes), b.split(self.sizes), strict=True):
            if len(rows_a):
                add_product(matrix, rows_a, rows_b, is_first=is_first)
            elif is_first:
                matrix.zero_()


def has_kernel(*factors: Tensor) -> bool:
    """Whether torch has one kernel that multiplies all groups.  Otherwise a loop over experts is as fast."""
    return all(x.is_cuda and x.dtype == torch.bfloat16 and x.numel() and _is_aligned(x) for x in factors)


def _is_aligned(x: Tensor) -> bool:
    """Whether all rows begin at aligned addresses.  A transposed matrix has its columns in memory, one after the other."""
    return all(stride * x.element_size() % _ALIGNED == 0 for stride in sorted(x.stride())[1:])


@dataclass(frozen=True, eq=False)
class Stay:
    """No exchange of rows: all experts are on this rank.  `groups`: the rows of each expert."""

    groups: RowGroups

    def to_experts(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return rows

    to_tokens = to_experts


@dataclass(frozen=True, eq=False)
class Travel:
    """Exchange of rows with the ranks of their experts, and back.

        rows of this rank's tokens      | for rank 0 | for rank 1 |          each sorted by expert
        exchanged, of its experts       | from rank 0  | from rank 1 |       likewise
        in `order`                      | expert 0 | expert 1 | expert 2 |   as grouped products take them

    Args:
        ep: the ranks with different experts.
        sends, receives: number of rows sent to, and received from, each rank of ep.
        order, place: int64 [received rows], the permutation that sorts them by expert, and its inverse.
        groups: the received rows, after sorting, of each expert of this rank.
    """

    ep: Axis
    sends: list[int]
    receives: list[int]
    order: Tensor
    place: Tensor
    groups: RowGroups

    @staticmethod
    def of(counts: Tensor, rows: int, ep: Axis) -> Travel:
        """Exchange the numbers of rows that ranks send each other, and return the plan of the exchange.

        Args:
            counts: int64 [experts of the layer], number of this rank's rows for each expert.
            rows: the sum of `counts`.
            ep: the ranks with different experts.
        """
        leaving = counts.view(ep.size, -1)
        arriving = torch.empty_like(leaving)
        all_to_all(arriving, leaving, ep).wait()
        both = row_counts(torch.cat([leaving.sum(1), arriving.sum(1)]), 2 * rows)
        sends, receives = both[: ep.size], both[ep.size :]
        expert = torch.arange(arriving.shape[1], device=counts.device).repeat(ep.size)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(receives)).argsort(stable=True)
        return Travel(ep, sends, receives, order, _inverse(order), RowGroups(arriving.sum(0), sum(receives)))

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send the rows to the ranks of their experts.  [rows of this rank's tokens, ...] -> [rows of its experts,
        ...].

        Both are sorted by expert.
        """
        arrived = exchange_rows(rows, self.sends, self.receives, self.ep)
        result: Tensor = _Reordered.apply(arrived, self.order, self.place)
        return result

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Send the rows back: the inverse of `to_experts`."""
        return exchange_rows(_Reordered.apply(rows, self.place, self.order), self.receives, self.sends, self.ep)


class _Reordered(torch.autograd.Function):
    """Permute rows: rows[order].  `place` is the inverse of `order`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.place = place
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("a dispatch to experts")
        return grad[ctx.place], None, None


def _inverse(order: Tensor) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def row_counts(counts: Tensor, total: int) -> list[int]:
    """Return the numbers of rows as Python integers.  On a GPU, this synchronizes with the device.

    `total`: their sum if all experts get equally many rows.  Under a plan, where tensors hold no numbers, this function
    is replaced by one that divides `total` among the experts.
    """
    numbers: list[int] = counts.tolist()
    return numbers


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts chosen for the tokens of a micro-batch.

    Args:
        experts: int64 [tokens, k].
        order: int64 [tokens * k], the indices of all pairs sorted by expert, then by token.
        place: int64 [tokens * k], the position of each pair in that order.
        counts: int64 [experts], the number of rows for each expert of the layer.
        travel: sends the sorted rows to the ranks of their experts.
    """

    experts: Tensor
    order: Tensor
    place: Tensor
    counts: Tensor
    travel: Stay | Travel

    @staticmethod
    def of(experts: Tensor, count: int, ep: Axis) -> Routing:
        """Sort the (token, expert) pairs of all tokens by expert.  Collective over `ep`.  `count`: number of experts of
        the layer.
        """
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
        travel = Stay(RowGroups(counts, len(flat))) if ep.size == 1 else Travel.of(counts, len(flat), ep)
        return Routing(experts, order, _inverse(order), counts, travel)

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each sorted row, int64 [tokens * k]."""
        return self.order // self.experts.shape[1]

    def by_token(self, rows: Tensor) -> Tensor:
        """Bring sorted rows back into the order of pairs.  [tokens * k, ...] -> [tokens, k, ...]."""
        return rows[self.place].unflatten(0, self.experts.shape)


class _Logits(torch.autograd.Function):
    """Compute x @ weight.T in fp32.  [tokens, hidden], [experts, hidden] -> fp32 [tokens, experts].  It saves x in its
    own dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.parameter = queue, weight
        return product_t(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a router")
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        grad_x = product_t(grad, weight.float().t()).to(x.dtype)
        if ctx.queue.defers:
            ctx.queue.defer_product(ctx.parameter, grad, lambda: (x.float(), Pending()))
            return grad_x, None, None
        return grad_x, ctx.queue.add_now(ctx.parameter, [(grad, x.float())]), None


class _Dispatch(torch.autograd.Function):
    """Copy each token's row once per choice.  [tokens, hidden] -> [tokens * k, hidden], sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return x[routing.tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("a dispatch to experts")
        return ctx.routing.by_token(grad).sum(1), None


class _Combine(torch.autograd.Function):
    """Sum each token's k rows, weighted by its gates.  [tokens * k, hidden], fp32 gates [tokens, k] -> [tokens,
    hidden].
    """

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


class ExpertProduct:
    """Multiplies rows by the matrices of their experts, without autograd.  This class computes in the dtype of the
    factors; subclasses may round them.
    """

    def times(self, x: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        """See `RowGroups.times`.  The backward multiplies by the transposed matrices."""
        return groups.times(x, weights)


class _GroupedProduct(torch.autograd.Function):
    """Multiply each row by the matrix of its expert.  [rows, k], [experts * n, k] -> [rows, n]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups, queue: WeightGradQueue, product: ExpertProduct
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.queue, ctx.product, ctx.parameter = groups, queue, product, weight
        return product.times(x, _stack(weight, groups), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("an expert")
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        groups: RowGroups = ctx.groups
        grad = grad.contiguous()
        grad_x = ctx.product.times(grad, _stack(weight, groups).transpose(1, 2), groups)
        return grad_x, ctx.queue.take_stacked(ctx.parameter, grad, x, groups), None, None, None


def _stack(weight: Tensor, groups: RowGroups) -> Tensor:
    return weight.unflatten(0, (len(groups.counts), -1))


class _WithLoss(torch.autograd.Function):
    """Return the gates unchanged.  Their backward also starts the backward of a loss, with the gradient `grad_scale()`."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, _: Tensor, grad_scale: Callable[[], Tensor]) -> Tensor:
        ctx.grad_scale = grad_scale
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.grad_scale(), None


@dataclass
class Balance:
    """Losses that keep a router balanced, and the router's statistics over a step.

        auxiliary loss  aux * E / k * sum over samples of n * sum over experts of f * P
        z-loss          z * sum over tokens of logsumexp(logits)^2

    Only counted tokens enter the losses and the statistics: n is their number in a sample, f is the fraction of them
    that go to an expert, and P is the mean score of the expert.  Both losses are sums over the global batch and are
    divided like the model's loss, so nothing here depends on the cluster or on the split into micro-batches.

    Args:
        aux, z: the coefficients.
        across: axes that split the tokens of a sample over ranks.
        tp: the axis that splits a rank's labels by sequence.
        tally: fp32 [experts + 3], accumulates the counted tokens of each expert, then the sums of the entropy, in nats,
            and of both losses.
        grad_scale: returns the gradient of the step's scaled loss with respect to a sum over tokens.

    Source: DeepSeek-AI 2024, equations 17 to 20, for each sequence; Zoph et al. 2022, equation 5.
    """

    aux: float
    z: float
    across: Sequence[Axis]
    tp: Axis
    tally: Tensor
    grad_scale: Callable[[], Tensor] = lambda: torch.ones(())

    def __call__(self, gates: Tensor, logits: Tensor, scores: Tensor, routing: Routing, layout: TokenLayout) -> Tensor:
        """Add to the statistics, and return the gates with the losses attached.  logits, scores: fp32 [tokens,
        experts]; the scores of a token add up to 1.
        """
        if layout.labels is None:
            return gates
        experts, chosen = scores.shape[1], routing.experts
        counted = (layout.labels.chunk(self.tp.size)[self.tp.index] >= 0).to(scores.dtype)
        weights = counted.flatten()
        self.tally[:experts].scatter_add_(0, chosen.flatten(), weights.repeat_interleave(chosen.shape[1]))
        self.tally[experts] += (weights * torch.special.entr(scores.detach()).sum(1)).sum()
        if not (self.aux or self.z):
            return gates
        aux = self._aux(scores, chosen, counted) if self.aux else scores.new_zeros(())
        z = self.z * (weights * logits.logsumexp(1).square()).sum()
        self.tally[experts + 1 :] += torch.stack([aux, z]).detach()
        tied: Tensor = _WithLoss.apply(gates, aux + z, self.grad_scale)
        return tied

    def _aux(self, scores: Tensor, chosen: Tensor, counted: Tensor) -> Tensor:
        """Compute this rank's auxiliary loss.  `counted`: [seq, samples], 1 where a token counts."""
        (samples, experts), k = (counted.shape[1], scores.shape[1]), chosen.shape[1]
        sample = torch.arange(samples, device=chosen.device).repeat(len(counted)).unsqueeze(1)
        chosen_of = scores.new_zeros(samples * experts)
        chosen_of.scatter_add_(0, (sample * experts + chosen).flatten(), counted.flatten().repeat_interleave(k))
        sums = torch.cat([chosen_of.view(samples, experts), counted.sum(0).unsqueeze(1)], dim=1)
        for axis in self.across:
            all_reduce(sums, axis).wait()
        fraction = sums[:, :experts] / sums[:, experts:].clamp(min=1)
        score = (scores.view(*counted.shape, experts) * counted.unsqueeze(2)).sum(0)
        return self.aux * experts / k * (fraction * score).sum()


# Added to the sum of a token's scores, which may be 0, before a division by it.  Changes no other sum.
_LEAST_SUM = 1e-20


@dataclass(frozen=True)
class Choice:
    """How the experts of a token are chosen from its scores, and how its gates are computed.

        experts in 4 groups      0 1 | 2 3 | 4 5 | 6 7
        a token's best 2 groups        x x         x x      its k experts are among these

    Args:
        k: experts per token.
        renormalize: divide the gates of a token by their sum.
        scale: factor on the gates, after that.
        groups: number of groups of consecutive experts.
        groups_per_token: number of groups that the experts of one token are chosen from.

    Source: DeepSeek-AI 2024, section 2.1.2; DeepSeek-V3, the code of its gate.
    """

    k: int
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1

    def experts(self, preferences: Tensor, of_group: int) -> Tensor:
        """Choose the experts of each token.  fp32 [tokens, experts] -> int64 [tokens, k].

        Args:
            of_group: how many of a group's best preferences are summed to rank the groups.
        """
        if self.groups > 1:
            grouped = preferences.unflatten(1, (self.groups, -1))
            best = _first_best(grouped.topk(of_group).values.sum(-1), self.groups_per_token)
            left = torch.full_like(grouped, -torch.inf)
            index = best.unsqueeze(-1).expand(-1, -1, grouped.shape[-1])
            preferences = left.scatter_(1, index, grouped.gather(1, index)).flatten(1)
        return _first_best(preferences, self.k)

    def gates(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the gates of the chosen experts.  [tokens, experts], int64 [tokens, k] -> [tokens, k]."""
        gates = scores.gather(1, experts)
        if self.renormalize:
            gates = gates / (gates.sum(-1, keepdim=True) + _LEAST_SUM)
        return gates if self.scale == 1.0 else gates * self.scale


def _first_best(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class Router(nn.Module):
    """Choose k experts for each token, by a softmax.  [seq, batch, hidden] -> gates, fp32 [tokens, k], and the `Routing`.

    Args:
        spec: spec of the weight, [experts of the layer, hidden].
        choice: see `Choice`.
        ep: the ranks over which the experts are distributed.
        wgrad_queue: takes the weight's gradient; `BY_AUTOGRAD` returns it to autograd.

    Attributes:
        balance: losses and statistics during training; None for none.
    """

    of_group = 1  # see `Choice.experts`

    def __init__(self, spec: ParamSpec, choice: Choice, ep: Axis, wgrad_queue: WeightGradQueue = BY_AUTOGRAD) -> None:
        super().__init__()
        self.experts, self.choice, self.ep, self.wgrad_queue = spec.shape[0], choice, ep, wgrad_queue
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)
        self.balance: Balance | None = None

    def forward(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Routing]:
        logits = _Logits.apply(x.flatten(0, 1), self.weight, self.wgrad_queue)
        scores = self.scores(logits)
        chosen = self.choice.experts(self.preferences(scores.detach()), self.of_group)
        gates = self.choice.gates(scores, chosen)
        routing = Routing.of(chosen, self.experts, self.ep)
        if self.balance is not None and torch.is_grad_enabled():
            gates = self.balance(gates, logits, self.normalized(scores), routing, layout)
        return gates, routing

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores from which the gates are computed.  fp32 [tokens, experts], unchanged in shape."""
        return logits.softmax(-1)

    def preferences(self, scores: Tensor) -> Tensor:
        """Return the numbers by which the experts of a token are chosen.  fp32 [tokens, experts], unchanged in shape."""
        return scores

    def normalized(self, scores: Tensor) -> Tensor:
        """Return the scores normalized so that those of a token add up to 1."""
        return scores


class SigmoidRouter(Router):
    """A `Router` that scores experts by sigmoids, and balances them by a bias instead of a loss.

    The bias affects only which experts are chosen, never the gates.  After a step, `update_bias` lowers the bias of
    experts that got more tokens than the mean, and raises that of the others.

    Source: DeepSeek-AI 2024 (V3), section 2.1.2; Wang et al. 2024.
    """

    of_group = 2

    def __init__(self, spec: ParamSpec, *of_router: Any) -> None:
        super().__init__(spec, *of_router)
        bias = buffer_spec(f"{spec.name.removesuffix('weight')}e_score_correction_bias", self.experts)
        self.specs["bias"], self.bias = bias, drawn_parameter(bias)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def preferences(self, scores: Tensor) -> Tensor:
        return scores + self.bias

    def normalized(self, scores: Tensor) -> Tensor:
        return scores / (scores.sum(-1, keepdim=True) + _LEAST_SUM)

    @torch.no_grad()
    def update_bias(self, tokens: Tensor, rate: float) -> None:
        """Lower the bias of experts with more tokens than the mean by `rate`, and raise that of those with fewer.

        tokens: fp64 [experts], of the global batch, so every rank computes the same bias.
        """
        self.bias.add_((tokens.mean() - tokens).sign().float(), alpha=rate)


class Dispatch(nn.Module):
    """Send one row per choice of each token to the rank of its expert.  [seq, batch, hidden] -> [rows, hidden], sorted
    by expert.

    With one ep rank, the result has tokens * k rows.
    """

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return routing.travel.to_experts(_Dispatch.apply(x.flatten(0, 1), routing))


class ExpertLinear(nn.Module):
    """Multiply each row by the matrix of its expert.  [rows, in], sorted by expert -> [rows, out].

    Args:
        spec: of the stacked matrices of all experts, see `expert_spec`.
        ep, wgrad_queue: see `Router`.

    Attributes:
        product: multiplies the rows.
    """

    def __init__(self, spec: ParamSpec, ep: Axis, wgrad_queue: WeightGradQueue = BY_AUTOGRAD) -> None:
        super().__init__()
        self.wgrad_queue, self.product = wgrad_queue, ExpertProduct()
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec, ep.index, ep.size)

    def forward(self, rows: Tensor, routing: Routing) -> Tensor:
        groups = routing.travel.groups
        result: Tensor = _GroupedProduct.apply(rows, self.weight, groups, self.wgrad_queue, self.product)
        return result


class Combine(nn.Module):
    """Sum the rows of each token's experts, weighted by the gates.  [rows, hidden] -> [tokens, hidden]."""

    def forward(self, rows: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        result: Tensor = _Combine.apply(routing.travel.to_tokens(rows), gates, routing)
        return result


class MixtureOfExperts(nn.Module):
    """The sum of the MLPs of k experts, weighted by a router.  [seq or seq / tp, batch, hidden], unchanged in shape.

    Each expert is down(silu(gate(x)) * up(x)) (Shazeer 2020), with gate | up fused.
    """

    compiles = False  # an expert's number of rows changes in every step, and compiled code is for one size

    def __init__(self, router: Router, gate_up: ExpertLinear, down: ExpertLinear) -> None:
        super().__init__()
        self.router, self.dispatch, self.combine = router, Dispatch(), Combine()
        self.up, self.activation, self.down = gate_up, Gated(), down

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        gates, routing = self.router(x, layout)
        rows = self.activation(self.up(self.dispatch(x, routing), routing))
        return self.combine(self.down(rows, routing), gates, routing).view_as(x)

    def body_and_projection(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules that recomputation may run again.

        They exclude the router, because its choice must not change, and the last sum.
        """
        return [self.dispatch, self.up, self.activation, self.down], []


class WithSharedExperts(MixtureOfExperts):
    """A `MixtureOfExperts` that adds the output of the MLP `shared`, which every token passes through."""

    def __init__(self, router: Router, gate_up: ExpertLinear, down: ExpertLinear, shared: MLP) -> None:
        super().__init__(router, gate_up, down)
        self.shared = shared

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return super().forward(x, layout) + self.shared(x)

    def body_and_projection(self) -> tuple[list[nn.Module], list[nn.Module]]:
        (routed, _), (shared, _) = super().body_and_projection(), self.shared.body_and_projection()
        return [*routed, *shared], []
