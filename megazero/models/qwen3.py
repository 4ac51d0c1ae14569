"""Qwen 3 (dense): Llama with RMSNorm of each query and key, and heads of 128 at every hidden size (Yang et al. 2025)."""

from megazero.models.llama.family import LlamaFamily, Variant
from megazero.models.qwen2 import QWEN2_FORMAT

QWEN3_FORMAT = QWEN2_FORMAT.variant("qwen3")
QWEN3 = LlamaFamily(Variant(qk_norm="head"), QWEN3_FORMAT)
