"""What a rank sends, counted where collectives are called, and the collective in which it waits."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megazero.parallel_state.groups import Axis


class CollectiveCall(NamedTuple):
    """The collective for which this rank started or stopped waiting last.

    `is_inside`: the host waits for it; an operation that runs beside the computation does not count.
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
        self.last: CollectiveCall | None = None
        self.advanced = 0.0  # when the host last began or ended a pass of a micro-batch; of `time.perf_counter`

    def advance(self) -> None:
        """The host makes progress without a collective."""
        self.advanced = time.perf_counter()

    def add(self, axis: str, operation: str, sent_bytes: int, link_bytes: int = 0) -> None:
        """Count an operation that begins."""
        self.sent_bytes[axis, operation] += sent_bytes
        self.link_bytes[axis, operation] += link_bytes
        self.calls[axis, operation] += 1

    def enter(self, axis: Axis, operation: str) -> CollectiveCall:
        """The host starts to wait for an operation."""
        self.last = CollectiveCall(operation, axis.name, axis.ranks, True, time.perf_counter())
        return self.last

    def leave(self, entered: CollectiveCall) -> None:
        """The host has stopped waiting."""
        now = time.perf_counter()
        self.waited_seconds += now - entered.since
        self.last = CollectiveCall(entered.operation, entered.axis, entered.ranks, False, now)

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
