"""Which rank talks to whom: a grid of ranks, its groups as data, then process groups.

    order "tp-cp-dp-pp", tp=2 dp=2 pp=2            pp 0            pp 1
    rank = tp + 2*dp + 4*pp                     dp 0   dp 1     dp 0   dp 1
                                          tp 0   0      2        4      6
                                          tp 1   1      3        5      7

`RankGrid` is arithmetic and needs no process. `ParallelState` binds one rank of a grid to process groups and is handed
down by argument. An axis of size 1 has no group, and nothing that runs over it makes a call.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

AXES = ("tp", "cp", "dp", "pp")
TIMEOUT = timedelta(minutes=30)  # of the scripts that start their ranks themselves


@dataclass(frozen=True)
class Coordinate:
    """Where one rank stands on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class RankGrid:
    """Sizes of the parallel axes and the order in which ranks fill them, innermost (nearest neighbours) first.

    Args:
        tp, cp, dp, pp: degree of tensor, context, data and pipeline parallelism.
        order: the four axes joined by "-", innermost first.

    Raises:
        ValueError: a degree below 1, or an order that is not a permutation of the axes.

    Source: Narayanan et al. 2021, section 3 (tensor parallelism inside a node, pipeline across nodes).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "tp-cp-dp-pp"

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ValueError(f"{axis}={self.size(axis)} must be at least 1")
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ValueError(f"order={self.order!r} must name each of {', '.join(AXES)} once, joined by '-'")

    def size(self, axis: str) -> int:
        """Degree of one axis."""
        return int(getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.size(axis) for axis in AXES)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= self.size(axis)
        return strides

    def coordinate(self, rank: int) -> Coordinate:
        """Place of `rank` on each axis.  Raises: ValueError for a rank outside the grid."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the grid of {self.world_size} ranks")
        return Coordinate(**{axis: rank // self._strides[axis] % self.size(axis) for axis in AXES})

    def rank(self, at: Coordinate) -> int:
        """The rank at a coordinate.  Raises: ValueError for a coordinate outside the grid."""
        for axis in AXES:
            if not 0 <= getattr(at, axis) < self.size(axis):
                raise ValueError(f"{axis}={getattr(at, axis)} is outside the grid, whose {axis} is {self.size(axis)}")
        return sum(getattr(at, axis) * self._strides[axis] for axis in AXES)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` only on `axes`, in rank order.

        Args:
            rank: a rank of the grid; it is part of the group.
            axes: one or more axis names; the group has the product of their sizes.

        Raises:
            ValueError: an unknown or repeated axis.
        """
        _check_axes(axes)
        base = rank - sum(getattr(self.coordinate(rank), axis) * self._strides[axis] for axis in axes)
        steps = ([i * self._strides[axis] for i in range(self.size(axis))] for axis in axes)
        return tuple(sorted(base + sum(combination) for combination in itertools.product(*steps)))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group over `axes`: a partition of all ranks, ordered by first rank.  Raises: as `group_of`."""
        _check_axes(axes)
        others = [axis for axis in AXES if axis not in axes]
        steps = ([i * self._strides[axis] for i in range(self.size(axis))] for axis in others)
        bases = sorted(sum(combination) for combination in itertools.product(*steps))
        return [self.group_of(base, *axes) for base in bases]

    def embedding_group_of(self, rank: int) -> tuple[int, ...]:
        """First and last pipeline stage at this rank's other coordinates: the two holders of tied embeddings.

        One rank when pp = 1.  The group is defined for every rank; those in between are not members of it.
        """
        pipeline = self.group_of(rank, "pp")
        return tuple(sorted({pipeline[0], pipeline[-1]}))


def _check_axes(axes: Sequence[str]) -> None:
    if unknown := [axis for axis in axes if axis not in AXES]:
        raise ValueError(f"unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"axes {', '.join(axes)} name one more than once")


class Call(NamedTuple):
    """The collective that this rank entered or left last, and when (`time.perf_counter`).

    To enter is to wait for it on the host; what runs beside the computation has not been entered.
    """

    operation: str
    axis: str
    ranks: tuple[int, ...]
    is_inside: bool
    since: float


class Traffic:
    """Bytes that this rank sent, by (axis, operation), as ring volume; what it waits for, and how long it has waited.

    One thread at a time makes the calls that are counted here; any thread may look.

    Source: ring collectives send (n-1)/n of the full buffer per pass (Rajbhandari et al. 2020, section 7).
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.waited_seconds = 0.0
        self.last: Call | None = None

    def add(self, axis: str, operation: str, sent_bytes: int) -> None:
        """Count one call."""
        self.sent_bytes[axis, operation] += sent_bytes
        self.calls[axis, operation] += 1

    def enter(self, axis: Axis, operation: str) -> Call:
        """Note that the host waits for an operation from now on."""
        self.last = Call(operation, axis.name, axis.ranks, True, time.perf_counter())
        return self.last

    def leave(self, entered: Call) -> None:
        """Note that it waits no longer."""
        now = time.perf_counter()
        self.waited_seconds += now - entered.since
        self.last = Call(entered.operation, entered.axis, entered.ranks, False, now)

    def by_axis(self) -> dict[str, int]:
        """Bytes sent over each axis, all operations together."""
        totals: Counter[str] = Counter()
        for (axis, _), sent in self.sent_bytes.items():
            totals[axis] += sent
        return dict(totals)

    def reset(self) -> None:
        """Start counting from zero."""
        self.sent_bytes.clear()
        self.calls.clear()


@dataclass
class Shared:
    """Memory that ranks of this machine share, by the ranks that do.

    Args:
        timeout_seconds: how long a rank may keep others waiting in it.
        rooms: by ranks and purpose, made by `comm` when first needed; None for ranks that cannot share any.
        listening: hears the ranks of all rooms; of `comm`.
    """

    timeout_seconds: float
    rooms: dict[tuple[tuple[int, ...], str], Any] = field(default_factory=dict)
    listening: Any = None

    def close(self) -> None:
        """Leave all of it."""
        for room in self.rooms.values():
            if room is not None:
                room.close()
        self.rooms.clear()


@dataclass(frozen=True, eq=False)
class Axis:
    """One rank's view of a group: what every parallel layer and every collective takes as its argument.

    Args:
        name: "tp", "dp", ...; the key under which traffic is counted.
        ranks: global ranks of the group, in order.
        index: this rank's place among them.
        group: the process group; None when the axis has one rank.
        traffic: where collectives count their bytes.
        shared: what `comm` has found for its ranks on this machine; None where they need a communicator.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    shared: Shared | None = None

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class SavingAxes:
    """The ranks of a stage and all ranks, over communicators that only checkpoints use."""

    model: Axis
    world: Axis


class ParallelState:
    """One rank of a grid with its process groups, made up front, once per distinct set of ranks.

    Args:
        grid: the rank grid; its world size must equal the number of running ranks.
        rank: this rank.
        device: where this rank computes.
        timeout_seconds: how long a collective may wait for a peer.
        shard_group_size: neighbours on the dp axis that share one copy of the sharded state; 0 for all of them.
        neighbours: ranks that run on this machine, this one included.
        shares_memory: CPU ranks that all run on one machine exchange through memory; False takes their communicator always.

    Attributes:
        shard, replica: dp cut in two: ranks that hold different shards, and ranks that hold the same one.

    Raises:
        ValueError: `shard_group_size` does not divide dp, the grid does not have as many ranks as were started, or a CUDA
            run has no backend for CPU tensors.
    """

    def __init__(
        self,
        grid: RankGrid,
        rank: int = 0,
        device: torch.device | None = None,
        timeout_seconds: float = 600,
        shard_group_size: int = 0,
        neighbours: int = 1,
        shares_memory: bool = True,
    ) -> None:
        running = dist.get_world_size() if dist.is_initialized() else 1
        if grid.world_size != running:
            raise ValueError(
                f"tp*cp*dp*pp={grid.world_size} ranks are described but {running} were started; "
                f"start {grid.world_size}, or change the degrees"
            )
        if shard_group_size and grid.dp % shard_group_size:
            raise ValueError(f"shard_group_size={shard_group_size} must divide dp={grid.dp}")
        self.grid, self.neighbours = grid, neighbours
        self.rank = rank
        self.device = device or torch.device("cpu")
        if running > 1 and self.device.type != "cpu" and "gloo" not in str(dist.get_backend_config()):
            raise ValueError(
                f"the process group was made with backend {dist.get_backend_config()}, but checkpoints travel as CPU "
                'tensors; use init_process_group("cpu:gloo,cuda:nccl")'
            )
        self.at = grid.coordinate(rank)
        self.traffic = Traffic()
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._shared = Shared(timeout_seconds) if shares_memory and self.device.type == "cpu" else None
        self._axes: list[Axis] = []
        self._saving: SavingAxes | None = None
        self.tp, self.cp, self.dp, self.pp = (self._axis(axis, grid.group_of(rank, axis)) for axis in AXES)
        # Messages down and up the pipeline go over communicators of their own, so that neither waits for the other.
        self.pp_up = replace(self.pp, group=self._group(self.pp.ranks, "up"))
        self._axes.append(self.pp_up)
        self.model = self._axis("stage", grid.group_of(rank, "tp", "cp", "dp"))
        self.world = self._axis("world", tuple(range(grid.world_size)))
        holders = grid.embedding_group_of(rank)
        self.embedding = self._part("embedding", holders)
        size = shard_group_size or grid.dp
        first = self.dp.index // size * size
        self.shard, self.replica = self.dp, Axis("replica", (rank,), traffic=self.traffic)
        if size < grid.dp:
            self.shard = self._axis("shard", self.dp.ranks[first : first + size])
            self.replica = self._axis("replica", self.dp.ranks[self.dp.index % size :: size])

    def among_stages(self, stages: Sequence[int]) -> Axis:
        """The ranks of some pipeline stages at this rank's other coordinates; alone where it is in none of them.

        Every rank of the pipeline makes it, in one order.
        """
        return self._part("tied", [self.pp.ranks[stage] for stage in sorted(set(stages))])

    def _part(self, name: str, ranks: Sequence[int]) -> Axis:
        self._group(tuple(ranks))
        return self._axis(name, ranks if self.rank in ranks else (self.rank,))

    def _axis(self, name: str, ranks: Sequence[int]) -> Axis:
        ranks = tuple(ranks)
        self._axes.append(Axis(name, ranks, ranks.index(self.rank), self._group(ranks), self.traffic, self._shared))
        return self._axes[-1]

    def saving_axes(self, timeout_seconds: float) -> SavingAxes:
        """Communicators of their own for saving behind the training, over host memory.  Every rank makes them, once.

        To be made before the first step: in the middle of a run the ranks would wait for one that has died meanwhile.

        Args:
            timeout_seconds: how long a rank may wait for a peer that is writing.
        """
        if self._saving is None:
            self._timeout, usual = timedelta(seconds=timeout_seconds), self._timeout
            traffic = Traffic()
            axes = [
                replace(
                    axis,
                    name=f"saving {axis.name}",
                    group=self._group(axis.ranks, "save"),
                    traffic=traffic,
                    shared=None,  # another thread's
                )
                for axis in (self.model, self.world)
            ]
            self._timeout = usual
            self._axes += axes
            self._saving = SavingAxes(*axes)
        return self._saving

    def leave(self) -> None:
        """Let go of every process group; one that is referred to when the interpreter exits would abort the process."""
        for axis in self._axes:
            object.__setattr__(axis, "group", None)
            object.__setattr__(axis, "shared", None)
        if self._shared is not None:
            self._shared.close()
        self._groups.clear()

    def _group(self, ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if len(ranks) == self.grid.world_size and not purpose and self.device.type != "cuda":
            return dist.group.WORLD  # on CUDA it has the options that whoever made it chose; unused, it costs nothing
        if (ranks, purpose) not in self._groups:
            # Only members wait for one another, so making a group does not grow with the world.  torch names a group by its
            # ranks and by how many groups a rank has made: a rank outside makes one of its own, to have made as many.
            members = ranks if self.rank in ranks else (self.rank,)
            backend, device = ("gloo", torch.device("cpu")) if purpose == "save" else (None, self.device)
            group = dist.new_group(
                list(members),
                timeout=self._timeout,
                backend=backend,
                pg_options=None if purpose == "save" else nccl_options(self.device, self._timeout),
                use_local_synchronization=True,
            )
            # NCCL connects at the first call; here all members are certain to make it.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self._groups[ranks, purpose] = group
        return self._groups[ranks, purpose]


def nccl_options(device: torch.device, timeout: timedelta) -> Any:
    """How process groups of a CUDA run communicate: on streams that go before the computation's; None on other devices.

    A collective takes few of a GPU's cores, and what waits for it is long: it must not stand behind a queue of kernels.

    Args:
        device: where the rank computes.
        timeout: of the group's collectives.
    """
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where it is not the group's
    return options


def parallel_state_of(
    grid: RankGrid | None = None,
    device: torch.device | None = None,
    *,
    timeout_seconds: float = TIMEOUT.total_seconds(),
    shard_group_size: int = 0,
) -> ParallelState:
    """This rank's place among those that a launcher such as torchrun has started, or alone.

    Args:
        grid: the rank grid; data parallelism over all ranks when None.
        device: where this rank computes; `local_device()` when None.
        timeout_seconds, shard_group_size: as in `ParallelState`.

    Raises:
        ValueError: as `ParallelState`.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    return ParallelState(
        grid or RankGrid(dp=world), rank, device or local_device(), timeout_seconds, shard_group_size, neighbours
    )


def local_device() -> torch.device:
    """cuda:LOCAL_RANK where there is CUDA and the ranks can talk over it, else the CPU."""
    talks = not dist.is_initialized() or dist.get_world_size() == 1 or "nccl" in str(dist.get_backend_config())
    if not (talks and torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
