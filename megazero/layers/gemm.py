"""Matrix products without autograd, in the library that is fastest for them: torch's, or one that an annex adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megazero.annexes import added


@cache
def cpu_product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """A product x @ w.T of fp32 tensors that is faster than torch's on this CPU, if an annex adds one.

    [rows, k], [n, k] -> [rows, n]; any strides.  Autograd cannot differentiate it.
    """
    choose = added("kernel").get("fp32 product")
    return None if choose is None else choose()


def bypasses_autograd(x: Tensor) -> bool:
    """Whether products of `x` run in a library that autograd cannot differentiate."""
    return x.is_cpu and x.dtype == torch.float32 and cpu_product() is not None


def add_product(out: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """out = a.T @ b, or out += a.T @ b unless `is_first`; without a temporary where the library can.

    Args:
        out: [m, n], contiguous, in the dtype of the sum; on CUDA 16-bit factors lose nothing in an fp32 sum.
        a, b: [k, m] and [k, n], in the dtype of the computation; any strides.
    """
    a = a.t()
    if out.dtype == a.dtype and not bypasses_autograd(a):
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
    product = cpu_product() if a.is_cpu and a.dtype == torch.float32 else None
    if product is None:
        return torch.matmul(a, b.t())
    rows = product(a.reshape(-1, a.shape[-1]), b)
    # as matmul does: a view, to autograd, could not be summed over tp in place
    result: Tensor = torch.ops.aten._unsafe_view(rows, [*a.shape[:-1], b.shape[0]])
    return result
