"""A dry run: the engine's real code for any rank of any world, with tensors that hold no data and messages that move none.

    run file -> fake state -> engine -> train steps      the real program; see fake_ranks.py
                     |             |
                 groups      operations, in order          compared among ranks: simulated_world.py

A dry run cannot see what depends on the data (overflows, masked labels), the memory inside kernels, or what differs on a
GPU: its kernels, and NCCL's order of messages, which `schedules/proof.py` proves.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from megazero.config import ResolvedRun
from megazero.engine import BatchSlice, Engine, initialize
from megazero.engine.outline import schedule_of
from megazero.layers.sequence_shard import sequence_shard
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import RankGrid
from megazero.parallel_state.grid import Coordinate
from megazero.plan.fake_ranks import FakeState, MadeGroup, RecordedTraffic, without_files
from megazero.plan.fake_tensors import FakeTensors, Message, kernel_bytes
from megazero.plan.simulated_world import Lockstep, SimulatedWorld
from megazero.plan.state_trace import fewest_micro_batches, without_auto

#: The largest world, and the most micro-batches of all its ranks, for which every rank is simulated.
MOST_COMPARED, MOST_MICRO_BATCHES = 64, 256
_LR = 1e-4


@dataclass(frozen=True)
class DryRank:
    """The record of one simulated rank.

    Args:
        rank: global rank.
        at: its place in the grid.
        groups: the process groups that it made, in order.
        start: the messages and collectives that it started while its engine was built, in order.
        step: the messages and collectives of its last step, in order.
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
    """The result of a dry run.

    Args:
        grid: the grid of the whole world.
        simulated: ranks whose engine was built.
        steppers: the simulated ranks that run their steps; for the others only the engine is built.
        ranks: records of the ranks that ended their steps.
        problems: reasons for which a real start would fail or hang; empty if none was found.
        notes: differences from the real run.
        seconds: duration of the dry run.
    """

    grid: RankGrid
    simulated: tuple[int, ...]
    steppers: tuple[int, ...]
    ranks: Mapping[int, DryRank]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def build_engine(run: ResolvedRun, state: FakeState) -> Engine:
    """Build the engine as training does, without drawing initial weights."""
    own = None if run.config.parallel.schedule_file is None else schedule_of(run)
    engine = initialize(run.config, state, init_weights=False, schedule=own)
    engine.sharded_model.parameters.sync_from_master()
    return engine


def dry_run(run: ResolvedRun, *, per_node: int, rank: int | None = None, on_cuda: bool = True) -> DryRun:
    """Run the steps of one rank, or compare the steps of many.

    Args:
        per_node: ranks of a node.
        rank: the rank to run; the engines of the other ranks of its pipeline are only built.  None runs all ranks of a
            small world; in a large world, it runs a whole pipeline and the first, second and last rank of each other axis.
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
        notes += ("the peak leaves out memory inside a GPU's kernels, and includes what the run stores on the host",)
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

    # Where torch 2.11 is built for CUDA and there is no GPU, the first thread that enters fake tensors owns torch's stand-in
    # for the GPU.  A rank's thread ends, and after it the next one would crash.
    with FakeTensors():
        pass
    with without_files():
        world.lockstep.run({own_rank: partial(program, own_rank) for own_rank in simulated})
    problems = tuple(_problems(world.lockstep))
    seconds = time.perf_counter() - began
    return DryRun(grid, simulated, steppers, dict(sorted(found.items())), problems, notes, seconds)


def some_ranks(grid: RankGrid) -> tuple[int, ...]:
    """Return a few ranks that stand for all: every other rank starts the same operations as one of them."""
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
    """Return the run without settings that need a device or a disk, and notes on the changes."""
    config = without_auto(run.config)
    if config.training.compile:
        config = config.model_copy(update={"training": config.training.model_copy(update={"compile": False})})
    is_decided = config.zero == run.config.zero
    return replace(run, config=config), () if is_decided else ("zero.offload = auto keeps all on the device here",)


# ---- one rank


def run_rank(
    run: ResolvedRun, rank: int, world: SimulatedWorld, per_node: int, on_cuda: bool, *, is_built_only: bool
) -> DryRank | None:
    """Build a rank's engine, run two steps, and return the record of the second one.

    Args:
        run, rank, per_node, on_cuda: see `dry_run`.
        world: the other simulated ranks.
        is_built_only: build the engine, run no step and return None.
    """
    with FakeTensors(kernel_bytes=kernel_bytes(on_cuda=on_cuda)) as fake:
        state = FakeState(run, rank, per_node, world, RecordedTraffic(fake.operators), on_cuda=on_cuda)
        engine = build_engine(run, state)
        start = fake.messages
        if is_built_only:
            return None
        batches = [_batch(run, engine.batch_slice) for _ in range(run.accumulation)]
        # The optimizer allocates its state within the fewest that the schedule takes.  At stage 3 a second step gathers the
        # weights in the order of the first.
        warming = run.accumulation if run.config.zero.stage == 3 else fewest_micro_batches(run, 1)
        engine.train_step(batches[:warming], _LR)
        fake.operators.clear()
        gc.collect()
        fake.peak = fake.live
        engine.train_step(batches, _LR)
        return DryRank(rank, state.at, tuple(state.made), start, fake.messages, fake.peak)


def _batch(run: ResolvedRun, batch_slice: BatchSlice) -> MicroBatch:
    """Return a micro-batch of zeros in which each sample is one document."""
    model, size = run.config.model, run.micro_batch_size
    samples = torch.zeros(model.seq_len + 1, size, dtype=torch.int64)
    shard = None
    if batch_slice.documents or batch_slice.ulysses.size * batch_slice.ring.size > 1:
        # given the lengths, `sequence_shard` caches nothing beyond this run
        lengths = [[model.seq_len]] * (size if batch_slice.documents else 1)
        shard = sequence_shard(lengths, model.seq_len, batch_slice.ulysses, batch_slice.ring, batch_slice.device)
        shard = replace(shard, fits_any=not batch_slice.documents)
    return batch_slice.cut(torch.zeros(size, dtype=torch.int64), samples[:-1], samples[1:], shard)
