"""Which of torch's two CPU libraries multiplies fp32 matrices.

torch's `mm` calls MKL, which on AMD processors runs at about half the speed of oneDNN.  The choice depends on the
processor's vendor and not on a measurement, so that every run on a machine computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def fp32_product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """oneDNN's product x @ w.T where it is the faster one, at the seam "kernel"."""
    cpu = Path("/proc/cpuinfo")
    is_amd = cpu.is_file() and "AuthenticAMD" in cpu.read_text()[:4096]
    return _onednn_product if is_amd and torch.backends.mkldnn.is_available() else None


def _onednn_product(x: Tensor, w: Tensor) -> Tensor:
    rows: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return rows
