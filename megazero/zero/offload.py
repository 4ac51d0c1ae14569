"""Which part of a rank's state leaves the device, and where it goes.

    optimizer = "cpu"     master weights, moments and the gradient that steps them lie in host memory
                "nvme"    master weights and moments lie in a file, the gradient in host memory
    parameters = ...      stage 3's shard of the weights; its units come to the device to be gathered

`ratio` takes whole buckets, in order, until that share of the elements is offloaded.  (Rajbhandari et al. 2021.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megazero.comm.collectives import agree
from megazero.config.schema import OffloadConfig
from megazero.parallel_state import Axis
from megazero.zero.bucket import BucketLayout
from megazero.zero.file_store import FileStore, region_bytes
from megazero.zero.policy import ShardingPolicy
from megazero.zero.storage import FlatArray, StorageError, in_host_memory

FILE_PART_ELEMENTS = 1 << 22  # how many elements of a file are stepped at a time


@dataclass(frozen=True)
class OffloadPlan:
    """What leaves the device; known before the buckets are."""

    config: OffloadConfig = field(default_factory=OffloadConfig)  # no key of it is "auto"
    moments: int = 0  # arrays of optimizer state per element
    rank: int = 0  # for the file's name
    world: Axis = field(default_factory=lambda: Axis("world"))  # the ranks that must all succeed

    def allocate(self, layouts: Sequence[BucketLayout], policy: ShardingPolicy) -> Offload:
        """Reserve space for the buckets.  Raises: StorageError, on every rank, if one rank has too little."""
        return agree(partial(Offload, self, layouts, policy), self.world, StorageError)


class Offload:
    """Where the state of each of this rank's buckets is allocated.  Without arguments: everything on the device.

    Raises:
        StorageError: the file does not fit on its disk.
    """

    def __init__(
        self,
        plan: OffloadPlan | None = None,
        layouts: Sequence[BucketLayout] = (),
        policy: ShardingPolicy | None = None,
    ) -> None:
        self._plan = plan or OffloadPlan()
        self._config, self._dtype = self._plan.config, policy.dtype if policy else torch.float32
        self._masters: dict[str, str] = {}  # by name of a bucket, where its master weights lie if not on the device
        trained = [layout for layout in layouts if layout.trains]
        offloads = self._config.optimizer != "none"
        wanted = self._config.ratio * sum(layout.numel for layout in trained) if offloads else 0.0
        taken = 0
        for layout in trained:
            if taken < wanted:
                self._masters[layout.name] = self._config.optimizer
                taken += layout.numel
        self.store: FileStore | None = None
        if policy is not None and "nvme" in (self._config.optimizer, self._config.parameters):
            size = sum(self._file_bytes(layout, policy) for layout in layouts)
            self.store = FileStore(Path(self._config.nvme_path or "."), self._plan.rank, size)

    def _file_bytes(self, layout: BucketLayout, policy: ShardingPolicy) -> int:
        owned, moments = layout.shard_numel if policy.shards_master else layout.padded_numel, self._plan.moments
        total = 0
        if self._masters.get(layout.name) == "nvme":
            # moments are stored for parts of a bucket: each optimizer group's, cut to what is stepped at a time
            parts = len(list(layout.runs(lambda info: info.group))) + owned // FILE_PART_ELEMENTS
            total += region_bytes(owned, torch.float32) * (1 + moments) + parts * moments * region_bytes(1, torch.int8)
        if self._config.parameters == "nvme":
            total += region_bytes(owned, policy.dtype)
        return total

    def master(self, layout: BucketLayout) -> Callable[[int], FlatArray] | None:
        """Makes the bucket's array of master weights; None keeps them on the device."""
        device = self._masters.get(layout.name)
        return None if device is None or self.shares_weights(layout) else partial(self._new, device, torch.float32)

    def shares_weights(self, layout: BucketLayout) -> bool:
        """Whether a gathered bucket's fp32 weight shard lies where its master weights would, and so is both."""
        both_on_host = self._masters.get(layout.name) == self._config.parameters == "cpu"
        return both_on_host and self._dtype == torch.float32 and not layout.persistent

    def weights(self) -> Callable[[int], FlatArray] | None:
        """Makes the array of a gathered bucket's weight shard; None keeps it on the device."""
        device = self._config.parameters
        return None if device == "none" else partial(self._new, device, self._dtype)

    def moment(self, numel: int) -> FlatArray:
        """An array of zeros in the file, for optimizer state."""
        return self._new("nvme", torch.float32, numel)

    def _new(self, device: str, dtype: torch.dtype, numel: int) -> FlatArray:
        if device == "cpu":
            return in_host_memory(numel, dtype, pin=self._config.pin_memory)
        assert self.store is not None
        return self.store.allocate(numel, dtype)

    def close(self) -> None:
        """Free the file."""
        if self.store is not None:
            self.store.close()
