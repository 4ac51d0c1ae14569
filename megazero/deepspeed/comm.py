"""`deepspeed.comm`: the collectives of torch.distributed, which also accept DeepSpeed's further arguments."""

import os
from typing import Any

import torch.distributed as dist

from megazero.deepspeed.script_setup import init_distributed

__path__: list[str] = []  # modules of DeepSpeed below this file are the mirror's
_LOGGED = {"prof", "log_name", "debug"}  # arguments of DeepSpeed's communication logger

__all__ = ["get_local_rank", "get_world_group", "init_distributed"]


def __getattr__(name: str) -> Any:
    found = getattr(dist, name)
    if isinstance(found, type) or not callable(found):
        return found
    return lambda *args, **kwargs: found(*args, **{key: kwargs[key] for key in kwargs.keys() - _LOGGED})


def get_local_rank() -> int:
    """Return this rank's index on its host; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Return the process group of all ranks."""
    return dist.group.WORLD
