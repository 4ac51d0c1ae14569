"""The names for `model.family` and `model.preset`.  A script may register its own family, see `ModelFamily`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.registry import Registry

if TYPE_CHECKING:
    from megazero.models.family import ModelFamily


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


FAMILIES: Registry[ModelFamily] = Registry(
    "model family", _table("families.toml"), "megazero.models.family:ModelFamily"
)

# Published models by name, as keys of [model], and how many parameters each has.
PRESETS: dict[str, dict[str, Any]] = _table("presets.toml")
PARAMETERS: dict[str, int] = {name: preset.pop("parameters") for name, preset in PRESETS.items()}
