"""A Llama layer under its Hugging Face names."""

from __future__ import annotations

from megazero.layers.attention import Attention, RotaryEmbedding
from megazero.layers.mlp import SwiGLU
from megazero.layers.spec import NamedRows
from megazero.models.gpt import Block, BuildContext


def rotary_embedding(context: BuildContext) -> RotaryEmbedding:
    """The tables that the layers of a stage share."""
    return RotaryEmbedding(context.head_size, context.model.seq_len, context.model.rope_theta, context.device)


def llama_block(layer: int, context: BuildContext, rope: RotaryEmbedding) -> Block:
    """One layer; q | k | v and gate | up are fused."""
    prefix, hidden = f"model.layers.{layer}", context.model.hidden_size
    gate_up = tuple(NamedRows(f"{prefix}.mlp.{key}_proj.weight", context.ffn_hidden_size) for key in ("gate", "up"))
    down = context.row(NamedRows(f"{prefix}.mlp.down_proj.weight", hidden), context.ffn_hidden_size)
    attention, mlp = llama_attention(prefix, context, rope), SwiGLU(context.column(gate_up), down)
    norms = context.rms_norm(f"{prefix}.input_layernorm"), context.rms_norm(f"{prefix}.post_attention_layernorm")
    return Block(context, (f"{prefix}.self_attn", f"{prefix}.mlp"), norms, attention, mlp)


def llama_attention(prefix: str, context: BuildContext, rope: RotaryEmbedding) -> Attention:
    """Grouped-query attention with rotary positions and no biases; `prefix` is the layer's."""
    hidden, kv_rows = context.model.hidden_size, context.kv_heads * context.head_size
    rows = {"q": hidden, "k": kv_rows, "v": kv_rows}
    qkv = context.column(tuple(NamedRows(f"{prefix}.self_attn.{key}_proj.weight", rows[key]) for key in rows))
    return context.attention(qkv, context.row(NamedRows(f"{prefix}.self_attn.o_proj.weight", hidden), hidden), rope)
