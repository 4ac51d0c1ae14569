"""Finds out which rank is missing when a collective does not finish.

    rank 0   beat . . . . beat . . . . beat . . LostPeerError: requests heartbeats, reads twice -> "rank 3 does not respond"
    rank 1   beat . . . . beat . . . . beat . . requested: beat . beat . beat                  -> "rank 1 is alive"
    rank 3   beat . . . . beat . X

A thread on each rank writes heartbeats into the store of the process group; a step never waits for it.  On request every
rank writes one at every tick, and a rank whose counter stands still is dead.  The thread also ends its own process if
nothing else would: see `_waits_for_others`.

Where ranks communicate through the memory of their GPUs, nobody notices a peer that has died.  So a rank that waits looks
at the heartbeats of the next one, and whoever finds it silent ends, and with it all that wait:

    0 --> 1 --> 2 --> 3 X       one key for each rank to read: all heartbeats for all ranks would be too much for the store
    ^-----------------'
"""

import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megazero.comm.agreement import in_thread
from megazero.comm.collectives import from_first
from megazero.comm.messages import LostPeerError
from megazero.launchers import SET_CARDS
from megazero.parallel_state import ParallelState
from megazero.settings import listed
from megazero.terminal import warn

T = TypeVar("T")

FLIGHT_RECORDS = "flight-recorder"
_TICKS_PER_BEAT, _SECONDS_PER_BEAT = 10, 10.0  # at most, unless heartbeats are requested
_DONE = "it was done"
_WHOLE_WORLD = 1024  # up to this many ranks, all heartbeats are read; beyond that, those of the axis
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
    for rank, beat in sorted(after.items()):
        if beat.ended and not beat.lost:
            texts.append(f"rank {rank} ended in step {beat.step}: {beat.ended}")
    if texts:
        return listed(texts, separator="; ")

    def takes_part(beat: Heartbeat) -> bool:
        if axis in _IN_STEP:
            return beat.begun.get(axis, 0) >= mine.begun.get(axis, 0)
        return beat.is_inside and beat.axis == axis

    missing = [rank for rank in ranks if not takes_part(after[rank])]
    outside = [rank for rank, beat in after.items() if not (beat.is_inside or beat.ended) and beat.step <= mine.step]
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


def waits_for_another(beats: Heartbeats, since: float) -> bool:
    """Whether a rank that has written a heartbeat since this time of day is doing something that others must wait for."""
    return any(beat.at >= since and not (beat.waits or beat.ended) for beat in beats.values())


def _text_of_dead(rank: int, beat: Heartbeat | None, now: float) -> str:
    if beat is None:
        return f"rank {rank} does not respond (it has sent no heartbeat)"
    ago = max(0.0, now - beat.at)  # clocks of hosts may differ a little
    return f"rank {rank} does not respond (at its last heartbeat, {ago:.0f} s ago, it was {_doing(beat)})"


def _doing(beat: Heartbeat) -> str:
    words = {TRAINING: "in step", EVALUATING: "evaluating after step", SAVING: "saving step", BETWEEN: "after step"}
    return f"{words[beat.phase]} {beat.step}" if beat.phase in words else beat.phase


def _text_of_living(rank: int, beat: Heartbeat) -> str:
    if beat.ended:
        return f"rank {rank} has lost a peer itself: {beat.ended}"
    doing = _doing(beat)
    collective = f"{beat.operation} over {beat.axis}"
    if beat.is_inside:
        return f"rank {rank} is alive, {doing}, in {collective} for {beat.seconds:.0f} s"
    last = f", the last was {collective}" if beat.operation else ""
    return f"rank {rank} is alive, {doing}, outside any collective for {beat.seconds:.0f} s{last}"


def store_of_run(store: Store, run: str) -> Store:
    """Return the part of the process group's store that belongs to a run, over a new connection.

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

    A store can tell only whether all of some keys exist, so this asks for all keys, and if some are missing for each half.
    """
    if not keys or store.check(list(keys)):
        return []
    half = len(keys) // 2
    return missing_keys(store, keys[:half]) + missing_keys(store, keys[half:]) if half else list(keys)


class HeartbeatStore:
    """The heartbeats of a run's ranks.  Args: see `store_of_run`."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store_of_run(store, run)

    def write(self, rank: int, beat: Heartbeat) -> None:
        """Replace a rank's heartbeat."""
        self._store.set(str(rank), json.dumps(asdict(beat), separators=(",", ":")))

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

    def tell(self, found: str) -> None:
        """Tell the other ranks which ranks are lost."""
        self._store.set(_FOUND, found)

    def told(self) -> str:
        """Return what another rank has reported about lost ranks; empty if nothing."""
        return self._store.get(_FOUND).decode() if self._store.check([_FOUND]) else ""

    def requested(self) -> tuple[bool, bool]:
        """Whether a rank has requested heartbeats, and whether the run is over."""
        is_requested = bool(self._store.check([_REQUEST]))
        return is_requested, is_requested and self._store.get(_REQUEST) == _OVER.encode()


