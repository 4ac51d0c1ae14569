"""Locations of a rank's flat state between uses: the device, host memory, or a file on a local disk.

    location  elements                          a copy to or from the device
    device    a tensor                          on the current stream
    host      a tensor, page-locked if asked    on the current stream; beside the compute on a copier's (`comm/memory.py`)
    file      a region of the rank's file       by a worker thread, through page-locked memory (`file_store`)

Invariant: the accesses of one array take effect in the order in which they were started.  Two accesses overlap in time
only if they touch different elements or both read.  So an array can be streamed: slice k is written while slice k + 1 is
read (Rajbhandari et al. 2021, ZeRO-Infinity, section 6).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending
from megazero.comm.memory import host_tensor
from megazero.zero.sharding import BucketLayout, ShardingPolicy

Location: TypeAlias = Literal["device", "host", "file"]

FILE_SLICE_ELEMENTS = 1 << 22  # elements of a file that are updated at a time
# Paths below the root of the control groups: limit, usage, statistics.  Then the statistic of the page cache that the
# kernel frees first.
_CGROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class Access(NamedTuple):
    """A read or a write of elements [start, stop)."""

    start: int
    stop: int
    writes: bool

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two accesses matters."""
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


class FlatArray(ABC):
    """`numel` elements of `dtype` in one location."""

    numel: int
    dtype: torch.dtype
    location: Location
    tensor: Tensor | None  # [numel] if addressable; call `flush` before changing it in place

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def write(self, start: int, values: Tensor) -> None:
        """Set the elements from `start` on.  `values` may be on any device and of any dtype."""
        self.start_write(start, values).wait()

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) after all earlier writes: a view (device, host) or a CPU copy (file)."""

    @abstractmethod
    def start_read(self, out: Tensor, start: int) -> Pending:
        """Start to copy the elements from `start` on into `out`, contiguous [n] of `dtype`.  Do not touch `out` before
        `wait`, which makes the result visible: to the current stream if it is on a CUDA device, otherwise to the host.

        Raises:
            StorageError: the copy failed; at every `wait`.
        """

    @abstractmethod
    def start_write(self, start: int, values: Tensor) -> Pending:
        """Like `write`, but `values` must not change before `wait`.  Later reads see the new values without a `wait`."""

    @abstractmethod
    def flush(self) -> None:
        """Block until every access is complete.  Raises the error of a write that failed."""

    def access(self, start: int, stop: int, *, writes: bool) -> Access:
        """Return elements [start, stop) as an access.  Raises: ValueError: the array has no such elements."""
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"elements [{start}, {stop}) are not within an array of {self.numel} elements")
        return Access(start, stop, writes)


def check_out(out: Tensor, dtype: torch.dtype) -> None:
    """Raises: ValueError: one copy of elements of `dtype` cannot fill `out`."""
    if out.dtype != dtype or out.dim() != 1 or not out.is_contiguous():
        hint = f"it is {list(out.shape)} with strides {out.stride()}, {out.dtype}"
        raise ValueError(f"out must be contiguous, [n] and {dtype}; {hint}")


def as_flat(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values as contiguous [n] of `dtype` on their device, since a copy that also converts would block the
    host.
    """
    return values.detach().to(dtype).reshape(-1).contiguous()


class InMemory(FlatArray):
    """A flat array that is a contiguous tensor.  `location` names its purpose: without a GPU both kinds are CPU memory."""

    tensor: Tensor

    def __init__(self, tensor: Tensor, location: Literal["device", "host"]) -> None:
        check_out(tensor, tensor.dtype)
        self.tensor, self.numel, self.dtype, self.location = tensor, tensor.numel(), tensor.dtype, location
        self._under_way: list[tuple[Access, torch.cuda.Event]] = []

    def read(self, start: int, stop: int) -> Tensor:
        self._wait_for_conflicts(self.access(start, stop, writes=False), self.tensor.device)
        return self.tensor[start:stop]

    def start_read(self, out: Tensor, start: int) -> Pending:
        check_out(out, self.dtype)
        access = self.access(start, start + out.numel(), writes=False)
        return self._copy(out, self.tensor[access.start : access.stop], access)

    def start_write(self, start: int, values: Tensor) -> Pending:
        access = self.access(start, start + values.numel(), writes=True)
        # Between memories, the narrower format is sent; within one memory, the copy converts.
        dtype = values.dtype if values.device == self.tensor.device else self.dtype
        if self.tensor.is_cuda and not values.is_cuda and not (values.dtype == dtype and values.is_pinned()):
            # Memory that is not page-locked would block the host.  torch keeps this until the stream has read it.
            values = torch.empty(values.shape, dtype=dtype, pin_memory=True).copy_(values.detach())
        return self._copy(self.tensor[access.start : access.stop], as_flat(values, dtype), access)

    def flush(self) -> None:
        for _, event in self._under_way:
            event.synchronize()
        self._under_way.clear()

    def _wait_for_conflicts(self, access: Access, device: torch.device) -> None:
        """Make later work on `device`'s current stream, or the host, wait for the copies that conflict with this
        access.
        """
        self._under_way = [(copy, event) for copy, event in self._under_way if not event.query()]
        for copy, event in self._under_way:
            if not copy.conflicts(access):
                continue
            if device.type == "cuda":
                torch.cuda.current_stream(device).wait_event(event)
            else:
                event.synchronize()

    def _copy(self, target: Tensor, source: Tensor, access: Access) -> Pending:
        device = target.device if target.is_cuda else source.device
        self._wait_for_conflicts(access, device)
        with torch.no_grad():
            target.copy_(source, non_blocking=True)
        if device.type != "cuda":
            return Pending()
        event = torch.cuda.current_stream(device).record_event()
        self._under_way.append((access, event))
        if target.is_cuda and (source.is_cuda or not access.writes):
            return Pending(lambda: torch.cuda.current_stream(device).wait_event(event))
        return Pending(event.synchronize)  # after the wait, the host may read the target or change the source


