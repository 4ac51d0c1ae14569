"""Kills a rank at a counted event, not at a time, so that the kill can be repeated.

    writing   open  write  half of it  ...  rename     manifest   open  write  half of it  rename     latest   open ...
    event      0     1         2              17         event     0      1        2         3         event    0

A fault kills the process at the n-th event of the m-th step, save, ... Events are collectives, computed actions, halves of
a write, and the file operations that Python reports to its audit hooks.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from megazero.checkpoint import retention, saver
from megazero.checkpoint.folder import Folder, Output
from megazero.checkpoint.index import MANIFEST
from megazero.checkpoint.retention import Pruner
from megazero.engine import Engine
from megazero.parallel_state.axis import Traffic
from megazero.schedules.executor import Executor
from megazero.training.callbacks.metrics import MetricsFile


@dataclass(frozen=True)
class Moment:
    """What a rank may be killed in: one of its first `occurrences` in a round, at one of so many events; on any rank?"""

    occurrences: int
    events: int
    anywhere: bool


MOMENTS = {
    "step": Moment(5, 60, True),
    "writing": Moment(2, 120, True),
    "manifest": Moment(2, 6, False),
    "latest": Moment(2, 6, False),
    "pruning": Moment(1, 24, False),
    "loading": Moment(1, 60, True),
    "metrics": Moment(3, 6, False),
}


@dataclass(frozen=True)
class Fault:
    """Which rank is killed, and when.

    Args:
        moment: a key of MOMENTS.
        occurrence: counts such moments of the round, from 1.
        event: counts events in the moment, from 0; where it has fewer, its end.
        rank: which one is killed.
        kills_all: whether all ranks are killed with it.
        grace_seconds: after this time the other ranks are killed, too; None: they must end by themselves.
    """

    moment: str
    occurrence: int
    event: int
    rank: int
    kills_all: bool
    grace_seconds: float | None


class FullDisk:
    """A disk on which a while of this process's writes finds no space: checkpoints and metrics.

    Args:
        random_: chooses the while.
    """

    def __init__(self, random_: Random) -> None:
        self._first, self._count, self._writes = random_.randint(1, 40), random_.randint(1, 60), 0

    def arm(self) -> None:
        """From now on writes count."""
        for owner, name in ((Output, "write"), (MetricsFile, "_write")):
            self._refuse(owner, name)

    def _refuse(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any) -> None:
            self._writes += 1
            if self._first <= self._writes < self._first + self._count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(*args)

        setattr(owner, name, wrapped)


@dataclass
class _Counted:
    moment: str
    occurrence: int
    events: int = 0


class FaultInjector:
    """Counts events in this process and ends it at the one that was chosen.

    Args:
        fault: when.
        log: takes a line that says at which event.
    """

    _AUDITED = ("open", "os.rename", "os.remove", "os.rmdir", "os.scandir")

    def __init__(self, fault: Fault, log: Callable[[str], None]) -> None:
        self._fault, self._log = fault, log
        self._seen: Counter[str] = Counter()
        self._of_thread = threading.local()
        self._injected = False

    def arm(self) -> None:
        """Watch this process from now on."""
        self._within(Engine, "train_step", lambda *_: "step")
        self._within(Engine, "load", lambda *_: "loading")
        self._within(saver, "save_checkpoint", lambda *_: "writing")
        self._within(Folder, "write", lambda _, name, __: "manifest" if name == MANIFEST else None)
        self._within(Pruner, "_remove", lambda pruner, folder: None if pruner._is_read(folder) else "pruning")
        self._within(retention.index, "remove_own_files", lambda *_: "pruning")
        self._within(MetricsFile, "__init__", lambda *_: "metrics")
        self._within(MetricsFile, "after_step", lambda *_: "metrics")
        for owner, name, told in ((Executor, "_compute", 1), (Engine, "update", 1), (Traffic, "enter", 2)):
            self._before(owner, name, told)
        self._halve_writes()
        sys.addaudithook(self._on_audit)

    def _within(self, owner: Any, name: str, moment_of: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            moment = moment_of(*args)
            if moment is None:
                return original(*args, **kwargs)
            with self._during(moment):
                return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def _before(self, owner: Any, name: str, told: int) -> None:
        """Calls of a method are events; the log names this argument of theirs."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._event(f"{name} {args[told]}")
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def _halve_writes(self) -> None:
        original = Output.write

        def wrapped(output: Output, data: bytes | memoryview) -> None:
            self._event("write")
            original(output, data[: len(data) // 2])
            output._file.flush()
            self._event("half of a write")
            original(output, data[len(data) // 2 :])

        Output.write = wrapped  # type: ignore[method-assign]

    def _on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in self._AUDITED:
            self._event(f"{event} {args[0]}")

    @contextmanager
    def _during(self, moment: str) -> Iterator[None]:
        """Events of this thread are those of the innermost moment; one ends early where another begins within it.

        After the manifest a save is no longer "writing" but at "latest".
        """
        stack = self._of_thread.__dict__.setdefault("stack", [])
        if stack and stack[-1].moment == moment:
            yield
            return
        self._end(f"the beginning of {moment}")
        stack.append(self._begin(moment))
        try:
            yield
            self._end("its end")
        finally:
            stack.pop()
        if moment == "manifest" and stack and stack[-1].moment == "writing":
            stack[-1] = self._begin("latest")

    def _begin(self, moment: str) -> _Counted:
        self._seen[moment] += 1
        return _Counted(moment, self._seen[moment])

    def _event(self, what: str) -> None:
        stack = getattr(self._of_thread, "stack", None)
        if stack and not self._injected:
            counted = stack[-1]
            if self._is_chosen(counted) and counted.events == self._fault.event:
                self._kill(what, counted.events)
            counted.events += 1

    def _end(self, what: str) -> None:
        stack = self._of_thread.stack
        if stack and self._is_chosen(stack[-1]) and not self._injected:
            self._kill(what, stack[-1].events)

    def _is_chosen(self, counted: _Counted) -> bool:
        return (counted.moment, counted.occurrence) == (self._fault.moment, self._fault.occurrence)

    def _kill(self, what: str, event: int) -> None:
        self._injected = True
        self._log(f"KILLED {self._fault.moment}: rank {self._fault.rank} at event {event}, {what}")
        if self._fault.kills_all:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # not reached
