"""Qwen 2 and 2.5: Llama with biases of q, k and v (Yang et al. 2024)."""

from dataclasses import replace

from megazero.models.llama.family import LLAMA_FORMAT, LlamaFamily
from megazero.models.llama.variant import Variant

# transformers gives a file without this key 32 heads, whatever the model; so it must be there.
_KV_HEADS = {"num_key_value_heads": "num_kv_heads"}

QWEN2_FORMAT = replace(
    LLAMA_FORMAT,
    architecture="Qwen2ForCausalLM",
    sizes={**LLAMA_FORMAT.sizes, **_KV_HEADS},
    defaults={theirs: ours for theirs, ours in LLAMA_FORMAT.defaults.items() if theirs not in _KV_HEADS},
    constants={"hidden_act": "silu", "use_sliding_window": False},
    reads=(*LLAMA_FORMAT.reads, "sliding_window", "max_window_layers"),  # which say nothing without a window
)
QWEN2 = LlamaFamily(Variant(qkv_bias=True), QWEN2_FORMAT, "megazero.models.llama.foreign:QWEN2")
