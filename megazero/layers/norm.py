"""RMSNorm and LayerNorm over the hidden dimension.  Their weights are whole on every TP rank."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megazero.layers.spec import Initializer, drawn_parameter, vector_spec


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019).  [..., hidden] -> [..., hidden].

    Args:
        name: prefix of the canonical name; the weight is `name.weight`.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        sum_over_tp: each TP rank sees part of the sequence, so its gradient is partial.
    """

    def __init__(self, name: str, hidden_size: int, eps: float, *, sum_over_tp: bool) -> None:
        super().__init__()
        self.eps = eps
        spec = vector_spec(f"{name}.weight", hidden_size, Initializer("ones"), sum_over_tp=sum_over_tp)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias (Ba et al. 2016).  [..., hidden] -> [..., hidden].  Arguments as `RMSNorm`."""

    def __init__(self, name: str, hidden_size: int, eps: float, *, sum_over_tp: bool) -> None:
        super().__init__()
        self.eps = eps
        weight = vector_spec(f"{name}.weight", hidden_size, Initializer("ones"), sum_over_tp=sum_over_tp)
        bias = vector_spec(f"{name}.bias", hidden_size, Initializer("zeros"), sum_over_tp=sum_over_tp)
        self.specs = {"weight": weight, "bias": bias}
        self.weight, self.bias = drawn_parameter(weight), drawn_parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
