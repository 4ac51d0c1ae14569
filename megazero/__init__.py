"""megazero: GPT pretraining in which every parallel dimension and every ZeRO stage compose.

    import megazero
    engine = megazero.initialize(config, state)                                                  # of a run file
    engine, optimizer, loader, schedule = megazero.initialize(model=..., config="ds_config.json")  # of your own module

A script written for DeepSpeed finds the names it uses most here, and all of them in `megazero.deepspeed`; they are imported
when first used.  `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

from megazero.registry import added_name

__all__ = ["PipelineModule", "RankGrid", "RepeatingLoader", "__version__", "add_config_arguments", "checkpoint"]
__all__ += ["init_distributed", "initialize", "parallel_state_of", "pipe", "zero"]
__version__ = "0.1.0"


def initialize(*args: Any, **more: Any) -> Any:
    """Build an engine from a run file's configuration, or from a script's own module with DeepSpeed's arguments.

    Args: see `megazero.engine.initialize` if the configuration is a `RunConfig`, otherwise see
        `megazero.deepspeed.initialize`.
    """
    from megazero.config import RunConfig

    if isinstance(args[0] if args else more.get("config"), RunConfig):
        return import_module("megazero.engine").initialize(*args, **more)
    return added_name("megazero", "initialize")(*args, **more)


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "pipe", "zero"):
        return import_module(f"megazero.{name}")
    return added_name("megazero", name)


def __dir__() -> list[str]:
    return __all__
