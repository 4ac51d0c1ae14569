"""Names the ranks whose own work takes much longer than that of others."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean, median_low
from threading import Thread
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from megazero.config.schema import LoggingConfig
from megazero.parallel_state import ParallelState
from megazero.training.callbacks.base import Callback
from megazero.training.record import StepRecord

_NOTICEABLE_SECONDS = 0.01
_MOST_RANKS_NAMED = 4
# A look ends when all ranks have written, or after so long; the last one of a run is waited for.
_LOOK_SECONDS, _LAST_SECONDS = 60.0, 5.0
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 1.0


class RankWork(NamedTuple):
    """How long a rank's own work takes per step, without waiting for others; ranks of one stage have the same work."""

    step: int  # the last of those that it is the mean of
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
    """Compares the own work of all ranks every `logging.straggler_every_steps` steps, beside the training.

        rank 0    step 50, write | step 51        | report with step 51
        a thread                 [ read all ranks' ]
        rank 1    step 50, write | step 51 ...

    Args:
        store: of the run; None in a world of one rank.
        say: takes lines for the terminal, on rank 0.
    """

    def __init__(
        self, logging: LoggingConfig, state: ParallelState, store: Store | None, say: Callable[[str], None]
    ) -> None:
        self._every = 0 if store is None else logging.straggler_every_steps
        self._ratio, self._state, self._say = logging.straggler_ratio, state, say
        self._store = None if store is None else PrefixStore("work", store)
        self._seconds: list[float] = []
        self._look: _Look | None = None  # on rank 0

    def after_step(self, record: StepRecord) -> None:
        """Begin a look where one is due; report the metric `own_seconds` and the slow ranks of the one before."""
        if self._store is None or not self._every:
            return
        self._report(record)
        if record.work_seconds is None:
            return
        self._seconds.append(record.work_seconds)
        if record.step % self._every:
            return
        state, host = self._state, socket.gethostname()
        mine = RankWork(record.step, state.rank, host, state.at.pp, fmean(self._seconds))
        self._seconds = []
        with suppress(RuntimeError):  # a dead store is no reason to end the run
            self._store.set(str(state.rank), json.dumps(mine))
        if state.rank == 0:
            if self._look is None or self._look.has_failed:
                self._look = _Look(self._store, state.world.size, record.step)
            if record.is_last:
                self._look.join(_LAST_SECONDS)
                self._report(record)

    def _report(self, record: StepRecord) -> None:
        works = [] if self._look is None else self._look.found
        if not works:
            return
        self._look = None
        record.metrics["own_seconds"] = spread_of(works)
        slow = slow_ranks(works, self._ratio)
        for work, median in slow[:_MOST_RANKS_NAMED]:
            self._say(
                f"rank {work.rank} on {work.host} is slow: {work.seconds:.2f} s of its own work per step, the median is "
                f"{median:.2f} s"
            )
        if len(slow) > _MOST_RANKS_NAMED:
            self._say(f"... and {len(slow) - _MOST_RANKS_NAMED} more ranks are slow")


class _Look(Thread):
    """Reads the work of all ranks; `found` is empty until every rank has written that of this step."""

    def __init__(self, store: Store, ranks: int, step: int) -> None:
        super().__init__(name="stragglers", daemon=True)
        self.found: list[RankWork] = []
        self._store, self._keys, self._step = store, [str(rank) for rank in range(ranks)], step
        self.start()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without having found anything."""
        return not self.is_alive() and not self.found

    def run(self) -> None:
        end, pause, found, missing = time.monotonic() + _LOOK_SECONDS, _FIRST_POLL_SECONDS, list[RankWork](), self._keys
        with suppress(RuntimeError):  # the store has gone, as the run may: there is nothing to report
            while time.monotonic() < end:
                if self._store.check(missing):
                    works = [RankWork(*json.loads(one)) for one in self._store.multi_get(missing)]
                    found += [work for work in works if work.step >= self._step]
                    missing = [str(work.rank) for work in works if work.step < self._step]
                if not missing:
                    self.found = sorted(found, key=lambda work: work.rank)
                    return
                # of 16,384 ranks each read takes the training thread's interpreter for a while
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_SECONDS)
