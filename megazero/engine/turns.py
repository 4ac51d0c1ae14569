"""Two passes of a rank that take turns: while an exchange of one is under way, the other computes.

    backward   start | pass on         wait, experts, start | pass on                 wait, attention ...
    forward          attention, start | pass on             wait, experts, start | pass on

Exactly one of them runs at any time, and hands over only where it would wait for an exchange, so every rank starts its
work in the same order.  Each pass has a thread of its own, for a backward cannot be left on the way otherwise; on CUDA
that is how the host queues them, and both use one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Semaphore
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


class AbandonedError(RuntimeError):
    """The pass beside this one has failed."""


class Turns:
    """Runs two functions that call `pass_on` where they would wait."""

    def __init__(self) -> None:
        self._gates = (Semaphore(0), Semaphore(0))
        self._running = 0  # which of both
        self._both = False  # none has ended
        self._failed = False

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """One that stays: a new thread would start its own threads for products."""
        return ThreadPoolExecutor(1, "turns")

    def pass_on(self) -> None:
        """Let the other function run until it passes on or ends; no-op where there is none.  Raises: AbandonedError."""
        if self._failed:
            raise AbandonedError("the pass beside this one has failed")
        if self._both:
            own = self._running
            self._running = 1 - own
            self._gates[1 - own].release()
            self._gates[own].acquire()
            if self._failed:
                raise AbandonedError("the pass beside this one has failed")

    def run(self, aside: Callable[[], A], here: Callable[[], B]) -> tuple[A, B]:
        """The results of both; `aside` begins, in another thread.

        Raises: what one of them raises; the other is left where it next passes on.
        """
        self._gates = (Semaphore(0), Semaphore(0))
        self._running, self._both, self._failed = 0, True, False
        found: Future[A] = self._thread.submit(self._until_end, aside)
        try:
            self._gates[1].acquire()
            mine = self._until_end(here)
            return found.result(), mine
        except AbandonedError:
            found.result()
            raise
        except BaseException:
            self._end(failed=True)
            found.exception()  # it has ended
            raise
        finally:
            self._failed = False

    def _until_end(self, function: Callable[[], A]) -> A:
        try:
            result = function()
        except BaseException:
            self._end(failed=True)
            raise
        self._end(failed=False)
        return result

    def _end(self, *, failed: bool) -> None:
        """The running function has ended: the other one runs on."""
        self._both, self._failed = False, self._failed or failed
        for gate in self._gates:
            gate.release()
