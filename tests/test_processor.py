"""How many threads a rank on a CPU has, and how Linux schedules them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from harness import run_world

from megazero.cpu.processor import prepare_cpu_rank, schedule_as_batch_job
from megazero.launchers import stay_near


def _policies(rank: int) -> dict[str, int]:
    """Of threads that were there, of one with a policy of its own, and of one that starts afterwards."""
    is_over = threading.Event()

    def started() -> int:
        thread = threading.Thread(target=is_over.wait, daemon=True)
        thread.start()
        assert thread.native_id is not None
        return thread.native_id

    of = {"main": 0, "before": started(), "idle": started()}
    plain = os.sched_param(0)
    for name, thread in of.items():  # the tests' own processes are batch jobs
        os.sched_setscheduler(thread, os.SCHED_IDLE if name == "idle" else os.SCHED_OTHER, plain)
    schedule_as_batch_job()
    of["after"] = started()
    found = {name: os.sched_getscheduler(thread) for name, thread in of.items()}
    is_over.set()
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
def test_threads_are_a_batch_jobs_but_for_those_with_a_policy_of_their_own() -> None:
    found = run_world(1, _policies)[0]
    assert found == {"main": os.SCHED_BATCH, "before": os.SCHED_BATCH, "idle": os.SCHED_IDLE, "after": os.SCHED_BATCH}


@pytest.mark.parametrize(
    ("mine", "parents", "ranks", "threads"),
    [(64, 64, 8, 8), (8, 8, 8, 1), (8, 64, 8, 8), (2, 64, 8, 2), (32, 64, 8, 8), (8, 8, 16, 1), (3, 4, 1, None)],
    ids=[
        "a host",
        "a container",
        "bound by a launcher",
        "bound to few",
        "bound to a node",
        "more ranks than cores",
        "alone",
    ],
)
def test_a_rank_takes_its_share_of_the_cores_that_it_may_use(
    mine: int, parents: int, ranks: int, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda of: set(range(parents if of else mine)))
    prepare_cpu_rank(ranks)
    assert set_to == ([] if threads is None else [threads])


@pytest.mark.parametrize(
    ("nodes", "may_use", "ranks", "bound"),
    [
        ([1, 0, 0, 0], 16, 4, [{4, 5, 6, 7, 12}]),
        ([1, 0, 0, 0], 6, 4, [{4, 5}]),  # of a container
        ([1, 0, 0, 0], 5, 2, []),  # one core is near, and the rank's share is two
        ([1, 0, 0, 0], 4, 4, []),  # all that it may use are far
        ([1, 1, 1, 1], 16, 4, []),  # four ranks would share five cores
        ([1, 1, 0, 0, 0, 0, 0, 0], 16, 2, []),  # the two ranks may be on the two GPUs of this node
        ([-1], 16, 4, []),  # of a virtual machine
        ([], 16, 4, []),
    ],
)
def test_a_rank_stays_on_the_cores_near_its_device_if_they_are_its_share_at_least(
    nodes: list[int], may_use: int, ranks: int, bound: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nodes`: of the host's GPUs; the rank's is the first."""
    devices = tmp_path / "bus/pci/devices"
    for number, node in enumerate(nodes):
        address = f"0000:1{number}:00.0"
        (devices / "0000:10:00.0/driver" / address).mkdir(parents=True)
        (devices / address).mkdir(exist_ok=True)
        (devices / address / "numa_node").write_text(f"{node}\n")
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpulist").write_text("4-7,12\n")
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(may_use)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: found.append(cores))
    stay_near("0000:10:00.0", ranks, tmp_path)
    assert found == bound
