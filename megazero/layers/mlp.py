"""Feed-forward blocks: SwiGLU (Shazeer 2020) with a fused gate|up projection, and GELU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)).  [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        gate_up: fused projection whose sections are gate | up.
        down: projection back to the hidden size.
    """

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every position."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class GELU(nn.Module):
    """down(gelu(up(x))) with the tanh form of GPT-2.  [seq or seq / tp, batch, hidden], unchanged in shape.

    Args:
        up: projection to the inner size.
        down: projection back to the hidden size.
    """

    def __init__(self, up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every position."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))
