"""Reads from the environment what a launcher says about this process.  Importing this does not import torch.

    torchrun            RANK  WORLD_SIZE  LOCAL_RANK  LOCAL_WORLD_SIZE  MASTER_ADDR  MASTER_PORT       a rank of a run
    srun, mpirun, ...   their own variables and no RANK             a task, which would train independently of the others

Sources: srun(1), "output environment variables"; Open MPI, "environment variables set for MPI applications";
flux-environment(7); the manuals of MVAPICH, MPICH's Hydra, Cray PALS and Horovod.  Kubeflow sets torchrun's PET_*.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
_ALL = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (docs/elastic.md)"
# The settings of torch's CUDA allocator, and the older names that torch reads, too.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# How to put the messages of gloo and NCCL on the right network.
SET_CARDS = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the card that the hosts share (docs/elastic.md)"
# How many tasks, which of them this is, and what starts one on each node.  The variables of Hydra and PMIx come last: other
# launchers set them, too.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun --map-by ppr:1:node"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpiexec -ppn 1"), ("", "ALPS_APP_PE", "aprun -N 1"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run --tasks-per-node=1"), ("", "PALS_RANKID", "mpiexec --ppn 1"),
    ("SLURM_NTASKS", "SLURM_PROCID", "srun --ntasks-per-node=1"), ("HOROVOD_SIZE", "HOROVOD_RANK", "horovodrun -np NODES"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun --ntasks-per-node=1"), ("PMI_SIZE", "PMI_RANK", "mpiexec -ppn 1"),
    ("", "PMIX_RANK", "prterun --map-by ppr:1:node"), ("PET_NNODES", "PET_NODE_RANK", "Kubeflow command:"),
)  # fmt: skip


class MeetingError(ConnectionError):
    """This rank cannot reach the address at which the ranks meet."""


def start_problem(environment: Mapping[str, str]) -> str | None:
    """Check the rank that the environment describes; return why it is impossible, or None if it is possible.

    Without the variables of a rank, the process must be the only one.
    """
    given = environment.get
    for name, least in _LEAST.items():
        if (text := given(name)) is not None and not (re.fullmatch(r"[0-9]{1,9}", text) and int(text) >= least):
            return f"{name}={text!r} in the environment must be a number of {least} or more, or unset"
    if "RANK" not in environment:
        return _task_without_rank(environment)
    rank, world, port = int(environment["RANK"]), int(given("WORLD_SIZE", "0")), given("MASTER_PORT", "")
    found = [f"{name} is not set" for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not given(name)]
    found += [f"WORLD_SIZE={world} is not larger"] if 0 < world <= rank else []
    found += [f"MASTER_PORT={port!r} is no port"] if port and not (port.isdecimal() and 0 < int(port) < 2**16) else []
    if not found or (rank, world) == (0, 1):  # a single rank meets nobody
        return None
    advice = f"start with torchrun, or set in every rank what it sets: {_ALL}; alone, unset RANK"
    return f"RANK={rank}, but {' and '.join(found)}; {advice}"


def joined_world() -> tuple[int, int]:
    """Return the world size and this rank in torch.distributed; (1, 0) without it.

    Raises: ValueError: a launcher has started several processes, but they have not joined a process group.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    started, call = os.environ.get("WORLD_SIZE", "1"), 'init_process_group("cpu:gloo,cuda:nccl"), or "gloo"'
    unjoined = f"{started} ranks were started but torch.distributed does not know of them; call {call} without CUDA"
    if problem := start_problem(os.environ) or (None if started == "1" else unjoined):
        raise ValueError(problem)
    return 1, 0


def _task_without_rank(environment: Mapping[str, str]) -> str | None:
    """Return an error if a launcher has started this process as one of several tasks, which would all train alone."""
    # A batch script has the job's SLURM_NTASKS, but no step; a shell of salloc has step 4294967290, one of srun a terminal.
    given = dict(environment)
    if "SLURM_STEP_NUM_TASKS" in given or not re.fullmatch("[0-9]{1,9}", given.get("SLURM_STEP_ID", "")):
        given.pop("SLURM_NTASKS", None)
    for size, rank, starts in _LAUNCHERS:
        many = re.fullmatch("([0-9]+:)?([2-9]|[1-9][0-9]+)", given.get(size, ""))  # elastic Kubeflow has MIN:MAX
        is_shell = rank in ("SLURM_PROCID", "PMI_RANK", "PMIX_RANK") and "SLURM_PTY_PORT" in given
        if (many or re.fullmatch("[1-9][0-9]*", given.get(rank, ""))) and not is_shell:
            found = ", ".join(f"{name}={given[name]}" for name in (size, rank) if name in given)
            return (
                f"{starts.split()[0]} has started several tasks ({found}) without RANK, and each would train alone; start "
                f"one torchrun on each node ({starts} torchrun ...), or set in each task "
                f"what torchrun sets: {_ALL}, with RANK=${rank}; for a run of its own in each task, torchrun --standalone"
            )
    return None


def cores_of_rank(local_world_size: int) -> int:
    """Return the number of cores for this rank: its share of the cores that it may use.

    A container may use some of the host's cores.  If the rank is bound to some of its launcher's cores (mpirun, srun,
    numactl, `stay_near`), a proportional number of ranks shares these.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // local_world_size)
    mine, ranks = os.sched_getaffinity(0), local_world_size
    with suppress(OSError):  # the launcher has ended, or is not to be seen
        if mine < (every := os.sched_getaffinity(os.getppid())):
            ranks = max(1, round(local_world_size * len(mine) / len(every)))
    return max(1, len(mine) // ranks)


def stay_near(address: str, local_world_size: int, system: Path = Path("/sys")) -> None:
    """Bind this thread, and the threads that it starts, to the cores of a PCI device's NUMA node, if that is known.

    Nothing is bound if the node has fewer cores than the rank's share of all cores: the GPUs of a node share its cores, and
    on a host with more GPUs than ranks, all ranks may be on one node.

    Args:
        address: PCI address, such as "0000:1b:00.0".
        local_world_size: ranks on this host.
        system: where sysfs is mounted.
    """
    with suppress(OSError, ValueError):  # the kernel does not say: the node of a device may be -1
        devices = system / "bus/pci/devices"
        node = int((devices / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [list(map(int, cores.split("-"))) for cores in listed.split(",")]
        near = os.sched_getaffinity(0) & {core for ends in ranges for core in range(ends[0], ends[-1] + 1)}
        gpus = (devices / address / "driver").glob("*:*:*")  # also those that this process may not use
        sharing = sum(int((devices / gpu.name / "numa_node").read_text()) == node for gpu in gpus) or local_world_size
        if near and len(near) // min(sharing, local_world_size) >= cores_of_rank(local_world_size):
            os.sched_setaffinity(0, near)
