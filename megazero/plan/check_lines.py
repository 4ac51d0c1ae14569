"""What `megazero check` says of memory: model state, what is kept for backward passes, and whether a device has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from megazero.config import ResolvedRun
from megazero.engine.outline import chunks_of, elements_in, kind_of, stages_of
from megazero.models.stages import by_rank
from megazero.plan.activations import activations_of_ranks, size_text
from megazero.plan.cluster import Cluster, cluster_of, with_memory
from megazero.plan.memory import ACTIVATIONS, memory_of
from megazero.plan.out_of_memory import advise
from megazero.plan.quick_memory import with_decided_offload
from megazero.plan.state_bytes import formula_of
from megazero.schedules.action import Schedule
from megazero.schedules.kind import ScheduleKind
from megazero.training.check import DeviceNeeds


def memory_lines(
    run: ResolvedRun, gpu: str | None, device_gib: float | None, ranks_per_node: int
) -> Callable[[Schedule], DeviceNeeds]:
    """The lines on what a rank of a run needs, for its schedule.

    Args:
        gpu: a name of `plan.devices`, to be told at which moment the device is fullest; None where none was named.
        device_gib: memory of a rank's device, to be told whether the run fits; None where that is not known.

    Raises:
        ValueError, OSError: as `cluster_of`.
    """
    cluster = None
    if gpu is not None or device_gib is not None:
        names = "--world-size", "--nproc-per-node"
        cluster = cluster_of(gpu or "h200", run.world_size, ranks_per_node, options=names)
    if cluster is not None and device_gib is not None:
        cluster = with_memory(cluster, device_gib, on_cuda=run.config.launch.device != "cpu")
    return partial(lines_on, run, cluster)


def lines_on(run: ResolvedRun, cluster: Cluster | None, schedule: Schedule) -> DeviceNeeds:
    """What a rank needs, and whether a device of the cluster has it; without a cluster it is taken to fit."""
    elements = elements_of_stages(run, kind_of(run.config))
    lines = [("memory", line) for line in (*_memory(run, elements), *_activations(run, schedule))]
    if cluster is None:
        return DeviceNeeds(lines)
    fits, text = _plan(run, cluster, elements)
    return DeviceNeeds([*lines, ("plan", text)], fits)


def _memory(run: ResolvedRun, elements: list[int]) -> Iterator[str]:
    zero = run.config.zero
    formula, largest = formula_of(run, run.shards), max(elements)
    place = zero.offload.optimizer
    away = round(largest * zero.offload.ratio) if place in ("cpu", "nvme") else 0
    state, _ = formula.bytes_with(largest, away)
    text = formula.state_text(offloads=away > 0)
    stage = f", pipeline rank {elements.index(largest)}" if len(set(elements)) > 1 else ""
    yield (
        f"{size_text(state)} of model state on a rank{stage}: ZeRO {zero.stage}, {text} bytes with N = {largest:.4g} "
        f"parameters{f', in brackets off the device ({place})' if away else ''}; buffers and what it keeps come on top"
    )
    if place == "auto" or zero.offload.parameters != "none":
        yield "offloaded weights, and what auto decides where the run starts, are not in this sum"


def _activations(run: ResolvedRun, schedule: Schedule) -> Iterator[str]:
    """What each pipeline rank keeps for its backward passes, the fullest named."""
    on_cuda = run.config.launch.device != "cpu"  # "auto" may take it; a run says at its start what it has taken
    try:
        ranks = activations_of_ranks(run, schedule, on_cuda=on_cuda)
    except TypeError as error:  # layers of a script's own
        yield f"not known what is kept for the backward passes: {error}"
        return
    fullest = max(ranks, key=lambda one: one.device)
    for one in ranks:
        where = f"pipeline rank {one.rank}" if len(ranks) > 1 else "a rank"
        most = "; the fullest" if len(ranks) > 1 and one is fullest else ""
        again = f"; {one.again:.1%} more to compute" if one.again else ""
        yield f"{where} keeps for its backward passes{' on CUDA' if on_cuda else ''} at most {one}{again}{most}"


def _plan(run: ResolvedRun, cluster: Cluster, elements: list[int]) -> tuple[bool, str]:
    """Whether the device has what the fullest rank needs at its fullest moment, and a line that says so, by kind."""
    run = with_decided_offload(run, cluster)
    fullest = max(memory_of(run, cluster), key=lambda one: one.peak)
    of = f"pipeline rank {fullest.stage}" if run.config.parallel.pp > 1 else "a rank"
    ordered = sorted(fullest.kinds.items(), key=lambda one: -one[1])
    kinds = ", ".join(f"{size_text(count)} {kind.replace('_', ' ')}" for kind, count in ordered if count >= 2**20)
    has = cluster.device.memory_bytes
    text = (
        f"{size_text(fullest.peak)} at most on {of}, in the {fullest.moment}: {kinds}; of the {size_text(has)} of "
        f"{cluster.device.name}"
    )
    if fullest.peak <= has:
        return True, f"{text}: fits, {size_text(has - fullest.peak)} are left"
    device = torch.device("cpu" if cluster.processors else "cuda")
    kept = fullest.kinds.get(ACTIVATIONS, 0)
    missing = fullest.peak - has
    advice = advise(run, elements[fullest.stage], missing, working=kept, rank=fullest.stage, device=device)
    return False, f"{text}: does not fit; {advice}"


def elements_of_stages(run: ResolvedRun, kind: ScheduleKind) -> list[int]:
    """Number of parameters that one tensor-parallel rank of each pipeline rank holds."""
    config, parallel = run.config, run.config.parallel
    placement = kind.placement(parallel.pp, chunks_of(config, kind))
    counts = list(map(elements_in, stages_of(config, len(placement))))
    return [sum(own) for own in by_rank(counts, placement)]
