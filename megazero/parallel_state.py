"""Which ranks communicate with which: a grid of ranks, its groups as data, then process groups.

    order "tp-cp-dp-pp", tp=2 dp=2 pp=2            pp 0            pp 1
    rank = tp + 2*dp + 4*pp                     dp 0   dp 1     dp 0   dp 1
                                          tp 0   0      2        4      6
                                          tp 1   1      3        5      7

    context parallelism, cp = 6 = 2 (Ulysses) x 3 (ring)      cp_ulysses 0   1
    cp index = ring index * 2 + ulysses index      cp_ring 0         0   1      Ulysses neighbours are nearest
                                                           1         2   3
                                                           2         4   5

`RankGrid` is arithmetic and needs no process.  `ParallelState` joins one rank of a grid to its process groups and is
handed down by argument.  An axis of one rank has no group, and a collective over it makes no call.

[Note: starting many ranks]  What a rank writes into the store of the process groups and reads there does not grow with the
world: gloo connects two ranks when they first have a message, groups of GPUs are NCCL's alone, host memory travels over one
gloo group, and a sum over the world goes over its axes in turn, so that no communicator of GPUs spans it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.launchers import joined_world

AXES = ("tp", "cp", "dp", "pp")
TIMEOUT = timedelta(minutes=30)  # for scripts that start their ranks themselves
MOST_SHARING_RANKS = 16  # of a group that reduces through shared memory: every rank signals every other
Wait: TypeAlias = Callable[[], object]
Transfers: TypeAlias = Sequence[tuple[Tensor, int]]  # (tensor, global rank of the other side)


@dataclass(frozen=True)
class Coordinate:
    """Position of one rank on each axis."""

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
        """Position of `rank` on each axis.  Raises: ValueError for a rank outside the grid."""
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
        """`rank` and the ranks that differ from it only on `axes`, in rank order.

        Raises:
            ValueError: an unknown or repeated axis.
        """
        if unknown := [axis for axis in axes if axis not in AXES]:
            raise ValueError(f"unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
        if len(set(axes)) != len(axes):
            raise ValueError(f"axes {', '.join(axes)} name one more than once")
        at = self.coordinate(rank)
        steps = ([(i - getattr(at, axis)) * self._strides[axis] for i in range(self.size(axis))] for axis in axes)
        return tuple(sorted(rank + sum(combination) for combination in itertools.product(*steps)))

    def lies_within(self, axis: str, block: int, neighbours: int = 0) -> bool:
        """Whether no group over `axis` has ranks in two blocks of so many neighbouring ranks.

        neighbours: cut each group in groups of so many neighbours on the axis, and look at these; 0 for whole groups.
        """
        # Groups fill stretches of stride x size ranks, and any cut inside a stretch parts one of its groups.
        size = neighbours or self.size(axis)
        stretch = self._strides[axis] * size
        return size == 1 or self.world_size <= block or block % stretch == 0


class Call(NamedTuple):
    """The collective that this rank entered or left last.

    It is inside while the host waits for it, not while the operation runs beside the computation.
    """

    operation: str
    axis: str
    ranks: tuple[int, ...]
    is_inside: bool
    since: float  # of `time.perf_counter`


class Traffic:
    """Counts the bytes that this rank sent, by (axis, operation), as ring volume, and the time that it waited for peers.

    One thread at a time makes the calls that are counted here; any thread may read.

    Attributes:
        link_bytes: of the messages that this rank truly sends, those to other hosts.

    Source: ring collectives send (n-1)/n of the full buffer per pass (Rajbhandari et al. 2020, section 7).
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.link_bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.waited_seconds = 0.0
        self.last: Call | None = None
        self.advanced = 0.0  # when the host last began or ended a pass of a micro-batch; of `time.perf_counter`

    def advance(self) -> None:
        """The host makes progress without a collective."""
        self.advanced = time.perf_counter()

    def add(
        self,
        axis: str,
        operation: str,
        sent_bytes: int,
        link_bytes: int = 0,
        filled: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> None:
        """Count an operation that begins; `filled`: what it writes, which only a plan looks at."""
        self.sent_bytes[axis, operation] += sent_bytes
        self.link_bytes[axis, operation] += link_bytes
        self.calls[axis, operation] += 1

    def enter(self, axis: Axis, operation: str) -> Call:
        """The host starts to wait for an operation."""
        self.last = Call(operation, axis.name, axis.ranks, True, time.perf_counter())
        return self.last

    def leave(self, entered: Call) -> None:
        """The host has stopped waiting."""
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
        self.link_bytes.clear()
        self.calls.clear()


class Backend(Protocol):
    """Carries the collectives of tensors of one group of at least two ranks; see `comm/backend.py`.

    Arguments are those of the functions of the same names in `comm/collectives.py`.  Every method starts an operation and
    returns the call that waits for it and completes it.
    """

    needs_scratch: bool  # `reduce_scatter` only brings the parts into memory as long as `full`; the caller sums them
    needs_contiguous: bool  # `all_to_all` takes contiguous tensors only

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait: ...

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait: ...

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait: ...

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait: ...

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait: ...

    def link_bytes(self, operation: str, full: Tensor, axis: Axis, /) -> int:
        """What this rank sends to other hosts in an operation on a buffer, `full` being the longer of its two."""

    def check_order(self) -> None:
        """Compare the labels of gathers that their waits have not compared.  Raises: OrderError."""

    def progress(self) -> bool:
        """Continue the operations under way; False if they need no call for that."""

    def close(self) -> None:
        """Release what it holds; operations that are not finished fail."""


class Messages(Protocol):
    """Carries what no `Backend` does for a group: broadcasts, messages between two ranks, and small values.

    Arguments are those of the functions of the same names in `comm/collectives.py`.
    """

    def broadcast(self, tensor: Tensor, axis: Axis, source: int, /) -> Wait: ...

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis, /) -> Sequence[Wait]: ...

    def gather(self, values: list[Any], axis: Axis, /) -> list[Any]:
        """The lists of all ranks as one, in rank order."""

    def from_first(self, value: Any, axis: Axis, /) -> Any: ...

    def largest(self, numbers: Sequence[float], axis: Axis, /) -> Sequence[float]: ...


