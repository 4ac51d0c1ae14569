"""DeepSpeed's Adam classes as one function: it makes torch's optimizer that computes the same.

The engine runs torch's fused kernels on the device or, offloaded, on the host, so there is no class for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def adam(
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,  # FusedAdam and DeepSpeedCPUAdam have the rest in different orders
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adam_w_mode: bool = True,
    adamw_mode: bool = True,
    set_grad_none: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """torch's AdamW; Adam where `adam_w_mode` or `adamw_mode` is False.  Raises: NotImplementedError for another update."""
    if not (bias_correction and fp32_optimizer_states):
        raise NotImplementedError("torch's Adam corrects its biases and keeps fp32 moments; leave these options out")
    decoupled = adam_w_mode and adamw_mode
    made = torch.optim.AdamW if decoupled else torch.optim.Adam
    return made(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class _CompatibleOps(dict[Any, bool]):
    """Which of DeepSpeed's extensions a script may count on, by the NAME of their builders: those of Adam."""

    def __missing__(self, name: Any) -> bool:
        return "adam" in str(name).lower()


compatible_ops = _CompatibleOps()


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The groups as they are, in a list: without experts there is nothing to split off."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
