"""Feed-forward blocks: SwiGLU and GeGLU (Shazeer 2020) with a fused gate|up projection, and GELU."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.saved_tensors import refuse_second_derivative

_aten = torch.ops.aten
#: A function of a gate: of a tensor, with `out`, and its gradient with `grad_input`.
GateFunction: TypeAlias = tuple[Callable[..., Tensor], ...]
SILU: GateFunction = F.silu, _aten.silu.out, _aten.silu_backward.grad_input
_GELU = F.gelu, _aten.gelu.out, _aten.gelu_backward.grad_input
GELU_TANH: GateFunction = tuple(partial(gelu, approximate="tanh") for gelu in _GELU)


class _Gated(torch.autograd.Function):
    """Compute function(gate) * up, [..., 2 * inner] -> [..., inner].

    It saves only its input, whereas autograd would also save function(gate).  It writes the gradients of both halves
    into one tensor, whereas autograd would concatenate two.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, function: GateFunction) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.function = function
        gate, up = gate_up.chunk(2, dim=-1)
        return function[0](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("a gated unit")
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_both = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        _, into, backward = ctx.function
        into(gate, out=grad_up)
        grad_up.mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        backward(grad_gate, gate, grad_input=grad_gate)
        return grad_both, None


def gated(gate_up: Tensor, function: GateFunction = SILU) -> Tensor:
    """Compute function(gate) * up.  [..., 2 * inner], gate before up -> [..., inner].  torch.compile traces the plain
    formula.
    """
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, dim=-1)
        return function[0](gate) * up
    result: Tensor = _Gated.apply(gate_up, function)
    return result


class Gated(nn.Module):
    """The function `gated` as a module."""

    def __init__(self, function: GateFunction = SILU) -> None:
        super().__init__()
        self.function = function

    def forward(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up, self.function)


class MLP(nn.Module):
    """down(activation(up(x))).  [seq or seq / tp, batch, hidden], unchanged in shape."""

    def __init__(self, up: ColumnParallelLinear, activation: nn.Module, down: RowParallelLinear) -> None:
        super().__init__()
        self.up, self.activation, self.down = up, activation, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def body_and_projection(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before the last projection, and the last projection."""
        return [self.up, self.activation], [self.down]


class SwiGLU(MLP):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), with gate | up fused; a GeGLU with `GELU_TANH` for silu."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear, function: GateFunction = SILU) -> None:
        super().__init__(gate_up, Gated(function), down)


class GELU(MLP):
    """down(gelu(up(x))) in the tanh form of GPT-2 (Hendrycks and Gimpel 2016)."""

    def __init__(self, up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        super().__init__(up, nn.GELU(approximate="tanh"), down)
