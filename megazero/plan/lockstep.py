"""Programs that wait for one another, one running at a time.

    rank 0   runs ---- waits for rank 1 ............ runs
    rank 1             runs ------ waits for rank 0        nobody can go on: that is a hang, with what each waits for

A program calls `wait_until` with a condition and goes on when it holds.  Each has a thread of its own, because torch's modes
are a thread's; since one runs at a time, what happens does not depend on their speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class StoppedError(BaseException):
    """Another program has failed, so this one ends where it waits."""


@dataclass(eq=False)
class _Turn:
    """One program: what it waits for, and the lock that lets it run."""

    ready: Callable[[], bool] = lambda: True
    doing: str = "has not begun"
    may_run: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_done: bool = False
    error: BaseException | None = None


class Lockstep:
    """Runs programs in turns.

    Attributes:
        failed: the first program that raised, and its error.
        waiting: of programs that all wait and cannot go on, what each does; empty unless they hang.
    """

    def __init__(self) -> None:
        self.failed: tuple[int, Exception] | None = None
        self.waiting: dict[int, str] = {}
        self._turns: dict[int, _Turn] = {}
        self._ended = threading.Semaphore(0)  # of a turn
        self._stops = False

    def run(self, programs: Mapping[int, Callable[[], None]]) -> None:
        """Run all programs until they end, one fails, or all that remain wait."""
        self._turns = {number: _Turn() for number in programs}
        threads = [
            threading.Thread(target=self._run, args=(number, program), name=f"rank {number}", daemon=True)
            for number, program in programs.items()
        ]
        for thread in threads:
            thread.start()
        while left := {number: turn for number, turn in self._turns.items() if not turn.is_done}:
            able = [turn for turn in left.values() if self._stops or turn.ready()]
            if not able:
                self.waiting, self._stops = {number: turn.doing for number, turn in left.items()}, True
            for turn in able:
                turn.may_run.release()
                self._ended.acquire()
        for thread in threads:
            thread.join()

    def wait_until(self, number: int, ready: Callable[[], bool], doing: str) -> None:
        """Let other programs run until `ready()`; a program passes its own number.  `doing` says what it waits for."""
        if ready():
            return
        turn = self._turns[number]
        turn.ready, turn.doing = ready, doing
        self._ended.release()
        turn.may_run.acquire()
        if self._stops:
            raise StoppedError
        turn.doing = "runs"

    def _run(self, number: int, program: Callable[[], None]) -> None:
        turn = self._turns[number]
        turn.may_run.acquire()
        try:
            if not self._stops:
                program()
        except StoppedError:
            pass
        except Exception as error:
            if self.failed is None and not self._stops:
                self.failed = number, error
            self._stops = True
        finally:
            turn.is_done = True
            self._ended.release()
