"""What the host does per step, per layer and per bucket, in microseconds, and whether it grows with the world.

    python -m benchmarks.overhead [--world 1,2,4,8] [--layers 2,4,8,16] [--steps 40]

    host     time of the thread that runs the step (`time.thread_time`), median over the steps, mean over the ranks: the
             waiting for others is not in it, so it can be compared where there are more ranks than cores
    process  the same with the threads of gloo
    wall     what a step takes, its slowest rank's; beyond the cores, ranks wait for one another

    ours     Engine.train_step: ZeRO 0 to 3 over all ranks, ZeRO 1 over half of them with tp = 2
    plain    the same layers in torch modules, clip_grad_norm_, fused AdamW; every rank by itself
    ddp      the plain loop under DistributedDataParallel

The model is so small that its kernels cost next to nothing.  All use the matrix products of torch, as they would on a GPU.
All live in the same ranks, one thread each, and take turns of five steps.  Lines are fitted over layers, and over buckets
of ever fewer bytes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import correlation, linear_regression
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from benchmarks.contenders import Plain, megazero, write_weights
from benchmarks.peers.data_parallel import Replicated
from benchmarks.report import markdown
from benchmarks.setting import MODELS, ModelSize, Setting, whole_numbers
from benchmarks.worlds import Contender
from megazero.plan.processes import in_processes

TURN, WARMUP_TURNS = 5, 2  # steps of a contender before the next one's
BUCKET_LAYERS, BUCKET_WORLD, BUCKET_BYTES = 8, 2, (1 << 30, 200_000, 100_000, 50_000, 25_000)


class Cost(NamedTuple):
    """Microseconds of a step: see the head of the file."""

    host: float
    process: float
    wall: float


def model_of(layers: int) -> str:
    """The name of the tiny model with so many layers."""
    name = f"{layers} layers"
    MODELS[name] = ModelSize(32, layers, 2, 64, 8, 1)
    return name


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def by_contender(rank: int, world: int, layers: int, steps: int, weights: Path) -> dict[str, Any]:
    """Of every contender at these sizes, each step's (host, process, wall) seconds on this rank."""
    model = model_of(layers)
    settings = {f"ours, ZeRO {stage}": Setting(model, world, zero_stage=stage) for stage in range(4)}
    if world > 1:
        settings["ours, ZeRO 1, tp 2"] = Setting(model, world, tp=2, zero_stage=1)
    named: dict[str, Contender] = {name: megazero(setting, rank, weights) for name, setting in settings.items()}
    if world > 1:
        named["ddp"] = Replicated(Setting(model, world), rank, weights)
    named["plain"] = Plain(Setting(model, 1), 0, weights)
    return _take_turns(named, Setting(model, 1), steps)


def by_buckets(rank: int, world: int, stage: int, steps: int) -> dict[str, Any]:
    """Of a ZeRO stage, the same by number of buckets."""
    named: dict[str, Contender] = {}
    setting = Setting(model_of(BUCKET_LAYERS), world, zero_stage=stage)
    for size in BUCKET_BYTES:
        contender = megazero(setting, rank, Path(), options=[f"zero.bucket_bytes={size}"])
        named[str(len(contender.engine.sharded_model.parameters.buckets))] = contender
    return _take_turns(named, setting, steps)


def _take_turns(named: Mapping[str, Contender], setting: Setting, steps: int) -> dict[str, Any]:
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in named}
    clocks = time.thread_time, time.process_time, time.perf_counter
    for number in range(WARMUP_TURNS + -(-steps // TURN)):
        for name in list(named)[:: -1 if number % 2 else 1]:
            batch = setting.batch(0, 0)
            for _ in range(TURN):
                if dist.get_world_size() > 1:
                    dist.barrier()
                begin = [clock() for clock in clocks]
                named[name].step(*batch)
                if number >= WARMUP_TURNS:
                    found[name].append(tuple(clock() - at for clock, at in zip(clocks, begin, strict=True)))
    return found


def costs(world: int, body: Callable[..., Any], *arguments: Any) -> dict[str, Cost]:
    """Run a body on forked ranks and put its steps together.  Raises: ProcessFailedError."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    ranks = in_processes(world, body, world, *arguments)
    found = {}
    for name in ranks[0]:
        host, process, wall = np.array([rank[name] for rank in ranks]).transpose(2, 0, 1) * 1e6  # each [rank, step]
        of_ranks = (float(np.median(one, axis=1).mean()) for one in (host, process))
        found[name] = Cost(*of_ranks, float(np.median(wall.max(axis=0))))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What it says


def fitted(by_count: Mapping[int, Cost], kind: str) -> tuple[str, str, str]:
    """Slope and intercept of the line through a kind's costs, by least squares, and R2."""
    values = [getattr(cost, kind) for cost in by_count.values()]
    line = linear_regression(list(by_count), values)
    return f"{line.slope:.0f}", f"{line.intercept:.0f}", f"{correlation(list(by_count), values) ** 2:.3f}"


def over_layers(world: int, depths: Sequence[int], steps: int) -> list[list[str]]:
    """A row for every contender, with costs by number of layers, and their lines."""
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for depth in depths:
            weights = Path(folder) / str(depth)
            write_weights(Setting(model_of(depth), 1), weights)
            measured[depth] = costs(world, by_contender, depth, steps, weights)
    rows = []
    for name in measured[depths[0]]:
        by_depth = {depth: measured[depth][name] for depth in depths}
        of_layers = [f"{cost.host:.0f}" for cost in by_depth.values()]
        process, wall = fitted(by_depth, "process"), fitted(by_depth, "wall")
        rows.append([str(world), name, *of_layers, *fitted(by_depth, "host"), process[0], *wall[:2]])
    return rows


def over_buckets(steps: int) -> list[list[str]]:
    """A row for each of ZeRO 0 to 2, with costs by number of buckets, and their lines."""
    rows = []
    for stage in range(3):
        found = costs(BUCKET_WORLD, by_buckets, stage, steps)
        by_count = {int(count): cost for count, cost in found.items()}
        host, process, wall = (fitted(by_count, kind) for kind in Cost._fields)
        shown = ", ".join(f"{count}: {cost.host:.0f}" for count, cost in by_count.items())
        rows.append([str(stage), shown, host[0], host[2], process[0], wall[0]])
    return rows


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=whole_numbers, default=(1, 2, 4, 8), help="comma-separated")
    parser.add_argument("--layers", type=whole_numbers, default=(2, 4, 8, 16), help="comma-separated")
    parser.add_argument("--steps", type=int, default=40, help="of each contender at each size")
    given = parser.parse_args()
    at = (f"host us, {depth} layers" for depth in given.layers)
    heads = ("world", "contender", *at, "host/layer", "+ per step", "R2", "process/layer", "wall/layer", "+ per step")
    for world in given.world:
        print(markdown(heads, over_layers(world, given.layers, given.steps)), flush=True)
    if BUCKET_WORLD in given.world:
        heads = ("ZeRO", "buckets: host us", "host/bucket", "R2", "process/bucket", "wall/bucket")
        print(markdown(heads, over_buckets(given.steps)))


if __name__ == "__main__":
    main()
