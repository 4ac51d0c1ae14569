"""Signs of life, where the ranks leave them, and what they tell of a collective that did not finish.

rank 3, at two moments       count 41 -> 41    it is gone
                             count 41 -> 43    it lives: waiting in another collective, or outside any
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

STARTING, TRAINING, SAVING = "starting", "training", "saving"

# All ranks of these make the same collectives in the same order, so that their numbers can be compared.
_IN_STEP = ("tp", "cp", "dp", "shard", "replica", "world")
_CALL, _OVER = "call", "over"
_SHOWN = 8


@dataclass(frozen=True)
class Heartbeat:
    """A rank's sign of life.

    Args:
        count: goes up with every sign.
        step: the step that it does, or did last.
        phase: what it does: STARTING, TRAINING, SAVING.
        operation, axis: the collective that it entered or left last.
        is_inside: it waits in that collective.
        seconds: since it entered or left it, or since it began the step or the saving.
        begun: collectives begun, by axis.
        ended: why it has left the run, or is about to; empty while it goes on.
        lost: it leaves because it lost a peer itself.
        at: the time of day on its host, in seconds.
    """

    count: int
    step: int
    phase: str = TRAINING
    operation: str = ""
    axis: str = ""
    is_inside: bool = False
    seconds: float = 0.0
    begun: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""
    lost: bool = False
    at: float = 0.0

    def as_json(self) -> str:
        """One line, for the store."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: bytes) -> Heartbeat:
        """The inverse."""
        return Heartbeat(**json.loads(text))


Heartbeats = Mapping[int, Heartbeat]


def what_became_of(axis: str, ranks: Sequence[int], mine: Heartbeat, before: Heartbeats, after: Heartbeats) -> str:
    """Say which ranks a collective is missing.

    Args:
        axis, ranks: what it runs over; without this rank.
        mine: this rank's sign of life, from when the trouble was noticed.
        before, after: signs of life of these ranks and perhaps of others, as they were found at two moments between which
            each living rank has given one.
    """
    known = sorted(set(ranks) | set(before) | set(after))
    gone = [rank for rank in known if is_gone(rank, before, after)]
    left = [rank for rank, beat in sorted(after.items()) if beat.ended and not beat.lost]
    if gone or left:
        told = [_of_gone(rank, after.get(rank), mine.at) for rank in gone]
        return _listed(told + [_of_left(rank, after[rank]) for rank in left])
    missing = [rank for rank in ranks if not _takes_part(axis, mine, after[rank])]
    outside = [rank for rank, beat in after.items() if not (beat.is_inside or beat.ended) and beat.step <= mine.step]
    outside.sort(key=lambda rank: -after[rank].seconds)
    # A rank that waits for others is no cause: first those of the axis that do something else, then such ranks anywhere.
    causes = (
        [rank for rank in outside if rank in missing]
        or [rank for rank in outside if rank not in ranks]
        or [rank for rank in ranks if rank in missing or after[rank].ended]
    )
    if not causes:
        return f"all ranks of the axis are alive and take part; look at the network between them ({axis})"
    return _listed([_of_living(rank, after[rank]) for rank in causes])


def is_gone(rank: int, before: Heartbeats, after: Heartbeats) -> bool:
    """Whether a rank has given no sign of life between two moments, although it has not said that it leaves."""
    if rank not in after:
        return True
    return not after[rank].ended and rank in before and before[rank].count == after[rank].count


def _takes_part(axis: str, mine: Heartbeat, other: Heartbeat) -> bool:
    if axis in _IN_STEP:
        return other.begun.get(axis, 0) >= mine.begun.get(axis, 0)
    return other.is_inside and other.axis == axis


def _of_gone(rank: int, beat: Heartbeat | None, now: float) -> str:
    if beat is None:
        return f"rank {rank} is gone (it gave no sign of life)"
    ago = max(0.0, now - beat.at)  # clocks of hosts may differ a little
    return f"rank {rank} is gone (its last sign of life, {ago:.0f} s before, was in step {beat.step})"


def _of_left(rank: int, beat: Heartbeat) -> str:
    return f"rank {rank} ended in step {beat.step}: {beat.ended}"


def _of_living(rank: int, beat: Heartbeat) -> str:
    if beat.ended:
        return f"rank {rank} has lost a peer itself: {beat.ended}"
    doing = {TRAINING: f"in step {beat.step}", SAVING: f"saving step {beat.step}"}.get(beat.phase, beat.phase)
    where = f"rank {rank} is alive, {doing}"
    if beat.is_inside:
        return f"{where}, in {beat.operation} over {beat.axis} for {beat.seconds:.0f} s"
    last = f", the last was {beat.operation} over {beat.axis}" if beat.operation else ""
    return f"{where}, outside any collective for {beat.seconds:.0f} s{last}"


def _listed(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


class HeartbeatStore:
    """Where the ranks of a run leave their signs of life: a corner of the store.

    Args:
        store: through which the ranks have met; a connection of its own, so that no call of the main thread blocks it.
        run: tells this run's signs from those of an earlier one in the same store.
    """

    def __init__(self, store: Store, run: str) -> None:
        clone = getattr(store, "clone", None)
        if clone is not None:
            with suppress(RuntimeError):  # not every store of every torch can; then the threads take turns
                store = clone()
                store.set_timeout(timedelta(seconds=10))
        self._store = PrefixStore(f"megazero/{run}", store)

    def put(self, rank: int, beat: Heartbeat) -> None:
        """Leave a rank's sign of life, over the one before."""
        self._store.set(str(rank), beat.as_json())

    def read(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """The signs of these ranks, of those that have left one."""
        found = [rank for rank in ranks if self._store.check([str(rank)])]
        texts = self._store.multi_get([str(rank) for rank in found]) if found else []
        return {rank: Heartbeat.from_json(text) for rank, text in zip(found, texts, strict=True)}

    def call(self, *, is_over: bool) -> None:
        """Ask everyone for a sign at every tick, for good.

        Args:
            is_over: the run cannot go on.
        """
        if is_over or not self._store.check([_CALL]):
            self._store.set(_CALL, _OVER if is_over else "")

    def called(self) -> tuple[bool, bool]:
        """Whether someone has called, and whether because the run is over."""
        is_called = bool(self._store.check([_CALL]))
        return is_called, is_called and self._store.get(_CALL) == _OVER.encode()
