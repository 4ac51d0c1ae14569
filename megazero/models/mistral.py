"""Mistral: Llama whose attention may see a window of positions only (Jiang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megazero.models.config import ModelConfig
from megazero.models.llama.family import LLAMA_FORMAT, LlamaFamily
from megazero.models.llama.variant import LLAMA_2
from megazero.models.qwen2 import QWEN2_FORMAT

_WINDOW = 4096  # what transformers takes where the key is missing; null is none


class MistralFamily(LlamaFamily):
    """Llama that reads `sliding_window`."""

    reads = (*LlamaFamily.reads, "sliding_window")


def _extra(model: ModelConfig) -> dict[str, Any]:
    return LLAMA_FORMAT.extra(model) | {"sliding_window": model.sliding_window}


def _read_extra(config: Mapping[str, Any]) -> dict[str, Any]:
    return LLAMA_FORMAT.read_extra(config) | {"sliding_window": config.get("sliding_window", _WINDOW)}


MISTRAL_FORMAT = replace(
    QWEN2_FORMAT,  # as there, num_key_value_heads must be in the file: without it transformers takes 8, whatever the model
    architecture="MistralForCausalLM",
    constants={"hidden_act": "silu"},
    extra=_extra,
    read_extra=_read_extra,
    reads=(*LLAMA_FORMAT.reads, "sliding_window"),
)
MISTRAL = MistralFamily(LLAMA_2, MISTRAL_FORMAT, "megazero.models.llama.foreign:TABLES")
