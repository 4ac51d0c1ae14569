"""Matrix products, on the faster of the two libraries that torch brings for the CPU.

torch's fp32 `mm` calls MKL, which on processors of another maker than its own runs at about half the speed of oneDNN
(1 thread, 128 x 256 x 768: 104 and 219 GFLOP/s on an AMD EPYC with AVX-512).  The choice is by the maker's name, not by a
measurement, so that every run on a machine computes the same.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _onednn_is_faster() -> bool:
    cpu = Path("/proc/cpuinfo")
    return torch.backends.mkldnn.is_available() and cpu.is_file() and "AuthenticAMD" in cpu.read_text()[:4096]


def prefers_onednn(x: Tensor) -> bool:
    """Whether products of `x` run on oneDNN here; autograd does not see through them."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and _onednn_is_faster()


def add_product(place: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """place = a.T @ b, or += where something is there already; without autograd.

    Args:
        place: [m, n], contiguous, in the dtype that is accumulated in.
        a, b: [k, m] and [k, n], in the dtype that was computed in; any strides.
        is_first: overwrite.

    Where the library can, the product adds itself to the place and nothing is written down in between; on CUDA 16-bit
    factors lose nothing on their way into an fp32 sum.
    """
    a = a.t()
    if place.dtype == a.dtype and not prefers_onednn(a):
        if is_first:
            torch.mm(a, b, out=place)
        else:
            torch.addmm(place, a, b, out=place)
    elif place.device.type == "cuda" and place.dtype == torch.float32:
        if is_first:
            torch.mm(a, b, out_dtype=torch.float32, out=place)
        else:
            torch.addmm(place, a, b, out_dtype=torch.float32, out=place)
    elif is_first:
        place.copy_(product_t(a, b.t()))
    else:
        place.add_(product_t(a, b.t()))


def product_t(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T without autograd.  [..., k], [n, k] -> [..., n]; any strides."""
    if not prefers_onednn(a):
        return torch.matmul(a, b.t())
    rows = torch.ops.mkldnn._linear_pointwise(a.reshape(-1, a.shape[-1]), b, None, "none", [], "")
    # as matmul does: autograd must not take the result for a view, or it could not be summed over tp in place
    result: Tensor = torch.ops.aten._unsafe_view(rows, [*a.shape[:-1], b.shape[0]])
    return result
