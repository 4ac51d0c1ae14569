"""Results of processes come in rank order, and a failure ends all of them."""

from __future__ import annotations

import os

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
def test_the_error_of_a_process_ends_all(dies: bool, said: str) -> None:
    """The message names the process that failed, or one that lost its connection to it."""
    with pytest.raises(ProcessFailedError, match=f"process 1 of 2.*{said}|process 0 of 2"):
        in_processes(2, _fail, dies)
