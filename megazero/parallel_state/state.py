r"""One rank of a grid with its groups, passed as an argument.

    Axis ("tp", ranks, index) ---> Group ---> Backend     collectives of tensors: shared memory, two hosts, torch
                                        \---> Messages    broadcasts, messages between two ranks, small values

    context parallelism, cp = 6 = 2 (Ulysses) x 3 (ring)      cp_ulysses 0   1
    cp index = ring index * 2 + ulysses index      cp_ring 0         0   1      Ulysses neighbours are nearest
                                                           1         2   3
                                                           2         4   5

What a rank writes to and reads from the process groups' store does not grow with the world.  gloo connects two ranks at
their first message.  Groups of GPUs use only NCCL, and all host memory is sent over one gloo group.  A sum over the
world sums over its axes in turn, so no communicator of GPUs spans the world.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.launchers import joined_world
from megazero.parallel_state.axis import Axis, Counts, Traffic, Transfers, Wait
from megazero.parallel_state.grid import RankGrid

TIMEOUT = timedelta(minutes=30)  # for scripts that start their ranks themselves
MOST_SHARING_RANKS = 16  # in a group that reduces through shared memory: every rank signals every other


class Backend(Protocol):
    """Collectives of tensors for one group of at least two ranks; see `comm/backend.py`.

    Arguments are those of the functions with the same names in `comm/collectives.py`.  Every method starts an operation
    and returns the function that waits for it and completes it.
    """

    needs_scratch: bool  # `reduce_scatter` only receives the terms, into memory as long as `full`; the caller sums them
    runs_by_itself: bool  # operations continue while this rank computes; otherwise only while it waits for one

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait: ...

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait: ...

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait: ...

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait: ...

    def all_to_all_rows(self, out: Tensor, x: Tensor, axis: Axis, sends: Counts, receives: Counts) -> Wait: ...

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait: ...

    def link_bytes(self, operation: str, full: Tensor, axis: Axis, /) -> int:
        """Return the bytes that this rank sends to other hosts in an operation; `full` is the longer of its two
        buffers.
        """

    def check_order(self) -> None:
        """Compare the labels of gathers, unless their waits have done it.  Raises: OrderError."""

    def close(self) -> None:
        """Release all resources.  Unfinished operations fail."""


class Messages(Protocol):
    """Broadcasts, point-to-point messages and small objects of a group, which are not collectives of a `Backend`.

    Arguments are those of the functions with the same names in `comm/collectives.py`.
    """

    def broadcast(self, tensor: Tensor, axis: Axis, source: int, /) -> Wait: ...

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis, /) -> Sequence[Wait]: ...

    def gather(self, values: list[Any], axis: Axis, /) -> list[Any]:
        """Return the lists of all ranks as one list, in rank order."""

    def from_first(self, value: Any, axis: Axis, /) -> Any: ...

    def largest(self, numbers: Sequence[float], axis: Axis, /) -> Sequence[float]: ...


@dataclass(eq=False)
class Group:
    """The communicators of one set of ranks.  Axes with equal ranks share them; `ParallelState.leave` closes them."""

    process_group: dist.ProcessGroup | None  # None if only host memory is sent, or after `close`
    device: torch.device  # where the ranks compute
    timeout_seconds: float  # how long an operation may wait for a peer
    shares_memory: bool  # whether ranks of one host may communicate through shared memory
    local_world_size: int  # ranks of a host; rank // local_world_size is the host
    siblings: Collection[Group]  # all groups of this rank
    host: dist.ProcessGroup | None = None  # gloo group with at least these ranks, for messages of host memory
    backends: dict[str, Backend] = field(default_factory=dict)  # by type of the tensors' device; chosen by `comm`
    messages: Messages | None = None  # None: the process groups send them
    # Waits of operations whose `Pending` was dropped: gloo stops reading from a peer if a message's memory is freed.
    unfinished: deque[Wait] = field(default_factory=deque)

    def close(self) -> None:
        """Release the backends and the process groups."""
        for backend in self.backends.values():
            backend.close()
        self.backends.clear()
        self.unfinished.clear()
        self.process_group = self.host = None


class Groups(dict[tuple[tuple[int, ...], str], Group]):
    """This rank's groups by their ranks and purpose, each created when it is first needed.

    Attributes:
        is_reusable: whether further states may use the groups: they are open, and no operation was left running.
        savers: number of states that have communicators for saving.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_reusable, self.savers = True, 0

    def close(self) -> None:
        """Release every process group."""
        self.is_reusable = False
        for group in self.values():
            group.close()


class SavingAxes(NamedTuple):
    """The axes of a stage and of all ranks for saving: only checkpoints use them, for messages of host memory."""

    model: Axis
    world: Axis


