"""What `auto` means in [zero.offload]: the fastest of device, host and disk that has space at the start of the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import torch

from megazero.comm.collectives import gather_objects
from megazero.config.schema import OffloadConfig
from megazero.parallel_state import Axis
from megazero.zero.policy import ShardingPolicy

_MASTER_BYTES = 4
# Below the root of the control groups: limit, use, statistics, and the statistic of page cache that is given up first.
_CGROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def free_memory_bytes(
    device: torch.device, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Free memory of a CUDA device, or of the host within the limit of this container.

    All ranks of a node share the host's.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _fields(meminfo)["MemAvailable"] * 1024
    for limit, used, statistics, cache in _CGROUPS:
        if (cgroup / limit).exists() and (text := (cgroup / limit).read_text().strip()) != "max":
            in_use = int((cgroup / used).read_text()) - _fields(cgroup / statistics)[cache]
            free = min(free, max(int(text) - in_use, 0))
    return free


def choose_location(
    needed_device_bytes: int, offloadable_bytes: int, free_device: int, free_host: int, free_disk: int | None
) -> Literal["none", "cpu", "nvme"]:
    """The fastest location that the state fits in: what `auto` means.

    A tenth of device and host memory stays free, for allocators lose some and a full host kills without an error.  The file
    is preallocated, so the disk may fill up.

    Args:
        needed_device_bytes: bytes on the device with nothing offloaded, the offloadable ones included.
        offloadable_bytes: those of them that may lie elsewhere.
        free_device: free bytes of the device.
        free_host: free bytes of the host that are this rank's to use.
        free_disk: likewise of the disk, None without one.

    Raises:
        ValueError: it fits nowhere.
    """

    def fits(needed: int, free: int) -> bool:
        return needed * 10 <= free * 9

    if fits(needed_device_bytes, free_device):
        return "none"
    if fits(needed_device_bytes - offloadable_bytes, free_device):
        if fits(offloadable_bytes, free_host):
            return "cpu"
        if free_disk is not None and offloadable_bytes <= free_disk:
            return "nvme"
    disk = "no disk is set (zero.offload.nvme_path)" if free_disk is None else f"{free_disk} on the disk"
    raise ValueError(
        f"the state fits nowhere: {needed_device_bytes} bytes are needed on the device, {offloadable_bytes} of them can be"
        f" offloaded; free are {free_device} on the device, {free_host} on the host (of both, 90% are used) and {disk};"
        " use more ranks, a higher zero.stage or a smaller model"
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
        config: may say "auto".
        policy: stage, dtypes and axes.
        elements: parameters of this rank's model.
        moments: arrays of optimizer state per element.
        world: all ranks; the poorest one decides.
        neighbours: ranks of this machine, which share its memory and its disk.
        free: measures the free bytes of a device.

    Raises:
        ValueError: on every rank, when it fits nowhere on one.
    """
    if "auto" not in (config.optimizer, config.parameters):
        return config
    stage, shards, width = policy.zero_stage, policy.shard.size, policy.dtype.itemsize
    owned = -(-elements // shards) if stage >= 1 else elements
    masters = 0 if policy.dtype == torch.float32 else _MASTER_BYTES
    gradients = 4 * (owned if stage >= 2 else elements)
    movable = {
        "optimizer": owned * (4 * moments + masters) + (4 * owned if stage >= 2 else 0),
        "parameters": owned * width if stage == 3 else 0,
    }
    # Beyond what leaves the device: on the host, gradients and, with fp32 weights, masters that are then separate.
    beyond = owned * (4 * moments + _MASTER_BYTES) - movable["optimizer"]
    extra = {"optimizer": (beyond + 4 * owned, beyond), "parameters": (0, 0)}
    left = (0 if stage == 3 else elements * width) + gradients - (4 * owned if stage >= 2 else 0)
    needed = left + sum(size for key, size in movable.items() if getattr(config, key) in ("none", "auto"))
    host = free(torch.device("cpu")) // neighbours
    disk = shutil.disk_usage(config.nvme_path).free // neighbours if config.nvme_path else None
    chosen = {}
    for key, size in movable.items():
        if getattr(config, key) != "auto":
            continue
        # What is decided later counts as movable, too: it is an error only if all that may move together is not enough.
        undecided = sum(movable[other] for other in movable if other > key and getattr(config, other) == "auto")
        on_host, on_disk = extra[key]
        free_disk = None if disk is None else disk - on_disk
        answers = gather_objects(
            _choose(needed, size, undecided, free(policy.device), host - on_host, free_disk), world
        )
        refusals = [text for text in answers if text not in _ORDER]
        if refusals:
            raise ValueError("zero.offload auto: " + "\n".join(dict.fromkeys(refusals)))
        chosen[key] = max(answers, key=_ORDER.index)
        if chosen[key] != "none":
            needed -= size
            host -= size + on_host if chosen[key] == "cpu" else 0
    return config.model_copy(update=chosen)


_ORDER = ("none", "cpu", "nvme")


def _choose(needed: int, size: int, undecided: int, free_device: int, free_host: int, free_disk: int | None) -> str:
    failure = ""
    for movable in (size, size + undecided):
        try:
            return choose_location(needed, movable, free_device, free_host, free_disk)
        except ValueError as error:
            failure = str(error)
    return failure