class Watchdog:
    """Writes this rank's heartbeats and explains a lost peer.  A context around a run, on every rank.

    A `LostPeerError` that leaves the context says which ranks are missing.  A world of one rank has no thread.

    Args:
        timeout_seconds: how long a collective may wait.
        folder: of the run; flight records go below it.
        tick_seconds: how often the thread wakes up. None: 1 s, and more in a large world, to spare the store.
    """

    # The thread ends a rank that waits in vain this long after `timeout_seconds`, or on CUDA after another one gave up.
    margin_seconds = 30.0
    silence_seconds = 30.0  # without a heartbeat for so long, the next rank is dead

    def __init__(
        self, state: ParallelState, timeout_seconds: float, folder: Path, tick_seconds: float | None = None
    ) -> None:
        self.state, self._folder = state, folder
        self._is_on_cuda = state.device.type == "cuda"
        self._timeout = timeout_seconds
        self._tick = tick_seconds or min(max(1.0, state.world.size / 1024), 8.0)
        self._patience = max(4.0, 3 * self._tick + 1)  # a rank without heartbeat for so long is dead
        self._at = (0, STARTING, time.perf_counter())
        self._first_steps: dict[str, int] = {}  # by phase
        self._next, self._next_count, self._silent_ticks = (state.rank + 1) % state.world.size, -1, 0
        self._count, self._is_over, self._has_warned = 0, False, False
        self._ended, self._lost = "", False
        self._store: HeartbeatStore | None = None
        self._run = ""  # its name in the store of the process group
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """Note that this rank begins to do something: TRAINING, EVALUATING, SAVING or BETWEEN, in this step."""
        self._first_steps.setdefault(phase, step)
        self._at = (step, phase, time.perf_counter())

    def end(self) -> None:
        """End this process, which a collective may hold."""
        os._exit(1)

    def open_store(self) -> Store | None:
        """The run's part of the store, over a connection of the caller's own; None outside a run of several ranks."""
        return store_of_run(dist.distributed_c10d._get_default_store(), self._run) if self._run else None

    def __enter__(self) -> Self:
        if self.state.world.size > 1:
            self._run = from_first(uuid.uuid4().hex[:8], self.state.world)
            self._store = HeartbeatStore(dist.distributed_c10d._get_default_store(), self._run)
            self._store.write(self.state.rank, self._beat())
            self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._store is None:
            return
        if isinstance(error, LostPeerError):
            self._leave(f"{error.operation} over {error.axis} did not finish", lost=True)
            found = self._explain(error.axis, error.ranks, is_over=True)
            self._leave(found, lost=True)
            error.explain(self._at[0], found + self._record())
        else:
            line = (str(error).strip().splitlines() or [""])[0]
            self._leave(_DONE if error is None else f"{type(error).__name__}: {line}")
        self._over.set()
        self._thread.join(timeout=max(1.0, self._tick))

    def _beat(self) -> Heartbeat:
        (step, phase, _), last = self._at, self.state.traffic.last
        collective = ("", "", False) if last is None else (last.operation, last.axis, last.is_inside)
        begun: Counter[str] = Counter()
        for (axis, operation), calls in list(self.state.traffic.calls.items()):
            if operation != "send_recv":  # stages of a pipeline send unequally often
                begun[axis] += calls
        self._count += 1
        idle, now = round(self._seconds_without_progress(), 3), round(time.time(), 1)
        # Before the first pass of a step it reads data.
        waits = self._waits_for_others() and (collective[2] or self.state.traffic.advanced > self._at[2])
        return Heartbeat(self._count, step, phase, *collective, idle, dict(begun), self._ended, self._lost, waits, now)

    def _seconds_without_progress(self) -> float:
        traffic = self.state.traffic
        last = 0.0 if traffic.last is None else traffic.last.since
        return time.perf_counter() - max(self._at[2], traffic.advanced, last)

    def _leave(self, why: str, *, lost: bool = False) -> None:
        """Let the other ranks know why this one leaves the run."""
        self._ended, self._lost = why, lost
        _within(self._patience, self._write_heartbeat)

    def _write_heartbeat(self) -> None:
        if self._store is not None:
            self._store.write(self.state.rank, self._beat())

    def _explain(self, axis: str, ranks: Sequence[int], *, is_over: bool) -> str:
        """Say what the peers do, within a bounded time even if the store does not answer."""
        others, mine = [rank for rank in ranks if rank != self.state.rank], self._beat()
        return _within(2 * self._patience, lambda: self._compare(axis, others, mine, is_over=is_over)) or (
            "nothing is known of the other ranks: the store with their heartbeats does not answer; "
            "its host may be the one that is lost"
        )

    def _compare(self, axis: str, others: Sequence[int], mine: Heartbeat, *, is_over: bool) -> str:
        store, world = self._store, self.state.world.ranks
        assert store is not None
        if is_over and (found := store.told()):  # another rank has searched: all of them read from one store
            return found
        ranks = [r for r in world if r != self.state.rank] if len(world) <= _WHOLE_WORLD else [*others, self._next]
        before = store.read(ranks)
        store.request(is_over=is_over)
        until, after, silent = time.monotonic() + self._patience, dict[int, Heartbeat](), ranks
        while True:
            time.sleep(self._tick / 2)
            self._write_heartbeat()  # the thread, which does so otherwise, may be the caller
            after |= store.read(silent)  # those alone: all ranks of the world read from one store
            silent = [rank for rank in silent if is_dead(rank, before, after)]
            if time.monotonic() > until or not silent:
                found = explain_missing_ranks(axis, others, mine, before, after)
                if is_over and (silent or any(beat.ended and not beat.lost for beat in after.values())):
                    store.tell(found)  # it holds for every axis
                return found

    def _record(self) -> str:
        """Write what torch has recorded of this rank's last collectives, where this build of torch does, and say where."""
        recorder = "_dump_nccl_trace_json" if self._is_on_cuda else "_dump_fr_trace_json"
        path = self._folder / FLIGHT_RECORDS / f"rank-{self.state.rank}.json"

        def write() -> str:
            record = getattr(torch._C._distributed_c10d, recorder)()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record)
            return f"; what torch recorded of the last collectives is in {path}"

        return _within(self._patience, write) or ""

    def _watch(self) -> None:
        store, ticks = self._store, 0
        assert store is not None
        ticks_per_beat = min(_TICKS_PER_BEAT, max(1, round(_SECONDS_PER_BEAT / self._tick)))
        while not self._over.wait(self._tick):
            ticks += 1
            with suppress(RuntimeError):  # a dead store is no reason to stop watching this rank
                is_requested, self._is_over = store.requested()
                if is_requested or ticks % ticks_per_beat == 0:
                    self._write_heartbeat()
                self._check_next_rank(store)
            self._check_own_progress()

    def _check_next_rank(self, store: HeartbeatStore) -> None:
        """End a process that waits while the next rank is silent, unless a living rank keeps all waiting.

        A rank may be alive and silent: a launch into the full queue of a device holds Python's lock.
        """
        idle = self._seconds_without_progress()
        if not self._waits_for_others() or idle < self.silence_seconds / 3:
            self._silent_ticks = 0
            return
        beat = store.read([self._next]).get(self._next)
        is_silent = beat is None or (beat.count == self._next_count and beat.ended != _DONE)
        self._next_count = -1 if beat is None else beat.count
        self._silent_ticks = self._silent_ticks + 1 if is_silent else 0  # ticks: who was suspended gives others time
        if self._silent_ticks * self._tick > self.silence_seconds:
            self._write_heartbeat()
            if not waits_for_another(store.read(self.state.world.ranks), time.time() - self.silence_seconds):
                self._give_up(idle)

    def _give_up(self, idle: float) -> None:
        self._leave(self._report(idle, "; this rank ends itself", is_over=True), lost=True)
        self.end()

    def _check_own_progress(self) -> None:
        """End a process that will never make progress; on CUDA explain it before NCCL's own watchdog kills it."""
        idle = self._seconds_without_progress()
        if idle < self._timeout / 2:
            self._has_warned = False
        if not self._waits_for_others():
            return
        limit = self.margin_seconds if self._is_over and self._is_on_cuda else self._timeout + self.margin_seconds
        if idle > limit:
            self._give_up(idle)
        elif self._is_on_cuda and idle > 0.9 * self._timeout and not self._has_warned:
            self._has_warned = True
            self._report(idle, "", is_over=False)

    def _waits_for_others(self) -> bool:
        """Whether a long time without progress means that this rank waits for others in vain.

        True inside a collective, in the passes of a step or an evaluation on CUDA (a device may make its host wait), and
        once a rank has lost a peer. False while the rank computes, saves, is in a callback, or compiles in its first step
        or first evaluation: that may take any time.
        """
        (step, phase, _), last = self._at, self.state.traffic.last
        if self._is_over or phase in (STARTING, SAVING) or last is None:
            return self._is_over
        passes = phase in (TRAINING, EVALUATING) and step != self._first_steps[phase]
        return last.is_inside or (self._is_on_cuda and passes)

    def _report(self, idle: float, then: str, *, is_over: bool) -> str:
        last = self.state.traffic.last
        axis, ranks = ("world", self.state.world.ranks) if last is None else (last.axis, last.ranks)
        doing = "" if last is None else f", {'in' if last.is_inside else 'after'} {last.operation} over {axis}"
        text = f"rank {self.state.rank}: no progress for {idle:.0f} s in step {self._at[0]}{doing}: "
        found = self._explain(axis, ranks, is_over=is_over)
        warn(f"{text}{found}{self._record()}{then}")
        return found


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of a call; None where it fails or takes longer."""
    with suppress(Exception):
        return in_thread(call).result(seconds)
    return None
