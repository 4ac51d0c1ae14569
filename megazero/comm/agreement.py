"""What the ranks of an axis agree on: an action that failed on one of them failed on all, also if it takes long.

rank 0   action . . . . . . . . . . done         in a thread of its own
ranks      meet   meet   meet   meet             every few seconds, since no collective waits for as long as the action
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from megazero.comm.collectives import from_first, gather_lists, gather_objects
from megazero.parallel_state import Axis

T = TypeVar("T")


def agree(action: Callable[[], T], axis: Axis, raises: type[Exception]) -> T:
    """Run an action that may fail on some ranks only.  If it fails on one of them, every rank raises an error.

    Args:
        action: makes no collective call.
        raises: the type of the error that all ranks raise, with the texts of all failures; the type of the first
            failure if that is a subclass.
    """
    answer: list[T] = []
    failure: tuple[str, type[Exception]] | None = None
    cause = None
    try:
        answer.append(action())
    except Exception as error:
        # an error with further arguments cannot be created from a text
        is_plain = isinstance(error, raises) and type(error).__init__ is raises.__init__
        failure, cause = (str(error) or repr(error), type(error) if is_plain else raises), error
    if found := gather_lists([] if failure is None else [failure], axis):  # without failures, almost nothing is sent
        raise found[0][1]("\n".join(dict.fromkeys(text for text, _ in found))) from cause
    return answer[0]


def on_first(action: Callable[[], T], axis: Axis, raises: type[Exception]) -> T:
    """Run an action on the axis's first rank.  Every rank returns the result, which must be picklable, or raises the
    error.
    """
    answer = agree(action if axis.index == 0 else lambda: None, axis, raises)
    return from_first(answer, axis)  # type: ignore[return-value]  # the first rank's is one


class CallThread:
    """A thread that runs calls one after another.  A call that never returns does not keep the process alive."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while item := self._calls.get():
            call, result = item
            try:
                result.set_result(call())
            except BaseException as error:  # also a panic of a library: somebody waits for an answer
                result.set_exception(error)

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call behind the earlier ones."""
        result = Future[T]()
        self._calls.put((call, result))
        return result

    def end(self) -> None:
        """End the thread after all queued calls."""
        self._calls.put(None)


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in its own thread."""
    thread = CallThread()
    result = thread.begin(call)
    thread.end()
    return result


def seconds_between_meetings(timeout_seconds: float) -> float:
    """Return how many seconds a rank may work before it must meet the ranks that wait for it.

    A collective waits for at most `timeout_seconds`.
    """
    return min(20.0, timeout_seconds / 4)


def agree_in_time(action: Callable[[], T], axis: Axis, raises: type[Exception], seconds: float) -> T:
    """Run `agree` on an action that may take longer than the timeout of collectives: it runs in a thread while the ranks
    meet.

    rank 0   action . . . . . . . . . . done
    ranks      meet   meet   meet   meet           every `seconds`
    """
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
