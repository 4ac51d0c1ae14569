"""Llama, and the families that differ from it only by a `Variant`.

Rotary positions, RMSNorm, SwiGLU, grouped-query attention (Touvron et al. 2023; Grattafiori et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

from megazero.models.config import ROPE_READS, ModelConfig, RopeScaling
from megazero.models.family import HuggingFaceFormat, ModelFamily, ModelRule, attention_weights
from megazero.settings import Problem, nearest_multiples, nearest_text

if TYPE_CHECKING:
    from torch import nn

    from megazero.models.build_context import BuildContext
    from megazero.models.gpt import Block, Embedding, Head


@dataclass(frozen=True)
class Variant:
    """How the layers of a family differ from those of Llama 2.

    Args:
        qkv_bias: q, k and v have biases.
        out_bias: with `model.attention_bias`, the output projection has a bias, too.
        qk_norm: RMSNorm of queries and keys before rotation: over each "head", or over the "width" of all heads.
        norm_place: the norms are before attention and MLP, after them, or both.
        norms: names of a layer's norms, for attention and MLP; of four, the two norms before come first.
        fused: which of "qkv" and "gate_up" are stored as one matrix.
        rotates_adjacent: rotary positions rotate pairs of adjacent elements, in the first half of each head only.
        offset_norms: norms multiply by 1 + their weights, except those over the width.
        gates_by_gelu: the MLP is a GeGLU.
        scales_embeddings: embeddings are multiplied by the square root of their size, rounded to their dtype.
        experts: name of the mixture of experts in place of the MLP, and of an expert's gate, up and down projections.
    """

    qkv_bias: bool = False
    out_bias: bool = True
    qk_norm: Literal["none", "head", "width"] = "none"
    norm_place: Literal["before", "after", "around"] = "before"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    fused: tuple[str, ...] = ()
    rotates_adjacent: bool = False
    offset_norms: bool = False
    gates_by_gelu: bool = False
    scales_embeddings: bool = False
    experts: tuple[str, tuple[str, str, str]] | None = None


LLAMA_2 = Variant()

# With 8/3 of the hidden size, SwiGLU's three matrices hold as much as the two of a 4x MLP (Shazeer 2020, section 3).
_FFN_MULTIPLE = 256


def _extra(model: ModelConfig) -> dict[str, Any]:
    return {"head_dim": model.head_size} | written_rope(model.rope_theta, model.rope_scaling)


def _read_extra(config: Mapping[str, Any]) -> dict[str, Any]:
    size = {} if config.get("head_dim") is None else {"head_dim": config["head_dim"]}
    return size | read_rope(config)


def llama_problems(config: Mapping[str, Any], _: int | None = None, *, rotated: float = 1.0) -> Iterator[str]:
    """Return what is not supported in a `config.json`.  `rotated`: the fraction of a head that the family rotates."""
    yield from rope_problems(config, rotated)
    layers = config.get("layer_types") or ()
    if other := sorted({str(layer_type) for layer_type in layers} - {"full_attention"}):
        yield f"layer_types has {', '.join(map(repr, other))}, which is not supported; each must be 'full_attention'"


def _lost(config: Mapping[str, Any]) -> Iterator[str]:
    if dropout := config.get("attention_dropout"):
        yield f"attention_dropout = {dropout!r}: attention here drops nothing"
    if (slices := config.get("pretraining_tp") or 1) != 1:
        yield f"pretraining_tp = {slices!r}: here each product is computed at once, which gives the same numbers"


LLAMA_FORMAT = HuggingFaceFormat().variant(
    "like_llama", extra=_extra, read_extra=_read_extra, problems=llama_problems, lost=_lost
)


ROTARY_READS = "rope_theta", "rope_scaling", "head_dim"
BIASES = "attention_bias", "mlp_bias"


class LlamaFamily(ModelFamily):
    """Llama or a family like it.  To add such a family, make an instance of this class, as `models/qwen.py` does.

    Args:
        variant: how its layers differ from Llama's.
        hugging_face: its format in transformers.
        reads: see `ModelFamily`.
    """

    def __init__(
        self, variant: Variant, hugging_face: HuggingFaceFormat, reads: tuple[str, ...] = ROTARY_READS
    ) -> None:
        self.variant, self.hugging_face, self.reads = variant, hugging_face, reads

    def ffn_hidden_size(self, model: ModelConfig) -> int:
        """Return the default inner size of the MLP: 8/3 of the hidden size, rounded up to a multiple of 256."""
        return -(-8 * model.hidden_size // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE

    def hidden_size_divisor(self, model: ModelConfig) -> tuple[int, str]:
        step = 2 * model.num_heads
        return step, f"2*num_heads={step} (rotary positions turn pairs of a head's elements)"

    def rules(self) -> tuple[ModelRule, ...]:
        """The rules of every family, and that head sizes are even."""
        return (*super().rules(), ModelRule(("model.head_dim",), self.check_head_dim))

    def check_head_dim(self, model: ModelConfig, _: int) -> Iterator[Problem]:
        """Check that the head size is even, since rotary positions rotate pairs."""
        if model.head_dim is not None and model.head_dim % 2:
            nearest = nearest_text(nearest_multiples(model.head_dim, 2))
            yield Problem("model.head_dim", model.head_dim, "must be even: rotary positions turn pairs", nearest)

    def layer_weights(self, model: ModelConfig) -> float:
        """Count the elements of a layer's matrices: q, k, v, out; gate, up, down."""
        return attention_weights(model) + 3 * model.hidden_size * (model.ffn_hidden_size or self.ffn_hidden_size(model))

    def embedding(self, context: BuildContext) -> Embedding:
        from megazero.models.gpt import Embedding

        name, scale = "model.embed_tokens.weight", context.model.embedding_multiplier
        if self.variant.scales_embeddings:
            scale = context.rounded(sqrt(context.model.hidden_size))
        return Embedding(context, name, scale=scale)

    def blocks(self, context: BuildContext, layers: Sequence[int]) -> list[Block]:
        from megazero.models.llama.block import llama_block, rotary_embedding

        first_layers = {context.model.rope_of(layer): layer for layer in layers}
        ropes = {
            rope: rotary_embedding(context, self.variant, layer) if rope else None
            for rope, layer in first_layers.items()
        }
        return [llama_block(layer, context, ropes[context.model.rope_of(layer)], self.variant) for layer in layers]

    def head(self, context: BuildContext, tied_weight: nn.Parameter | None) -> Head:
        from megazero.models.gpt import Head

        name = "model.embed_tokens.weight" if context.model.tie_embeddings else "lm_head.weight"
        return Head(context, context.rms_norm("model.norm", offset=self.variant.offset_norms), name, tied_weight)


