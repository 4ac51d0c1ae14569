"""How Megatron-Core names and lays out the tensors of a GPT-2; see `checkpoint/foreign/names.py`.

Its matrices are [out, in] there, and [in, out] here, as transformers stores them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.checkpoint.foreign.names import NameTable, Theirs
from megazero.formats.moves import without_padding
from megazero.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def _transposed(tensor: Tensor, _: ModelConfig) -> Tensor:
    return tensor.t()


def _qkv(tensor: Tensor, model: ModelConfig) -> Tensor:
    """q | k | v of all heads, from q, k, v of each head."""
    rows = tensor.unflatten(0, (model.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return rows.t() if rows.dim() == 2 else rows


def _megatron() -> NameTable:
    layer = "decoder.layers.{}."
    qkv, proj = f"{layer}self_attention.linear_qkv.", f"{layer}self_attention.linear_proj."
    fc1, fc2 = f"{layer}mlp.linear_fc1.", f"{layer}mlp.linear_fc2."
    tensors = {
        "transformer.wte.weight": Theirs("embedding.word_embeddings.weight", without_padding, None),
        "transformer.wpe.weight": Theirs("embedding.position_embeddings.weight"),
        "transformer.h.{}.attn.c_attn.weight": Theirs(f"{qkv}weight", _qkv, None),
        "transformer.h.{}.attn.c_attn.bias": Theirs(f"{qkv}bias", _qkv, None),
    }
    for ours, theirs in {"attn.c_proj": proj, "mlp.c_fc": fc1, "mlp.c_proj": fc2}.items():
        tensors[f"transformer.h.{{}}.{ours}.weight"] = Theirs(f"{theirs}weight", _transposed, _transposed)
        tensors[f"transformer.h.{{}}.{ours}.bias"] = Theirs(f"{theirs}bias")
    for of in ("weight", "bias"):
        tensors[f"transformer.h.{{}}.ln_1.{of}"] = Theirs(f"{qkv}layer_norm_{of}")
        tensors[f"transformer.h.{{}}.ln_2.{of}"] = Theirs(f"{fc1}layer_norm_{of}")
        tensors[f"transformer.ln_f.{of}"] = Theirs(f"decoder.final_layernorm.{of}")
    return NameTable("megatron", "transformer.wte.weight", tensors, head="output_layer.weight")


GPT2 = (_megatron(),)
