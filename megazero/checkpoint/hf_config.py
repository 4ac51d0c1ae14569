"""From the `config.json` of a transformers model to a [model] section, or to the reasons why there is none; its tensors.

    hidden_size, n_embd             ->  model.hidden_size        sizes, by the name that the family has for them
    rope_parameters, rope_theta     ->  model.rope_theta
    hidden_act = "silu"             ->  nothing: it is what our model does
    hidden_act = "gelu"             ->  refused

`hugging_face_config` in `models/hf_names.py` is the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from megazero.config import ConfigError, RunConfig, resolve
from megazero.models.config import ModelConfig
from megazero.models.gpt import BuildContext, GPTStage
from megazero.models.stages import cut_evenly
from megazero.parallel_state import Axis
from megazero.zero.units import describe

# What the configuration must say, and what our section calls it.
_SIZES = {
    "llama": {
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "seq_len",
    },
    "gpt2": {
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "vocab_size": "vocab_size",
        "n_positions": "seq_len",
    },
}
# What it may say: the value that transformers takes where it does not, or where it says null.
_DEFAULTS: dict[str, dict[str, tuple[str, Any]]] = {
    "llama": {
        "num_key_value_heads": ("num_kv_heads", None),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_embeddings", False),
        "initializer_range": ("init_std", 0.02),
    },
    "gpt2": {
        "n_inner": ("ffn_hidden_size", None),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
    },
}
# Where our model does one thing, which is also what it means to leave the key out.
_ONLY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "quantization_config": None,
    },
}


def model_section(config: Mapping[str, Any], seq_len: int | None = None) -> ModelConfig:
    """The resolved [model] section of a transformers configuration.

    Args:
        config: the contents of `config.json`.
        seq_len: tokens in a sample, for a llama; as many as the configuration names when None.

    Raises:
        ValueError: our models do not compute what this one does; everything that is in the way is listed.
    """
    family = config.get("model_type")
    if family not in _SIZES:
        raise ValueError(f"model_type={family!r} is not supported; llama and gpt2 are")
    problems = [*_missing(config, family), *_foreign(config, family)]
    if seq_len is not None and family == "gpt2" and seq_len != config.get("n_positions"):
        problems.append(
            f"seq_len={seq_len}, but a gpt2 has its n_positions={config.get('n_positions')!r} rows of learned "
            "positions; leave seq_len out"
        )
    if problems:
        raise ValueError("; ".join(problems))
    section = {"family": family} | {ours: config[theirs] for theirs, ours in _SIZES[family].items()}
    for theirs, (ours, default) in _DEFAULTS[family].items():
        section[ours] = default if config.get(theirs) is None else config[theirs]
    if family == "llama":
        section["rope_theta"] = _rope(config).get("rope_theta", 10000.0)
    else:
        section["dropout"] = residual_dropout(config)
    if seq_len is not None:
        section["seq_len"] = seq_len
    try:
        return resolve(RunConfig.model_validate({"model": section}), 1).config.model
    except ConfigError as error:
        raise ValueError("; ".join(map(str, error.problems))) from error
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(wrong)) from error


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's logical tensors by name, in the order of the layers.

    Args:
        model: a resolved section.
    """
    if model.family == "llama":
        model = model.model_copy(update={"seq_len": 1})  # no weight depends on it, and the tables are long
    context = BuildContext(model, Axis("tp"), False, 0, torch.device("meta"))
    with torch.device("meta"):
        stage = GPTStage(context, cut_evenly(model.num_layers, 1)[0])
    return {name: shape for one in describe(stage) for name, shape in one.spec.logical_shapes().items()}


def residual_dropout(config: Mapping[str, Any]) -> float:
    """A gpt2's dropout where it is one number for the embedding and the residual branches, else 0."""
    found = {config.get(key, 0.1) or 0.0 for key in ("embd_pdrop", "resid_pdrop")}
    return found.pop() if len(found) == 1 else 0.0


def _missing(config: Mapping[str, Any], family: str) -> Iterator[str]:
    for key in _SIZES[family]:
        if config.get(key) is None:
            yield f"{key} is missing"


def _foreign(config: Mapping[str, Any], family: str) -> Iterator[str]:
    """What the configuration asks for and our model does not do."""
    for key, value in _ONLY[family].items():
        if config.get(key, value) != value:
            supported = "leave it out" if value is None else f"it must be {value!r}"
            yield f"{key}={config[key]!r} is not supported in a {family}; {supported}"
    if family == "llama":
        yield from _foreign_heads(config)
        yield from _foreign_rope(config)


def _foreign_heads(config: Mapping[str, Any]) -> Iterator[str]:
    hidden, heads, size = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if isinstance(hidden, int) and isinstance(heads, int) and size is not None and size * heads != hidden:
        rule = f"hidden_size / num_attention_heads = {hidden} / {heads} = {hidden / heads:g}"
        yield f"head_dim={size!r} is not supported; it must be {rule}"


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about rotary positions in one place: transformers 5 nests what its elders kept apart."""
    flat = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return flat | dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})


def _foreign_rope(config: Mapping[str, Any]) -> Iterator[str]:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        yield f"{key}={config[key]!r} is not supported; the rope_type must be 'default'"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; it must be 1.0"
