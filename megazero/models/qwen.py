"""Qwen: Llama with biases of q, k and v, or with a norm of each query and key.

Qwen 2, 2.5     biases (Yang et al. 2024)
Qwen 3          RMSNorm of each query and key, and heads of 128 at every hidden size (Yang et al. 2025)
with experts    Qwen 3 with a mixture of experts in place of each MLP (Yang et al. 2025, section 2)
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.models.llama.family import LLAMA_FORMAT, ROTARY_READS, LlamaFamily, Variant
from megazero.models.mixtral import EXPERT_KEYS, ExpertFamily, lost_balance


def _window_problems(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    """Return what is not supported: a window, which three keys enable if `layer_types` is unset (`Qwen2Config`)."""
    asks = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    is_beyond = config.get("max_window_layers", 28) >= (config.get("num_hidden_layers") or 0)
    if asks and config.get("layer_types") is None and not is_beyond:
        yield f"use_sliding_window=True is not supported in a {config['model_type']}; it must be False"
    yield from LLAMA_FORMAT.problems(config, seq_len)


# num_key_value_heads is required: without it transformers assumes 32 heads, whatever the model.
QWEN2_FORMAT = LLAMA_FORMAT.variant(
    "qwen2", extra=lambda model: LLAMA_FORMAT.extra(model) | {"use_sliding_window": False}, problems=_window_problems
)
QWEN2 = LlamaFamily(Variant(qkv_bias=True), QWEN2_FORMAT)
QWEN3_FORMAT = QWEN2_FORMAT.variant("qwen3")
QWEN3 = LlamaFamily(Variant(qk_norm="head"), QWEN3_FORMAT)


def _dense_layer_problems(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    if layers := config.get("mlp_only_layers"):
        yield f"mlp_only_layers={layers!r} is not supported in a qwen3_moe; every layer must have experts"
    yield from QWEN3_FORMAT.problems(config, seq_len)


QWEN3_MOE_FORMAT = QWEN3_FORMAT.variant("qwen3_moe", problems=_dense_layer_problems, lost=lost_balance)
QWEN3_MOE = ExpertFamily(
    Variant(qk_norm="head", experts=("mlp", ("gate_proj", "up_proj", "down_proj"))),
    QWEN3_MOE_FORMAT,
    {"num_experts": 128, "experts_per_token": 8, "renormalize_gates": False},
    (*ROTARY_READS, *EXPERT_KEYS, "expert_hidden_size"),
)
