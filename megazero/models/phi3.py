"""Phi 3 and Phi 4: Llama whose q, k and v, and whose gate and up, are one stored matrix each (Abdin et al. 2024)."""

from dataclasses import replace

from megazero.models.llama.family import LLAMA_FORMAT, LlamaFamily, Variant

PHI3_FORMAT = replace(
    LLAMA_FORMAT,
    architecture="Phi3ForCausalLM",
    defaults={**LLAMA_FORMAT.defaults, "rms_norm_eps": ("norm_eps", 1e-5), "sliding_window": ("sliding_window", None)},
    assumed={**LLAMA_FORMAT.assumed, "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
)
PHI3 = LlamaFamily(Variant(fused=("qkv", "gate_up")), PHI3_FORMAT, ("rope_theta", "head_dim", "sliding_window"))
