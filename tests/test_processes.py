"""Processes that measure answer in order, and the first that fails ends all of them."""

from __future__ import annotations

import os
from multiprocessing import connection
from multiprocessing.connection import wait

import pytest
import torch.distributed as dist

from megazero.plan.processes import ProcessFailedError, in_processes


def _fail(rank: int, dies: bool) -> None:
    if rank == 1 and dies:
        os._exit(3)
    if rank == 1:
        raise ValueError("no such operator")
    dist.barrier()


def test_answers_come_in_rank_order() -> None:
    assert in_processes(2, lambda rank, more: (rank + more, dist.get_world_size()), 5) == [(5, 2), (6, 2)]


@pytest.mark.parametrize(("dies", "said"), [(False, "ValueError: no such operator"), (True, "exit code 3")])
def test_who_fails_is_named_though_others_wait(monkeypatch: pytest.MonkeyPatch, dies: bool, said: str) -> None:
    # a busy machine looks when the survivor, too, has ended: of a lost connection
    monkeypatch.setattr(connection, "wait", lambda ends, timeout: [end for end in ends if wait([end], timeout)])
    with pytest.raises(ProcessFailedError, match=f"process 1 of 2.*{said}"):
        in_processes(2, _fail, dies)
