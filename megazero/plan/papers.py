"""The tables of the papers, by their own formulas: what a plan is compared with, and what it is not.

    Rajbhandari et al. 2020, table 1    16 bytes a parameter, divided by stage         `zero_gigabytes`
    Korthikanti et al. 2022, table 2    activations of a layer, sbh(34 + 5as/h)        `layer_activation_bytes`
    Ren et al. 2021, Rajbhandari 2021   what stays on the device under offloading      `offload_device_bytes`

The papers count fp16 weights and gradients; here gradients add up in fp32, so `state_bytes` has 18 and not 16 bytes.  Their
layer is GPT's with dropout inside attention and a stored [s, s] matrix of scores; `models/activation_bytes.py` counts ours.
"""

from __future__ import annotations

from typing import Literal

Cut = Literal["none", "tp", "tp+sp", "tp+selective", "tp+sp+selective", "full"]


def zero_gigabytes(parameters: float, dp: int, stage: int) -> float:
    """Model state on a rank in 10^9 bytes: fp16 weights 2, fp16 gradients 2, Adam with fp32 masters 12.

    Source: Rajbhandari et al. 2020 (ZeRO), figure 1 and table 1; stages 1, 2, 3 are P_os, P_os+g, P_os+g+p.
    """
    weights, gradients, optimizer = 2.0, 2.0, 12.0
    optimizer /= dp if stage >= 1 else 1
    gradients /= dp if stage >= 2 else 1
    weights /= dp if stage >= 3 else 1
    return parameters * (weights + gradients + optimizer) / 1e9


def layer_activation_bytes(s: int, b: int, h: int, a: int, t: int = 1, cut: Cut = "none") -> float:
    """Activations of one layer in 16 bits.  s: sequence, b: micro-batch, h: hidden, a: heads, t: tensor-parallel ranks.

    Source: Korthikanti et al. 2022, equations 1 to 6 and table 2.
    """
    scores = 5 * a * s / h  # softmax 2, dropout's mask 1, its output 2: a s^2 b bytes each
    per_token = {
        "none": 34 + scores,
        "tp": 10 + (24 + scores) / t,
        "tp+sp": (34 + scores) / t,
        "tp+selective": 10 + 24 / t,
        "tp+sp+selective": 34 / t,
        "full": 2.0,
    }[cut]
    return s * b * h * per_token


def offload_device_bytes(parameters: float, where: Literal["optimizer", "parameters"]) -> float:
    """Model state that stays on the device: fp16 weights with the optimizer offloaded (ZeRO-Offload), and none with the
    parameters offloaded too (ZeRO-Infinity), but for what is gathered.

    Source: Ren et al. 2021, section 3 (2M bytes on the GPU, 14M on the CPU); Rajbhandari et al. 2021, section 5.
    """
    return 2.0 * parameters if where == "optimizer" else 0.0
