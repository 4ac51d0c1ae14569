"""What `auto` means in [zero.offload]: the fastest of device, host and disk that has space at the start of the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from megazero.comm.collectives import agree, gather_objects
from megazero.config.schema import OffloadConfig
from megazero.parallel_state import Axis
from megazero.zero.policy import ShardingPolicy

# Below the root of the control groups: limit, use, statistics, and the statistic of page cache that is given up first.
_CGROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_LOCATIONS: Final = ("none", "cpu", "nvme")  # fastest first


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def free_memory_bytes(
    device: torch.device, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Free memory of a CUDA device, or of the host within the limit of this container; a node's ranks share the latter."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _fields(meminfo)["MemAvailable"] * 1024
    for limit, used, statistics, cache in _CGROUPS:
        if (cgroup / limit).exists() and (text := (cgroup / limit).read_text().strip()) != "max":
            in_use = int((cgroup / used).read_text()) - _fields(cgroup / statistics)[cache]
            free = min(free, max(int(text) - in_use, 0))
    return free


def choose_location(
    needed: int, offloadable: int, free_device: int, free_host: int, free_disk: int | None, undecided: int = 0
) -> str:
    """The fastest location that the state fits in: "none", "cpu" or "nvme".

    A tenth of device and host memory stays free, for allocators lose some and a full host kills without an error.  The file
    is preallocated, so the disk may fill up.

    Args:
        needed: bytes on the device with nothing offloaded, the offloadable ones included.
        offloadable: those of them that this decision is about.
        free_device, free_host, free_disk: free bytes that are this rank's to use; no disk is None.
        undecided: bytes that the next decision may offload, too; it is an error only if both together do not help.

    Raises:
        ValueError: it fits nowhere.
    """
    if needed * 10 <= free_device * 9:
        return "none"
    for size in (offloadable, offloadable + undecided):
        if (needed - size) * 10 > free_device * 9:
            continue
        if size * 10 <= free_host * 9:
            return "cpu"
        if free_disk is not None and size <= free_disk:
            return "nvme"
    disk = "no disk is set (zero.offload.nvme_path)" if free_disk is None else f"{free_disk} on the disk"
    raise ValueError(
        f"zero.offload auto: the state fits nowhere: {needed} bytes are needed on the device, {offloadable + undecided} of"
        f" them can be offloaded; free are {free_device} on the device, {free_host} on the host (of both, 90% are used) and"
        f" {disk}; use more ranks, a higher zero.stage or a smaller model"
    )


def without_auto(
    config: OffloadConfig,
    policy: ShardingPolicy,
    elements: int,
    moments: int,
    world: Axis,
    neighbours: int,
    free: Callable[[torch.device], int] = free_memory_bytes,
) -> OffloadConfig:
    """Choose what the configuration leaves to the memory that is free now, on all ranks alike.

    Args:
        elements: parameters of this rank's model.
        moments: arrays of optimizer state per element.
        world: all ranks; the one with the least free memory decides.
        neighbours: ranks of this machine, which share its memory and its disk.
        free: measures the free bytes of a device.

    Raises:
        ValueError: on every rank, when it fits nowhere on one.
    """
    if "auto" not in (config.optimizer, config.parameters):
        return config
    stage = policy.zero_stage
    owned = -(-elements // policy.shard.size) if stage >= 1 else elements
    owned_gradients = 4 * owned if stage >= 2 else 0
    masters = 0 if policy.dtype == torch.float32 else 4 * owned
    movable = {
        "optimizer": owned * 4 * moments + masters + owned_gradients,
        "parameters": owned * policy.dtype.itemsize if stage == 3 else 0,
    }
    whole_weights = 0 if stage == 3 else elements * policy.dtype.itemsize
    needed = whole_weights + (0 if stage >= 2 else 4 * elements)
    needed += sum(size for key, size in movable.items() if getattr(config, key) in ("none", "auto"))
    # More than leaves the device: on the host, gradients and, with fp32 weights, masters that are then separate.
    more = owned * 4 * (moments + 1) - movable["optimizer"]
    host = free(torch.device("cpu")) // neighbours
    disk = shutil.disk_usage(config.nvme_path).free // neighbours if config.nvme_path else None
    chosen: dict[str, str] = {}
    for key, size in movable.items():
        if getattr(config, key) != "auto":
            continue
        is_first = key == "optimizer"
        on_disk, on_host = (more, more + 4 * owned) if is_first else (0, 0)
        undecided = movable["parameters"] if is_first and config.parameters == "auto" else 0
        free_disk = None if disk is None else disk - on_disk
        free_device = free(policy.device)
        choose = partial(choose_location, needed, size, free_device, host - on_host, free_disk, undecided)
        chosen[key] = max(gather_objects(agree(choose, world, ValueError), world), key=_LOCATIONS.index)
        if chosen[key] != "none":
            needed -= size
            host -= size + on_host if chosen[key] == "cpu" else 0
    return config.model_copy(update=chosen)
