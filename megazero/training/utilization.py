"""Model FLOP/s utilization (MFU): the share of the devices' peak that went into the model's own products.

    MFU = tokens / second * FLOPs per token / (devices * peak FLOP/s)

    FLOPs per token = 6 N + 6 layers * seq_len * hidden          Chowdhery et al. 2022 (PaLM), appendix B
        N       weights of all matrix products: the projections of every layer and the head; not the embedding's look-up,
                nor norms and biases.  2 FLOPs a weight forward, 4 backward.
        second  q k^T and the mixing of v: 4 seq_len * hidden a layer forward and twice that backward, halved, since a token
                attends to half of the sequence on average (the paper counts the whole, and so does nanoGPT)

What is computed a second time, such as the logits of a chunked head, is not counted: it is not the model's.
"""

from __future__ import annotations

import re

import torch

from megazero.models.config import ModelConfig

# Dense peak of the matrix units in bf16 and fp16, from the makers' data sheets (what is given "with sparsity" halved), by
# words of torch.cuda.get_device_name(); the first entry counts whose words are all in the name.
_HALF_PRECISION_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A40": 150e12,
    "A10": 125e12,
    "MI300X": 1307e12,
}


def model_flops_per_token(model: ModelConfig) -> float:
    """FLOPs of forward and backward that the model itself asks for, per token; see the formula above.

    Args:
        model: resolved.
    """
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    if ffn is None:
        raise ValueError("model.ffn_hidden_size is not resolved; count the FLOPs of a resolved config")
    kv_rows = (model.num_kv_heads or model.num_heads) * (hidden // model.num_heads)
    attention = 2 * hidden * hidden + 2 * hidden * kv_rows  # q and out, k and v
    mlp = (3 if model.family == "llama" else 2) * hidden * ffn
    weights = model.num_layers * (attention + mlp) + model.vocab_size * hidden
    return 6.0 * weights + 6.0 * model.num_layers * model.seq_len * hidden


def known_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of a device, by its name; None for one that is not known, and for fp32."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    words = set(re.findall(r"\w+", device_name))
    return next((peak for name, peak in _HALF_PRECISION_PEAKS.items() if words.issuperset(name.split())), None)


def peak_flops(device: torch.device, dtype: torch.dtype, given: float | None) -> float | None:
    """FLOP/s that a device can do at most: `logging.peak_flops` if given, else by the table; None where it is not known."""
    if given is not None or device.type != "cuda":
        return given
    return known_peak_flops(torch.cuda.get_device_name(device), dtype)
