"""The model families that `model.family` may name; a script may register its own, see `ModelFamily`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.registry import Registry

if TYPE_CHECKING:
    from megazero.models.family import ModelFamily

FAMILIES: Registry[ModelFamily] = Registry(
    "model family",
    {
        "llama": "megazero.models.llama.family:LLAMA",
        "gpt2": "megazero.models.gpt2.family:GPT2",
        "qwen2": "megazero.models.qwen2:QWEN2",
        "qwen3": "megazero.models.qwen3:QWEN3",
        "olmo2": "megazero.models.olmo2:OLMO2",
        "mistral": "megazero.models.mistral:MISTRAL",
        "mixtral": "megazero.models.mixtral:MIXTRAL",
        "qwen3_moe": "megazero.models.qwen3_moe:QWEN3_MOE",
        "olmoe": "megazero.models.olmoe:OLMOE",
    },
    "megazero.models.family:ModelFamily",
)
