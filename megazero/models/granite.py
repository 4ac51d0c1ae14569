"""Granite 3: Llama with factors on embeddings, scores, residual branches and logits (Granite Team 2024)."""

from megazero.models.llama.family import BIASES, LLAMA_2, LLAMA_FORMAT, ROTARY_READS, LlamaFamily

_FACTORS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
GRANITE_FORMAT = LLAMA_FORMAT.variant("granite")
GRANITE = LlamaFamily(LLAMA_2, GRANITE_FORMAT, (*ROTARY_READS, *BIASES, *_FACTORS))