class CheckedFamily(LlamaFamily):
    """A family for which transformers restricts the configuration more than the model needs.

    Source: `validate_architecture` of `LlamaConfig`, `Gemma2Config` and `Gemma3TextConfig` of transformers 5.
    """

    def rules(self) -> tuple[ModelRule, ...]:
        """The rules of families like Llama, and those of transformers' configuration class."""
        loads = ModelRule(("model.hidden_size", "model.num_heads", "model.init_std"), self.check_loads)
        return (*super().rules(), loads)

    def check_loads(self, model: ModelConfig, _: int) -> Iterator[Problem]:
        """Check that transformers loads the model: num_heads divides hidden_size, and a llama's init_std is at most 1."""
        if model.head_dim is not None and model.hidden_size % model.num_heads:
            rule = f"must be divisible by num_heads={model.num_heads}: transformers loads no other {model.family}"
            hint = nearest_text(nearest_multiples(model.hidden_size, model.num_heads))
            hint += '; family = "mistral" without a window computes the same, and loads' * (model.family == "llama")
            yield Problem("model.hidden_size", model.hidden_size, rule, hint)
        if model.family == "llama" and model.init_std > 1:
            yield Problem("model.init_std", model.init_std, "must be at most 1: transformers loads no other llama")


def every_nth(differs: Sequence[bool], key: str) -> int | None:
    """Return the n for which every n-th layer differs and no other does; None if no layer differs.

    Raises: ValueError: there is no such n.  `key` is the key in its message.
    """
    n = [*differs, True].index(True) + 1
    if list(differs) != [(layer + 1) % n == 0 for layer in range(len(differs))]:
        raise ValueError(f"{key} is not supported where another layer than every n-th differs")
    return n if n <= len(differs) else None


# Our names of these keys -> those of transformers.
_THEIRS = {"type": "rope_type", "original_seq_len": "original_max_position_embeddings"}


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all keys about rotary positions in a `config.json`.  transformers 5 nests them, transformers 4 does not."""
    flat = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    return flat | dict(given.get("full_attention", given))  # where layers with a window have their own


def rope_problems(config: Mapping[str, Any], rotated: float = 1.0) -> list[str]:
    """Return what is not supported about rotary positions in a `config.json`.

    Args:
        rotated: the fraction of a head that the family rotates.
    """
    rope, problems = rope_keys(config), []
    rope_type, key = _rope_type(rope), "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    if rope_type != "default" and rope_type not in ROPE_READS:
        known = ", ".join(map(repr, ("default", *ROPE_READS)))
        problems.append(f"{key}={config[key]!r} is not supported; the rope_type must be {known}")
    if (fraction := rope.get("partial_rotary_factor", rotated)) != rotated:
        problems.append(f"partial_rotary_factor={fraction!r} is not supported; it must be {rotated}")
    known_keys = {_THEIRS.get(name, name) for name in RopeScaling.model_fields}
    known_keys |= {"type", "rope_theta", "partial_rotary_factor"}
    if rope_type in ROPE_READS and rope.get("factor") is None:
        return [*problems, f"{key} has no factor"]
    for name in (name for name in rope if name not in known_keys):
        if not rope[name] if name == "truncate" else rope[name] is not None:
            mend = "it must be true" if name == "truncate" else "leave it out, or set attention_factor instead"
            problems.append(f"{key}: {name}={rope[name]!r} is not supported; {mend}")
    return problems


def read_rope(config: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """Translate a `config.json`'s rotary settings into keys of [model].  `theta`: the family's default base."""
    rope = rope_keys(config)
    found: dict[str, Any] = {"rope_theta": rope.get("rope_theta", theta)}
    if (rope_type := _rope_type(rope)) == "default":
        return found
    original = _THEIRS["original_seq_len"]
    # As in transformers: a number outside the table takes precedence; without any, the model was trained on all positions.
    rope[original] = config.get(original) or rope.get(original) or config.get("max_position_embeddings")
    names = {name: rope.get(_THEIRS.get(name, name)) for name in ("factor", *ROPE_READS[rope_type])}
    return found | {
        "rope_scaling": {"type": rope_type} | {name: value for name, value in names.items() if value is not None}
    }


def written_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the keys of a `config.json` about rotary positions, in a form that transformers 4 and 5 read."""
    if scaling is None:
        return {"rope_theta": theta}
    values = {name: getattr(scaling, name) for name in ("type", "factor", *ROPE_READS[scaling.type])}
    written = {_THEIRS.get(name, name): value for name, value in values.items() if value is not None}
    return {"rope_theta": theta, "rope_scaling": written}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")) or "default")


LLAMA = CheckedFamily(LLAMA_2, LLAMA_FORMAT.variant("llama"), (*ROTARY_READS, *BIASES))
