"""Names and layouts that torchtitan, Megatron-Core and transformers give to a family's tensors.

    theirs                                                          ours
    torchtitan   layers.3.attention.wq.weight    row pairs   ->     model.layers.3.self_attn.q_proj.weight
    Megatron     decoder.layers.3...linear_qkv   q, k, v     ->     ... q_proj.weight, ... k_proj.weight, ... v_proj.weight

A tensor of ours is made of one tensor of theirs by moving elements only, so moments move as the weights do.  `{}` stands
for the number of the layer.

Sources: torchtitan/models/{llama3,qwen3}/state_dict_adapter.py, of today and of its releases up to 0.2; Megatron-LM's
megatron/core: transformer/attention.py (linear_qkv), transformer/mlp.py (linear_fc1), models/gpt/gpt_layer_specs.py (a
separate norm is saved under the name of the fused one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megazero.formats.match import Move, Names
from megazero.models.config import ModelConfig, RopeScaling
from megazero.models.registry import FAMILIES

_LAYER = re.compile(r"\.(\d+)\.")
_NOTHING = re.compile(r"(?!)")


def unmoved(tensor: Tensor, model: ModelConfig) -> Tensor:
    """The tensor as it is."""
    return tensor


@dataclass(frozen=True)
class Theirs:
    """Where a tensor of ours lies in a checkpoint of another framework.

    Args:
        name: of their tensor.
        take: from their tensor to ours.  Raises RuntimeError for a shape that cannot be.
        give: from ours to theirs; None where theirs holds more than ours.
    """

    name: str
    take: Move = unmoved
    give: Move | None = unmoved


@dataclass(frozen=True)
class NameTable:
    """How one framework names and lays out the tensors of a family.

    Args:
        name: of the table, as commands take it.
        embedding: our name of the embedding table, by which a prefix of theirs is found.
        tensors: by our name; one that is not listed has the same name there.
        dropped: a prefix that our names have and theirs have not.
        head: their name of the output layer.  Where embeddings are tied it may hold a copy of the embedding.
        buffers: their names of stored tensors that are no parameters.
        own: keys of [model] that no tensor shows, with the values that the framework's own models of this family have.
        unscaled: in words, rotary positions without scaling, where its own models scale them.
        rotations: their name of stored rotary rotations, complex [positions, head size / 2]; "" where they store none.
        prefix: before all of their names in this checkpoint.
    """

    name: str
    embedding: str
    tensors: Mapping[str, Theirs] = field(default_factory=dict)
    dropped: str = ""
    head: str = "lm_head.weight"
    buffers: re.Pattern[str] = _NOTHING
    own: Mapping[str, Any] = field(default_factory=dict)
    unscaled: str = ""
    rotations: str = ""
    prefix: str = ""

    def theirs(self, ours: str) -> Theirs:
        """Where a tensor of ours lies, without the prefix."""
        layer = _LAYER.search(ours)
        pattern = ours if layer is None else f"{ours[: layer.start(1)]}{{}}{ours[layer.end(1) :]}"
        found = self.tensors.get(pattern) or Theirs(pattern.removeprefix(self.dropped))
        return found if layer is None else Theirs(found.name.replace("{}", layer[1]), found.take, found.give)

    def names(self, ours: Iterable[str]) -> Names:
        """Where all tensors of a model lie."""
        places = {name: self.theirs(name) for name in ours}
        theirs = {name: self.prefix + place.name for name, place in places.items()}
        moves = {name: place.take for name, place in places.items() if place.take is not unmoved}
        return Names(theirs, theirs.get(self.embedding, ""), self.prefix + self.head, self.is_buffer, moves)

    def is_buffer(self, name: str) -> bool:
        """Whether a stored tensor of theirs is no parameter."""
        return self.buffers.fullmatch(name.removeprefix(self.prefix)) is not None


def rows_of_pairs(heads: Callable[[ModelConfig], int]) -> tuple[Move, Move]:
    """(take, give) for the rows of q or k: rotary positions rotate neighbouring rows there, and halves of a head here.

        theirs  a0 b0 a1 b1 a2 b2        each pair (a, b) is rotated by one angle
        ours    a0 a1 a2 b0 b1 b2

    Args:
        heads: how many heads the rows hold.
    """

    def take(tensor: Tensor, model: ModelConfig) -> Tensor:
        return tensor.unflatten(0, (heads(model), -1, 2)).transpose(1, 2).flatten(0, 2)

    def give(tensor: Tensor, model: ModelConfig) -> Tensor:
        return tensor.unflatten(0, (heads(model), 2, -1)).transpose(1, 2).flatten(0, 2)

    return take, give


def kv_heads(model: ModelConfig) -> int:
    """Key and value heads of a resolved model."""
    return model.num_kv_heads or model.num_heads


def of_query_groups(projection: str) -> Move:
    """ "q", "k" or "v" of rows that hold them by query group, as Megatron's `linear_qkv` does, biases included.

    theirs  q0 q1 k0 v0 | q2 q3 k1 v1        4 heads, 2 groups
    """

    def take(tensor: Tensor, model: ModelConfig) -> Tensor:
        groups = kv_heads(model)
        queries = model.num_heads // groups
        grouped = tensor.unflatten(0, (groups, queries + 2, -1))
        if projection == "q":
            return grouped[:, :queries].flatten(0, 2)
        return grouped[:, queries + "kv".index(projection)].flatten(0, 1)

    return take


def half(index: int) -> Move:
    """The first or second half of the rows."""
    return lambda tensor, _: tensor.unflatten(0, (2, -1))[index]


def without_padding(tensor: Tensor, model: ModelConfig) -> Tensor:
    """The rows of the vocabulary, of a table that is padded to a multiple of some number."""
    return tensor[: model.vocab_size]


# What torchtitan's own models compute with; releases from 0.2 on scale the frequencies of every Llama, and 0.1 of none.
_SCALED = RopeScaling(type="llama3", factor=8.0, original_seq_len=8192)
_TITAN_LLAMA = {"rope_theta": 500000.0, "rope_scaling": _SCALED, "norm_eps": 1e-5, "sliding_window": None}
_TITAN_QWEN3 = {"rope_theta": 1000000.0, "rope_scaling": None, "norm_eps": 1e-6}
EMBEDDING, LAYER = "model.embed_tokens.weight", "model.layers.{}."


def torchtitan(
    name: str, qkv: str, head: str, *, unscaled: str = "", of_layer: Mapping[str, Theirs] | None = None
) -> NameTable:
    """torchtitan's names for a family of which the tensors are named like a Llama's.

    Args:
        name: of the table.
        qkv: the module of q, k and v.
        head: the output layer.
        unscaled: how to leave rotary positions unscaled there; of Llama alone, whose rotary positions turn neighbours there,
            not halves of a head.
        of_layer: further tensors of a layer, by our name without the layer.
    """
    q, k = (Theirs(f"layers.{{}}.{qkv}.{one}.weight") for one in ("wq", "wk"))
    if unscaled:
        q = Theirs(q.name, *rows_of_pairs(lambda model: model.num_heads))
        k = Theirs(k.name, *rows_of_pairs(kv_heads))
    layer = {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": Theirs(f"layers.{{}}.{qkv}.wv.weight"),
        "self_attn.o_proj.weight": Theirs("layers.{}.attention.wo.weight"),
        "mlp.gate_proj.weight": Theirs("layers.{}.feed_forward.w1.weight"),
        "mlp.up_proj.weight": Theirs("layers.{}.feed_forward.w3.weight"),
        "mlp.down_proj.weight": Theirs("layers.{}.feed_forward.w2.weight"),
        "input_layernorm.weight": Theirs("layers.{}.attention_norm.weight"),
        "post_attention_layernorm.weight": Theirs("layers.{}.ffn_norm.weight"),
    }
    top = {EMBEDDING: "tok_embeddings.weight", "model.norm.weight": "norm.weight", "lm_head.weight": head}
    table = _table(name, {ours: Theirs(theirs) for ours, theirs in top.items()}, layer | dict(of_layer or {}), head)
    own = _TITAN_LLAMA if unscaled else _TITAN_QWEN3
    return replace(table, own=own, unscaled=unscaled, rotations="freqs_cis", buffers=re.compile("freqs_cis"))


def megatron(of_layer: Mapping[str, Theirs] | None = None) -> NameTable:
    """The table of a family that is named as a Llama, with further tensors of a layer by our name without the layer."""
    qkv, fc1 = "decoder.layers.{}.self_attention.linear_qkv.", "decoder.layers.{}.mlp.linear_fc1."
    head = "output_layer.weight"
    layer = {f"self_attn.{one}_proj.weight": Theirs(f"{qkv}weight", of_query_groups(one), None) for one in "qkv"}
    layer |= {
        "self_attn.o_proj.weight": Theirs("decoder.layers.{}.self_attention.linear_proj.weight"),
        "mlp.gate_proj.weight": Theirs(f"{fc1}weight", half(0), None),
        "mlp.up_proj.weight": Theirs(f"{fc1}weight", half(1), None),
        "mlp.down_proj.weight": Theirs("decoder.layers.{}.mlp.linear_fc2.weight"),
        "input_layernorm.weight": Theirs(f"{qkv}layer_norm_weight"),
        "post_attention_layernorm.weight": Theirs(f"{fc1}layer_norm_weight"),
    }
    top = {
        EMBEDDING: Theirs("embedding.word_embeddings.weight", without_padding, None),
        "model.norm.weight": Theirs("decoder.final_layernorm.weight"),
        "lm_head.weight": Theirs(head, without_padding, None),
    }
    return _table("megatron", top, layer | dict(of_layer or {}), head)


def _table(name: str, top: Mapping[str, Theirs], layer: Mapping[str, Theirs], head: str) -> NameTable:
    return NameTable(name, EMBEDDING, {**top, **{LAYER + ours: theirs for ours, theirs in layer.items()}}, head=head)


_UNSCALED, _UNSCALED_0_2 = 'none (scaling="none" in ComplexRoPE.Config)', "none (RoPEScalingArgs(scaling_factor=1.0))"
LLAMA = (
    torchtitan("torchtitan", "attention.qkv_linear", "lm_head.weight", unscaled=_UNSCALED),
    torchtitan("torchtitan-0.2", "attention", "output.weight", unscaled=_UNSCALED_0_2),
    megatron(),
)

_QKV = "decoder.layers.{}.self_attention.linear_qkv."
QWEN2 = (megatron({f"self_attn.{one}_proj.bias": Theirs(f"{_QKV}bias", of_query_groups(one), None) for one in "qkv"}),)

_TITAN_NORMS = {f"self_attn.{one}_norm.weight": Theirs(f"layers.{{}}.attention.{one}_norm.weight") for one in "qk"}
_MEGATRON_NORMS = {
    f"self_attn.{one}_norm.weight": Theirs(f"decoder.layers.{{}}.self_attention.{one}_layernorm.weight") for one in "qk"
}
QWEN3 = (  # rotary positions turn halves there, too
    torchtitan("torchtitan", "attention.qkv_linear", "lm_head.weight", of_layer=_TITAN_NORMS),
    torchtitan("torchtitan-0.2", "attention", "output.weight", of_layer=_TITAN_NORMS),
    megatron(_MEGATRON_NORMS),
)


# GPT-2: matrices are [out, in] there and [in, out] here, as transformers stores them.


def _transposed(tensor: Tensor, _: ModelConfig) -> Tensor:
    return tensor.t()


def _qkv(tensor: Tensor, model: ModelConfig) -> Tensor:
    """q | k | v of all heads, from q, k, v of each head."""
    rows = tensor.unflatten(0, (model.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return rows.t() if rows.dim() == 2 else rows


def _megatron_gpt2() -> NameTable:
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


GPT2 = (_megatron_gpt2(),)


TABLES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gpt2": GPT2}
"""By family.  A script adds those of its own family."""


def tables_of(family: str) -> tuple[NameTable, ...]:
    """The tables of a family, the likeliest first; transformers' names come with the model's prefix and without it."""
    if (form := FAMILIES[family].hugging_face) is None:
        return (*TABLES.get(family, ()), NameTable("own", ""))
    whole = NameTable("hugging-face", form.embedding, head=form.head, buffers=form.buffers)
    return (*TABLES.get(family, ()), whole, replace(whole, dropped=form.prefix))