def in_host_memory(numel: int, dtype: torch.dtype, *, pin: bool, remedy: str | None = None) -> InMemory:
    """Return zeros in host memory; see `host_tensor`.  Raises: StorageError."""
    return InMemory(host_tensor(numel, dtype, pin=pin, remedy=remedy), "host")


class Extent(Enum):
    """How much of a bucket's weights, gradients or optimizer state a rank holds between uses."""

    FULL = "full"
    SHARD = "shard"


_EXTENTS: Final = {
    # stage: weights, gradients, master weights and moments (Rajbhandari et al. 2020, figure 1)
    0: (Extent.FULL, Extent.FULL, Extent.FULL),
    1: (Extent.FULL, Extent.FULL, Extent.SHARD),
    2: (Extent.FULL, Extent.SHARD, Extent.SHARD),
    3: (Extent.SHARD, Extent.SHARD, Extent.SHARD),
}


@dataclass(frozen=True)
class Residency:
    """What a rank holds of a bucket, and where: weights, gradients, and state (master weights and moments).

    Full weights are on the device.  The reduced gradient is on the host, unless the state is on the device.
    """

    weights: Extent
    gradients: Extent
    state: Extent
    weights_on: Location = "device"
    state_on: Location = "device"

    @classmethod
    def of(
        cls, layout: BucketLayout, zero_stage: int, weights_on: Location = "device", state_on: Location = "device"
    ) -> Residency:
        """Return the table's row for a stage.  On one rank a shard is the whole bucket, unless it is offloaded.

        Args:
            weights_on: location of stage 3's shards of the weights.
            state_on: location of the optimizer state.
        """
        weights, gradients, state = _EXTENTS[zero_stage]
        if layout.first.persistent or (layout.shards == 1 and weights_on == "device"):
            weights = Extent.FULL
        if layout.shards == 1 and state_on == "device":
            gradients = Extent.FULL
        return cls(
            weights,
            gradients,
            state,
            weights_on if weights is Extent.SHARD else "device",
            state_on if layout.trains else "device",
        )


class StateMemory:
    """Allocates what this rank holds of its buckets: on the device.  See `Offload` for other locations."""

    def __init__(self, policy: ShardingPolicy) -> None:
        self.policy = policy

    def residency(self, layout: BucketLayout) -> Residency:
        """Return which elements of a bucket this rank holds, and where."""
        return Residency.of(layout, self.policy.zero_stage)

    def open(self, rank: int) -> None:
        """Reserve the space of this rank outside memory.  Raises: StorageError."""

    def allocate(self, location: Location, numel: int, dtype: torch.dtype) -> FlatArray:
        """Allocate an array of zeros in a location.  Raises: StorageError."""
        assert location == "device"
        return InMemory(torch.zeros(numel, dtype=dtype, device=self.policy.device), location)

    def close(self) -> None:
        """Free what lies outside memory."""


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line, by the line's first word."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def free_memory_bytes(
    device: torch.device, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the free memory of a CUDA device, or of the host within this container's limit.  All ranks of a host share
    the latter.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _fields(meminfo)["MemAvailable"] * 1024
    for limit, used, statistics, cache in _CGROUPS:
        if (cgroup / limit).exists() and (text := (cgroup / limit).read_text().strip()) != "max":
            in_use = int((cgroup / used).read_text()) - _fields(cgroup / statistics)[cache]
            free = min(free, max(int(text) - in_use, 0))
    return free
