"""Work that may take longer than a collective may wait: it runs in a thread, while the ranks meet or the caller counts.

rank 0   work . . . . . . . . . . . done
ranks      meet   meet   meet   meet        each within `parallel.timeout_seconds`
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from megazero.comm.collectives import agree, gather_objects
from megazero.config import RunConfig
from megazero.parallel_state import Axis

T = TypeVar("T")

# Between two meetings of ranks that wait; below any `timeout_seconds` that a run can live with.
MEET_SECONDS: Final = 20.0


class Worker:
    """A thread that makes one call after another.  A call that never returns does not keep the process alive."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while item := self._calls.get():
            call, result = item
            try:
                result.set_result(call())
            except BaseException as error:  # also a panic of a library: somebody waits for an answer
                result.set_exception(error)

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Make a call after those before it."""
        result = Future[T]()
        self._calls.put((call, result))
        return result

    def end(self) -> None:
        """End the thread after the calls that have begun."""
        self._calls.put(None)


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call in a thread of its own."""
    worker = Worker()
    result = worker.begin(call)
    worker.end()
    return result


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of a call; None where it fails or takes longer."""
    with suppress(Exception):
        return in_thread(call).result(seconds)
    return None


def seconds_between_meetings(config: RunConfig) -> float:
    """How long a rank may work before it meets those that wait for it."""
    return min(MEET_SECONDS, config.parallel.timeout_seconds / 4)


def agree_in_time(action: Callable[[], T], axis: Axis, raises: type[Exception], seconds: float) -> T:
    """`agree` on an action that may take longer than a collective may wait: it runs in a thread while the ranks meet."""
    if axis.size == 1:
        return agree(action, axis, raises)
    result, is_over = in_thread(action), False
    while not is_over:
        wait([result], seconds)
        is_done = result.done()
        now = gather_objects((is_done, is_done and result.exception() is not None), axis)
        is_over = any(failed for _, failed in now) or all(done for done, _ in now)

    def outcome() -> T | None:
        if not is_done:
            return None  # another rank has failed
        error = result.exception()
        if error is not None and not isinstance(error, Exception):
            raise raises(repr(error)) from error
        return result.result()

    answer = agree(outcome, axis, raises)
    assert answer is not None
    return answer
