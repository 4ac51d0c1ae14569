"""A layer of DeepSeek-V2 or V3, under its Hugging Face names."""

from collections.abc import Sequence
from dataclasses import replace

from megazero.layers.attention import Attention, NeighbourRotary, RotaryEmbedding
from megazero.layers.latent_attention import LatentCore, LatentHead, LatentProjection, NormedLinear
from megazero.layers.rotary_frequencies import rotary_frequencies
from megazero.layers.spec import NamedRows
from megazero.models.blocks import ExpertBlock
from megazero.models.build_context import BuildContext
from megazero.models.gpt import Block
from megazero.models.llama.block import swiglu
from megazero.parallel_state import Axis

_LATENT_EPS = 1e-6  # of the latents' norms, whatever `model.norm_eps` is


def deepseek_blocks(layers: Sequence[int], context: BuildContext) -> list[Block]:
    """Return the layers of a stage.  They share their rotary tables."""
    model = context.model
    frequencies = rotary_frequencies(model.qk_rope_head_dim or 0, model.rope_theta, model.rope_scaling)
    rope = NeighbourRotary(frequencies, model.seq_len, context.device, has_shards=context.context is not None)
    return [_block(f"model.layers.{layer}", layer, context, rope) for layer in layers]


def _block(prefix: str, layer: int, context: BuildContext, rope: RotaryEmbedding) -> Block:
    model, mlp = context.model, f"{prefix}.mlp"
    sites, attention = (f"{prefix}.self_attn", mlp), _attention(f"{prefix}.self_attn", context, rope)
    norms = tuple(context.rms_norm(f"{prefix}.{name}") for name in ("input_layernorm", "post_attention_layernorm"))
    if layer < model.first_dense_layers:
        return Block(context, sites, norms, attention, swiglu(mlp, context, context.ffn_hidden_size))
    shared = swiglu(f"{mlp}.shared_experts", context, (model.shared_experts or 0) * model.expert_size)
    experts = context.experts(mlp, ("gate_proj", "up_proj", "down_proj"), shared)
    return ExpertBlock(context, sites, norms, attention, experts)


def _attention(prefix: str, context: BuildContext, rope: RotaryEmbedding) -> Attention:
    model = context.model
    nope, rotated, size = model.qk_nope_head_dim or 0, model.qk_rope_head_dim or 0, model.v_head_dim or 0
    q_rank, kv_rank = model.q_lora_rank or 0, model.kv_lora_rank or 0

    def rows(name: str, count: int) -> tuple[NamedRows]:
        return (NamedRows(f"{prefix}.{name}.weight", count),)

    latents = rows("kv_a_proj_with_mqa", kv_rank + rotated)
    down = replace(context, tp=Axis("tp")).column(rows("q_a_proj", q_rank) + latents if q_rank else latents)
    sums, spec = context.sequence_parallel and context.tp.size > 1, down.specs["weight"]
    down.specs["weight"] = replace(spec, placement=(None, None), sum_over_tp=sums)  # whole on each rank of tp

    def up(name: str, elements: int, norm: str, rank: int) -> NormedLinear:
        latent_norm = context.rms_norm(f"{prefix}.{norm}_layernorm", rank, _LATENT_EPS)
        return NormedLinear(latent_norm, context.column(rows(name, elements), in_features=rank))

    size_q = model.attention_size
    q = up("q_b_proj", size_q, "q_a", q_rank) if q_rank else context.column(rows("q_proj", size_q))
    kv = up("kv_b_proj", model.num_heads * (nope + size), "kv_a", kv_rank)
    sequence = context.tp if context.sequence_parallel else Axis("tp")
    projection = LatentProjection(down, (q_rank, kv_rank, rotated), (q, kv), sequence)
    scale = 1.0 if model.rope_scaling is None else model.rope_scaling.score_factor
    core = LatentCore(context.heads, LatentHead(nope, rotated, size, scale), context.kernel, rope)
    return Attention(projection, core, context.row(*rows("o_proj", model.hidden_size), model.num_heads * size))
