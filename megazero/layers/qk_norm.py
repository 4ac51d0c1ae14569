"""RMSNorm of queries and keys, before they are rotated: of each head, or over all heads together.

         queries                  keys
x        [ h0 | h1 | h2 | h3 ]    [ k0 | k1 ]      [batch, heads + kv heads, seq, head_size], heads cut over TP
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
    """RMSNorm of each query and key over its head (Qwen3).  [batch, heads + kv heads, seq, head_size], unchanged in shape.

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
        weight = torch.cat([q.expand(heads, 1, -1), k.expand(x.shape[1] - heads, 1, -1)])
        return F.rms_norm(x, (self.head_size,), None, self.eps) * weight


class WidthNorm(nn.Module):
    """RMSNorm of all queries together and of all keys together (OLMo 2).  Shapes as for `HeadNorm`.

    Each head has weights of its own, cut over TP like the heads.  Mean squares are averaged over TP, in fp32.

    Args:
        names: prefixes of the canonical names for queries and for keys.
        sizes: elements of all query heads and of all key heads, all TP ranks together.
        eps, tp: as for `HeadNorm`.
    """

    def __init__(self, names: tuple[str, str], sizes: tuple[int, int], eps: float, tp: Axis) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        rows = tuple(NamedRows(f"{name}.weight", size) for name, size in zip(names, sizes, strict=True))
        spec = ParamSpec(rows, split=0, init=Initializer("ones"), decay=False)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec, tp.index, tp.size)

    def forward(self, x: Tensor, heads: int) -> Tensor:
        """`heads` of this rank are queries, the others keys."""
        counts = heads, x.shape[1] - heads
        wide = x.float()
        squares = torch.stack([part.square().mean(dim=(1, 3)) for part in wide.split(counts, dim=1)])
        # the sum goes to work on every rank again, so its gradient is summed too
        squares = copy_to_tp(reduce_from_tp(squares, self.tp), self.tp) / self.tp.size
        q, k = (squares + self.eps).rsqrt()[:, :, None, :, None]
        scale = torch.cat([q.expand(-1, counts[0], -1, -1), k.expand(-1, counts[1], -1, -1)], dim=1)
        return (wide * scale * self.weight.view(-1, 1, x.shape[-1])).to(x.dtype)
