"""Mistral: Llama whose attention may be limited to a window of positions (Jiang et al. 2023)."""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.models.config import ModelConfig
from megazero.models.llama.family import LLAMA_2, LLAMA_FORMAT, ROTARY_READS, LlamaFamily

_WINDOW = 4096  # transformers' default for a missing key; null means no window


def _extra(model: ModelConfig) -> dict[str, Any]:
    return LLAMA_FORMAT.extra(model) | {"sliding_window": model.sliding_window}


def _layer_types(config: Mapping[str, Any]) -> set[str]:
    """Return the types of its layers.  With this key transformers' Auto classes make a Ministral: layers may differ."""
    return {str(layer_type) for layer_type in config.get("layer_types") or ()}


def _read_extra(config: Mapping[str, Any]) -> dict[str, Any]:
    window = None if _layer_types(config) == {"full_attention"} else config.get("sliding_window", _WINDOW)
    return LLAMA_FORMAT.read_extra(config) | {"sliding_window": window}


def _unsupported(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    layer_types = _layer_types(config)
    if layer_types == {"full_attention", "sliding_attention"}:
        yield "layer_types has 'full_attention' and 'sliding_attention', which is not supported; all must be equal"
    if "sliding_attention" in layer_types and config.get("sliding_window", _WINDOW) is None:
        yield "layer_types has 'sliding_attention', which needs a sliding_window, and that is null"
    yield from LLAMA_FORMAT.problems({**config, "layer_types": layer_types - {"sliding_attention"}}, seq_len)


MISTRAL_FORMAT = LLAMA_FORMAT.variant("mistral", extra=_extra, read_extra=_read_extra, problems=_unsupported)
MISTRAL = LlamaFamily(LLAMA_2, MISTRAL_FORMAT, (*ROTARY_READS, "sliding_window"))