@dataclass(frozen=True)
class Links:
    """How this rank communicates with the others.

    Args:
        device: where this rank computes; None: the CPU.
        timeout_seconds: how long a collective may wait for a peer.
        local_world_size: number of ranks on this host, including this one.
        shares_memory: CPU ranks of one host reduce and gather through shared memory; False: always use process groups.
        max_ctas: most thread blocks that NCCL may use over tp, cp, dp, pp and ep; no limit for axes without a number.
    """

    device: torch.device | None = None
    timeout_seconds: float = 600
    local_world_size: int = 1
    shares_memory: bool = True
    max_ctas: Mapping[str, int] = field(default_factory=dict)


class ParallelState:
    """One rank of a grid with its process groups, which are created at once, one for each distinct set of ranks.

    Args:
        grid: the rank grid; its world size must equal the number of running ranks.
        rank: this rank.
        links: how it communicates with the others.
        groups: groups of another state that was created with the same arguments.

    Attributes:
        cp, and dp if cp is above 1: only sizes and indices of ranks, without a group.
        model, world: ranks of this stage, and all ranks; both send host memory and objects, and only `world` sums
            tensors.
        cp_ulysses, cp_ring: the two factors of cp: ranks that exchange heads for tokens, and ranks that pass on keys
            and values.
        dp_cp: ranks with the same parameters, over which gradients are summed; dp itself if cp is 1.
        shard, replica: the two factors of dp_cp: ranks that hold different shards, and ranks that hold the same one.
        groups: its process groups, which another state may share.

    Raises:
        ValueError: the grid has another number of ranks than were started; a CUDA run has no backend for CPU tensors;
            or the device is not the current CUDA device.
    """

    def __init__(self, grid: RankGrid, rank: int = 0, links: Links = Links(), groups: Groups | None = None) -> None:
        running = self._started()
        if grid.world_size != running:
            hint = f"start {grid.world_size}, or change the degrees"
            raise ValueError(f"tp*cp*dp*pp={grid.world_size} ranks are described but {running} were started; {hint}")
        self.grid, self.rank, self.local_world_size = grid, rank, links.local_world_size
        self.device = links.device or torch.device("cpu")
        if self.device.type == "cuda":
            current = torch.device("cuda", torch.cuda.current_device())
            if self.device.index not in (None, current.index):
                raise ValueError(
                    f"this rank computes on {self.device}, but the current device is {current}: streams of both would not "
                    f"wait for one another; call torch.cuda.set_device({self.device.index}) first"
                )
            self.device = current  # with an index, as tensors report it
        if running > 1 and self.device.type != "cpu" and "gloo" not in str(dist.get_backend_config()):
            raise ValueError(
                f"the process group was made with backend {dist.get_backend_config()}, but checkpoints travel as CPU "
                'tensors; use init_process_group("cpu:gloo,cuda:nccl")'
            )
        self.at = grid.coordinate(rank)
        self.traffic = self._new_traffic()
        connect_on_demand(os.environ)
        self._timeout_seconds, self._max_ctas = links.timeout_seconds, links.max_ctas
        self._shares_memory = links.shares_memory and self.device.type == "cpu"
        self.groups = Groups() if groups is None else groups
        self.tp, self.pp = (self._axis(axis, grid.group_of(rank, axis)) for axis in ("tp", "pp"))
        # Gradients need dp_cp, attention the two factors of cp.  Others get no communicator: NCCL's takes device memory even
        # if it is unused.
        is_whole = grid.cp == 1
        self.dp = self._axis("dp", grid.group_of(rank, "dp"), communicates=is_whole)
        self.cp = self._axis("cp", grid.group_of(rank, "cp"), communicates=False)
        # Messages down and up the pipeline have separate communicators, so that neither waits for the other.
        self.pp_up = replace(self.pp, group=self._group(self.pp.ranks, "up", "pp"))
        # If dp is 1, ZeRO reduces over the ranks of cp: attention has its own groups so as not to wait for buckets.
        self.cp_ulysses, self.cp_ring = self.cut(self.cp, grid.cp_ulysses, "cp", "cp", "attention")
        self.dp_cp = self.dp if is_whole else self._axis("dp_cp", grid.group_of(rank, "dp", "cp"))
        self.shard, self.replica = self.dp_cp, Axis("replica", (rank,), traffic=self.traffic)
        if 0 < grid.shard_group_size < self.dp_cp.size:
            self.shard, self.replica = self.cut(self.dp_cp, grid.shard_group_size, "shard", "replica")
        self.model = self._host_axis("stage", grid.group_of(rank, "tp", "cp", "dp"))
        self.world = self._world()

    @property
    def ep(self) -> Axis:
        """Ranks that hold different experts.  Every rank must first access `ep` and `edp` in the same order."""
        columns = zip(*self.grid.expert_table(self.rank), strict=True)
        # A group of its own: tokens must not wait for gradients, even if another axis has the same ranks.
        return self._axis("ep", next(ranks for ranks in columns if self.rank in ranks), "experts")

    @property
    def edp(self) -> Axis:
        """Ranks that hold the same experts, over which their gradients are summed."""
        return self._axis("edp", next(row for row in self.grid.expert_table(self.rank) if self.rank in row))

    @property
    def device_type(self) -> str:
        """Type of the device that the run computes on; a plan has its tensors on another device."""
        return self.device.type

    def _started(self) -> int:
        """Return the number of running ranks."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def _new_traffic(self) -> Traffic:
        """Return the counter of the bytes that this rank sends."""
        return Traffic()

    def _world(self) -> Axis:
        """Return the axis of all ranks.  Up to 16 ranks that share memory sum in one operation, others over one axis
        after another.
        """
        ranks = tuple(range(self.grid.world_size))
        if self._shares_memory and len(ranks) <= MOST_SHARING_RANKS:
            return self._axis("world", ranks)
        factors = tuple(replace(axis, name="world") for axis in (self.tp, self.dp_cp, self.pp) if axis.size > 1)
        return replace(self._host_axis("world", ranks), factors=factors)

    def among_stages(self, stages: Sequence[int], name: str = "tied") -> Axis:
        """Return the axis of the ranks of these pipeline stages that have this rank's other coordinates; an axis of this
        rank alone if its stage is none of them.

        Every rank of the pipeline must call this, in the same order: ranks outside take part in creating the group.
        """
        ranks = tuple(self.pp.ranks[stage] for stage in sorted(set(stages)))
        self._group(ranks, "", name)
        return self._axis(name, ranks if self.rank in ranks else (self.rank,))

    def saving_axes(self, timeout_seconds: float) -> SavingAxes:
        """Return axes with a communicator for host memory, for saving in a thread during training.  Every rank must
        call this once.

        Call it before the first step: later, if a rank has died, the others would wait for it.
        """
        traffic, group = Traffic(), None  # another thread counts its own traffic
        if self.world.size > 1:
            self.groups.savers += 1  # engines that share groups each save in a thread of their own
            ranks, purpose = self.world.ranks, f"save {self.groups.savers}"
            made = self._process_group(ranks, torch.device("cpu"), timeout_seconds, "gloo")
            # no shared memory, which serves only one thread
            cpu, siblings = torch.device("cpu"), self.groups.values()
            group = Group(None, cpu, timeout_seconds, False, self.local_world_size, siblings, made)
            self.groups[ranks, purpose] = group
        stage = replace(self.model, name="saving stage", group=group if self.model.size > 1 else None, traffic=traffic)
        return SavingAxes(stage, replace(self.world, name="saving world", group=group, traffic=traffic, factors=()))

    def with_own_group(self, axis: Axis, purpose: str) -> Axis:
        """Return the same axis with its own communicator, whose operations do not queue behind those of the axis.

        Every rank must call this, in the same order.
        """
        return replace(axis, group=self._group(axis.ranks, purpose, axis.name))

    def across_tp(self, ranks: Sequence[int], name: str) -> tuple[Axis, list[list[int]]]:
        """Return an axis of these ranks at every tensor-parallel index, with its own communicator, and its ranks by
        tensor-parallel index.

        Every rank must call this, in the same order.
        """
        at = [self.grid.coordinate(rank) for rank in ranks]
        table = [[self.grid.rank(replace(place, tp=tp)) for place in at] for tp in range(self.tp.size)]
        return self._axis(name, tuple(rank for row in table for rank in row), name), table

    def block_on(self, axis: Axis, size: int, name: str, purpose: str = "") -> Axis:
        """Return this rank's block of `size` consecutive ranks of an axis.  Every rank must call this, in the same
        order.
        """
        first = axis.index // size * size
        return self._axis(name, axis.ranks[first : first + size], purpose)

    def leave(self) -> None:
        """Release every process group: if one is still referenced when the interpreter exits, the process aborts."""
        self.groups.close()

    def _axis(self, name: str, ranks: tuple[int, ...], purpose: str = "", *, communicates: bool = True) -> Axis:
        group = self._group(ranks, purpose, name) if communicates else None
        return Axis(name, ranks, ranks.index(self.rank), group, self.traffic)

    def cut(self, axis: Axis, size: int, inner: str, outer: str, purpose: str = "") -> tuple[Axis, Axis]:
        """Return this rank's block of `size` consecutive ranks of `axis`, and the ranks at the same position in the
        other blocks.

        Every rank must call this, in the same order.
        """
        others = axis.ranks[axis.index % size :: size]
        return self.block_on(axis, size, inner, purpose), self._axis(outer, others, purpose)

    def _host_axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        """Return an axis for messages of host memory only, without a communicator of its own."""
        axis = self._axis(name, ranks, communicates=False)
        if axis.size == 1:
            return axis
        group = self.groups.setdefault((ranks, "host"), self._joined(None, dist.group.WORLD))
        return replace(axis, group=group)

    def _group(self, ranks: tuple[int, ...], purpose: str, name: str) -> Group | None:
        """Return the group of these ranks for this purpose.  The first call, by every rank of the world, creates it.

        Args:
            name: the axis.  Axes without a limit in `max_ctas` sum gradients or gather weights, and have that of dp.
        """
        on_cpu, seconds = self.device.type == "cpu", self._timeout_seconds
        if len(ranks) > 1 and (ranks, purpose) not in self.groups:
            made = dist.group.WORLD
            if len(ranks) < self.grid.world_size or purpose or not on_cpu:
                backend = "nccl" if self.device.type == "cuda" else None
                most = self._max_ctas.get(name if name in self._max_ctas else "dp", 0)
                made = self._process_group(ranks, self.device, seconds, backend, most)
            self.groups[ranks, purpose] = self._joined(made, made if on_cpu else dist.group.WORLD)
        return self.groups.get((ranks, purpose))

    def _joined(self, made: dist.ProcessGroup | None, host: dist.ProcessGroup | None) -> Group:
        limits, siblings = (self._timeout_seconds, self._shares_memory, self.local_world_size), self.groups.values()
        return Group(made, self.device, *limits, siblings, host)

    def _process_group(
        self, ranks: tuple[int, ...], device: torch.device, seconds: float, backend: str | None, max_ctas: int = 0
    ) -> Any:
        # Only members wait for each other, so the time to create a group does not grow with the world.  torch names a
        # group by its ranks and the number of groups that a rank has created: a rank outside creates one of its own to
        # stay in step.
        timeout, options = timedelta(seconds=seconds), None
        if device.type == "cuda":
            # A collective takes few of a GPU's cores and much computation depends on it, so it must not queue behind other
            # kernels.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timeout  # torch warns if it differs from the group's
            if max_ctas:  # most cores to use; 0: NCCL chooses
                options.config.max_ctas = max_ctas
        group = dist.new_group(
            list(ranks if self.rank in ranks else (self.rank,)),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
        )
        if device.type == "cuda":  # NCCL connects at the first call, and here all members are sure to make it
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group


def connect_on_demand(environment: MutableMapping[str, str]) -> None:
    """Let gloo connect two ranks at their first message, unless the user has set this.  Call it before groups are
    created.

    Otherwise a new group connects all pairs of its ranks, for which each rank writes 154 + 8 n bytes to the store and
    reads what all others have written.
    """
    environment.setdefault("TORCH_GLOO_LAZY_INIT", "1")


#: Groups by the arguments of their states, for reuse: torch never frees the sockets and threads of a process group.
_MADE: WeakValueDictionary[tuple[Any, ...], Groups] = WeakValueDictionary()


def parallel_state_of(
    grid: RankGrid | None = None,
    device: torch.device | None = None,
    *,
    timeout_seconds: float = TIMEOUT.total_seconds(),
    shard_group_size: int = 0,
    cp_ulysses: int = 0,
) -> ParallelState:
    """Return the parallel state of this rank, whether a launcher such as torchrun has started it or it runs alone.

    The same arguments give the same process groups, while torch's default group is the same.  Every rank must make
    these calls in the same order, for all engines together.

    Args:
        grid: the rank grid; None: data parallelism over all ranks.
        device: where this rank computes; None: `local_device()`, which becomes the current device.
        timeout_seconds: see `Links`.
        shard_group_size, cp_ulysses: those of the grid, see `RankGrid`; 0: as the grid says.

    Raises:
        ValueError: as `ParallelState`.
    """
    world, rank = joined_world()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if device is None and (device := local_device()).type == "cuda":
        torch.cuda.set_device(device)
    grid = grid or RankGrid(dp=world)
    ulysses, group = cp_ulysses or grid.cp_ulysses, shard_group_size or grid.shard_group_size
    grid = replace(grid, cp_ulysses=ulysses, shard_group_size=group)
    links = Links(device, timeout_seconds, local_world_size)
    if not dist.is_initialized():
        return ParallelState(grid, rank, links)
    key = dist.group.WORLD, grid, device, timeout_seconds, local_world_size
    groups = _MADE.get(key)
    if groups is None or not groups.is_reusable:
        groups = _MADE[key] = Groups()
    return ParallelState(grid, rank, links, groups)


def local_device() -> torch.device:
    """Return cuda:LOCAL_RANK, or the only device that this rank sees, if the ranks can communicate over CUDA; else the
    CPU.
    """
    talks = not dist.is_initialized() or dist.get_world_size() == 1 or "nccl" in str(dist.get_backend_config())
    if not (talks and torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0")))
