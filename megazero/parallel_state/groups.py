r"""Ranks that communicate: a group sends their messages, an axis is one rank's view of it.

    Axis ("tp", ranks, index) ---> Group ---> Backend     collectives of tensors: shared memory, two hosts, torch
                                        \---> Messages    broadcasts, messages between two ranks, small values

A parallel layer takes the one axis over which it communicates.  An axis of one rank has no group, and a collective over
it sends nothing.  `Traffic` counts what a rank sends, and records the collective that it waits for.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Wait: TypeAlias = Callable[[], object]
Counts: TypeAlias = Sequence[int]  # by index of the other side on the axis
Transfers: TypeAlias = Sequence[tuple[Tensor, int]]  # (tensor, global rank of the other side)


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
    """Communication of one set of ranks.  Axes with equal ranks share it; `ParallelState.leave` closes it."""

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
        is_reusable: whether further states may use them: they are open, and no operation was left running.
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


class CollectiveCall(NamedTuple):
    """The collective that this rank last started or stopped waiting for.

    Args:
        is_inside: the host is waiting for it; an operation that runs beside the computation does not count.
    """

    operation: str
    axis: str
    ranks: tuple[int, ...]
    is_inside: bool
    since: float  # by `time.perf_counter`


class Traffic:
    """Counts the bytes that this rank sent, by (axis, operation), as ring volume, and the time that it waited for
    peers.

    Only one thread at a time may make the counted calls; any thread may read.

    Attributes:
        link_bytes: bytes of the messages that this rank really sends to other hosts.
        pass_on: called when a pass would wait for rows to arrive; see `engine/turns.py`.

    Source: ring collectives send (n-1)/n of the full buffer per pass (Rajbhandari et al. 2020, section 7).
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.link_bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.waited_seconds = 0.0
        self.pass_on: Callable[[], None] = _go_on
        self.last: CollectiveCall | None = None
        self.advanced = 0.0  # when the host last began or ended a pass of a micro-batch, by `time.perf_counter`

    def advance(self) -> None:
        """Record that the host makes progress without a collective."""
        self.advanced = time.perf_counter()

    def add(self, axis: str, operation: str, sent_bytes: int, link_bytes: int = 0) -> None:
        """Count an operation that starts."""
        self.sent_bytes[axis, operation] += sent_bytes
        self.link_bytes[axis, operation] += link_bytes
        self.calls[axis, operation] += 1

    def enter(self, axis: Axis, operation: str) -> CollectiveCall:
        """Record that the host starts to wait for an operation."""
        self.last = CollectiveCall(operation, axis.name, axis.ranks, True, time.perf_counter())
        return self.last

    def leave(self, entered: CollectiveCall) -> None:
        """Record that the host has stopped waiting."""
        now = time.perf_counter()
        self.waited_seconds += now - entered.since
        self.last = CollectiveCall(entered.operation, entered.axis, entered.ranks, False, now)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context in which nothing is counted."""
        counts = [Counter(one) for one in (self.sent_bytes, self.link_bytes, self.calls)]
        waited = self.waited_seconds
        try:
            yield
        finally:
            self.sent_bytes, self.link_bytes, self.calls = counts
            self.waited_seconds = waited

    def by_axis(self) -> dict[str, int]:
        """Return the bytes sent over each axis, all operations together."""
        totals: Counter[str] = Counter()
        for (axis, _), sent in self.sent_bytes.items():
            totals[axis] += sent
        return dict(totals)

    def reset(self) -> None:
        """Start counting from zero."""
        self.sent_bytes.clear()
        self.link_bytes.clear()
        self.calls.clear()


def _go_on() -> None:
    """Do nothing: no other pass has a turn.  (Defined in the module, so that modules that hold an axis can be pickled.)"""


@dataclass(frozen=True, eq=False)
class Axis:
    """One rank's view of a group: the argument of every parallel layer and every collective."""

    name: str  # "tp", "dp", ...; the key of its traffic
    ranks: tuple[int, ...] = (0,)  # global ranks of the group, in order
    index: int = 0  # position of this rank among them
    group: Group | None = None  # None if the axis has one rank
    traffic: Traffic = field(default_factory=Traffic)
    parts: tuple[Axis, ...] = ()  # if not empty, axes whose product it is: `all_reduce` sums over each in turn

    @property
    def size(self) -> int:
        return len(self.ranks)

    def is_off_host(self, index: int) -> bool:
        """Whether the rank at this index of the axis runs on another host."""
        block = self.group.local_world_size if self.group is not None else 1
        return self.ranks[index] // block != self.ranks[self.index] // block

    @property
    def shares_hosts(self) -> bool:
        """Whether a host has several of these ranks, if all hosts have equally many ranks.  False without a group."""
        block = self.group.local_world_size if self.group is not None else 1
        return len({rank // block for rank in self.ranks}) < len(self.ranks)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group of these ranks.  Raises: RuntimeError, there is none, or it was closed."""
        if self.group is None or self.group.process_group is None:
            raise RuntimeError(f"this rank has left the process group of {self.name}, or never joined one")
        return self.group.process_group

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The process group for messages of host memory among these ranks.  Raises: RuntimeError, as `process_group`."""
        return self.process_group if self.group is None or self.group.host is None else self.group.host


class SavingAxes(NamedTuple):
    """The ranks of a stage, and all ranks, for messages of host memory that only checkpoints send."""

    model: Axis
    world: Axis
