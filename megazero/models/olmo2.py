"""OLMo 2: Llama with RMSNorm after attention and MLP, and over all queries and all keys (OLMo et al. 2025, section 3.2)."""

from megazero.models.llama.family import LLAMA_FORMAT, LlamaFamily, Variant

OLMO2_FORMAT = LLAMA_FORMAT.variant("olmo2")
_NORMS = "post_attention_layernorm", "post_feedforward_layernorm"
OLMO2 = LlamaFamily(Variant(qk_norm="width", norm_place="after", norms=_NORMS), OLMO2_FORMAT)
