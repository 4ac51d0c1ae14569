"""Builds a layer of Llama, or of a family like it, under its Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from megazero.layers.attention import Attention, AttentionKernel, NeighbourRotary, RotaryEmbedding
from megazero.layers.heads import HeadNorm, OffsetHeadNorm, WidthNorm
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.mlp import GELU_TANH, SILU, SwiGLU
from megazero.layers.rotary_frequencies import rotary_frequencies
from megazero.layers.spec import NamedRows
from megazero.models.blocks import AroundNormBlock, ExpertBlock, PostNormBlock
from megazero.models.build_context import BuildContext
from megazero.models.gpt import Block
from megazero.models.llama.family import LLAMA_2, Variant

if TYPE_CHECKING:
    from megazero.layers.experts import MixtureOfExperts


_BLOCKS: dict[str, type[Block]] = {"before": Block, "after": PostNormBlock, "around": AroundNormBlock}


def rotary_embedding(context: BuildContext, variant: Variant = LLAMA_2, layer: int = 0) -> RotaryEmbedding:
    """Return the rotary tables of a layer.  Layers of a stage with the same frequencies share them."""
    model, size = context.model, context.head_size
    theta, scaling = model.rope_of(layer) or (model.rope_theta, None)
    rotary, rotated = (NeighbourRotary, size // 2) if variant.rotates_adjacent else (RotaryEmbedding, size)
    frequencies = rotary_frequencies(size, theta, scaling, rotated=rotated, score_scale=model.score_scale)
    return rotary(frequencies, model.seq_len, context.device, has_shards=context.context is not None)


def llama_block(layer: int, context: BuildContext, rope: RotaryEmbedding | None, variant: Variant = LLAMA_2) -> Block:
    """Return one layer.  q | k | v are one product, and so are gate | up."""
    prefix = f"model.layers.{layer}"
    kernel = context.kernel if context.model.window_of(layer) else context.whole_kernel
    attention, mlp = llama_attention(prefix, context, rope, variant, kernel), _mlp(prefix, context, variant)
    norms = tuple(context.rms_norm(f"{prefix}.{name}", offset=variant.offset_norms) for name in variant.norms)
    block = _BLOCKS[variant.norm_place] if variant.experts is None else ExpertBlock
    return block(context, (f"{prefix}.self_attn", f"{prefix}.mlp"), norms, attention, mlp)


def _mlp(prefix: str, context: BuildContext, variant: Variant) -> SwiGLU | MixtureOfExperts:
    if variant.experts is not None:
        module, keys = variant.experts
        return context.experts(f"{prefix}.{module}", keys)
    return swiglu(f"{prefix}.mlp", context, context.ffn_hidden_size, variant)


def swiglu(prefix: str, context: BuildContext, width: int, variant: Variant = LLAMA_2) -> SwiGLU:
    """Return a gated MLP with inner size `width`, named `prefix`."""
    biased = context.model.mlp_bias
    gate_up = _column(prefix, "gate_up", context, {"gate": width, "up": width}, variant, biased=biased)
    down = _row(f"{prefix}.down_proj", context, width, biased=biased)
    return SwiGLU(gate_up, down, GELU_TANH if variant.gates_by_gelu else SILU)


def llama_attention(
    prefix: str,
    context: BuildContext,
    rope: RotaryEmbedding | None,
    variant: Variant = LLAMA_2,
    kernel: AttentionKernel | None = None,
) -> Attention:
    """Return grouped-query attention with rotary positions.

    Args:
        prefix: name of the layer.
        rope: rotary tables; None for a layer that does not rotate.
        kernel: attention kernel; None for the layer's default.
    """
    model, kv_rows, prefix = context.model, context.kv_heads * context.head_size, f"{prefix}.self_attn"
    rows, biased = {"q": model.attention_size, "k": kv_rows, "v": kv_rows}, variant.qkv_bias or model.attention_bias
    qkv = _column(prefix, "qkv", context, rows, variant, biased=biased)
    out = _row(f"{prefix}.o_proj", context, model.attention_size, biased=model.attention_bias and variant.out_bias)
    return context.attention(qkv, out, rope, _qk_norm(prefix, context, variant), kernel)


def _column(
    prefix: str, name: str, context: BuildContext, rows: Mapping[str, int], variant: Variant, *, biased: bool
) -> ColumnParallelLinear:
    """Return the projections into a block.  `name`: of the stored matrix, in families that store them as one."""

    def named(suffix: str) -> tuple[NamedRows, ...]:
        if name not in variant.fused:
            return tuple(NamedRows(f"{prefix}.{key}_proj.{suffix}", count) for key, count in rows.items())
        *firsts, total = accumulate(rows.values(), initial=0)
        stored = f"{prefix}.{name}_proj.{suffix}"
        return tuple(NamedRows(stored, count, first, total) for count, first in zip(rows.values(), firsts, strict=True))

    return context.column(named("weight"), named("bias") if biased else ())


def _row(name: str, context: BuildContext, in_features: int, *, biased: bool) -> RowParallelLinear:
    weight, bias = (NamedRows(f"{name}.{suffix}", context.model.hidden_size) for suffix in ("weight", "bias"))
    return context.row(weight, in_features, bias if biased else None)


def _qk_norm(prefix: str, context: BuildContext, variant: Variant) -> HeadNorm | WidthNorm | None:
    if variant.qk_norm == "none":
        return None
    names = f"{prefix}.q_norm", f"{prefix}.k_norm"
    per_head = OffsetHeadNorm if variant.offset_norms else HeadNorm
    return (per_head if variant.qk_norm == "head" else WidthNorm)(names, context.heads, context.model.norm_eps)
