"""ZeRO: state sharded over data-parallel ranks.  For scripts: `Init`, `GatheredParameters` and `gathered_parameters`."""

from importlib import import_module
from typing import Any

# Only scripts with DeepSpeed's calls need them, so they live in that room and are imported when they are asked for.
_FOR_SCRIPTS = {
    "Init": "megazero.deepspeed.meta_init",
    "GatheredParameters": "megazero.deepspeed.full_params",
    "gathered_parameters": "megazero.deepspeed.full_params",
}


def __getattr__(name: str) -> Any:
    if name in _FOR_SCRIPTS:
        return getattr(import_module(_FOR_SCRIPTS[name]), name)
    raise AttributeError(f"module megazero.zero has no attribute {name!r}")
