"""One rank of a dry run: its engine is built, and runs a step on tensors that hold nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from megazero.config import ResolvedRun
from megazero.config.derive import micro_batch_multiple
from megazero.engine import BatchShare, Engine, initialize
from megazero.layers.sample_part import part_of
from megazero.models.gpt import MicroBatch
from megazero.parallel_state.grid import Coordinate
from megazero.plan.fake_tensors import FakeTensors, Message
from megazero.plan.kernel_memory import kernel_bytes
from megazero.plan.silent import RecordedTraffic
from megazero.plan.silent_state import MadeGroup, SilentState
from megazero.plan.simulated_world import SimulatedWorld
from megazero.schedules.action import read_schedule

_LR = 1e-4

Build: TypeAlias = Callable[[ResolvedRun, SilentState], Engine]


@dataclass(frozen=True)
class DryRank:
    """What one simulated rank did.

    Args:
        groups: in the order in which it made them.
        start, step: what it sent and took part in while it was built, and in its last step, in order.
        peak: most bytes that lived at once in that step.
    """

    rank: int
    at: Coordinate
    groups: tuple[MadeGroup, ...]
    start: tuple[Message, ...]
    step: tuple[Message, ...]
    peak: int


def build_engine(run: ResolvedRun, state: SilentState) -> Engine:
    """Build the engine as training does, without drawing initial weights."""
    parallel = run.config.parallel
    own = None
    if parallel.schedule_file is not None:
        own = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
    engine = initialize(run.config, state, init_weights=False, schedule=own)
    engine.sharded_model.parameters.sync_from_master()
    return engine


def run_rank(
    run: ResolvedRun,
    rank: int,
    world: SimulatedWorld,
    per_node: int,
    on_cuda: bool,
    build: Build,
    *,
    is_built_only: bool,
) -> DryRank | None:
    """Build a rank's engine and, unless `is_built_only`, run two steps, of which the second counts.

    Args: as for `dry_run`; `world` has the other simulated ranks.
    """
    with FakeTensors(kernel_bytes=kernel_bytes(on_cuda=on_cuda)) as fake:
        state = SilentState(run, rank, per_node, world, RecordedTraffic(fake.operators), on_cuda=on_cuda)
        engine = build(run, state)
        start = tuple(one for one in fake.operators if isinstance(one, Message))
        if is_built_only:
            return None
        batches = [_batch(run, engine.share) for _ in range(run.accumulation)]
        engine.train_step(batches[: _warming(run)], _LR)
        fake.operators.clear()
        gc.collect()
        fake.peak = fake.live
        engine.train_step(batches, _LR)
        step = tuple(one for one in fake.operators if isinstance(one, Message))
        return DryRank(rank, state.at, tuple(state.made), start, step, fake.peak)


def _warming(run: ResolvedRun) -> int:
    """Return the micro-batches of the first step, in which an optimizer may allocate its state.

    As few as the schedule takes, but at stage 3, where weights are gathered ahead in the order of the step before.
    """
    return run.accumulation if run.config.zero.stage == 3 else fewest_micro_batches(run, 1)


def fewest_micro_batches(run: ResolvedRun, least: int) -> int:
    """Return the fewest micro-batches, but `least`, that the schedule takes; at most the run's."""
    parallel = run.config.parallel
    if parallel.schedule_file is not None:
        return run.accumulation
    multiple = micro_batch_multiple(parallel)
    return min(run.accumulation, -(-least // multiple) * multiple)


def _batch(run: ResolvedRun, share: BatchShare) -> MicroBatch:
    """Return a micro-batch of zeros; with documents, each sample is one document."""
    model, size = run.config.model, run.micro_batch_size
    samples = torch.zeros(model.seq_len + 1, size, dtype=torch.int64)
    part = None
    if share.documents or share.ulysses.size * share.ring.size > 1:
        # with lengths, nothing of it is kept after this run
        lengths = [[model.seq_len]] * (size if share.documents else 1)
        part = part_of(lengths, model.seq_len, share.ulysses, share.ring, share.device)
        part = part and replace(part, of_any=not share.documents)
    return share.cut(torch.zeros(size, dtype=torch.int64), samples[:-1], samples[1:], part)
