"""How much longer whole steps take than a plan of their parts says: what no timing of a part has seen.

    plan of a run   | compute | waits | compute | ...         made of operators, collectives and waits as they were measured
    the run itself, beside the probe                          the median ratio of a few runs stretches all computation

Caches that others have used, buffers between actions, the kernel's own work: one number for a machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from statistics import median

import torch
import torch.distributed as dist

from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine import initialize
from megazero.parallel_state import ParallelState
from megazero.plan.calibration import Calibration
from megazero.plan.cluster import Cluster
from megazero.plan.processes import in_processes
from megazero.plan.speed_probe import LR, SpeedProbe, random_batches, step_seconds
from megazero.plan.step_time import step_time_of

_MODEL = {"family": "llama", "hidden_size": 256, "num_layers": 6, "num_heads": 4, "vocab_size": 512, "seq_len": 128}
_STEPS, _MOST_RANKS = 3, 8


def step_stretch(bare: Calibration, turns: int = 3) -> float:
    """Return the median ratio of measured to planned step time.  `turns`: how often each run's steps are measured."""
    ratios = []
    for run in _runs(bare.processors):
        cluster = Cluster(bare.device, run.world_size, run.world_size, bare.within, bare.within, bare.processors)
        ranks = in_processes(run.world_size, _steps, run, bare.processors, turns)
        probe = bare.probe_seconds[run.world_size > 1]
        slowest = [max(steps) for steps in zip(*(seconds for seconds, _ in ranks), strict=True)]
        probes = [max(beside) for beside in zip(*(beside for _, beside in ranks), strict=True)]
        found = median(seconds * probe / beside for seconds, beside in zip(slowest, probes, strict=True))
        ratios.append(found / step_time_of(run, cluster).seconds)
    return median(ratios)


def _runs(processors: int) -> Iterator[ResolvedRun]:
    """Yield a run of one rank, then runs with one and two ranks per processor, each with and without a pipeline."""
    shared = min(processors, _MOST_RANKS // 2)
    worlds = [1, *(count for count in (shared, 2 * shared) if count > 1)]
    for world, pp in product(worlds, (1, 2)):
        if world % pp == 0:
            document = {
                "model": _MODEL,
                "parallel": {"pp": pp},
                "precision": {"dtype": "fp32"},
                "training": {"micro_batch_size": 2, "accumulation": 4 * pp, "compile": False},
            }
            yield resolve(RunConfig.model_validate(document), world)


def _steps(rank: int, run: ResolvedRun, processors: int, turns: int) -> tuple[list[float], list[float]]:
    """Measure steps, and the probe beside each of them on every processor; ranks without a probe report 0."""
    device = torch.device("cpu")
    state = ParallelState(run.grid, rank, device=device, local_world_size=run.world_size)
    engine = initialize(run.config, state)
    batches = random_batches(run, engine.share)
    probe = SpeedProbe(device) if rank < processors else None

    def probed() -> float:
        dist.barrier()
        seconds = 0.0 if probe is None else probe.seconds()
        dist.barrier()
        return seconds

    engine.train_step(batches, LR)
    seconds, beside, before = list[float](), list[float](), probed()
    for _ in range(turns):
        step_seconds(engine, batches)  # the probe's data left the caches
        seconds += [step_seconds(engine, batches) for _ in range(_STEPS)]
        after = probed()
        beside += [(before + after) / 2] * _STEPS
        before = after
    return seconds, beside
