"""Names of the logical tensors, as `transformers` stores them, and the config file that goes with them.

Checkpoints hold exactly these names, so the weights of any step load in `transformers` without conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.models.config import ModelConfig


@dataclass(frozen=True)
class LlamaNames:
    """LlamaForCausalLM."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm"
    head: str = "lm_head.weight"

    def block(self, layer: int, part: str) -> str:
        """Name of a part of one layer, for example `self_attn.q_proj.weight`."""
        return f"model.layers.{layer}.{part}"


@dataclass(frozen=True)
class GPT2Names:
    """GPT2LMHeadModel, whose linear weights are stored [in, out]."""

    embedding: str = "transformer.wte.weight"
    positions: str = "transformer.wpe.weight"
    final_norm: str = "transformer.ln_f"

    def block(self, layer: int, part: str) -> str:
        """Name of a part of one layer, for example `attn.c_attn.weight`."""
        return f"transformer.h.{layer}.{part}"


def hugging_face_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` with which `transformers` loads the weights.

    Args:
        model: the resolved model section.
        dtype: "fp32", "bf16" or "fp16", the dtype of the stored weights.
    """
    common = {
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.family == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_inner": model.ffn_hidden_size,
            "n_positions": model.seq_len,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
            "embd_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
            "attn_pdrop": 0.0,
        }
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
