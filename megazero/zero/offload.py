"""Which state of a rank leaves the device, and where it goes.

    optimizer = "cpu"     master weights, moments and the gradient for the optimizer are in host memory
                "nvme"    master weights and moments are in a file, the gradient is in host memory
    parameters = ...      stage 3's shards of the weights; gathered weights are on the device

`ratio` selects whole buckets, in order, until that fraction of the elements is offloaded.  (Rajbhandari et al. 2021.)
`auto` means the fastest of device, host and disk that has space at the start of the run.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_objects
from megazero.config.schema import OffloadConfig
from megazero.launchers import cores_of_rank
from megazero.parallel_state import Axis
from megazero.zero.file_store import FileStore, region_bytes
from megazero.zero.sharding import BucketLayout, ShardingPolicy
from megazero.zero.storage import (
    FILE_SLICE_ELEMENTS,
    Extent,
    FlatArray,
    Location,
    Residency,
    StateMemory,
    free_memory_bytes,
    in_host_memory,
)

_LOCATIONS: Final[dict[str, Location]] = {"none": "device", "cpu": "host", "nvme": "file"}  # fastest first


class Offload(StateMemory):
    """Allocates what this rank holds of its buckets on the device, on the host and in a file.

    Args:
        config: no key is "auto".
        moments: arrays of optimizer state per element.
    """

    def __init__(
        self, config: OffloadConfig, policy: ShardingPolicy, layouts: Sequence[BucketLayout], moments: int
    ) -> None:
        super().__init__(policy)
        self._config = config
        self.store: FileStore | None = None
        self._state_on: dict[str, Location] = {}  # by name of a bucket; on the device if absent
        trained = [layout for layout in layouts if layout.trains]
        left = config.ratio * sum(layout.numel for layout in trained) if config.optimizer != "none" else 0.0
        for layout in trained:
            if left > 0:
                self._state_on[layout.name] = _LOCATIONS[config.optimizer]
            left -= layout.numel
        self._file_bytes = sum(self._bytes_in_file(layout, moments) for layout in layouts)

    def open(self, rank: int) -> None:
        if "nvme" in (self._config.optimizer, self._config.parameters):
            self.store = FileStore(Path(self._config.nvme_path or "."), rank, self._file_bytes)

    def residency(self, layout: BucketLayout) -> Residency:
        weights_on, state_on = _LOCATIONS[self._config.parameters], self._state_on.get(layout.name, "device")
        return Residency.of(layout, self.policy.zero_stage, weights_on, state_on)

    def _bytes_in_file(self, layout: BucketLayout, moments: int) -> int:
        held, total = self.residency(layout), 0
        owned = layout.shard_numel if held.state is Extent.SHARD else layout.padded_numel
        if held.state_on == "file":
            # moments are stored by flat parameter: one for each optimizer group, cut to FILE_SLICE_ELEMENTS
            flat_params = len(list(layout.intervals(lambda info: info.group))) + owned // FILE_SLICE_ELEMENTS
            total += region_bytes(owned, torch.float32) * (1 + moments)
            total += flat_params * moments * region_bytes(1, torch.int8)
        if held.weights_on == "file":
            total += region_bytes(owned, self.policy.dtype)
        return total

    def allocate(self, location: Location, numel: int, dtype: torch.dtype) -> FlatArray:
        if location == "device":
            return super().allocate(location, numel, dtype)
        if location == "host":
            return in_host_memory(numel, dtype, pin=self._config.pin_memory)
        assert self.store is not None
        return self.store.allocate(numel, dtype)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def give_cores(config: OffloadConfig, device: torch.device, local_world_size: int) -> None:
    """Let the optimizer on the host use this rank's cores.  A launcher gives a rank on a GPU either one thread or as
    many as the host has.
    """
    if config.optimizer != "none" and device.type == "cuda" and local_world_size > 1:
        torch.set_num_threads(cores_of_rank(local_world_size))


def choose_location(
    needed: int, offloadable: int, free_device: int, free_host: int, free_disk: int | None, undecided: int = 0
) -> str:
    """Return the fastest location that the state fits in: "none", "cpu" or "nvme".

    A tenth of device and host memory stays free: allocators lose some, and a full host kills processes without an
    error.  The file is preallocated, so the disk may be filled.

    Args:
        needed: bytes on the device if nothing is offloaded, with the offloadable ones.
        offloadable: bytes that can be offloaded.
        free_disk: free bytes; None: no disk is configured.
        undecided: bytes that the next decision may also offload; only if both together do not help is it an error.

    Raises: ValueError, no location has enough space.
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


def _free_disk(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        text = f"zero.offload.nvme_path={path} cannot be used ({error.strerror}); create it, or name another disk"
        raise ValueError(text) from None


def without_auto(
    config: OffloadConfig,
    policy: ShardingPolicy,
    elements: int,
    moments: int,
    world: Axis,
    local_world_size: int,
    free: Callable[[torch.device], int] = free_memory_bytes,
) -> OffloadConfig:
    """Replace "auto" by the choice that fits the memory that is free now, the same on all ranks.

    The rank with the least free memory decides.

    Args:
        elements: elements of all parameters of this rank, before ZeRO shards them.
        moments: arrays of optimizer state per element.
        local_world_size: ranks of this host, which share its memory and disk.
        free: returns the free bytes of a device.

    Raises: ValueError, on every rank, if the state fits nowhere on one of them.
    """
    if "auto" not in (config.optimizer, config.parameters):
        return config
    stage = policy.zero_stage
    owned = -(-elements // policy.placement.shard.size) if stage >= 1 else elements
    owned_gradients = 4 * owned if stage >= 2 else 0
    masters = 0 if policy.dtype == torch.float32 else 4 * owned
    movable = {
        "optimizer": owned * 4 * moments + masters + owned_gradients,
        "parameters": owned * policy.dtype.itemsize if stage == 3 else 0,
    }
    full_weights = 0 if stage == 3 else elements * policy.dtype.itemsize
    needed = full_weights + (0 if stage >= 2 else 4 * elements)
    needed += sum(size for key, size in movable.items() if getattr(config, key) in ("none", "auto"))
    # The host needs more bytes than the device frees: gradients and, with fp32 weights, masters are then separate arrays.
    more = owned * 4 * (moments + 1) - movable["optimizer"]
    host = free(torch.device("cpu")) // local_world_size
    path = config.nvme_path
    disk = None if path is None else agree(lambda: _free_disk(path), world, ValueError) // local_world_size
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
        chosen[key] = max(gather_objects(agree(choose, world, ValueError), world), key=list(_LOCATIONS).index)
        if chosen[key] != "none":
            needed -= size
            host -= size + on_host if chosen[key] == "cpu" else 0
    return config.model_copy(update=chosen)
