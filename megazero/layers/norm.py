"""The norms of the residual stream, RMSNorm and LayerNorm, and the sum of the stream and a branch.

The weights are replicated over TP.  For its backward, a norm saves its input in the input's own dtype, and one or two
fp32 numbers per token.  `rms_norm` is also the norm of queries and keys (heads.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import reduce_from_tp
from megazero.layers.counter_rng import Dropout
from megazero.layers.saved_tensors import refuse_second_derivative
from megazero.layers.sequence_shard import TokenLayout
from megazero.layers.spec import Initializer, drawn_parameter, vector_spec
from megazero.parallel_state import Axis

_WHOLE = Axis("tp")


class _SplitRMSNorm(torch.autograd.Function):
    """RMSNorm of each slice of x, computed in fp32 and rounded once; see `rms_norm`.

    With r = 1 / rms(x), n the size of the last dimension, and sums over that dimension, for each token

        y = x r w        dx = dy w r - x r^2 / n sum(dy x r w)        dw = dy x r, summed over tokens

    by the chain rule, because dr / dx = -x r^3 / n.  The same formula in plain torch would make autograd save three
    fp32 tensors of the size of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, sizes: Sequence[int], dim: int, tp: Axis) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        xs = _cut(exact, sizes, dim)
        squares = _sum_over_tp([torch.linalg.vector_norm(xi, dim=-1, keepdim=True).square_() for xi in xs], tp)
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if exact is x else exact
        weights = _cut(weight, [xi.shape[-1] for xi in xs])
        for xi, square, w, place in zip(xs, squares, weights, _cut(y, sizes, dim), strict=True):
            r = square.div_(xi.shape[-1] * tp.size).add_(eps).rsqrt_()
            torch.mul(xi, r, out=place).mul_(w)
        ctx.save_for_backward(x, weight, *squares)  # squares now hold 1 / rms
        ctx.sizes, ctx.dim, ctx.tp = sizes, dim, tp
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a norm")
        x, weight, *scales = ctx.saved_tensors
        exact, exact_grad = x.to(scales[0].dtype), grad.to(scales[0].dtype)
        xs, grads = _cut(exact, ctx.sizes, ctx.dim), _cut(exact_grad, ctx.sizes, ctx.dim)
        weights = _cut(weight.to(exact_grad.dtype), [xi.shape[-1] for xi in xs])
        dots, grad_weights = [], []
        for xi, dy, r, w in zip(xs, grads, scales, weights, strict=True):
            products = (dy * xi).mul_(r).flatten(0, -2)
            dots.append((products @ w).view_as(r))
            grad_weights.append(products.sum(0))
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if exact_grad is grad else exact_grad
        dots, places = _sum_over_tp(dots, ctx.tp), _cut(grad_x, ctx.sizes, ctx.dim)
        for xi, dy, r, w, dot, place in zip(xs, grads, scales, weights, dots, places, strict=True):
            torch.mul(dy, w, out=place).mul_(r)
            place.addcmul_(xi, dot * r.square(), value=-1 / (xi.shape[-1] * ctx.tp.size))
        grad_weight = grad_weights[0] if len(grad_weights) == 1 else torch.cat(grad_weights)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None, None, None


def _cut(x: Tensor, sizes: Sequence[int], dim: int = -1) -> Sequence[Tensor]:
    """Split x into views.  A single slice is x itself: most norms have one, and making a view would cost a fifth of
    their time.
    """
    return [x] if len(sizes) == 1 else x.split(sizes, dim)


def _sum_over_tp(numbers: list[Tensor], tp: Axis) -> list[Tensor]:
    """Sum these tensors over TP, in a single message."""
    if tp.size == 1:
        return numbers
    sums = reduce_from_tp(torch.cat([x.flatten() for x in numbers]), tp).split([x.numel() for x in numbers])
    return [total.view_as(x) for total, x in zip(sums, numbers, strict=True)]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, sizes: Sequence[int] = (), dim: int = -1, tp: Axis = _WHOLE
) -> Tensor:
    """Compute x / rms(x) * weight, with rms over the last dimension (Zhang and Sennrich 2019).  [..., n], unchanged in
    shape.

    It saves x itself, which may be a view, the weight, and 1 / rms in fp32.

    Args:
        x: [..., n].
        weight: the weights of all slices, [n] each, one after the other; of the type of x, or wider.
        eps: added to the mean square.
        sizes, dim: sizes of the slices of x along a dimension that are normalized separately, each with its own weight;
            one slice if `sizes` is empty.
        tp: the axis that splits the last dimension; mean squares are over the whole dimension.
    """
    sizes = sizes or (x.shape[dim],)
    # torch's kernel saves the same, and takes one type
    if tp.size == 1 and (torch.compiler.is_compiling() or (x.is_cuda and x.dtype == weight.dtype)):
        xs = x.to(weight.dtype).split(sizes, dim)
        weights = weight.split([xi.shape[-1] for xi in xs])
        normed = [F.rms_norm(xi, w.shape, w, eps) for xi, w in zip(xs, weights, strict=True)]
        return (normed[0] if len(normed) == 1 else torch.cat(normed, dim)).to(x.dtype)
    result: Tensor = _SplitRMSNorm.apply(x, weight, eps, sizes, dim, tp)
    return result


def one_plus(weight: Tensor) -> Tensor:
    """Add 1 to a weight, in fp32 or wider: in 16 bits the sum would lose the weight's last digits."""
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


class Residual(nn.Module):
    """x + scale * dropout(branch): the residual stream after a branch.  `dropout`: None for none."""

    def __init__(self, scale: float = 1.0, dropout: Dropout | None = None) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout

    def forward(self, x: Tensor, branch: Tensor, layout: TokenLayout) -> Tensor:
        branch = branch if self.dropout is None else self.dropout(branch, layout)
        return torch.add(x, branch, alpha=self.scale)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019).  [..., hidden] -> [..., hidden].

    Args:
        name: prefix of the canonical name; the weight is `name.weight`.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        sum_over_tp: each TP rank sees a shard of the sequence, so its gradient is partial.
    """

    init = Initializer("ones")

    def __init__(self, name: str, hidden_size: int, eps: float, *, sum_over_tp: bool) -> None:
        super().__init__()
        self.eps, spec = eps, vector_spec(f"{name}.weight", hidden_size, self.init, sum_over_tp=sum_over_tp)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """An `RMSNorm` that multiplies by 1 + weight, with weights that start at 0 (Gemma Team 2024)."""

    init = Initializer("zeros")

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, one_plus(self.weight), self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias (Ba et al. 2016).  [..., hidden] -> [..., hidden].  Arguments as in `RMSNorm`."""

    def __init__(self, name: str, hidden_size: int, eps: float, *, sum_over_tp: bool) -> None:
        super().__init__()
        self.eps = eps
        weight = vector_spec(f"{name}.weight", hidden_size, Initializer("ones"), sum_over_tp=sum_over_tp)
        bias = vector_spec(f"{name}.bias", hidden_size, Initializer("zeros"), sum_over_tp=sum_over_tp)
        self.specs = {"weight": weight, "bias": bias}
        self.weight, self.bias = drawn_parameter(weight), drawn_parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
