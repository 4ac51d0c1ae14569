"""What `model.family` and `model.preset` may name; a script may register a family of its own, see `ModelFamily`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        "olmo3": "megazero.models.olmo3:OLMO3",
        "smollm3": "megazero.models.smollm3:SMOLLM3",
        "granite": "megazero.models.granite:GRANITE",
        "phi3": "megazero.models.phi3:PHI3",
        "glm4": "megazero.models.glm4:GLM4",
        "gemma2": "megazero.models.gemma:GEMMA2",
        "gemma3": "megazero.models.gemma:GEMMA3",
        "deepseek_v2": "megazero.models.deepseek.family:DEEPSEEK_V2",
        "deepseek_v3": "megazero.models.deepseek.family:DEEPSEEK_V3",
    },
    "megazero.models.family:ModelFamily",
)

# Published models by name, as keys of [model], and how many parameters each has.
PRESETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PARAMETERS: dict[str, int] = {name: preset.pop("parameters") for name, preset in PRESETS.items()}
