"""Feed-forward blocks: SwiGLU (Shazeer 2020) with a fused gate|up projection, and GELU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import refuse_second_derivative
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear


class _Gated(torch.autograd.Function):
    """Compute silu(gate) * up, [..., 2 * inner] -> [..., inner].

    It saves only its input, whereas autograd would also save silu(gate).  It writes the gradients of both halves into
    one tensor, whereas autograd would concatenate two.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        refuse_second_derivative("a gated unit")
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_both = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_both


def gated(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up.  [..., 2 * inner], gate before up -> [..., inner].  torch.compile traces the plain
    formula.
    """
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    result: Tensor = _Gated.apply(gate_up)
    return result


class Gated(nn.Module):
    """`gated` as a module: silu(gate) * up."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up)


class MLP(nn.Module):
    """down(activation(up(x))).  [seq or seq / tp, batch, hidden], unchanged in shape."""

    def __init__(self, up: ColumnParallelLinear, activation: nn.Module, down: RowParallelLinear) -> None:
        super().__init__()
        self.up, self.activation, self.down = up, activation, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before the last projection, and the last projection."""
        return [self.up, self.activation], [self.down]


class SwiGLU(MLP):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), with gate | up fused."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        super().__init__(gate_up, Gated(), down)


class GELU(MLP):
    """down(gelu(up(x))) in the tanh form of GPT-2 (Hendrycks and Gimpel 2016)."""

    def __init__(self, up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        super().__init__(up, nn.GELU(approximate="tanh"), down)
