"""How Linux schedules the threads of a rank on a CPU."""

from __future__ import annotations

import os
import threading

import pytest
from harness import run_world

from megazero.comm.process_groups import schedule_as_batch_job


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
