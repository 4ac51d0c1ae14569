"""Names the ranks whose own work takes much longer than that of others."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from statistics import fmean, median_low
from typing import NamedTuple

from megazero.comm.collectives import gather_objects
from megazero.config.schema import LoggingConfig
from megazero.parallel_state import ParallelState
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord

_NOTICEABLE_SECONDS = 0.01
_MOST_RANKS_NAMED = 4


class RankWork(NamedTuple):
    """How long a rank's own work takes per step, without waiting for others; ranks of one stage have the same work."""

    rank: int
    host: str
    stage: int
    seconds: float


def slow_ranks(works: Sequence[RankWork], ratio: float) -> list[tuple[RankWork, float]]:
    """The ranks whose work takes more than `ratio` times the median, the slowest first, each with that median.

    A rank is compared with the ranks of its pipeline stage, or with all ranks if it is alone in its stage.
    """
    found = []
    for work in works:
        peers = [other.seconds for other in works if other.stage == work.stage]
        median = median_low(peers if len(peers) > 1 else [other.seconds for other in works])
        if work.seconds > ratio * median and work.seconds - median > _NOTICEABLE_SECONDS:
            found.append((work, median))
    return sorted(found, key=lambda one: -one[0].seconds)


def spread_of(works: Sequence[RankWork]) -> dict[str, float]:
    """The metric of all ranks' work: min, median and max in seconds, and the slowest rank."""
    seconds = [work.seconds for work in works]
    slowest = max(works, key=lambda work: work.seconds)
    return {"min": min(seconds), "median": median_low(seconds), "max": slowest.seconds, "slowest_rank": slowest.rank}


class Stragglers(Callback):
    """Compares the own work of all ranks every `logging.straggler_every_steps` steps, by one collective call."""

    def __init__(self, logging: LoggingConfig, state: ParallelState, say: Callable[[str], None]) -> None:
        self._every = logging.straggler_every_steps if state.world.size > 1 else 0
        self._ratio, self._state, self._say = logging.straggler_ratio, state, say
        self._seconds: list[float] = []

    def after_step(self, record: StepRecord) -> None:
        """Report the metric `own_seconds` and the slow ranks, where a look is due."""
        if record.work_seconds is None or not self._every:
            return
        self._seconds.append(record.work_seconds)
        if record.step % self._every:
            return
        mine = RankWork(self._state.rank, socket.gethostname(), self._state.at.pp, fmean(self._seconds))
        self._seconds = []
        works = gather_objects(mine, self._state.world)
        record.metrics["own_seconds"] = spread_of(works)
        slow = slow_ranks(works, self._ratio)
        for work, median in slow[:_MOST_RANKS_NAMED]:
            self._say(
                f"rank {work.rank} on {work.host} is slow: {work.seconds:.2f} s of its own work per step, the median is "
                f"{median:.2f} s"
            )
        if len(slow) > _MOST_RANKS_NAMED:
            self._say(f"... and {len(slow) - _MOST_RANKS_NAMED} more ranks are slow")
