"""SmolLM3: Llama with some layers that do not rotate queries and keys (Bakouch et al. 2025; Yang et al. 2025, RNoPE)."""

from collections.abc import Mapping
from typing import Any

from megazero.models.config import ModelConfig
from megazero.models.llama.family import BIASES, LLAMA_2, LLAMA_FORMAT, ROTARY_READS, LlamaFamily, every_nth, read_rope
from megazero.models.qwen import QWEN2_FORMAT

_KEYS = "no_rope_layers", "no_rope_layer_interval"


def _extra(model: ModelConfig) -> dict[str, Any]:
    rotates = [int(model.rope_of(layer) is not None) for layer in range(model.num_layers)]
    return LLAMA_FORMAT.extra(model) | {_KEYS[0]: rotates, _KEYS[1]: model.no_rope_every or model.num_layers + 1}


def _read_extra(config: Mapping[str, Any]) -> dict[str, Any]:
    rotates, every = config.get(_KEYS[0]), config.get(_KEYS[1], 4)
    every = every if rotates is None else every_nth([not turns for turns in rotates], _KEYS[0])
    return LLAMA_FORMAT.read_extra(config) | read_rope(config, theta=2e6) | {"no_rope_every": every}


SMOLLM3_FORMAT = QWEN2_FORMAT.variant("smollm3", extra=_extra, read_extra=_read_extra)
SMOLLM3 = LlamaFamily(LLAMA_2, SMOLLM3_FORMAT, (*ROTARY_READS, *BIASES, "no_rope_every"))
