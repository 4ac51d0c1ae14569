"""The functions of `deepspeed.utils` and `deepspeed.runtime.utils` that scripts call."""

import gc
import logging
import random
import sys
from collections.abc import Collection
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megazero.deepspeed.accelerator import get_accelerator


def _make_logger() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")  # the name under which scripts and libraries set its level
    if not made.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _make_logger()


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        ranks: ranks that log; if it begins with -1, all do.  Without torch.distributed, the process always logs.
        level: level of the message.
    """
    wanted = list(ranks or ())
    rank = dist.get_rank() if dist.is_initialized() else None
    if rank is None or wanted[:1] == [-1] or rank in wanted:
        logger.log(level, "[Rank %d] %s", -1 if rank is None else rank, message)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy the tensors in nested containers to a device.  torch.save would write the whole bucket behind a view of it."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), item)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory in use on the device and the host, on rank 0.  No-op without `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() > 0):
        return
    gc.collect()
    device = get_accelerator()
    amounts = {
        "allocated": device.memory_allocated(),
        "most allocated": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        "free": device.available_memory(),
    }
    print(message, ", ".join(f"{name} {amount / 2**30:.2f} GiB" for name, amount in amounts.items()), sep=": ")
    device.reset_peak_memory_stats()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """No-op: a module that reads another module's parameter gets it gathered."""


#: The build information of `deepspeed.git_version_info`; 0.0 for versions that readers should get from torch.
torch_info = {"version": torch.__version__, "bf16_support": True, "cuda_version": "0.0", "nccl_version": "0.0"}


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch is `min_version` or newer, and `max_version` or older."""
    version = torch.__version__
    return not (min_version and version < str(min_version)) and not (max_version and version > str(max_version))
