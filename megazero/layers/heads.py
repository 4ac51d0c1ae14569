"""The heads of attention over TP: how they are split, what is shared between ranks, and RMSNorm of queries and keys.

         queries                  keys
x        [ h0 | h1 | h2 | h3 ]    [ k0 | k1 ]      heads are split over TP
head     one mean square for each of h0 ... k1     two weights, [head_size] each, replicated over TP
width    one for h0 ... h3        one for k0, k1   a weight per element, split over TP like the heads

If tp exceeds the number of kv heads, tp / kv_heads ranks share a head, and each rank computes a slice of it:

    4 query heads, 2 kv heads, tp = 4         rank 0     rank 1     rank 2     rank 3
    weights, and what they compute            q0 | k0.   q1 | k0"   q2 | k1.   q3 | k1"     and v likewise
    what attention reads                      q0 | k0    q1 | k0    q2 | k1    q3 | k1      gathered over tp

So no weight is stored or multiplied twice, and storage, norms and checkpoints see the usual split by rows.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from megazero.comm.autograd import gather_sequence
from megazero.layers.norm import one_plus, rms_norm
from megazero.layers.spec import Initializer, NamedRows, drawn_parameter, rows_spec
from megazero.parallel_state import Axis


@dataclass(frozen=True)
class Heads:
    """The heads of attention, split over TP.

    Args:
        num_heads, num_kv_heads: numbers of heads of the whole model (Ainslie et al. 2023 for fewer key and value
            heads).  tp divides `num_heads`; it divides `num_kv_heads` or is a multiple of it.
        size: number of elements of a head.
        tp: the tensor-parallel axis.
    """

    num_heads: int
    num_kv_heads: int
    size: int
    tp: Axis

    @property
    def queries(self) -> int:
        """Number of query heads of this rank."""
        return self.num_heads // self.tp.size

    @property
    def keys(self) -> int:
        """Number of key heads, and of value heads, that this rank attends to."""
        return max(self.num_kv_heads // self.tp.size, 1)

    @property
    def sharing(self) -> int:
        """Number of ranks that share a key and value head."""
        return max(self.tp.size // self.num_kv_heads, 1)

    @property
    def v_features(self) -> int:
        """Number of elements of v that this rank projects to; if it shares a head, its slice of that head."""
        return self.num_kv_heads * self.size // self.tp.size


class HeadNorm(nn.Module):
    """RMSNorm of each query and key over its head (Qwen3).  [seq, batch, heads + kv heads, head_size], unchanged in
    shape.

    All query heads share one weight and all key heads another.  Each TP rank sees some of the heads, so gradients are
    partial.

    Args:
        names: prefixes of the canonical names for queries and for keys.
        heads: see `Heads`.
        eps: added to the mean square.
    """

    init = Initializer("ones")

    def __init__(self, names: tuple[str, str], heads: Heads, eps: float) -> None:
        super().__init__()
        self.eps, self.sizes = eps, (heads.queries, heads.keys)
        rows = tuple(NamedRows(f"{name}.weight", heads.size) for name in names)
        spec = rows_spec(rows, init=self.init, sum_over_tp=heads.tp.size > 1, decay=False)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.sizes, dim=2)


class OffsetHeadNorm(HeadNorm):
    """A `HeadNorm` that multiplies by 1 + weight; see `OffsetRMSNorm`."""

    init = Initializer("zeros")

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, one_plus(self.weight), self.eps, self.sizes, dim=2)


class WidthNorm(nn.Module):
    """RMSNorm of all queries together and of all keys together (OLMo 2).  [seq, batch, q | k], unchanged in shape.

    Each head has its own weights, split over TP like the heads.  Squares are summed over TP in fp32, and in the
    backward so are the sums that the gradients need.  Arguments as in `HeadNorm`.
    """

    compiles = False  # it communicates

    def __init__(self, names: tuple[str, str], heads: Heads, eps: float) -> None:
        super().__init__()
        self.eps, self.tp, sizes = eps, heads.tp, (heads.num_heads * heads.size, heads.num_kv_heads * heads.size)
        self.sizes = [size // self.tp.size for size in sizes]
        rows = tuple(NamedRows(f"{name}.weight", size) for name, size in zip(names, sizes, strict=True))
        spec = rows_spec(rows, split=0, init=Initializer("ones"), decay=False)
        self.specs, self.weight = {"weight": spec}, drawn_parameter(spec, self.tp.index, self.tp.size)

    def forward(self, qk: Tensor) -> Tensor:
        return rms_norm(qk, self.weight, self.eps, self.sizes, tp=self.tp)


class SharedKVHead(nn.Module):
    """Gather the key and value head that several TP ranks share.  [seq, batch, q | slice of k], slice of v -> q | k, v.

    The backward sums the gradients of the ranks that share the head (as Megatron-LM does for fewer query groups than
    tp).
    """

    compiles = False  # it communicates

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads, self.tp = heads, heads.tp

    def forward(self, qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k = qk.split([qk.shape[-1] - v.shape[-1], v.shape[-1]], dim=-1)
        every = gather_sequence(torch.cat([k, v], dim=-1), self.tp).unflatten(0, (self.tp.size, -1))
        first = self.tp.index // self.heads.sharing * self.heads.sharing
        sharing = every[first : first + self.heads.sharing]
        k, v = rearrange(sharing, "ranks s b (kv d) -> s b (kv ranks d)", kv=2).chunk(2, dim=-1)
        return torch.cat([q, k], dim=-1), v
