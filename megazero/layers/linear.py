"""Linear layers split by tensor parallelism, with sequence parallelism and weight gradients that can be computed later.

    column-parallel  y = x @ W.T, W split by rows          row-parallel  W split by columns, x arrives split
      x  replicated --- copy -------+                        y  partial --- all-reduce ----> replicated
         or [seq/tp] -- all-gather -+--> y [.., out/tp]          or ----- reduce-scatter --> [seq/tp]

One autograd function serves both.  Its backward starts the exchange of the input gradient, meanwhile computes the
weight gradient directly into its bucket (or queues it in `WeightGradQueue`), then waits for the exchange.  In a
user's own model (`ByAutograd`) and with tp = 1, a layer is a plain `F.linear`, unless an annex adds a faster product.

    B and W together     B  gather x | dx = dy W  | dW = dy.T x      the gather runs beside the product
    W apart              B             dx = dy W                     the queue holds dy and this rank's shard of x
                         W  gather x (beside the dW before it) | dW = dy.T x

Products run in torch's library, or in one that an annex adds for the CPU.  The two products that read x and dy can be
replaced by a `Product` of another number format (`fp8.py`), chosen when the model is built.

Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2; Qi et al. 2024, section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import reduce_from_tp, scatter_sequence, start_gather_sequence, start_scatter_sequence
from megazero.comm.collectives import Pending, all_reduce
from megazero.layers.saved_tensors import refuse_second_derivative
from megazero.layers.spec import LinearSpec, ParamSpec, drawn_parameter
from megazero.parallel_state import Axis
from megazero.registry import added

if TYPE_CHECKING:
    from megazero.layers.experts import RowGroups


@cache
def cpu_product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a function x, w -> x @ w.T for fp32 tensors that is faster than torch's on this CPU, if an annex adds one.

    [rows, k], [n, k] -> [rows, n]; any strides.  Autograd cannot differentiate it.
    """
    choose = added("kernel").get("fp32 product")
    return None if choose is None else choose()


