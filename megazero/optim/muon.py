"""Muon: the update of a matrix is its orthogonalized momentum.

    m <- beta m + (1 - beta) g          u = beta m + (1 - beta) g  (Nesterov)
    W <- W - lr (0.2 sqrt(max(rows, columns)) orthogonal(u) + weight_decay W)

`orthogonal(u)` has the singular vectors of u and singular values near 1.  With the factor, its elements have the root
mean square of AdamW's updates, so that AdamW's learning rates and weight decays suit both.

Source: Jordan et al. 2024 (the iteration and its coefficients); Liu et al. 2025, "Muon is scalable for LLM training"
(the factor).
"""

from math import sqrt

import torch
from torch import Tensor

from megazero.optim.optimizers import MatrixOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
_EPS = 1e-7
_RMS_OF_ADAMW = 0.2


def orthogonalize(x: Tensor, scale: float = 1.0) -> Tensor:
    """Run the Newton-Schulz iteration on a whole matrix.  x: [rows, columns] -> the same shape, with singular values near
    `scale`.

    They lie between about 0.7 and 1.2 times `scale`.  It takes 20 m^2 n + 10 m^3 FLOPs; m is the smaller side, n the
    larger.
    """
    is_tall = x.shape[0] > x.shape[1]
    y = x.t() if is_tall else x
    y = y / y.norm().clamp(min=_EPS)
    a, b, c = COEFFICIENTS
    for step in range(STEPS):
        gram, factor = y @ y.t(), scale if step == STEPS - 1 else 1.0
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a * factor, alpha=factor)
    return y.t() if is_tall else y


def muon_update(momentum: Tensor) -> Tensor:
    """Return the update of one matrix, before the learning rate.  momentum: [rows, columns], Nesterov's."""
    return orthogonalize(momentum, _RMS_OF_ADAMW * sqrt(max(momentum.shape)))


def iteration_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of `orthogonalize`."""
    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


MUON = MatrixOptimizer(muon_update, iteration_flops)
