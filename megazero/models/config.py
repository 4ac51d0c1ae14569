"""The `[model]` section of a run file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import ceil, floor, log, pi, sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from megazero.models.registry import FAMILIES, PRESETS
from megazero.settings import (
    ActsWhere,
    Count,
    CountOrZero,
    Epsilon,
    NameIn,
    Positive,
    PositiveOrZero,
    ProperFraction,
    Section,
    Spelling,
    Text,
    toml_value,
)

if TYPE_CHECKING:
    from torch import Tensor


# The keys that each type reads, beside `type` and `factor`.
ROPE_READS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_seq_len", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}


class RopeScaling(Section):
    """How rotary frequencies are scaled for longer samples.

        wavelength     short                                            longer than the original positions
        linear         / factor .......................................................... / factor
        llama3, yarn   as it was ........... a blend of both ........... / factor

    Position p turns the i-th pair of a head's elements by p * frequency[i], of wavelength 2 pi / frequency[i].

    Source: Chen et al. 2023 (linear); Peng et al. 2023, sections 3.2 to 3.4 (YaRN); Grattafiori et al. 2024, and Meta's code
    of Llama 3.1 (llama3).  Numbers are named as in transformers' `modeling_rope_utils`, positions as `model.seq_len`.
    """

    #: The formula.
    type: Literal["linear", "yarn", "llama3"]
    #: The factor by which the number of positions grows.
    factor: Annotated[float, Field(ge=1)]
    #: Positions that the model was first trained on (yarn, llama3).
    original_seq_len: Count | None = None
    #: Wavelengths above original_seq_len / low_freq_factor are stretched in full (llama3).
    low_freq_factor: Positive = 1.0
    #: Wavelengths below original_seq_len / high_freq_factor are unchanged (llama3).
    high_freq_factor: Positive = 4.0
    #: Pairs that turn at least this many times within original_seq_len are unchanged (yarn).
    beta_fast: Positive = 32.0
    #: Pairs that turn at most this many times within it are stretched in full (yarn).
    beta_slow: Positive = 1.0
    #: Multiplies rotated queries and keys. Unset: 0.1 ln(factor) + 1, or of both keys below the quotient (yarn).
    attention_factor: Positive | None = None
    #: As DeepSeek writes it: 0.1 mscale ln(factor) + 1, over the same of mscale_all_dim, is the attention_factor (yarn).
    mscale: Positive | None = None
    #: In families with latent attention, scores get the square of 0.1 mscale_all_dim ln(factor) + 1 (yarn).
    mscale_all_dim: Positive | None = None

    @model_validator(mode="after")
    def _has_what_its_type_reads(self) -> RopeScaling:
        reads = ROPE_READS[self.type]
        for name, field in type(self).model_fields.items():
            if name not in ("type", "factor", *reads) and getattr(self, name) != field.default:
                raise PydanticCustomError("idle", f'not have {name}, which type = "{self.type}" does not read')
        if "original_seq_len" in reads and self.original_seq_len is None:
            raise PydanticCustomError("unset", f'have original_seq_len where type = "{self.type}"')
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise PydanticCustomError("order", f"have {low} < {high} = {toml_value(getattr(self, high))}")
        return self

    @property
    def amplitude(self) -> float:
        """The factor on rotated queries and keys (Peng et al. 2023, equation 22, applies it to both)."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._growth(1.0)
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """The factor on scores of latent attention (DeepSeek-V2, the code of its attention)."""
        return self._growth(self.mscale_all_dim or 0.0) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * log(self.factor) + 1.0

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return the scaled frequencies, [head size / 2], of the given ones.  `theta`: the base of the rotation."""
        if self.type == "linear":
            return frequencies / self.factor
        ramp = self._ramp_by_turns(frequencies, theta) if self.type == "yarn" else self._ramp_by_length(frequencies)
        return frequencies * (ramp + (1 - ramp) / self.factor)

    def _ramp_by_length(self, frequencies: Tensor) -> Tensor:
        """Llama 3.1: the unscaled share of each frequency falls linearly with the turns in the original positions."""
        turns = (self.original_seq_len or 0) * frequencies / (2 * pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)

    def _ramp_by_turns(self, frequencies: Tensor, theta: float) -> Tensor:
        """YaRN: as above, but the share falls linearly with the index of the pair, between two whole indices."""

        def pair_with(turns: float) -> float:
            return len(frequencies) * log((self.original_seq_len or 0) / (turns * 2 * pi)) / log(theta)

        first = max(floor(pair_with(self.beta_fast)), 0)
        last = min(ceil(pair_with(self.beta_slow)), 2 * len(frequencies) - 1)
        pairs = frequencies.new_tensor(range(len(frequencies)))
        return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


def _of_families(key: str) -> ActsWhere:
    def reading(_: object) -> tuple[str, ...]:
        return tuple(name for name in FAMILIES if key in FAMILIES[name].reads)

    return ActsWhere("model.family", reading, "this family does not read it (ModelFamily.reads)")


_ADAM_LIKE = ActsWhere("optimizer.name", ("adamw", "adam", "lion"), "its rates are for updates of Adam's size")
_WINDOWED = ActsWhere("model.sliding_window", (), "no layer has a window")


def _published(name: object) -> object:
    if name not in [*PRESETS]:
        plain = str(name).rpartition("/")[2].replace("-", "").lower()  # as on the hub
        begun = [preset for preset in PRESETS if preset.replace("-", "").startswith(plain)]
        raise PydanticCustomError("preset", "be a name that `megazero models` lists", {"choices": begun or [*PRESETS]})
    return name


Preset = Annotated[
    Text,
    Spelling("name that `megazero models` lists"),
    BeforeValidator(_published),
    WithJsonSchema({"type": "string", "enum": [*PRESETS]}),
]


class ModelConfig(Section):
    """The network: its family and its sizes."""

    #: A published model, which sets the keys below that are unset; seq_len is its whole context (docs/models.md).
    preset: Preset | None = None
    #: The layers and their names; see docs/models.md.
    family: Annotated[str, NameIn(FAMILIES)] = "llama"
    #: Width of the residual stream; where head_dim is unset a multiple of num_heads (rotary positions: of twice that).
    hidden_size: Annotated[int, Field(ge=1, le=2**20)] = 1024
    #: Number of transformer blocks; at least one for each pipeline stage.
    num_layers: Annotated[int, Field(ge=1, le=2**14)] = 24
    #: Attention heads; a multiple of parallel.tp.
    num_heads: Count = 16
    #: Key and value heads: divides num_heads, and is a multiple of parallel.tp or divides it. Unset: num_heads.
    num_kv_heads: Count | None = None
    #: Size of one head; even where positions are rotary. Unset: hidden_size / num_heads.
    head_dim: Annotated[Count | None, _of_families("head_dim")] = None
    #: Inner width of the MLP. Unset: 4*hidden_size (gpt2), or 8/3 of it up to a multiple of 256 (all others).
    ffn_hidden_size: Count | None = None
    #: Rank of the latent that keys and values are made of (multi-head latent attention). Unset: 512.
    kv_lora_rank: Annotated[Count | None, _of_families("kv_lora_rank")] = None
    #: Rank of the latent that queries are made of. Unset: they are made of the hidden state.
    q_lora_rank: Annotated[Count | None, _of_families("q_lora_rank")] = None
    #: Elements of a query and a key that do not rotate. Unset: 128.
    qk_nope_head_dim: Annotated[Count | None, _of_families("qk_nope_head_dim")] = None
    #: Elements of a query that rotate, and of a key, which all heads share; even. Unset: 64.
    qk_rope_head_dim: Annotated[Count | None, _of_families("qk_rope_head_dim")] = None
    #: Elements of a value; at most as many as of a key. Unset: 128.
    v_head_dim: Annotated[Count | None, _of_families("v_head_dim")] = None
    #: Experts of each layer. Unset: 8 (mixtral), 64 (olmoe, deepseek_v2), 128 (qwen3_moe) or 256 (deepseek_v3).
    num_experts: Annotated[Count | None, _of_families("num_experts")] = None
    #: Experts that a token goes to; at most num_experts. Unset: 2 (mixtral), 6 (deepseek_v2) or 8.
    experts_per_token: Annotated[Count | None, _of_families("experts_per_token")] = None
    #: Inner width of an expert. Unset: ffn_hidden_size.
    expert_hidden_size: Annotated[Count | None, _of_families("expert_hidden_size")] = None
    #: Whether a token's gates are divided by their sum. Unset: true for mixtral and deepseek_v3; else false.
    renormalize_gates: Annotated[bool | None, _of_families("renormalize_gates")] = None
    #: Factor on the gates of experts.
    routed_scaling_factor: Annotated[Positive, _of_families("routed_scaling_factor")] = 1.0
    #: Experts of every token beside those that the router chooses, as one MLP. Unset: 2 (deepseek_v2) or 1 (deepseek_v3).
    shared_experts: Annotated[Count | None, _of_families("shared_experts")] = None
    #: Layers with an MLP of ffn_hidden_size in place of experts, from the first on; fewer than num_layers.
    first_dense_layers: Annotated[CountOrZero, _of_families("first_dense_layers")] = 0
    #: Groups of neighbouring experts; divides num_experts.
    expert_groups: Annotated[Count, _of_families("expert_groups")] = 1
    #: Groups in which the experts of a token lie; at most expert_groups.
    groups_per_token: Annotated[Count, _of_families("groups_per_token")] = 1
    #: By how much the bias of an expert moves after each step, against its load. Unset: 0.001.
    router_bias_rate: Annotated[PositiveOrZero | None, _of_families("router_bias_rate")] = None
    #: Weight of the auxiliary loss that balances the experts of each sample; see docs/models.md.
    router_aux_coef: Annotated[PositiveOrZero, _of_families("router_aux_coef")] = 0.0
    #: Weight of the loss that keeps the router's scores small.
    router_z_coef: Annotated[PositiveOrZero, _of_families("router_z_coef")] = 0.0
    #: Number of token ids; any number, since the table is padded where tensor parallelism needs it.
    vocab_size: Count = 50304
    #: Tokens in a sample.
    seq_len: Count = 1024
    #: Whether the projections of attention have biases: of q, k, v and output, in glm4 of q, k and v.
    attention_bias: Annotated[bool, _of_families("attention_bias")] = False
    #: Whether the projections of the MLP have biases.
    mlp_bias: Annotated[bool, _of_families("mlp_bias")] = False
    #: Whether the output layer is the embedding table. Unset: true for gpt2, which has no other form; else false.
    tie_embeddings: bool | None = None
    #: Logits become cap * tanh(logits / cap). Unset: no cap. Families without it in transformers cannot be exported.
    final_logit_softcapping: Positive | None = None
    #: Scores of attention become cap * tanh(score / cap); not with parallel.cp. Unset: no cap.
    attn_logit_softcapping: Annotated[Positive | None, _of_families("attn_logit_softcapping")] = None
    #: Products of queries and keys are divided by its root. Unset: the size of a head.
    query_pre_attn_scalar: Annotated[Count | None, _of_families("query_pre_attn_scalar")] = None
    #: Added to the variance in every norm.
    norm_eps: Epsilon = 1e-5
    #: Base of the rotary frequencies.
    rope_theta: Annotated[Positive, _of_families("rope_theta")] = 10000.0
    #: Rotary frequencies for more positions than before: type = "linear", "yarn" or "llama3"; see docs/models.md.
    rope_scaling: Annotated[RopeScaling | None, _of_families("rope_scaling")] = None
    #: Base of the rotary frequencies in layers with a window, which are not scaled. Unset: rope_theta.
    rope_local_theta: Annotated[Positive | None, _of_families("rope_local_theta")] = None
    #: With n, every n-th layer has no positions: it does not rotate queries and keys. Unset: all layers rotate.
    no_rope_every: Annotated[Count | None, _of_families("no_rope_every")] = None
    #: Positions that a token attends to, its own included. Unset: all up to its own.
    sliding_window: Annotated[Count | None, _of_families("sliding_window")] = None
    #: With n, every n-th layer attends to all positions in spite of sliding_window. Unset: no layer does.
    full_attention_every: Annotated[Count | None, _of_families("full_attention_every"), _WINDOWED] = None
    #: Factor on the embeddings.
    embedding_multiplier: Annotated[Positive, _of_families("embedding_multiplier")] = 1.0
    #: Factor on what attention and MLP add to the residual stream.
    residual_multiplier: Annotated[Positive, _of_families("residual_multiplier")] = 1.0
    #: Factor on the products of queries and keys. Unset: 1 / sqrt(size of a head).
    attention_multiplier: Annotated[Positive | None, _of_families("attention_multiplier")] = None
    #: Divisor of the logits.
    logits_scaling: Annotated[Positive, _of_families("logits_scaling")] = 1.0
    #: muP: lr and init_std are those of this hidden_size, and follow the width. Unset: they do not; see docs/recipes.md.
    mup_base_width: Annotated[Count | None, _ADAM_LIKE] = None
    #: muP: head size at the base width; products of queries and keys get sqrt(it) / head size. Unset: it stays.
    mup_base_head_dim: Annotated[
        Count | None,
        _of_families("rope_theta"),
        ActsWhere("model.mup_base_width", (), "there is no base"),
        ActsWhere(
            "model.no_rope_every", (None,), "layers that do not rotate queries would keep 1 / sqrt(size of a head)"
        ),
    ] = None
    #: Probability of dropping an element after the embedding and after each residual branch.
    dropout: ProperFraction = 0.0
    #: Standard deviation of the initial weights.
    init_std: Positive = 0.02

    @model_validator(mode="before")
    @classmethod
    def _above_the_preset(cls, values: Any) -> Any:
        """The keys of the preset where none are given, and no preset; None leaves a key of the preset out."""
        if not isinstance(values, dict):
            return values
        preset = PRESETS.get(str(values.get("preset")), {})
        merged = preset | values | ({"preset": None} if preset else {})
        return {key: value for key, value in merged.items() if value is not None}

    @property
    def width_ratio(self) -> float:
        """The width divided by the width for which learning rates and init_std are tuned; 1 without muP."""
        return self.hidden_size / (self.mup_base_width or self.hidden_size)

    @property
    def score_scale(self) -> float:
        """Factor on the scores of attention, in addition to 1 / sqrt(head size)."""
        own = 1.0 if self.attention_multiplier is None else self.attention_multiplier * sqrt(self.head_size)
        own *= sqrt(self.head_size / (self.query_pre_attn_scalar or self.head_size))
        return own if self.mup_base_head_dim is None else own * sqrt(self.mup_base_head_dim / self.head_size)

    @property
    def head_size(self) -> int:
        """Number of elements in a query or a key of a head."""
        if self.qk_nope_head_dim and self.qk_rope_head_dim:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def attention_size(self) -> int:
        """Number of elements in all heads together: the width of the queries and of the output projection's input."""
        return self.num_heads * self.head_size

    @property
    def mean_attention_size(self) -> float:
        """Number of elements in all heads together, averaged over the two products of attention (q k^T, and with v)."""
        return self.num_heads * (self.head_size + (self.v_head_dim or self.head_size)) / 2

    @property
    def expert_size(self) -> int:
        """Inner width of an expert of a resolved model."""
        return self.expert_hidden_size or self.ffn_hidden_size or 0

    def window_of(self, layer: int) -> int | None:
        """Return how many positions a token attends to in a layer; None for all."""
        is_full = self.full_attention_every and (layer + 1) % self.full_attention_every == 0
        return None if is_full else self.sliding_window

    @property
    def layers_of_window(self) -> Counter[int | None]:
        """Count the layers by their window; None for none."""
        return Counter(map(self.window_of, range(self.num_layers)))

    def rope_of(self, layer: int) -> tuple[float, RopeScaling | None] | None:
        """Return base and scaling of a layer's rotary frequencies; None if the layer does not rotate."""
        if self.no_rope_every and (layer + 1) % self.no_rope_every == 0:
            return None
        if self.rope_local_theta is not None and self.window_of(layer) is not None:
            return self.rope_local_theta, None
        return self.rope_theta, self.rope_scaling

    @property
    def mean_reach(self) -> float:
        """Return how many positions a token attends to, averaged over a sample and the layers: at most seq_len / 2."""
        return self.reach_in([self.seq_len])

    def reach_in(self, lengths: Collection[int]) -> float:
        """Return the same as `mean_reach` for attention within documents of these lengths."""

        def seen(window: int | None) -> float:
            windows = [min(window or length, length) for length in lengths]
            return sum(length * size - size**2 / 2 for length, size in zip(lengths, windows, strict=True)) / sum(
                lengths
            )

        return sum(count * seen(window) for window, count in self.layers_of_window.items()) / self.num_layers
