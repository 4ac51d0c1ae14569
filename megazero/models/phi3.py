"""Phi 3 and Phi 4: Llama that stores q, k and v as one matrix, and gate and up as another (Abdin et al. 2024)."""

from megazero.models.llama.family import LLAMA_FORMAT, LlamaFamily, Variant

PHI3_FORMAT = LLAMA_FORMAT.variant("phi3")
PHI3 = LlamaFamily(Variant(fused=("qkv", "gate_up")), PHI3_FORMAT, ("rope_theta", "head_dim", "sliding_window"))
