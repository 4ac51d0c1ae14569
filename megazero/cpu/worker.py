"""A thread that makes calls one after another, beside the computation.

    computation   post(a) ..... post(b) ................ wait(a)
    worker              a a a a a a a a b b b b b b

Between hosts one hands messages to gloo, another adds up all-reduces.  gloo locks a connection while it reads or writes.
Where every core computes, its thread may lose its core with the lock held, and who has a message then waits: 2 to 7 ms for
each were measured, a fifth of a step of ZeRO-1 between two hosts.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

import torch

from megazero.parallel_state.groups import Wait

Start: TypeAlias = Callable[[], Wait]
"""Starts an operation, and returns a function that waits for it."""

_START_SECONDS = 2e-3  # a call takes 0.2 ms, but may meet gloo's lock
_END_SECONDS = 1.0  # after a lost peer all messages fail at once
_JOIN_SECONDS = 5.0  # one that waits in a system call alone needs a moment


class _Posted:
    """A call of the thread; called itself, it waits for the operation."""

    def __init__(self, start: Start) -> None:
        self._start: Start | None = start  # until it is over, with its tensors: those of messages are gloo's to keep
        self._is_over = threading.Event()
        self._wait: Wait | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        if (start := self._start) is None:  # it has failed with the worker's end
            return
        try:
            self._wait = start()
        except BaseException as error:
            self._error = error
        self._end()

    def fail(self, error: BaseException) -> None:
        if not self._is_over.is_set():
            self._error = error
            self._end()

    def _end(self) -> None:
        self._start = None
        self._is_over.set()

    def wait_until_made(self, seconds: float) -> None:
        """Until the call has returned or raised, but not for longer."""
        self._is_over.wait(seconds)

    def __call__(self) -> None:
        """Raises: what the call, or the wait that it returned, has raised."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        if self._wait is not None:
            self._wait()


class Worker:
    """Makes calls in a thread, in the order in which they were posted; one that fails does not keep the next from its turn.

    The thread starts with the first call, and ends with `close` or when nobody has the worker any more.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Posted | None] = SimpleQueue()
        self._posted: deque[_Posted] = deque()  # and not over
        arguments = (self._queue, self._posted, is_ready := threading.Event())
        self._thread, self._is_ready = threading.Thread(target=_run, args=arguments, name=name, daemon=True), is_ready
        weakref.finalize(self, _end, self._queue, self._thread)

    def post(self, start: Start) -> _Posted:
        """Queue `start` for the thread; what is returned waits until the operation has ended."""
        if self._thread.ident is None:
            threads = torch.get_num_threads()
            self._thread.start()
            try:
                self._is_ready.wait()
            finally:
                torch.set_num_threads(threads)  # the default of further threads, which this one has changed
        posted = _Posted(start)
        self._posted.append(posted)
        self._queue.put(posted)
        return posted

    def begin(self, start: Start, abandoned: deque[Wait]) -> Wait:
        """Post a call that waits for nobody, and lend the core for up to 2 ms to a thread that was idle.

        Beside a computation Linux wakes a batch job's thread only after milliseconds, in which the link is idle.

        abandoned: takes the operation's wait if an interrupt comes meanwhile, since nobody else has it.
        """
        was_idle, wait = not self._posted, self.post(start)
        if was_idle:
            try:
                wait.wait_until_made(_START_SECONDS)
            except BaseException:
                abandoned.append(wait)
                raise
        return wait

    def close(self, error: RuntimeError, interrupt: Callable[[], object]) -> None:
        """End the thread; what is not over fails with `error`.  A forked child has no thread, and interrupts nothing.

        `interrupt`: ends the wait in which the thread may be.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            interrupt()
            if threading.current_thread() is not self._thread:  # a garbage collector runs in any thread
                self._thread.join(_JOIN_SECONDS)
        for posted in list(self._posted):
            posted.fail(error)


def _end(queue: SimpleQueue[_Posted | None], thread: threading.Thread) -> None:
    """Let the thread end; a process that ends while it waits for a message aborts, so that one gets a moment."""
    queue.put(None)
    if thread.is_alive() and threading.current_thread() is not thread:
        thread.join(_END_SECONDS)


def _run(queue: SimpleQueue[_Posted | None], every: deque[_Posted], is_ready: threading.Event) -> None:
    torch.get_num_threads()  # the first call in a thread takes the default
    torch.set_num_threads(1)  # here: a team of its own would take the computation's cores
    is_ready.set()
    # Whoever posts may be in inference mode; only there can its tensors be written.
    with torch.inference_mode():
        while (posted := queue.get()) is not None:
            posted.run()
            every.popleft()
            del posted  # with what its wait holds
