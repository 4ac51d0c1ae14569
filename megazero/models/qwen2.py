"""Qwen 2 and 2.5: Llama with biases of q, k and v (Yang et al. 2024)."""

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.models.llama.family import LLAMA_FORMAT, LlamaFamily, Variant


def _unsupported(config: Mapping[str, Any], seq_len: int | None) -> Iterator[str]:
    """Return what is not supported: a window.  It is on if three keys say so and `layer_types` is unset (`Qwen2Config`)."""
    asks = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    is_late = config.get("max_window_layers", 28) >= (config.get("num_hidden_layers") or 0)
    if asks and config.get("layer_types") is None and not is_late:
        yield f"use_sliding_window=True is not supported in a {config['model_type']}; it must be False"
    yield from LLAMA_FORMAT.problems(config, seq_len)


# transformers gives a file without num_key_value_heads 32 heads, whatever the model; so it must be there.
QWEN2_FORMAT = LLAMA_FORMAT.variant(
    "qwen2", extra=lambda model: LLAMA_FORMAT.extra(model) | {"use_sliding_window": False}, problems=_unsupported
)
QWEN2 = LlamaFamily(Variant(qkv_bias=True), QWEN2_FORMAT)
