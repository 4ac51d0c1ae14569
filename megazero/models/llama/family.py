"""Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases (Touvron et al. 2023)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megazero.models.config import ModelConfig
from megazero.models.family import HuggingFaceFormat, ModelFamily, attention_weights

if TYPE_CHECKING:
    from torch import nn

    from megazero.models.gpt import Block, BuildContext, Embedding, Head

# With 8/3 of the hidden size, SwiGLU's three matrices hold as much as the two of a 4x MLP (Shazeer 2020, section 3).
_FFN_MULTIPLE = 256


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys about rotary positions; transformers 5 nests what its predecessors kept apart."""
    flat = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return flat | dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})


def _unsupported(config: Mapping[str, Any], _: int | None) -> Iterator[str]:
    hidden, heads, size = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if isinstance(hidden, int) and isinstance(heads, int) and size is not None and size * heads != hidden:
        rule = f"hidden_size / num_attention_heads = {hidden} / {heads} = {hidden / heads:g}"
        yield f"head_dim={size!r} is not supported; it must be {rule}"
    rope = rope_keys(config)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        yield f"{key}={config[key]!r} is not supported; the rope_type must be 'default'"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; it must be 1.0"


class LlamaFamily(ModelFamily):
    """As above."""

    reads = ("rope_theta",)
    hugging_face = HuggingFaceFormat(
        architecture="LlamaForCausalLM",
        sizes={
            "hidden_size": "hidden_size",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "intermediate_size": "ffn_hidden_size",
            "vocab_size": "vocab_size",
            "max_position_embeddings": "seq_len",
        },
        defaults={
            "num_key_value_heads": ("num_kv_heads", None),
            "rms_norm_eps": ("norm_eps", 1e-6),
            "tie_word_embeddings": ("tie_embeddings", False),
            "initializer_range": ("init_std", 0.02),
        },
        constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        assumed={"quantization_config": None},
        prefix="model.",
        buffers=re.compile(r".*\.rotary_emb\.inv_freq"),
        embedding="model.embed_tokens.weight",
        extra=lambda model: {"rope_theta": model.rope_theta},
        read_extra=lambda config: {"rope_theta": rope_keys(config).get("rope_theta", 10000.0)},
        problems=_unsupported,
    )

    def ffn_hidden_size(self, model: ModelConfig) -> int:
        """8/3 of the hidden size, up to a multiple of 256."""
        return -(-8 * model.hidden_size // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE

    def hidden_size_divisor(self, model: ModelConfig) -> tuple[int, str]:
        step = 2 * model.num_heads
        return step, f"2*num_heads={step} (rotary positions turn pairs of a head's elements)"

    def layer_weights(self, model: ModelConfig) -> int:
        """q, k, v, out; gate, up, down."""
        return attention_weights(model) + 3 * model.hidden_size * (model.ffn_hidden_size or self.ffn_hidden_size(model))

    def embedding(self, context: BuildContext) -> Embedding:
        from megazero.models.gpt import Embedding

        return Embedding(context, "model.embed_tokens.weight")

    def blocks(self, context: BuildContext, layers: Sequence[int]) -> list[Block]:
        from megazero.models.llama.block import llama_block, rotary_embedding

        rope = rotary_embedding(context)
        return [llama_block(layer, context, rope) for layer in layers]

    def head(self, context: BuildContext, tied_weight: nn.Parameter | None) -> Head:
        from megazero.models.gpt import Head

        name = "model.embed_tokens.weight" if context.model.tie_embeddings else "lm_head.weight"
        return Head(context, context.rms_norm("model.norm"), name, tied_weight)


LLAMA = LlamaFamily()
