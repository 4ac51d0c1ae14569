"""The thread that makes calls beside the computation: it holds nobody up, keeps order, tells what went wrong, and ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from unittest.mock import patch

import pytest
import torch
from harness import run_world
from torch import Tensor

from megazero.comm.collectives import all_gather, all_to_all, reduce_scatter, ring_shift
from megazero.cpu.worker import Worker
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid
from megazero.parallel_state.axis import Wait

_SECONDS = 30.0


def _axis(rank: int, world: int, timeout_seconds: float = 60) -> Axis:
    return ParallelState(RankGrid(dp=world), rank, Links(timeout_seconds=timeout_seconds, shares_memory=False)).dp


def _thread(name: str) -> threading.Thread:
    return next(one for one in threading.enumerate() if one.name == name)


def test_what_handing_over_raises_is_raised_by_every_wait_and_the_next_messages_go() -> None:
    def fail() -> Wait:
        raise RuntimeError("Connection closed by peer")

    worker, done = Worker("failing"), list[int]()
    failed, next_one = worker.post(fail), worker.post(lambda: lambda: done.append(1))
    next_one()
    assert done == [1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            failed()


def test_what_a_closed_worker_has_not_begun_fails_and_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.cpu.worker._JOIN_SECONDS", 0.0)  # the thread cannot end yet
    goes_on, ran = threading.Event(), list[str]()
    worker = Worker("closed")

    def start(name: str) -> Wait:
        assert goes_on.wait(_SECONDS)
        ran.append(name)
        return lambda: None

    worker.post(lambda: lambda: None)()
    thread = _thread("closed")
    waits = [worker.post(lambda name=name: start(name)) for name in ("begun", "queued", "behind")]  # type: ignore[misc]
    worker.close(RuntimeError("this rank has left"), lambda: None)
    for wait in waits:
        with pytest.raises(RuntimeError, match="this rank has left"):
            wait()
    goes_on.set()
    thread.join(_SECONDS)
    assert not thread.is_alive()
    assert ran in ([], ["begun"])


def test_messages_that_were_handed_over_are_not_kept() -> None:
    worker = Worker("keeps nothing")
    sent = torch.zeros(4)
    freed = threading.Event()

    class Message:
        def __del__(self) -> None:
            freed.set()

    message = Message()
    wait = worker.post(lambda message=message, sent=sent: lambda: None)  # type: ignore[misc]
    del message
    wait()
    worker.post(lambda: lambda: None)()  # the thread has let go of the one before
    del wait
    assert freed.wait(_SECONDS)


def _held_up(rank: int) -> None:
    """All operations whose messages a thread hands over are started while it stands still; none waits for it."""
    axis = _axis(rank, 2)
    all_gather(torch.empty(2), torch.zeros(1), axis).wait()  # the ranks have chosen what carries them
    thread_goes_on = threading.Event()

    def hold() -> Wait:
        assert thread_goes_on.wait(_SECONDS)
        return lambda: None

    assert axis.group is not None
    held = axis.group.backends["cpu"]._messages.post(hold)  # type: ignore[attr-defined]
    whole, parts, shifted = torch.empty(2), torch.empty(2, 3), torch.empty(3)
    sums: Tensor = torch.empty(2)
    pendings = [
        all_gather(whole, torch.full((1,), float(rank)), axis, "weights"),
        reduce_scatter(sums, torch.arange(4.0) + rank, axis),
        all_to_all(parts, torch.arange(6.0).view(2, 3) + 10 * rank, axis),
        ring_shift(shifted, torch.full((3,), float(rank)), axis),
    ]
    thread_goes_on.set()
    held()
    for pending in pendings:
        pending.wait()
    assert whole.tolist() == [0.0, 1.0]
    assert sums.tolist() == [[1.0, 3.0], [5.0, 7.0]][rank]
    assert parts.tolist() == [[3.0 * rank + k for k in range(3)], [10 + 3.0 * rank + k for k in range(3)]]
    assert shifted.unique().tolist() == [1.0 - rank]


def test_operations_over_sockets_start_without_waiting_for_the_thread_that_hands_them_over() -> None:
    run_world(2, _held_up)


def _interrupted_start(rank: int) -> list[list[float]]:
    """An interrupt while a starting operation lends its core: the group's next operation waits for it."""
    axis, found = _axis(rank, 2), []
    all_gather(torch.empty(2), torch.zeros(1), axis).wait()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    starts = [
        partial(all_gather, torch.empty(2), torch.zeros(1), axis),
        partial(reduce_scatter, torch.empty(2), torch.zeros(4), axis),
    ]
    for start in starts:
        with patch("megazero.cpu.worker.futures.wait", interrupt), pytest.raises(KeyboardInterrupt):
            start()
        whole = torch.empty(2)
        all_gather(whole, torch.full((1,), float(rank)), axis, "weights").wait()
        assert axis.group is not None
        assert not axis.group.unfinished
        found.append(whole.tolist())
    return found


def test_an_operation_whose_start_was_interrupted_is_waited_for_by_the_next() -> None:
    assert run_world(2, _interrupted_start) == [[[0.0, 1.0]] * 2] * 2


def test_a_process_that_ends_lets_its_threads_end_a_wait() -> None:
    """One in a message's wait returns to an interpreter that is gone, and the process aborts."""
    script = (
        "import time\n"
        "from megazero.cpu.worker import Worker\n"
        "worker = Worker('waits')\n"
        "worker.post(lambda: (time.sleep(0.2), print('ended', flush=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
