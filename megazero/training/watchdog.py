"""Finds out which rank is missing when a collective does not finish.

    rank 0   beat . . . . beat . . . . beat . . LostPeerError: requests heartbeats, reads twice -> "rank 3 does not respond"
    rank 1   beat . . . . beat . . . . beat . . requested: beat . beat . beat                  -> "rank 1 is alive"
    rank 3   beat . . . . beat . X

A thread on each rank writes heartbeats into the store of the process group; a step never waits for it.  On request every
rank writes one at every tick, and a rank with a counter that stands still is dead.  The thread also ends its own process if
nothing else would: see `_waits_for_others`.

Where ranks communicate through the memory of their GPUs, nobody notices a peer that has died.  So a rank that waits looks
at the heartbeats of the next one.  If they stop, it ends itself, and so all ranks that wait end one after another:

    0 --> 1 --> 2 --> 3 X       one key for each rank to read: all heartbeats for all ranks would be too much for the store
    ^-----------------'
"""

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megazero.comm.agreement import in_thread
from megazero.comm.collectives import from_first
from megazero.comm.messages import LostPeerError
from megazero.parallel_state import ParallelState
from megazero.terminal import warn
from megazero.training.heartbeat import (
    EVALUATING,
    SAVING,
    STARTING,
    TRAINING,
    Heartbeat,
    HeartbeatStore,
    explain_missing_ranks,
    is_dead,
    store_of_run,
    waits_for_another,
)

T = TypeVar("T")

FLIGHT_RECORDS = "flight-recorder"
_TICKS_PER_HEARTBEAT, _SECONDS_PER_HEARTBEAT = 10, 10.0  # at most, unless heartbeats are requested
_DONE = "it was done"
_WHOLE_WORLD = 1024  # up to this many ranks, all heartbeats are read; beyond that, those of the axis


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
        self._next, self._next_count, self._missed_ticks = (state.rank + 1) % state.world.size, -1, 0
        self._count, self._is_over, self._has_warned = 0, False, False
        self._ended, self._lost = "", False
        self._store: HeartbeatStore | None = None
        self._run = ""  # its name in the store of the process group
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """Record that this rank begins a phase of a step: TRAINING, EVALUATING, SAVING or BETWEEN."""
        self._first_steps.setdefault(phase, step)
        self._at = (step, phase, time.perf_counter())

    def end(self) -> None:
        """End this process, which a collective may hold."""
        os._exit(1)

    def open_store(self) -> Store | None:
        """Return the run's own keys in the store, over a new connection; None outside a run of several ranks."""
        return store_of_run(dist.distributed_c10d._get_default_store(), self._run) if self._run else None

    def __enter__(self) -> Self:
        if self.state.world.size > 1:
            self._run = from_first(uuid.uuid4().hex[:8], self.state.world)
            self._store = HeartbeatStore(dist.distributed_c10d._get_default_store(), self._run)
            self._store.write(self.state.rank, self._heartbeat())
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

    def _heartbeat(self) -> Heartbeat:
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
        """Publish why this rank leaves the run."""
        self._ended, self._lost = why, lost
        _within(self._patience, self._write_heartbeat)

    def _write_heartbeat(self) -> None:
        if self._store is not None:
            self._store.write(self.state.rank, self._heartbeat())

    def _explain(self, axis: str, ranks: Sequence[int], *, is_over: bool) -> str:
        """Describe what the peers do, within a bounded time even if the store does not answer."""
        others, mine = [rank for rank in ranks if rank != self.state.rank], self._heartbeat()
        return _within(2 * self._patience, lambda: self._compare(axis, others, mine, is_over=is_over)) or (
            "nothing is known of the other ranks: the store with their heartbeats does not answer; "
            "its host may be the one that is lost"
        )

    def _compare(self, axis: str, others: Sequence[int], mine: Heartbeat, *, is_over: bool) -> str:
        store, world = self._store, self.state.world.ranks
        assert store is not None
        if is_over and (found := store.findings()):  # another rank has searched: all of them read from one store
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
                if is_over and (silent or any(heartbeat.ended and not heartbeat.lost for heartbeat in after.values())):
                    store.publish(found)  # it holds for every axis
                return found

    def _record(self) -> str:
        """Write torch's record of this rank's last collectives, if this build of torch has one.  Returns where it is."""
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
        ticks_per_heartbeat = min(_TICKS_PER_HEARTBEAT, max(1, round(_SECONDS_PER_HEARTBEAT / self._tick)))
        while not self._over.wait(self._tick):
            ticks += 1
            with suppress(RuntimeError):  # a dead store is no reason to stop watching this rank
                is_requested, self._is_over = store.requested()
                if is_requested or ticks % ticks_per_heartbeat == 0:
                    self._write_heartbeat()
                self._check_next_rank(store)
            self._check_own_progress()

    def _check_next_rank(self, store: HeartbeatStore) -> None:
        """End a process that waits while the next rank is silent, unless a living rank keeps all waiting.

        A rank may be alive and silent: a launch into the full queue of a device holds Python's lock.
        """
        idle = self._seconds_without_progress()
        if not self._waits_for_others() or idle < self.silence_seconds / 3:
            self._missed_ticks = 0
            return
        heartbeat = store.read([self._next]).get(self._next)
        is_missing = heartbeat is None or (heartbeat.count == self._next_count and heartbeat.ended != _DONE)
        self._next_count = -1 if heartbeat is None else heartbeat.count
        self._missed_ticks = self._missed_ticks + 1 if is_missing else 0  # ticks: who was suspended gives others time
        if self._missed_ticks * self._tick > self.silence_seconds:
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
    """Return the result of a call; None if it fails or takes longer than `seconds`."""
    with suppress(Exception):
        return in_thread(call).result(seconds)
    return None
