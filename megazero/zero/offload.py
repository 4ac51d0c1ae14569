"""Which part of a rank's state leaves the device, and where it goes.

    optimizer = "cpu"     master weights, moments and the gradient that steps them lie in host memory
                "nvme"    master weights and moments lie in a file, the gradient in host memory
    parameters = ...      stage 3's shard of the weights; its units come to the device to be gathered

`ratio` takes whole buckets, in order, until that share of the elements is offloaded.  (Rajbhandari et al. 2021.)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megazero.comm.collectives import agree, gather_objects
from megazero.config.schema import OffloadConfig
from megazero.parallel_state import Axis
from megazero.zero.bucket import BucketLayout, ShardingPolicy
from megazero.zero.storage import (
    FileStore,
    FlatArray,
    StorageError,
    choose_place,
    free_memory_bytes,
    in_host_memory,
    region_bytes,
)

_MASTER_BYTES = 4
FILE_PART_ELEMENTS = 1 << 22  # how many elements of a file are stepped at a time


@dataclass(frozen=True)
class OffloadPlan:
    """What leaves the device; known before the buckets are.

    Args:
        config: no key of it is "auto".
        moments: arrays of optimizer state per element.
        rank: this rank, for the file's name.
        world: the ranks that must all succeed.
    """

    config: OffloadConfig = field(default_factory=OffloadConfig)
    moments: int = 0
    rank: int = 0
    world: Axis = field(default_factory=lambda: Axis("world"))

    @property
    def moves_weights(self) -> bool:
        """Whether stage 3's shards lie elsewhere, so that even one rank gathers unit by unit."""
        return self.config.parameters != "none"

    def place(self, layouts: Sequence[BucketLayout], policy: ShardingPolicy) -> Offload:
        """Find room for the buckets.  Raises: StorageError, on every rank, where one has none."""
        make = partial(Offload, layouts, policy, self.config, self.moments, self.rank)
        return agree(make, self.world, StorageError)


class Offload:
    """Where the state of each bucket lies.  Without arguments: everything on the device.

    Args:
        layouts: this rank's buckets.
        policy: stage, dtypes and axes.
        config: no key of it is "auto".
        moments: arrays of optimizer state per element.
        rank: this rank, for the file's name.

    Raises:
        StorageError: the file does not fit on its disk, or host memory is short.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout] = (),
        policy: ShardingPolicy | None = None,
        config: OffloadConfig | None = None,
        moments: int = 0,
        rank: int = 0,
    ) -> None:
        config = config or OffloadConfig()
        self._pins = config.pin_memory
        self._dtype = policy.dtype if policy is not None else torch.float32
        self._weights_at = config.parameters
        self._masters: dict[str, str] = {}
        trained = [layout for layout in layouts if layout.trains]
        wanted = config.ratio * sum(layout.numel for layout in trained) if config.optimizer != "none" else 0.0
        taken = 0
        for layout in trained:
            if taken < wanted:
                self._masters[layout.name] = config.optimizer
                taken += layout.numel
        self.store: FileStore | None = None
        if policy is not None and "nvme" in (config.optimizer, config.parameters):
            size = sum(self._file_bytes(layout, policy, moments) for layout in layouts)
            self.store = FileStore(Path(config.nvme_path or "."), rank, size)

    def _file_bytes(self, layout: BucketLayout, policy: ShardingPolicy, moments: int) -> int:
        sharded = policy.zero_stage >= 1 and layout.shards > 1
        owned = layout.shard_numel if sharded else layout.padded_numel
        total = 0
        if self._masters.get(layout.name) == "nvme":
            # moments are kept for parts of a bucket: each optimizer group's, cut to what is stepped at a time
            parts = len(list(layout.runs(lambda info: info.group))) + owned // FILE_PART_ELEMENTS
            total += region_bytes(owned, torch.float32) * (1 + moments) + parts * moments * region_bytes(1, torch.int8)
        if self._weights_at == "nvme":
            total += region_bytes(owned, policy.dtype)
        return total

    def master(self, layout: BucketLayout) -> Callable[[int], FlatArray] | None:
        """Makes the bucket's array of master weights; None keeps them on the device."""
        place = self._masters.get(layout.name)
        return None if place is None or self.shares_weights(layout) else partial(self._new, place, torch.float32)

    def shares_weights(self, layout: BucketLayout) -> bool:
        """Whether a gathered bucket's fp32 weight shard lies where its master weights would, and so is both."""
        same_place = self._masters.get(layout.name) == self._weights_at == "cpu"
        return same_place and self._dtype == torch.float32 and not layout.persistent

    def weights(self) -> Callable[[int], FlatArray] | None:
        """Makes the array of a gathered bucket's weight shard; None keeps it on the device."""
        return None if self._weights_at == "none" else partial(self._new, self._weights_at, self._dtype)

    def moment(self, numel: int) -> FlatArray:
        """An array of zeros in the file, for optimizer state."""
        return self._new("nvme", torch.float32, numel)

    def _new(self, place: str, dtype: torch.dtype, numel: int) -> FlatArray:
        if place == "cpu":
            return in_host_memory(numel, dtype, pin=self._pins)
        if self.store is None:
            raise ValueError(f"nothing is kept in files here, and an array was asked for at {place}")
        return self.store.allocate(numel, dtype)

    def close(self) -> None:
        """Give the file back."""
        if self.store is not None:
            self.store.close()


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
    state = owned * (4 * moments + _MASTER_BYTES)
    # Beyond what leaves the device: on the host, gradients and, with fp32 weights, masters that are then separate.
    extra = {
        "optimizer": (state + 4 * owned - movable["optimizer"], state - movable["optimizer"]),
        "parameters": (0, 0),
    }
    left = (0 if stage == 3 else elements * width) + gradients - (4 * owned if stage >= 2 else 0)
    needed = left + sum(size for key, size in movable.items() if getattr(config, key) in ("none", "auto"))
    host = free(torch.device("cpu")) // neighbours
    disk = shutil.disk_usage(config.nvme_path).free // neighbours if config.nvme_path else None
    chosen = {}
    for key, size in movable.items():
        if getattr(config, key) != "auto":
            continue
        # what can still follow counts as movable too: only if everything that may move were not enough is there an error
        later = sum(movable[other] for other in movable if other > key and getattr(config, other) == "auto")
        on_host, on_disk = extra[key]
        free_disk = None if disk is None else disk - on_disk
        answers = gather_objects(_choose(needed, size, later, free(policy.device), host - on_host, free_disk), world)
        refusals = [text for text in answers if text not in _ORDER]
        if refusals:
            raise ValueError("zero.offload auto: " + "\n".join(dict.fromkeys(refusals)))
        chosen[key] = max(answers, key=_ORDER.index)
        if chosen[key] != "none":
            needed -= size
            host -= size + on_host if chosen[key] == "cpu" else 0
    return config.model_copy(update=chosen)


_ORDER = ("none", "cpu", "nvme")


def _choose(needed: int, size: int, later: int, free_device: int, free_host: int, free_disk: int | None) -> str:
    failure = ""
    for movable in (size, size + later):  # this kind alone, or only together with what follows
        try:
            return choose_place(needed, movable, free_device, free_host, free_disk)
        except ValueError as error:
            failure = str(error)
    return failure
