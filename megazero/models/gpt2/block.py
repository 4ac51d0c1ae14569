"""Builds a GPT-2 layer under its Hugging Face names.  q, k and v are rows of one stored tensor."""

from megazero.layers.mlp import GELU
from megazero.layers.spec import NamedRows
from megazero.models.build_context import BuildContext
from megazero.models.gpt import Block


def gpt2_block(layer: int, context: BuildContext) -> Block:
    """Return one layer.  Its linear weights are stored as [in, out]."""
    prefix, hidden, ffn = f"transformer.h.{layer}", context.model.hidden_size, context.ffn_hidden_size

    def rows(name: str, count: int) -> tuple[NamedRows, NamedRows]:
        """Return the specs of a projection's weight and bias."""
        return NamedRows(f"{prefix}.{name}.weight", count), NamedRows(f"{prefix}.{name}.bias", count)

    qkv, qkv_bias = (
        tuple(NamedRows(f"{prefix}.attn.c_attn.{suffix}", hidden, number * hidden, 3 * hidden) for number in range(3))
        for suffix in ("weight", "bias")
    )
    attention_out, attention_bias = rows("attn.c_proj", hidden)
    up, up_bias = rows("mlp.c_fc", ffn)
    down, down_bias = rows("mlp.c_proj", hidden)
    attention = context.attention(
        context.column(qkv, qkv_bias, transposed=True),
        context.row(attention_out, hidden, attention_bias, transposed=True),
    )
    mlp = GELU(context.column((up,), (up_bias,), transposed=True), context.row(down, ffn, down_bias, transposed=True))
    norms = context.layer_norm(f"{prefix}.ln_1"), context.layer_norm(f"{prefix}.ln_2")
    return Block(context, (f"{prefix}.attn", f"{prefix}.mlp"), norms, attention, mlp)
