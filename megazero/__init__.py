"""megazero: GPT pretraining in which every parallel dimension and every ZeRO stage compose.

    import megazero
    engine, optimizer, loader, schedule = megazero.initialize(model=..., config="ds_config.json")

A script written for DeepSpeed finds the names it uses most here, and all of them in `megazero.deepspeed`; they are imported
when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero import pipe, zero
    from megazero.deepspeed.pipeline_module import PipelineModule
    from megazero.deepspeed.script_setup import add_config_arguments, init_distributed, initialize
    from megazero.deepspeed.training_engine import RepeatingLoader
    from megazero.layers.checkpoint import checkpoint
    from megazero.parallel_state import RankGrid, parallel_state_of

__all__ = [
    "PipelineModule",
    "RankGrid",
    "RepeatingLoader",
    "add_config_arguments",
    "checkpoint",
    "init_distributed",
    "initialize",
    "parallel_state_of",
    "pipe",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "pipe", "zero"):
        return import_module(f"megazero.{name}")
    if name in __all__:
        return getattr(import_module("megazero.deepspeed"), name)
    raise AttributeError(f"module megazero has no attribute {name!r}")
