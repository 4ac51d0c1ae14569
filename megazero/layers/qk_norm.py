"""RMSNorm of queries and keys, before they are rotated: of each head, or over all heads together.

         queries                  keys
x        [ h0 | h1 | h2 | h3 ]    [ k0 | k1 ]      heads cut over TP
head     one mean square for each of h0 ... k1     two weights, [head_size] each, whole on every TP rank
width    one for h0 ... h3        one for k0, k1   a weight for each element, cut over TP like the heads
"""

from __future__ import annotations

from torch import Tensor, nn

from megazero.layers.norm import rms_norm
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
        self.eps = eps
        rows = tuple(NamedRows(f"{name}.weight", head_size) for name in names)
        spec = ParamSpec(rows, init=Initializer("ones"), sum_over_tp=tp.size > 1, decay=False)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)

    def forward(self, x: Tensor, heads: int) -> Tensor:
        """`heads` of this rank are queries, the others keys."""
        return rms_norm(x, self.weight, self.eps, (heads, x.shape[2] - heads), dim=2)


class WidthNorm(nn.Module):
    """RMSNorm of all queries together and of all keys together (OLMo 2).  [seq, batch, q | k | v] -> q | k and v.

    Each head has weights of its own, cut over TP like the heads.  Squares are summed over TP in fp32, and so is, in the
    backward, what their gradients need.

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

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        qk, v = qkv.split([sum(self.sizes), self.sizes[1]], dim=-1)
        return rms_norm(qk, self.weight, self.eps, self.sizes, tp=self.tp), v
