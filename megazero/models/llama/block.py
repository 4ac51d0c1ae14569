"""A layer of Llama, or of a family like it, under its Hugging Face names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.layers.attention import Attention, RotaryEmbedding
from megazero.layers.mlp import SwiGLU
from megazero.layers.norm import HeadNorm, WidthNorm
from megazero.layers.spec import NamedRows
from megazero.models.gpt import Block, BuildContext, PostNormBlock
from megazero.models.llama.family import LLAMA_2, Variant

if TYPE_CHECKING:
    from megazero.layers.experts import MixtureOfExperts


def rotary_embedding(context: BuildContext) -> RotaryEmbedding:
    """The tables that the layers of a stage share."""
    model, by_parts = context.model, context.context is not None
    sizes = context.head_size, model.seq_len, model.rope_theta
    return RotaryEmbedding(*sizes, context.device, model.rope_scaling, by_parts=by_parts)


def llama_block(layer: int, context: BuildContext, rope: RotaryEmbedding, variant: Variant = LLAMA_2) -> Block:
    """One layer; q | k | v and gate | up are fused."""
    prefix = f"model.layers.{layer}"
    attention, mlp = llama_attention(prefix, context, rope, variant), _mlp(prefix, context, variant)
    first, second = (context.rms_norm(f"{prefix}.{name}") for name in variant.norms)
    kind: type[Block] = PostNormBlock if variant.norms_after else Block
    if variant.experts is not None:
        from megazero.models.expert_block import ExpertBlock  # which dense models do not load

        kind = ExpertBlock
    return kind(context, (f"{prefix}.self_attn", f"{prefix}.mlp"), (first, second), attention, mlp)


def _mlp(prefix: str, context: BuildContext, variant: Variant) -> SwiGLU | MixtureOfExperts:
    if variant.experts is not None:
        module, keys = variant.experts
        return context.experts(f"{prefix}.{module}", keys)
    gate_up = tuple(NamedRows(f"{prefix}.mlp.{key}_proj.weight", context.ffn_hidden_size) for key in ("gate", "up"))
    down = NamedRows(f"{prefix}.mlp.down_proj.weight", context.model.hidden_size)
    return SwiGLU(context.column(gate_up), context.row(down, context.ffn_hidden_size))


def llama_attention(prefix: str, context: BuildContext, rope: RotaryEmbedding, variant: Variant = LLAMA_2) -> Attention:
    """Grouped-query attention with rotary positions; `prefix` is the layer's."""
    model, kv_rows = context.model, context.kv_heads * context.head_size
    rows = {"q": model.attention_size, "k": kv_rows, "v": kv_rows}

    def named(kind: str) -> tuple[NamedRows, ...]:
        return tuple(NamedRows(f"{prefix}.self_attn.{key}_proj.{kind}", rows[key]) for key in rows)

    qkv = context.column(named("weight"), named("bias") if variant.qkv_bias else ())
    out = context.row(NamedRows(f"{prefix}.self_attn.o_proj.weight", model.hidden_size), model.attention_size)
    return context.attention(qkv, out, rope, _qk_norm(f"{prefix}.self_attn", context, variant))


def _qk_norm(prefix: str, context: BuildContext, variant: Variant) -> HeadNorm | WidthNorm | None:
    if variant.qk_norm == "none":
        return None
    names = f"{prefix}.q_norm", f"{prefix}.k_norm"
    given = names, context.heads, context.model.norm_eps
    return HeadNorm(*given) if variant.qk_norm == "head" else WidthNorm(*given)
