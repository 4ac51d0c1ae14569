"""The processor of a rank that computes on the CPU: how many cores it uses, how Linux schedules it, and which of torch's
two libraries multiplies its fp32 matrices.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megazero.launchers import cores_of_rank


def prepare_cpu_rank(local_world_size: int) -> None:
    """Set the number of threads so that the ranks of this host divide its cores, at the seam "rank".

    Args:
        local_world_size: number of ranks of this host.
    """
    if local_world_size > 1:
        torch.set_num_threads(cores_of_rank(local_world_size))
    schedule_as_batch_job()


def schedule_as_batch_job() -> None:
    """Have Linux schedule all threads of this process, and those that it starts later, as a batch job.  A thread of a batch
    job that wakes up does not take another thread's core.

    gloo's thread spins while another thread holds the lock of a connection.  If it took that thread's core, it would spin
    for a whole time slice.  A thread with another scheduling policy keeps it.  On systems other than Linux this does
    nothing.
    """
    with suppress(OSError, AttributeError):  # a thread that has just ended, no such system, not allowed
        for thread in map(int, os.listdir("/proc/self/task")):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def fp32_product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return oneDNN's product x @ w.T on processors where it is faster than `mm`, else None; at the seam "kernel".

    torch's `mm` calls MKL, which on AMD processors runs at about half the speed of oneDNN.  The choice depends on the
    processor's vendor and not on a measurement, so that every run on a machine computes the same numbers.
    """
    cpu = Path("/proc/cpuinfo")
    is_amd = cpu.is_file() and "AuthenticAMD" in cpu.read_text()[:4096]
    return _onednn_product if is_amd and torch.backends.mkldnn.is_available() else None


def _onednn_product(x: Tensor, w: Tensor) -> Tensor:
    rows: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return rows
