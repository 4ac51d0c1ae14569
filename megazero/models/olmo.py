"""OLMo 2: Llama with RMSNorm after attention and MLP, and over all queries and all keys (OLMo et al. 2025, section 3.2).

In OLMo 3 most layers attend to a window, too (Team OLMo et al. 2025).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.models.config import ModelConfig
from megazero.models.llama.family import LLAMA_FORMAT, ROTARY_READS, LlamaFamily, Variant, every_nth, read_rope

WINDOWS = "sliding_window", "full_attention_every"
_FULL, _LOCAL, _WINDOW = "full_attention", "sliding_attention", 4096


def window_problems(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    """Return what is not supported in a `config.json` with windows."""
    layer_types = {str(layer_type) for layer_type in config.get("layer_types") or ()}
    if config.get("sliding_window", _WINDOW) is None and layer_types != {_FULL}:
        yield "sliding_window is null, and layers need one; write layer_types that are all 'full_attention'"
    yield from LLAMA_FORMAT.problems({**config, "layer_types": layer_types - {_LOCAL}}, seq_len)


def window_and_rope_problems(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    """Like `window_problems`, for families whose layers with a window have other rotary positions."""
    if _rope_of_windows(config).get("rope_type", "default") != "default":
        yield f"rope_parameters: {_LOCAL} is scaled, which is not supported"
    if (rope := config.get("rope_parameters")) and not {_FULL, _LOCAL} & {*rope}:
        yield f"rope_parameters must have one table of {_FULL} and one of {_LOCAL}: transformers reads only these"
    yield from window_problems(config, seq_len)


def written_windows(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a `config.json` about windows."""
    layer_types = [_LOCAL if model.window_of(layer) else _FULL for layer in range(model.num_layers)]
    return LLAMA_FORMAT.extra(model) | {"layer_types": layer_types, "sliding_window": model.sliding_window}


def written_ropes(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a `config.json` about windows and rotary positions, where layers with a window have other ones."""
    written, plain = written_windows(model), {"rope_type": "default"}
    full = plain | {"rope_theta": model.rope_theta} | written.get("rope_scaling", {})
    rope = {_FULL: full, _LOCAL: plain | {"rope_theta": model.rope_local_theta}}
    return written | {"rope_parameters": rope}


def read_windows(config: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Return the keys of [model] about windows, from a `config.json`.

    Args:
        every: if `layer_types` is left out, every `every`-th layer has no window.

    Raises: ValueError: layers differ in another way.
    """
    types = config.get("layer_types")
    period = every if types is None else every_nth([each == _FULL for each in types], "layer_types")
    windows = (None, None) if period == 1 else (config.get("sliding_window", _WINDOW), period)
    return LLAMA_FORMAT.read_extra(config) | dict(zip(WINDOWS, windows, strict=True))


def read_ropes(config: Mapping[str, Any], theta: float, local: float) -> dict[str, Any]:
    """Return the keys of [model] about rotary positions, from a `config.json`.

    Args:
        theta, local: default bases of layers without and with a window.
    """
    local = _rope_of_windows(config).get("rope_theta", config.get("rope_local_base_freq", local))
    return read_rope(config, theta) | {"rope_local_theta": local}


def _rope_of_windows(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return (config.get("rope_parameters") or {}).get(_LOCAL) or {}


OLMO2_FORMAT = LLAMA_FORMAT.variant("olmo2")
_NORMS = "post_attention_layernorm", "post_feedforward_layernorm"
OLMO2 = LlamaFamily(Variant(qk_norm="width", norm_place="after", norms=_NORMS), OLMO2_FORMAT)

OLMO3_FORMAT = OLMO2_FORMAT.variant(
    "olmo3",
    extra=written_ropes,
    read_extra=lambda config: read_windows(config, 4) | read_ropes(config, 5e5, 5e5),
    problems=window_and_rope_problems,
)
OLMO3 = LlamaFamily(OLMO2.variant, OLMO3_FORMAT, (*ROTARY_READS, "rope_local_theta", *WINDOWS))
