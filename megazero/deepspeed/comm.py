"""`deepspeed.comm`: torch.distributed's collectives, under its names and with DeepSpeed's further arguments."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch.distributed as dist

from megazero.deepspeed.script_setup import init_distributed

__path__: list[str] = []  # modules of DeepSpeed below this file are the mirror's
_TORCH = {
    "P2POp", "ProcessGroup", "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "destroy_process_group", "gather", "get_backend", "get_global_rank", "get_rank", "get_world_size", "irecv",
    "is_available", "is_initialized", "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip
_LOGGED = {"prof", "log_name", "debug"}  # arguments of DeepSpeed's communication logger

__all__ = ["get_local_rank", "get_world_group", "init_distributed"]


def __getattr__(name: str) -> Any:
    if name not in _TORCH:
        raise AttributeError(f"megazero's deepspeed.comm has no {name!r}; take it from torch.distributed")
    found = getattr(dist, name)
    if name[0].isupper():
        return found

    @wraps(found)
    def without_logging(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **{key: value for key, value in kwargs.items() if key not in _LOGGED})

    return without_logging


def get_local_rank() -> int:
    """Return this rank among those of its host; 0 if no launcher has said it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Return the process group of all ranks."""
    return dist.group.WORLD
