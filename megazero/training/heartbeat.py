"""Heartbeats of the ranks, the store that holds them, and what they reveal about a collective that did not finish.

rank 3, read twice       count 41 -> 41    it does not respond
                         count 41 -> 43    it is alive: in another collective, or outside any
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from megazero.launchers import SET_CARDS
from megazero.settings import listed

STARTING, TRAINING, EVALUATING, SAVING, BETWEEN = "starting", "training", "evaluating", "saving", "between steps"

# All ranks of these make the same collectives in the same order, so their counts can be compared.
_IN_STEP = ("tp", "cp", "dp", "dp_cp", "shard", "replica", "world")
_REQUEST, _OVER, _FOUND = "request", "over", "found"


@dataclass(frozen=True)
class Heartbeat:
    """The current activity of a rank."""

    count: int  # goes up with every heartbeat
    step: int  # the current step, or the last one
    phase: str = TRAINING  # one of the above; BETWEEN: in the callbacks after the step
    operation: str = ""  # the collective that the rank entered or left last
    axis: str = ""
    is_inside: bool = False  # the rank is inside that collective
    seconds: float = 0.0  # since it last made progress: a collective, a pass of a micro-batch, another phase
    begun: Mapping[str, int] = field(default_factory=dict)  # collectives begun, by axis
    ended: str = ""  # why the rank has left the run, or is about to; empty while it runs
    lost: bool = False  # it leaves because it lost a peer itself
    waits: bool = False  # it makes no progress unless others do
    at: float = 0.0  # the time of day on its host, in seconds


Heartbeats = Mapping[int, Heartbeat]


def explain_missing_ranks(
    axis: str, ranks: Sequence[int], mine: Heartbeat, before: Heartbeats, after: Heartbeats
) -> str:
    """Describe which ranks have not joined a collective over an axis, and what they are doing.

    Args:
        axis: name of the axis.
        ranks: ranks of the collective, without this one.
        mine: this rank's heartbeat when the failure was noticed.
        before, after: heartbeats read twice; every living rank has written one in between.
    """
    known = sorted({*ranks, *before, *after})
    texts = [_text_of_dead(rank, after.get(rank), mine.at) for rank in known if is_dead(rank, before, after)]
    for rank, heartbeat in sorted(after.items()):
        if heartbeat.ended and not heartbeat.lost:
            texts.append(f"rank {rank} ended in step {heartbeat.step}: {heartbeat.ended}")
    if texts:
        return listed(texts, separator="; ")

    def has_joined(heartbeat: Heartbeat) -> bool:
        if axis in _IN_STEP:
            return heartbeat.begun.get(axis, 0) >= mine.begun.get(axis, 0)
        return heartbeat.is_inside and heartbeat.axis == axis

    missing = [rank for rank in ranks if not has_joined(after[rank])]
    outside = [rank for rank, peer in after.items() if not (peer.is_inside or peer.ended) and peer.step <= mine.step]
    outside.sort(key=lambda rank: -after[rank].seconds)
    # A rank that waits for others is no cause. First those of the axis that do something else, then such ranks anywhere.
    causes = (
        [rank for rank in outside if rank in missing]
        or [rank for rank in outside if rank not in ranks]
        or [rank for rank in ranks if rank in missing or after[rank].ended]
    )
    if not causes:
        return f"all ranks of the axis are alive and take part; look at their network ({axis}), or {SET_CARDS}"
    return listed([_text_of_living(rank, after[rank]) for rank in causes], separator="; ")


def is_dead(rank: int, before: Heartbeats, after: Heartbeats) -> bool:
    """Whether a rank has written no heartbeat between two reads, although it has not left the run."""
    if rank not in after:
        return True
    return not after[rank].ended and rank in before and before[rank].count == after[rank].count


def waits_for_another(heartbeats: Heartbeats, since: float) -> bool:
    """Whether a rank that has written a heartbeat since this time of day is doing something that others must wait for."""
    return any(heartbeat.at >= since and not (heartbeat.waits or heartbeat.ended) for heartbeat in heartbeats.values())


def _text_of_dead(rank: int, heartbeat: Heartbeat | None, now: float) -> str:
    if heartbeat is None:
        return f"rank {rank} does not respond (it has sent no heartbeat)"
    ago = max(0.0, now - heartbeat.at)  # clocks of hosts may differ a little
    return f"rank {rank} does not respond (at its last heartbeat, {ago:.0f} s ago, it was {_doing(heartbeat)})"


def _doing(heartbeat: Heartbeat) -> str:
    words = {TRAINING: "in step", EVALUATING: "evaluating after step", SAVING: "saving step", BETWEEN: "after step"}
    return f"{words[heartbeat.phase]} {heartbeat.step}" if heartbeat.phase in words else heartbeat.phase


def _text_of_living(rank: int, heartbeat: Heartbeat) -> str:
    if heartbeat.ended:
        return f"rank {rank} has lost a peer itself: {heartbeat.ended}"
    doing = _doing(heartbeat)
    collective = f"{heartbeat.operation} over {heartbeat.axis}"
    if heartbeat.is_inside:
        return f"rank {rank} is alive, {doing}, in {collective} for {heartbeat.seconds:.0f} s"
    last = f", the last was {collective}" if heartbeat.operation else ""
    return f"rank {rank} is alive, {doing}, outside any collective for {heartbeat.seconds:.0f} s{last}"


def store_of_run(store: Store, run: str) -> Store:
    """Return the run's own keys in the store of the process group, over a new connection.

    Args:
        store: the store of the process group.
        run: a name that differs from those of earlier runs in the store.
    """
    # A clone, so that the calls of one thread do not block another's. Without one the threads share one connection.
    with suppress(AttributeError, RuntimeError):
        store = store.clone()  # type: ignore[attr-defined]  # not in its stubs
        store.set_timeout(timedelta(seconds=10))
    return PrefixStore(f"megazero/{run}", store)


def missing_keys(store: Store, keys: Sequence[str]) -> list[str]:
    """Return the keys that nobody has written.

    A store answers only whether all of some keys exist, so this asks for all keys, and if some are missing, for each half.
    """
    if not keys or store.check(list(keys)):
        return []
    half = len(keys) // 2
    return missing_keys(store, keys[:half]) + missing_keys(store, keys[half:]) if half else list(keys)


class HeartbeatStore:
    """The heartbeats of a run's ranks.  Args: see `store_of_run`."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store_of_run(store, run)

    def write(self, rank: int, heartbeat: Heartbeat) -> None:
        """Replace a rank's heartbeat."""
        self._store.set(str(rank), json.dumps(asdict(heartbeat), separators=(",", ":")))

    def read(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Return the heartbeats of these ranks, as far as they have written any."""
        keys = [str(rank) for rank in ranks]
        missing = set(missing_keys(self._store, keys))
        found = [key for key in keys if key not in missing]
        texts = self._store.multi_get(found) if found else []
        return {int(key): Heartbeat(**json.loads(text)) for key, text in zip(found, texts, strict=True)}

    def request(self, *, is_over: bool) -> None:
        """Ask all ranks for a heartbeat at every tick from now on; `is_over` says that the run cannot continue."""
        if is_over or not self._store.check([_REQUEST]):
            self._store.set(_REQUEST, _OVER if is_over else "")

    def publish(self, found: str) -> None:
        """Publish which ranks are lost, for the other ranks."""
        self._store.set(_FOUND, found)

    def findings(self) -> str:
        """Return what another rank has reported about lost ranks; empty if nothing."""
        return self._store.get(_FOUND).decode() if self._store.check([_FOUND]) else ""

    def requested(self) -> tuple[bool, bool]:
        """Whether a rank has requested heartbeats, and whether the run is over."""
        is_requested = bool(self._store.check([_REQUEST]))
        return is_requested, is_requested and self._store.get(_REQUEST) == _OVER.encode()
