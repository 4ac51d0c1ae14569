"""The outline of a run, from its configuration alone: the schedule, and the stages without memory."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import nn

from megazero.config import ResolvedRun, RunConfig
from megazero.models.gpt import BuildContext, GPTStage
from megazero.models.stages import by_rank, cut
from megazero.parallel_state import Axis
from megazero.schedules.action import Schedule, read_schedule
from megazero.schedules.kind import GivenSchedule, ScheduleKind
from megazero.schedules.registry import SCHEDULES
from megazero.zero.bucket import DTYPES


def kind_of(config: RunConfig) -> ScheduleKind:
    """The kind of schedule that a run names, or that of its file."""
    parallel = config.parallel
    if parallel.schedule_file is None:
        return SCHEDULES[parallel.schedule]
    return GivenSchedule(read_schedule(Path(parallel.schedule_file), parallel.schedule_placement))


def chunks_of(config: RunConfig, kind: ScheduleKind) -> int:
    """Model chunks of each pipeline rank."""
    return kind.chunks or config.parallel.virtual_stages


def schedule_of(run: ResolvedRun) -> Schedule:
    """The pipeline schedule of a run: built by its kind, or read from `parallel.schedule_file`."""
    kind = kind_of(run.config)
    build = kind.build if run.config.parallel.schedule_file else partial(_built, kind)
    return build(run.config.parallel.pp, run.accumulation, chunks_of(run.config, kind))


@lru_cache(maxsize=64)
def _built(kind: ScheduleKind, pp: int, microbatches: int, chunks: int) -> Schedule:
    return kind.build(pp, microbatches, chunks)


def stages_of(config: RunConfig, count: int = 1, tp: int | None = None) -> list[GPTStage]:
    """The model cut into `count` stages on the meta device, as the first tensor-parallel rank builds them.

    tp: number of tensor-parallel ranks; that of the run by default.
    """
    layouts = cut(config.model, "even" if count == 1 else config.parallel.layout, count)
    device, axis = torch.device("meta"), Axis("tp", tuple(range(tp or config.parallel.tp)))
    cuts, seed = config.parallel.sequence_parallel, config.training.seed
    context = BuildContext(config.model, axis, cuts, seed, device, dtype=DTYPES[config.precision.dtype])
    with device:
        return [GPTStage(context, layout) for layout in layouts]


def elements_of_stages(run: ResolvedRun, kind: ScheduleKind) -> list[int]:
    """Number of parameters that one tensor-parallel rank of each pipeline rank holds."""
    config, parallel = run.config, run.config.parallel
    placement = kind.placement(parallel.pp, chunks_of(config, kind))
    counts = list(map(elements_in, stages_of(config, len(placement))))
    return [sum(own) for own in by_rank(counts, placement)]


def elements_in(module: nn.Module) -> int:
    """Number of parameters of a stage, or of a module in it."""
    return sum(weight.numel() for weight in module.parameters())
