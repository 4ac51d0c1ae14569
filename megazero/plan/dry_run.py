"""A dry run: the engine's own code for ranks of any world, on tensors without data and with messages that move nothing.

    run file -> fake state -> engine -> train steps      the program is the real one; see fake_ranks.py
                     |             |
                 groups      operations, in order          compared among ranks: simulated_world.py

What it cannot know: numbers that come from data (no overflow, no label that is masked), memory within a kernel, and what
differs on a GPU because of the device: its kernels, and NCCL's order of messages, which `schedules/proof.py` proves.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from megazero.config import ResolvedRun
from megazero.engine import BatchShare, Engine, initialize
from megazero.engine.outline import schedule_of
from megazero.layers.sample_part import part_of
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import RankGrid
from megazero.parallel_state.grid import Coordinate
from megazero.plan.fake_ranks import FakeState, MadeGroup, RecordedTraffic, without_files
from megazero.plan.fake_tensors import FakeTensors, Message, kernel_bytes
from megazero.plan.simulated_world import Lockstep, SimulatedWorld
from megazero.plan.state_trace import fewest_micro_batches, without_auto

MOST_COMPARED, MOST_MICRO_BATCHES = 64, 256  # of a world of which all ranks are simulated; of all ranks together
_LR = 1e-4


@dataclass(frozen=True)
class DryRank:
    """What one simulated rank did.

    Args:
        groups: the groups that it made, in order.
        start: the messages and collectives that it started while it was built, in order.
        step: those of its last step.
        peak: most bytes that were live at once in that step.
    """

    rank: int
    at: Coordinate
    groups: tuple[MadeGroup, ...]
    start: tuple[Message, ...]
    step: tuple[Message, ...]
    peak: int


@dataclass(frozen=True)
class DryRun:
    """What the simulated ranks did.

    Args:
        grid: the grid of the whole world.
        simulated: the ranks that were built.
        compared: the ranks that ran steps.
        ranks: the ranks that ran their steps to the end.
        problems: why a real start would fail or hang; empty if none was found.
        notes: what was left out, or differs from the real run.
        seconds: the time that the dry run took.
    """

    grid: RankGrid
    simulated: tuple[int, ...]
    compared: tuple[int, ...]
    ranks: Mapping[int, DryRank]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def build_engine(run: ResolvedRun, state: FakeState) -> Engine:
    """Build the engine as training does, but draw no initial weights."""
    own = None if run.config.parallel.schedule_file is None else schedule_of(run)
    engine = initialize(run.config, state, init_weights=False, schedule=own)
    engine.sharded_model.parameters.sync_from_master()
    return engine


def dry_run(run: ResolvedRun, *, per_node: int, rank: int | None = None, on_cuda: bool = True) -> DryRun:
    """Run the steps of one rank, or compare the steps of many.

    Args:
        per_node: ranks of a node.
        rank: the rank to run; the other ranks of its pipeline are only built.  None runs all ranks of a small world, and
            of a large one a whole pipeline and the first, second and last rank of each other axis.
        on_cuda: use the groups, backends and traffic of a run on GPUs.
    """
    began, grid = time.perf_counter(), run.grid
    pipeline = grid.group_of(rank or 0, "pp")
    is_large = grid.world_size > MOST_COMPARED or grid.world_size * run.accumulation > MOST_MICRO_BATCHES
    steppers = (rank,) if rank is not None else some_ranks(grid) if is_large else tuple(range(grid.world_size))
    simulated = tuple(sorted({*pipeline, *steppers}))
    world = SimulatedWorld(grid, simulated)
    prepared, notes = _prepared(run)
    if on_cuda:
        notes += ("the peak is without what a GPU's kernels take inside, and with what the run keeps on the host",)
    if rank is None and is_large and (few := fewest_micro_batches(run, 2)) < run.accumulation:
        prepared = replace(prepared, accumulation=few)
        notes += (
            f"steps of {few} micro-batches in place of {run.accumulation}; for the peak of a step ask for a rank",
        )
    found: dict[int, DryRank] = {}

    def program(own_rank: int) -> None:
        result = run_rank(prepared, own_rank, world, per_node, on_cuda, is_built_only=own_rank not in steppers)
        if result is None:
            world.left.add(own_rank)
        else:
            found[own_rank] = result

    with without_files():
        world.lockstep.run({own_rank: partial(program, own_rank) for own_rank in simulated})
    problems = tuple(_problems(world.lockstep))
    seconds = time.perf_counter() - began
    return DryRun(grid, simulated, steppers, dict(sorted(found.items())), problems, notes, seconds)


def some_ranks(grid: RankGrid) -> tuple[int, ...]:
    """Return a few ranks such that every other rank does the same as one of them."""
    found = {*grid.group_of(0, "pp")}
    for axis in ("tp", "cp", "dp"):
        group = grid.group_of(0, axis)
        found |= {*group[:2], group[-1]}
    return tuple(sorted(found))


def _problems(lockstep: Lockstep) -> Iterator[str]:
    if lockstep.failed is not None:
        rank, error = lockstep.failed
        yield f"rank {rank}: {type(error).__name__}: {error}"
    by_doing: dict[str, list[int]] = {}
    for rank, doing in sorted(lockstep.waiting.items()):
        by_doing.setdefault(doing, []).append(rank)
    for doing, ranks in by_doing.items():
        named = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
        yield f"no rank can go on: {named} for {doing}"


def _prepared(run: ResolvedRun) -> tuple[ResolvedRun, tuple[str, ...]]:
    """Return the run without what needs a device or a disk, and notes on what changed."""
    config = without_auto(run.config)
    if config.training.compile:
        config = config.model_copy(update={"training": config.training.model_copy(update={"compile": False})})
    is_decided = config.zero == run.config.zero
    return replace(run, config=config), () if is_decided else ("zero.offload = auto keeps all on the device here",)


# ---- one rank


def run_rank(
    run: ResolvedRun, rank: int, world: SimulatedWorld, per_node: int, on_cuda: bool, *, is_built_only: bool
) -> DryRank | None:
    """Build a rank's engine and, unless `is_built_only`, run two steps, of which the second counts.

    Args: as for `dry_run`; `world` has the other simulated ranks.
    """
    with FakeTensors(kernel_bytes=kernel_bytes(on_cuda=on_cuda)) as fake:
        state = FakeState(run, rank, per_node, world, RecordedTraffic(fake.operators), on_cuda=on_cuda)
        engine = build_engine(run, state)
        start = fake.messages
        if is_built_only:
            return None
        batches = [_batch(run, engine.share) for _ in range(run.accumulation)]
        engine.train_step(batches[: _warming(run)], _LR)
        fake.operators.clear()
        gc.collect()
        fake.peak = fake.live
        engine.train_step(batches, _LR)
        return DryRank(rank, state.at, tuple(state.made), start, fake.messages, fake.peak)


def _warming(run: ResolvedRun) -> int:
    """Return the micro-batches of the first step, in which an optimizer may allocate its state.

    They are as few as the schedule takes, except at stage 3, which gathers weights ahead in the order of the step before.
    """
    return run.accumulation if run.config.zero.stage == 3 else fewest_micro_batches(run, 1)


def _batch(run: ResolvedRun, share: BatchShare) -> MicroBatch:
    """Return a micro-batch of zeros in which each sample is one document."""
    model, size = run.config.model, run.micro_batch_size
    samples = torch.zeros(model.seq_len + 1, size, dtype=torch.int64)
    part = None
    if share.documents or share.ulysses.size * share.ring.size > 1:
        # with lengths, nothing of it is kept after this run
        lengths = [[model.seq_len]] * (size if share.documents else 1)
        part = part_of(lengths, model.seq_len, share.ulysses, share.ring, share.device)
        part = part and replace(part, of_any=not share.documents)
    return share.cut(torch.zeros(size, dtype=torch.int64), samples[:-1], samples[1:], part)
