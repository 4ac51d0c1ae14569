"""RMSNorm of queries and keys, before they are rotated: of each head, or over all heads together.

         queries                  keys
x        [ h0 | h1 | h2 | h3 ]    [ k0 | k1 ]      heads cut over TP
head     one mean square for each of h0 ... k1     two weights, [head_size] each, whole on every TP rank
width    one for h0 ... h3        one for k0, k1   a weight for each element, cut over TP like the heads
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.autograd import copy_to_tp, reduce_from_tp
from megazero.layers.spec import Initializer, NamedRows, ParamSpec, drawn_parameter
from megazero.parallel_state import Axis


class HeadNorm(nn.Module):
    """RMSNorm of each query and key over its head (Qwen3).  [seq, batch, heads + kv heads, head_size], unchanged in shape.

    All query heads share one weight and all key heads another; each TP rank sees some heads, so their gradients are partial.

    Args:
        names: prefixes of the canonical names for queries and for keys.
        head_size: size of one head.
        eps: added to the mean square.
        tp: the axis over which heads are cut.
    """

    def __init__(self, names: tuple[str, str], head_size: int, eps: float, tp: Axis) -> None:
        super().__init__()
        self.eps, self.head_size = eps, head_size
        rows = tuple(NamedRows(f"{name}.weight", head_size) for name in names)
        spec = ParamSpec(rows, init=Initializer("ones"), sum_over_tp=tp.size > 1, decay=False)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)

    def forward(self, x: Tensor, heads: int) -> Tensor:
        """`heads` of this rank are queries, the others keys."""
        q, k = self.weight.split(self.head_size)
        weight = torch.cat([q.expand(heads, -1), k.expand(x.shape[2] - heads, -1)])
        return F.rms_norm(x, (self.head_size,), None, self.eps) * weight


class WidthNorm(nn.Module):
    """RMSNorm of all queries together and of all keys together (OLMo 2).  [seq, batch, q | k | v], unchanged in shape.

    Each head has weights of its own, cut over TP like the heads.  Mean squares are averaged over TP, in fp32; v stays.

    Args:
        names: prefixes of the canonical names for queries and for keys.
        sizes: elements of all query heads and of all key heads, all TP ranks together.
        eps, tp: as for `HeadNorm`.
    """

    def __init__(self, names: tuple[str, str], sizes: tuple[int, int], eps: float, tp: Axis) -> None:
        super().__init__()
        self.eps, self.tp, self.sizes = eps, tp, [size // tp.size for size in sizes]
        rows = tuple(NamedRows(f"{name}.weight", size) for name, size in zip(names, sizes, strict=True))
        spec = ParamSpec(rows, split=0, init=Initializer("ones"), decay=False)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec, tp.index, tp.size)

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.split([*self.sizes, self.sizes[1]], dim=-1)
        wide = q.contiguous(), k.contiguous()  # copies: views would keep v too in memory for the backward
        squares = torch.stack([_mean_square(part) for part in wide])
        # the sum goes to work on every rank again, so its gradient is summed too
        squares = copy_to_tp(reduce_from_tp(squares, self.tp), self.tp) / self.tp.size
        scales, weights = (squares + self.eps).rsqrt(), self.weight.split(self.sizes)
        # the product with the scale is fp32; what is kept of it for the gradient of the weight is not
        normed = (
            (part * scale).to(qkv.dtype) * weight for part, scale, weight in zip(wide, scales, weights, strict=True)
        )
        return torch.cat([*normed, v], dim=-1)


def _mean_square(x: Tensor) -> Tensor:
    """[..., size] -> [..., 1], in fp32; the backward needs x itself and no fp32 copy of it."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square() / x.shape[-1]
