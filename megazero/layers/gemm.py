"""Matrix products without autograd, on the faster of torch's two CPU libraries.

torch's fp32 `mm` calls MKL, which on AMD processors runs at about half the speed of oneDNN.  The choice depends on the
processor's vendor and not on a measurement, so that every run on a machine computes the same numbers.
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
    """Whether products of `x` run on oneDNN here; autograd cannot differentiate them."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and _onednn_is_faster()


def add_product(out: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """out = a.T @ b, or out += a.T @ b unless `is_first`; without a temporary where the library can.

    Args:
        out: [m, n], contiguous, in the dtype of the sum; on CUDA 16-bit factors lose nothing in an fp32 sum.
        a, b: [k, m] and [k, n], in the dtype of the computation; any strides.
    """
    a = a.t()
    if out.dtype == a.dtype and not prefers_onednn(a):
        if is_first:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(out, a, b, out=out)
    elif out.device.type == "cuda" and out.dtype == torch.float32:
        if is_first:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        write = out.copy_ if is_first else out.add_
        write(product_t(a, b.t()))


def product_t(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T without autograd.  [..., k], [n, k] -> [..., n]; any strides."""
    if not prefers_onednn(a):
        return torch.matmul(a, b.t())
    rows = torch.ops.mkldnn._linear_pointwise(a.reshape(-1, a.shape[-1]), b, None, "none", [], "")
    # as matmul does: a view, to autograd, could not be summed over tp in place
    result: Tensor = torch.ops.aten._unsafe_view(rows, [*a.shape[:-1], b.shape[0]])
    return result
