"""A thread that makes calls one after another while the rank computes.

    computation   post(a) ..... post(b) ................ wait(a)
    worker              a a a a a a a a b b b b b b

Between hosts, one worker hands messages to gloo, and another adds up all-reduces.  gloo locks a connection while it
reads or writes.  If every core computes, gloo's thread may lose its core while it holds the lock, and every thread with a
message then waits.  Each wait took 2 to 7 ms, together a fifth of a step of ZeRO-1 between two hosts.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import torch

from megazero.parallel_state.axis import Wait

#: Starts an operation, and returns a function that waits for it.
Start: TypeAlias = Callable[[], Wait]
_Queue: TypeAlias = SimpleQueue[tuple[Start, Future[Wait]] | None]
_Unfinished: TypeAlias = deque[Future[Wait]]

_START_SECONDS = 2e-3  # a call takes 0.2 ms, unless it waits for gloo's lock
_END_SECONDS = 1.0  # after a lost peer all messages fail at once
_JOIN_SECONDS = 5.0  # a thread that waits in a system call needs a moment


class Worker:
    """Makes calls in a thread, in the order in which they were posted.  A failed call does not affect the next one.

    The thread starts with the first call.  It ends with `close`, or when nothing refers to the worker any more.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: _Queue = SimpleQueue()
        self._unfinished: _Unfinished = deque()
        arguments = (self._queue, self._unfinished, is_ready := threading.Event())
        self._thread, self._is_ready = threading.Thread(target=_run, args=arguments, name=name, daemon=True), is_ready
        weakref.finalize(self, _end, self._queue, self._thread)

    def post(self, start: Start) -> Wait:
        """Queue `start` for the thread.  The returned function waits for the operation, and raises the exception of `start`
        or of its wait.
        """
        call = self._submit(start)
        return partial(_wait_for, call)

    def begin(self, start: Start, abandoned: deque[Wait]) -> Wait:
        """Post a call that does not wait for anything, and yield the core for up to 2 ms to a thread that was idle.

        During a computation, Linux wakes the thread of a batch job only after milliseconds.  The link would be idle until
        then.

        Args:
            abandoned: receives the operation's wait if an interrupt arrives during these 2 ms, since the caller gets none.
        """
        was_idle, call = not self._unfinished, self._submit(start)
        if was_idle:
            try:
                futures.wait([call], _START_SECONDS)
            except BaseException:
                abandoned.append(partial(_wait_for, call))
                raise
        return partial(_wait_for, call)

    def _submit(self, start: Start) -> Future[Wait]:
        if self._thread.ident is None:
            threads = torch.get_num_threads()
            self._thread.start()
            try:
                self._is_ready.wait()
            finally:
                torch.set_num_threads(threads)  # the worker has changed the default of threads that start later
        call: Future[Wait] = Future()
        self._unfinished.append(call)
        self._queue.put((start, call))
        return call

    def close(self, error: RuntimeError, interrupt: Callable[[], object]) -> None:
        """End the thread.  Unfinished calls fail with `error`.  A forked child has no thread, and interrupts nothing.

        Args:
            interrupt: ends the wait that the thread may be in.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            interrupt()
            if threading.current_thread() is not self._thread:  # the garbage collector may run this in any thread
                self._thread.join(_JOIN_SECONDS)
        for call in list(self._unfinished):
            with suppress(InvalidStateError):  # it has ended
                call.set_exception(error)


def _end(queue: _Queue, thread: threading.Thread) -> None:
    """Tell the thread to end and give it a moment: a process that exits while a thread waits for a message aborts."""
    queue.put(None)
    if thread.is_alive() and threading.current_thread() is not thread:
        thread.join(_END_SECONDS)


def _run(queue: _Queue, unfinished: _Unfinished, is_ready: threading.Event) -> None:
    torch.get_num_threads()  # the first call in a thread sets the default
    torch.set_num_threads(1)  # in this thread only; more threads would take cores from the computation
    is_ready.set()
    # The caller may be in inference mode, and its tensors can be written only in that mode.
    with torch.inference_mode():
        while (posted := queue.get()) is not None:
            _make(*posted)
            del posted  # and its tensors: gloo keeps those of messages alive
            unfinished.popleft()


def _make(start: Start, call: Future[Wait]) -> None:
    """Make a call, unless it has already failed because the worker was closed."""
    with suppress(InvalidStateError):
        if not call.done():
            try:
                wait = start()
            except BaseException as error:
                call.set_exception(error)
            else:
                call.set_result(wait)


def _wait_for(call: Future[Wait]) -> None:
    call.result()()
