"""Operations among the ranks of a host, one after another in a thread beside the computation.

    computation   start(a)  start(b) ..................... wait(a)
    lane                 a a a a a a a a b b b b b b b b

An operation is the rounds of a `Channel`, which may wait for messages of other hosts in between.  The thread waits in system
calls, without Python's lock: while it waits it takes no core, and the computation takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megazero.comm.rendezvous import Neighbours, Poller
from megazero.comm.shared_memory import Channel, Rounds
from megazero.comm.worker import Worker
from megazero.parallel_state.groups import Wait


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
        self._worker = Worker(name)
        self._failed: BaseException | None = None
        self._left: RuntimeError | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def start(self, label: str, rounds: Rounds) -> Wait:
        """Start an operation; its label is the same on all ranks.  The wait raises what the thread has met."""
        if self._left is not None:
            return partial(_fail, self._left)
        return self._worker.post(partial(self._run, label, rounds))

    def _run(self, label: str, rounds: Rounds) -> Wait:
        if self._failed is None:
            try:
                self.channel.start(label, rounds)()
            except BaseException as error:
                self._failed = self._left or error
        if self._failed is not None:
            _fail(self._failed)
        return _nothing

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
        self._worker.close(self._left, self.channel.interrupt)
        self.channel.close()
        self._poller.forget()


def _fail(error: BaseException) -> None:
    raise error


def _nothing() -> None:
    """What waits for an operation that has ended."""