@dataclass(eq=False)
class Group:
    """The communication of one set of ranks.  Axes with equal ranks share it; `ParallelState.leave` closes it."""

    process_group: dist.ProcessGroup | None  # None where only host memory travels, and once closed
    device: torch.device  # where the ranks compute
    timeout_seconds: float  # how long an operation may wait for a peer
    shares_memory: bool  # whether ranks of one host may communicate through memory
    neighbours: int  # ranks of a host: rank // neighbours numbers the hosts
    siblings: Collection[Group]  # all groups of this rank
    host: dist.ProcessGroup | None = None  # of gloo, with at least these ranks: carries their messages of host memory
    backends: dict[str, Backend] = field(default_factory=dict)  # by type of the tensors' device; `comm` chooses them
    messages: Messages | None = None  # None: the process groups carry them
    # Of operations under way that nobody waits for.  gloo stops reading from a peer if a message's memory is gone, too.
    unfinished: deque[Wait] = field(default_factory=deque)

    def close(self) -> None:
        """Release the backends and the process groups."""
        for backend in self.backends.values():
            backend.close()
        self.backends.clear()
        self.unfinished.clear()
        self.process_group = self.host = None


class Groups(dict[tuple[tuple[int, ...], str], Group]):
    """This rank's groups by their ranks and purpose; the first who needs one makes it.

    Attributes:
        is_reusable: whether further states may use them: they are open, and no operation was left under way.
        savers: how many states have communicators for saving.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_reusable, self.savers = True, 0

    def close(self) -> None:
        """Release every process group."""
        self.is_reusable = False
        for group in self.values():
            group.close()


@dataclass(frozen=True, eq=False)
class Axis:
    """One rank's view of a group: the argument of every parallel layer and every collective."""

    name: str  # "tp", "dp", ...; the key under which traffic is counted
    ranks: tuple[int, ...] = (0,)  # global ranks of the group, in order
    index: int = 0  # position of this rank among them
    group: Group | None = None  # None when the axis has one rank
    traffic: Traffic = field(default_factory=Traffic)
    parts: tuple[Axis, ...] = ()  # axes whose product it is, where `all_reduce` goes over these in turn

    @property
    def size(self) -> int:
        return len(self.ranks)

    def is_apart(self, index: int) -> bool:
        """Whether a rank, by its number on the axis, is on another host than this one."""
        block = self.group.neighbours if self.group is not None else 1
        return self.ranks[index] // block != self.ranks[self.index] // block

    @property
    def shares_hosts(self) -> bool:
        """Whether a host has several of these ranks, if all have as many neighbours.  Without a group each is alone."""
        block = self.group.neighbours if self.group is not None else 1
        return len({rank // block for rank in self.ranks}) < len(self.ranks)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group of these ranks.  Raises: RuntimeError where there is none, or no longer."""
        if self.group is None or self.group.process_group is None:
            raise RuntimeError(f"this rank has left the process group of {self.name}, or never joined one")
        return self.group.process_group

    @property
    def host_group(self) -> dist.ProcessGroup:
        """What carries messages of host memory among these ranks.  Raises: RuntimeError as `process_group`."""
        return self.process_group if self.group is None or self.group.host is None else self.group.host


class SavingAxes(NamedTuple):
    """The ranks of a stage, and all ranks, for messages of host memory that only checkpoints send."""

    model: Axis
    world: Axis


class ParallelState:
    """One rank of a grid with its process groups, made up front, once per distinct set of ranks.

    Args:
        grid: the rank grid; its world size must equal the number of running ranks.
        rank: this rank.
        device: where this rank computes.
        timeout_seconds: how long a collective may wait for a peer.
        shard_group_size: neighbours among dp_cp that share one copy of the sharded state; 0 for all of them.
        neighbours: ranks that run on this host, this one included.
        shares_memory: CPU ranks of one host reduce and gather through shared memory; False always takes process groups.
        groups: those of another state that was made with the same arguments.
        cp_ulysses: Ulysses degree of context parallelism; the ring has cp / cp_ulysses ranks.
        traffic: counts what this rank sends.

    Attributes:
        cp, and dp where cp is above 1: ranks to count and to number, without a group.
        model, world: ranks of this stage, and all; both send host memory and objects, and only `world` sums tensors.
        cp_ulysses, cp_ring: cp cut in two: ranks that exchange heads for tokens, and ranks that pass keys and values on.
        dp_cp: ranks with the same parameters, whose gradients add up; dp itself where cp is 1.
        shard, replica: dp_cp cut in two: ranks that hold different shards, and ranks that hold the same one.
        groups: its process groups, of which another state may use the same.
        planned_on: of a plan, whose tensors hold nothing, the type of device that its run would compute on.

    Raises:
        ValueError: `shard_group_size` does not divide dp*cp, or `cp_ulysses` cp; the grid does not have as many ranks as
            were started, or a CUDA run has no backend for CPU tensors.
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
        groups: Groups | None = None,
        cp_ulysses: int = 1,
        traffic: Traffic | None = None,
    ) -> None:
        running = self._started()
        if grid.world_size != running:
            raise ValueError(
                f"tp*cp*dp*pp={grid.world_size} ranks are described but {running} were started; "
                f"start {grid.world_size}, or change the degrees"
            )
        if cp_ulysses < 1 or grid.cp % cp_ulysses:
            raise ValueError(f"cp_ulysses={cp_ulysses} must divide cp={grid.cp}")
        same, names = grid.dp * grid.cp, "dp" if grid.cp == 1 else f"dp*cp={grid.dp}*{grid.cp}"
        if shard_group_size and same % shard_group_size:
            raise ValueError(f"shard_group_size={shard_group_size} must divide {names}={same}")
        self.grid, self.rank, self.neighbours = grid, rank, neighbours
        self.device = device or torch.device("cpu")
        if running > 1 and self.device.type != "cpu" and "gloo" not in str(dist.get_backend_config()):
            raise ValueError(
                f"the process group was made with backend {dist.get_backend_config()}, but checkpoints travel as CPU "
                'tensors; use init_process_group("cpu:gloo,cuda:nccl")'
            )
        self.at, self.planned_on = grid.coordinate(rank), ""
        self.traffic = traffic or Traffic()
        connect_on_demand(os.environ)
        self._timeout_seconds = timeout_seconds
        self._shares_memory = shares_memory and self.device.type == "cpu"
        self.groups = Groups() if groups is None else groups
        self.tp, self.pp = (self._axis(axis, grid.group_of(rank, axis)) for axis in ("tp", "pp"))
        # Gradients are summed over dp_cp, and attention exchanges over the two parts of cp: a communicator of NCCL takes
        # memory of the device whether it is used or not.
        is_whole = grid.cp == 1
        self.dp = self._axis("dp", grid.group_of(rank, "dp"), communicates=is_whole)
        self.cp = self._axis("cp", grid.group_of(rank, "cp"), communicates=False)
        # Messages down and up the pipeline have communicators of their own, so that neither waits for the other.
        self.pp_up = replace(self.pp, group=self._group(self.pp.ranks, "up"))
        # Where dp is 1, ZeRO reduces over the ranks of cp: attention must not wait for its buckets.
        self.cp_ulysses, self.cp_ring = self.cut(self.cp, cp_ulysses, "cp", "cp", "attention")
        self.dp_cp = self.dp if is_whole else self._axis("dp_cp", grid.group_of(rank, "dp", "cp"))
        self.shard, self.replica = self.dp_cp, Axis("replica", (rank,), traffic=self.traffic)
        if 0 < shard_group_size < same:
            self.shard, self.replica = self.cut(self.dp_cp, shard_group_size, "shard", "replica")
        self.model = self._host_axis("stage", grid.group_of(rank, "tp", "cp", "dp"))
        self.world = self._world()

    def _started(self) -> int:
        """How many ranks run."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def _world(self) -> Axis:
        """All ranks.  Up to 16 that may share memory sum in one operation, others over one axis after another."""
        ranks = tuple(range(self.grid.world_size))
        if self._shares_memory and len(ranks) <= MOST_SHARING_RANKS:
            return self._axis("world", ranks)
        parts = tuple(replace(one, name="world") for one in (self.tp, self.dp_cp, self.pp) if one.size > 1)
        return replace(self._host_axis("world", ranks), parts=parts)

    def among_stages(self, stages: Sequence[int], name: str = "tied") -> Axis:
        """The ranks of some pipeline stages at this rank's other coordinates; this rank alone if it is in none of them.

        Every rank of the pipeline calls it, in the same order: those outside take part in making the group.
        """
        ranks = tuple(self.pp.ranks[stage] for stage in sorted(set(stages)))
        self._group(ranks)
        return self._axis(name, ranks if self.rank in ranks else (self.rank,))

    def saving_axes(self, timeout_seconds: float) -> SavingAxes:
        """A communicator of host memory, for saving in a thread while training goes on.  Every rank makes it, once.

        Make it before the first step: in the middle of a run the ranks would wait for one that has died meanwhile.
        """
        traffic, group = Traffic(), None  # of another thread
        if self.world.size > 1:
            self.groups.savers += 1  # engines that share groups save in threads of their own
            ranks, purpose = self.world.ranks, f"save {self.groups.savers}"
            made = self._process_group(ranks, torch.device("cpu"), timeout_seconds, "gloo")
            # A channel of shared memory serves one thread.
            cpu, siblings = torch.device("cpu"), self.groups.values()
            group = Group(None, cpu, timeout_seconds, False, self.neighbours, siblings, made)
            self.groups[ranks, purpose] = group
        stage = replace(self.model, name="saving stage", group=group if self.model.size > 1 else None, traffic=traffic)
        return SavingAxes(stage, replace(self.world, name="saving world", group=group, traffic=traffic, parts=()))

    def apart(self, axis: Axis, purpose: str) -> Axis:
        """The ranks of an axis over a communicator of their own, where operations do not queue behind those of the axis.

        Every rank makes it, in the same order.
        """
        return replace(axis, group=self._group(axis.ranks, purpose))

    def neighbours_on(self, axis: Axis, size: int, name: str, purpose: str = "") -> Axis:
        """The `size` neighbours of an axis among which this rank is, as an axis.  Every rank makes it, in the same order."""
        first = axis.index // size * size
        return self._axis(name, axis.ranks[first : first + size], purpose)

    def leave(self) -> None:
        """Release every process group: one that is still referenced when the interpreter exits aborts the process."""
        self.groups.close()

    def _axis(self, name: str, ranks: tuple[int, ...], purpose: str = "", *, communicates: bool = True) -> Axis:
        group = self._group(ranks, purpose) if communicates else None
        return Axis(name, ranks, ranks.index(self.rank), group, self.traffic)

    def cut(self, axis: Axis, size: int, inner: str, outer: str, purpose: str = "") -> tuple[Axis, Axis]:
        """This rank's axes over `size` neighbours of `axis`, and over those at its place among their neighbours.

        Every rank makes them, in the same order.
        """
        others = axis.ranks[axis.index % size :: size]
        return self.neighbours_on(axis, size, inner, purpose), self._axis(outer, others, purpose)

    def _host_axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        """An axis whose ranks have messages of host memory for one another, but no communicator of their own."""
        axis = self._axis(name, ranks, communicates=False)
        if axis.size == 1:
            return axis
        group = self.groups.setdefault((ranks, "host"), self._joined(None, dist.group.WORLD))
        return replace(axis, group=group)

    def _group(self, ranks: tuple[int, ...], purpose: str = "") -> Group | None:
        """The group of these ranks for this purpose, made at the first call, which every rank of the world makes."""
        on_cpu, seconds = self.device.type == "cpu", self._timeout_seconds
        if len(ranks) > 1 and (ranks, purpose) not in self.groups:
            made = dist.group.WORLD
            if len(ranks) < self.grid.world_size or purpose or not on_cpu:
                made = self._process_group(ranks, self.device, seconds, "nccl" if self.device.type == "cuda" else None)
            self.groups[ranks, purpose] = self._joined(made, made if on_cpu else dist.group.WORLD)
        return self.groups.get((ranks, purpose))

    def _joined(self, made: dist.ProcessGroup | None, host: dist.ProcessGroup | None) -> Group:
        limits, siblings = (self._timeout_seconds, self._shares_memory, self.neighbours), self.groups.values()
        return Group(made, self.device, *limits, siblings, host)

    def _process_group(self, ranks: tuple[int, ...], device: torch.device, seconds: float, backend: str | None) -> Any:
        # Only members wait for one another, so the time to make a group does not grow with the world.  torch names a group
        # by its ranks and by how many groups a rank has made: a rank outside makes one of its own to keep count.
        timeout = timedelta(seconds=seconds)
        group = dist.new_group(
            list(ranks if self.rank in ranks else (self.rank,)),
            timeout=timeout,
            backend=backend,
            pg_options=nccl_options(device, timeout),
            use_local_synchronization=True,
        )
        if device.type == "cuda":  # NCCL connects at the first call; here all members are certain to make it
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group


def connect_on_demand(environment: MutableMapping[str, str]) -> None:
    """Let gloo connect two ranks when they first have a message, unless the user has chosen; before groups are made.

    Otherwise every group begins with a connection between any two of its ranks, for which each rank writes 154 + 8 n bytes
    into the store and reads what all others have written.
    """
    environment.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def nccl_options(device: torch.device, timeout: timedelta) -> Any:
    """Options for process groups of a CUDA run: streams of high priority; None on other devices.

    A collective takes few of a GPU's cores and much computation depends on it, so it must not queue behind other kernels.
    """
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns if it differs from the group's
    return options


_MADE: WeakValueDictionary[tuple[Any, ...], Groups] = WeakValueDictionary()
"""Groups by the arguments of their states: torch never gives the sockets and threads of a process group back."""


def parallel_state_of(
    grid: RankGrid | None = None,
    device: torch.device | None = None,
    *,
    timeout_seconds: float = TIMEOUT.total_seconds(),
    shard_group_size: int = 0,
    cp_ulysses: int = 1,
) -> ParallelState:
    """The state of this rank, started by a launcher such as torchrun or alone.

    The same arguments give the same process groups, as long as torch's default one is the same.  Every rank makes its
    calls in one order, whichever engine makes them.

    Args:
        grid: the rank grid; data parallelism over all ranks when None.
        device: where this rank computes; `local_device()` when None.
        timeout_seconds, shard_group_size, cp_ulysses: as in `ParallelState`.

    Raises:
        ValueError: as `ParallelState`.
    """
    world, rank = joined_world()
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    grid, device = grid or RankGrid(dp=world), device or local_device()
    make = partial(
        ParallelState, grid, rank, device, timeout_seconds, shard_group_size, neighbours, cp_ulysses=cp_ulysses
    )
    if not dist.is_initialized():
        return make()
    key = dist.group.WORLD, grid, device, timeout_seconds, shard_group_size, neighbours, cp_ulysses
    groups = _MADE.get(key)
    if groups is None or not groups.is_reusable:
        groups = _MADE[key] = Groups()
    return make(groups=groups)


def local_device() -> torch.device:
    """cuda:LOCAL_RANK if there is CUDA and the ranks can communicate over it, else the CPU."""
    talks = not dist.is_initialized() or dist.get_world_size() == 1 or "nccl" in str(dist.get_backend_config())
    if not (talks and torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