def added_product(x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the `cpu_product` for tensors like x; None for torch's."""
    return cpu_product() if x.is_cpu and x.dtype == torch.float32 else None


def add_product(out: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """Compute out = a.T @ b if `is_first`, else out += a.T @ b; without a temporary if the library supports it.

    Args:
        out: [m, n], contiguous, in the dtype of the sum; on CUDA, products of 16-bit factors are summed in fp32 without
            loss.
        a, b: [k, m] and [k, n], in the dtype of the computation; any strides.
    """
    a = a.t()
    if out.dtype == a.dtype and added_product(a) is None:
        if is_first:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(out, a, b, out=out)
    elif out.device.type == "cuda" and out.dtype == torch.float32:
        if is_first:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        write = out.copy_ if is_first else out.add_
        write(product_t(a, b.t()))


def product_t(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b.T without autograd.  [..., k], [n, k] -> [..., n]; any strides."""
    if (product := added_product(a)) is None:
        return torch.matmul(a, b.t())
    rows = product(a.reshape(-1, a.shape[-1]), b)
    # the result must not be a view, like matmul's: autograd could not sum a view over tp in place
    result: Tensor = torch.ops.aten._unsafe_view(rows, [*a.shape[:-1], b.shape[0]])
    return result


class Product:
    """The forward and backward products of a linear layer with its weight, without autograd.

    This class computes in the dtype of the factors; subclasses may round them.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x @ weight.T.  [..., k], [n, k] -> [..., n]."""
        return product_t(x, weight)

    def backward(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute grad @ weight.  [..., n], [n, k] -> [..., k]."""
        return product_t(grad, weight.t())

    def compile(self, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Do nothing: these products need no compilation."""


PLAIN = Product()

#: A forward's product x @ weight.T, with the exchange over tp before or after it; see `tp_overlap.py` for others.
Exchange: TypeAlias = Callable[[Tensor, Tensor, Axis, Product], Tensor]


def gathered(x: Tensor, weight: Tensor, tp: Axis, product: Product) -> Tensor:
    """Gather x over tp and multiply.  [seq / tp, batch, in], [out / tp, in] -> [seq, batch, out / tp]."""
    full, pending = start_gather_sequence(x, tp)
    pending.wait()
    return product.forward(full, weight)


#: What a layer exchanges over tp, besides what its caller does:
#:
#: local        nothing
#: replicated   x is whole on every rank; the backward sums the gradient of x
#: sequence     x arrives as [seq / tp, batch, in] and is gathered; the backward scatters the gradient of x
#: scattered    y is summed and leaves as [seq / tp, batch, out]; the backward gathers the gradient of y
Entry: TypeAlias = Literal["local", "replicated", "sequence", "scattered"]


class GradientAccumulator(Protocol):
    """Adds up the gradients of micro-batches."""

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a micro-batch."""

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one micro-batch's gradient, a sum of a.T @ b; one bucket chunk at a time if `factors` is a list."""

    def add_stacked(self, weight: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> None:
        """Add one micro-batch's gradient of the stacked expert matrices: a.T @ b over the rows of each expert."""

    def add_rows(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of some rows: int64 [k] and [k, n].  A row that is listed twice gets the sum."""


#: Starts the exchange that a weight gradient needs, if any.  Returns a function that waits for it and adds the
#: gradient.
_Start: TypeAlias = Callable[[], Callable[[GradientAccumulator], None]]


class WeightGradQueue:
    """The weight gradients of linear layers, on their way to the gradient accumulator without autograd.

    They are computed at once or, while `defers` is set, later: a backward pass then computes only input gradients and
    queues the weight gradients.  `run_oldest` computes the queued gradients of one backward pass, oldest pass first, so
    that gradients add up in the order of the micro-batches.

    A layer's backward holds the weight itself, since the accumulator needs the same object and saved tensors may be
    unpacked as another one.  It returns to autograd whatever `add_now` or `take_stacked` returns.

    Attributes:
        defers: queue gradients instead of computing them at once.
        accumulator: adds up the gradients; set before the first forward.
    """

    accumulator: GradientAccumulator

    def __init__(self) -> None:
        self.defers = False
        self._passes: deque[deque[_Start]] = deque()

    def clear(self) -> None:
        """Discard the gradients that a failed step left in the queue."""
        self._passes.clear()

    def begin_pass(self) -> None:
        """Start a new list for the gradients of the next backward pass."""
        if self.defers:
            self._passes.append(deque())

    def add_now(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
        """Add a weight gradient, a sum of a.T @ b, at once."""
        self.accumulator.add_products(weight, factors)
        return None

    def defer(self, weight: Tensor, gradient: Tensor) -> None:
        """Queue a gradient that is already computed, behind the others of the same backward pass."""
        self._passes[-1].append(lambda: lambda accumulator: accumulator.add(weight, gradient))

    def defer_product(self, weight: Tensor, a: Tensor, start_b: Callable[[], tuple[Tensor, Pending]]) -> None:
        """Queue the gradient a.T @ b.

        Args:
            weight: [m, n].
            a: [..., m].
            start_b: starts the exchange that yields b, [..., n].
        """

        def start() -> Callable[[GradientAccumulator], None]:
            b, pending = start_b()

            def finish(accumulator: GradientAccumulator) -> None:
                pending.wait()
                accumulator.add_products(weight, [(_rows(a), _rows(b))])

            return finish

        self._passes[-1].append(start)

    def take_stacked(self, weight: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor | None:
        """Add the gradient of expert matrices, at once or later; see `GradientAccumulator.add_stacked`."""
        if self.defers:
            self._passes[-1].append(lambda: lambda accumulator: accumulator.add_stacked(weight, a, b, groups))
        else:
            self.accumulator.add_stacked(weight, a, b, groups)
        return None

    def run_oldest(self) -> None:
        """Compute the weight gradients of the oldest backward pass in the queue.

        The exchange for each gradient runs while the previous gradient is computed, so at most two gathered inputs are
        in memory.  Every tp rank starts the exchanges in the order of the queue.
        """
        if not (entries := self._passes.popleft()):  # a stage without layers
            return
        with torch.no_grad():
            finish = entries.popleft()()
            while entries:
                following = entries.popleft()()
                finish(self.accumulator)
                finish = following
            finish(self.accumulator)


class ByAutograd(WeightGradQueue):
    """Returns weight gradients to autograd, which accumulates them, as in a user's own model."""

    def add_now(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        return sum_of_products(weight, factors)

    def take_stacked(self, weight: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
        return groups.sum_products(a, b).view_as(weight)


BY_AUTOGRAD = ByAutograd()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def sum_of_products(weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of a.T @ b over at least one term, as a gradient of `weight`.  Terms add up in fp32."""
    terms = iter(factors)
    a, b = next(terms)
    total = product_t(a.t(), b.t())
    del a, b
    for a, b in terms:
        total = total.float()
        add_product(total, a, b, is_first=False)
        del a, b  # free them before the next pair is computed
    return total.to(weight.dtype)


class _ParallelLinear(torch.autograd.Function):
    """y = x @ weight.T (+ bias).  x: [seq or seq / tp, batch, in] -> [seq, batch, out / tp]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        entry: Entry,
        tp: Axis,
        wgrad_queue: WeightGradQueue,
        product: Product,
        exchange: Exchange,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.entry, ctx.tp, ctx.product, ctx.has_bias = entry, tp, product, bias is not None
        ctx.wgrad_queue, ctx.parameter = wgrad_queue, weight
        exchanges = entry in ("sequence", "scattered")
        y = exchange(x, weight, tp, product) if exchanges else product.forward(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a parallel linear layer")
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)  # detached: a queue must not hold the graph of x
        tp, queue = ctx.tp, ctx.wgrad_queue
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if ctx.entry == "scattered":
            grad, arriving = start_gather_sequence(grad, tp)
            arriving.wait()
        # Only a shard of the sequence was saved.  The weight gradient alone needs the full x, now or when it is computed.
        start_input = partial(start_gather_sequence, x, tp) if ctx.entry == "sequence" else lambda: (x, Pending())
        # Runs beside the product of the input gradient.
        now = start_input() if needs_weight and not queue.defers else None
        grad_x, exchanging = None, Pending()
        if needs_x:
            grad_x = ctx.product.backward(grad, weight)
            if ctx.entry == "replicated":
                exchanging = all_reduce(grad_x, tp)
            elif ctx.entry == "sequence":
                grad_x, exchanging = start_scatter_sequence(grad_x, tp)

        grad_weight = None
        if now is not None:
            full, gathering = now
            gathering.wait()
            grad_weight = queue.add_now(ctx.parameter, [(_rows(grad), _rows(full))])
        elif needs_weight:
            queue.defer_product(ctx.parameter, grad, start_input)
        grad_bias = _rows(grad).sum(0) if ctx.has_bias else None
        exchanging.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def unchanged(x: Tensor, _: Axis) -> Tensor:
    """Return x: the gather, or the sum, of x over an axis of one rank."""
    return x


def parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    entry: Entry,
    tp: Axis,
    wgrad_queue: WeightGradQueue = BY_AUTOGRAD,
    product: Product = PLAIN,
    exchange: Exchange = gathered,
) -> Tensor:
    """Compute y = x @ weight.T + bias with the exchange that `entry` names.  Weight and bias are this rank's shards."""
    is_plain = isinstance(wgrad_queue, ByAutograd) and product is PLAIN and added_product(x) is None
    if is_plain and (tp.size == 1 or entry == "local"):
        return F.linear(x, weight, bias)
    entry = entry if tp.size > 1 else "local"
    return _ParallelLinear.apply(x, weight, bias, entry, tp, wgrad_queue, product, exchange)


class _ParallelLayer(nn.Module):
    """A linear layer that is split over an axis.  Its product and its exchange can be replaced after construction."""

    def __init__(self, specs: dict[str, ParamSpec], tp: Axis, entry: Entry, wgrad_queue: WeightGradQueue) -> None:
        super().__init__()
        self.specs, self.tp, self.entry, self.wgrad_queue = specs, tp, entry, wgrad_queue
        self.product: Product = PLAIN
        self.exchange: Exchange = gathered
        self.weight = drawn_parameter(specs["weight"], tp.index, tp.size)
        self.bias = drawn_parameter(specs["bias"], tp.index, tp.size) if "bias" in specs else None


class ColumnParallelLinear(_ParallelLayer):
    """y = x @ W.T + b with W split by rows over tp.  x: [seq, batch, in] -> [seq, batch, out / tp].

    Args:
        linear: the whole layer.  Each of its fused outputs (q|k|v, or gate|up) is split over tp separately.
        tp: the tensor-parallel axis.
        sequence_parallel: x arrives as [seq / tp, batch, in].
        wgrad_queue: takes the weight gradients; `BY_AUTOGRAD` returns them to autograd.
    """

    compiles = False  # it communicates

    def __init__(
        self,
        linear: LinearSpec,
        tp: Axis,
        *,
        sequence_parallel: bool = False,
        wgrad_queue: WeightGradQueue = BY_AUTOGRAD,
    ) -> None:
        super().__init__(linear.params(0), tp, "sequence" if sequence_parallel else "replicated", wgrad_queue)

    def forward(self, x: Tensor) -> Tensor:
        how = self.entry, self.tp, self.wgrad_queue, self.product, self.exchange
        return parallel_linear(x, self.weight, self.bias, *how)


class RowParallelLinear(_ParallelLayer):
    """y = x @ W.T + b with W split by columns over tp.  x: [seq, batch, in / tp] -> [seq, batch, out].

    Args:
        linear: the whole layer; its `in_features` must be divisible by tp.  The bias is added once, after the sum.
        tp: the tensor-parallel axis.
        sequence_parallel: return [seq / tp, batch, out].
        wgrad_queue: takes the weight gradients; `BY_AUTOGRAD` returns them to autograd.
    """

    compiles = False

    def __init__(
        self,
        linear: LinearSpec,
        tp: Axis,
        *,
        sequence_parallel: bool = False,
        wgrad_queue: WeightGradQueue = BY_AUTOGRAD,
    ) -> None:
        specs = linear.params(1, sum_over_tp=sequence_parallel and tp.size > 1)
        super().__init__(specs, tp, "local", wgrad_queue)
        self.reduce = unchanged if tp.size == 1 else scatter_sequence if sequence_parallel else reduce_from_tp

    def forward(self, x: Tensor) -> Tensor:
        y = parallel_linear(x, self.weight, None, self.entry, self.tp, self.wgrad_queue, self.product, self.exchange)
        y = y if self.entry == "scattered" else self.reduce(y, self.tp)
        return y if self.bias is None else y + self.bias
