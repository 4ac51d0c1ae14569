"""megazero: GPT pretraining in which every parallel dimension and every ZeRO stage compose.

    import megazero
    engine, optimizer, loader, schedule = megazero.initialize(model=..., config="ds_config.json")

A script written for DeepSpeed finds the names it uses most here, and all of them in `megazero.deepspeed`; they are imported
when first used.  `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

from megazero.annexes import added_name

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "pipe", "zero"):
        return import_module(f"megazero.{name}")
    return added_name("megazero", name)
