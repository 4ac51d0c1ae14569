"""Qwen 3 (dense): Llama with RMSNorm of each query and key, and heads of 128 at every hidden size (Yang et al. 2025)."""

from dataclasses import replace

from megazero.models.llama.family import LlamaFamily, Variant
from megazero.models.qwen2 import QWEN2_FORMAT

QWEN3_FORMAT = replace(
    QWEN2_FORMAT,
    architecture="Qwen3ForCausalLM",
    defaults={**QWEN2_FORMAT.defaults, "head_dim": ("head_dim", 128)},
    constants={**QWEN2_FORMAT.constants, "attention_bias": False},
)
QWEN3 = LlamaFamily(Variant(qk_norm="head"), QWEN3_FORMAT)
