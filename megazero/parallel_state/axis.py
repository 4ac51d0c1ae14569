"""One rank's view of the ranks that it communicates with, and the count of what it sends them.

A parallel layer takes the one axis over which it communicates.  An axis of one rank has no group, and a collective over
it sends nothing.  `Traffic` counts what a rank sends, and records the collective that it waits for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megazero.parallel_state.state import Group

Wait: TypeAlias = Callable[[], object]
Counts: TypeAlias = Sequence[int]  # by index of the other side on the axis
Transfers: TypeAlias = Sequence[tuple[Tensor, int]]  # (tensor, global rank of the other side)


class CollectiveCall(NamedTuple):
    """The collective that this rank last started or stopped waiting for.

    Args:
        is_inside: the host is waiting for the operation; False while the operation overlaps the computation.
    """

    operation: str
    axis: str
    ranks: tuple[int, ...]
    is_inside: bool
    since: float  # by `time.perf_counter`


class Traffic:
    """Counts the bytes that this rank has sent, by (axis, operation) and as ring volume, and the time that it has waited
    for peers.

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
        """Record that the host no longer waits for this collective."""
        now = time.perf_counter()
        self.waited_seconds += now - entered.since
        self.last = CollectiveCall(entered.operation, entered.axis, entered.ranks, False, now)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Return a context in which nothing is counted."""
        counts = [Counter(counter) for counter in (self.sent_bytes, self.link_bytes, self.calls)]
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
    """Do nothing, since there is no other pass to run.  (Defined in the module, so that modules that hold an axis can be
    pickled.)
    """


@dataclass(frozen=True, eq=False)
class Axis:
    """One rank's view of a group of ranks.  Every parallel layer and every collective takes one."""

    name: str  # "tp", "dp", ...; the key of its traffic
    ranks: tuple[int, ...] = (0,)  # global ranks of the group, in order
    index: int = 0  # position of this rank among them
    group: Group | None = None  # None if the axis has one rank
    traffic: Traffic = field(default_factory=Traffic)
    factors: tuple[Axis, ...] = ()  # if not empty, axes with this product: `all_reduce` sums over each in turn

    @property
    def size(self) -> int:
        return len(self.ranks)

    def is_off_host(self, index: int) -> bool:
        """Whether the rank at this index of the axis runs on another host."""
        block = self.group.local_world_size if self.group is not None else 1
        return self.ranks[index] // block != self.ranks[self.index] // block

    @property
    def shares_hosts(self) -> bool:
        """Whether hosts have several of these ranks, provided that all hosts have equally many.  False without a group."""
        block = self.group.local_world_size if self.group is not None else 1
        return len({rank // block for rank in self.ranks}) < len(self.ranks)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group of these ranks.  Raises: RuntimeError: there is no group, or it was closed."""
        if self.group is None or self.group.process_group is None:
            raise RuntimeError(f"this rank has left the process group of {self.name}, or never joined one")
        return self.group.process_group

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The process group for sending tensors in host memory among these ranks.

        Raises: RuntimeError, as `process_group`.
        """
        return self.process_group if self.group is None or self.group.host is None else self.group.host
