"""A thread that runs operations among the ranks of a host one after another, beside the computation.

    computation   start(a)  start(b) ..................... wait(a)
    lane                 a a a a a a a a b b b b b b b b

An operation is the rounds of a `Channel`, which may wait for messages of other hosts in between.  The thread waits in system
calls, without Python's lock: while it waits it takes no core, and the computation takes no part.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from megazero.comm.rendezvous import Neighbours, Poller
from megazero.comm.shared_memory import Channel, Rounds
from megazero.parallel_state import Wait

_JOIN_SECONDS = 5.0  # one that waits in a system call alone needs a moment


@dataclass(eq=False)
class _Task:
    """An operation of a lane."""

    label: str
    rounds: Rounds | None  # until it has run
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        if not self.done.is_set():
            self.rounds, self.error = None, error
            self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class Lane:
    """Runs operations in the order in which they are started; after one that failed, all others fail.

    Args:
        neighbours: the ranks of this host.
        index: number of this rank among them.
        timeout_seconds: how long an operation may wait for a peer.
        name: of the thread.
    """

    def __init__(self, neighbours: Neighbours, index: int, timeout_seconds: float, name: str) -> None:
        self._poller = Poller()
        self.channel = Channel(neighbours, index, timeout_seconds, self._poller)  # for the thread alone
        self._timeout = timedelta(seconds=timeout_seconds)
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_ready = threading.Event()
        self._started: deque[_Task] = deque()  # and not finished
        self._left: RuntimeError | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def start(self, label: str, rounds: Rounds) -> Wait:
        """Start an operation; its label is the same on all ranks.  The wait raises what the thread has met."""
        task = _Task(label, rounds)
        if self._left is not None:
            task.finish(self._left)
            return task.wait
        if self._thread.ident is None:
            threads = torch.get_num_threads()
            self._thread.start()
            self._is_ready.wait()
            torch.set_num_threads(threads)  # the default of further threads, which the lane has changed
        self._started.append(task)
        self._tasks.put(task)
        return task.wait

    def wait_for(self, messages: Sequence[Any]) -> None:
        """Let the thread wait for messages.  Raises: RuntimeError: a peer has died or is late, or this rank has left."""
        for message in messages:
            if self._left is not None:
                raise self._left
            message.wait(self._timeout)

    def scratch(self, rows: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
        """Memory that the operations use in turn, [rows, row_bytes / item size]."""
        if self._scratch.numel() < rows * row_bytes:
            self._scratch = torch.empty(rows * row_bytes, dtype=torch.uint8)
        return self._scratch[: rows * row_bytes].view(dtype).view(rows, -1)

    def close(self) -> None:
        """End the thread; what it has not finished fails.  A forked child has no thread, and leaves the peers alone.

        gloo has no call that ends the wait for a message: a thread that is in one ends when the message or its time does.
        """
        self._left = RuntimeError("this rank has left the memory that it shared")
        if self._thread.is_alive():
            self._tasks.put(None)
            self.channel.interrupt()
            if threading.current_thread() is not self._thread:  # a garbage collector runs in any thread
                self._thread.join(_JOIN_SECONDS)
        for task in list(self._started):
            task.finish(self._left)
        self.channel.close()
        self._poller.forget()

    def _run(self) -> None:
        torch.get_num_threads()  # the first call in a thread takes the default
        torch.set_num_threads(1)  # here: a team of its own would take the computation's cores
        self._is_ready.set()
        failed: BaseException | None = None
        # Whoever started an operation may be in inference mode; only there can its tensors be written.
        with torch.inference_mode():
            while (task := self._tasks.get()) is not None:
                if failed is None and task.rounds is not None:
                    try:
                        self.channel.start(task.label, task.rounds)()
                    except BaseException as error:
                        failed = self._left or error
                task.finish(failed)
                self._started.popleft()
                del task  # with the tensors of its operation
