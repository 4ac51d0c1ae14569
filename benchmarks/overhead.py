"""What the host does per step, per layer and per bucket, in microseconds, and whether it grows with the world.

    python -m benchmarks.overhead [--world 1,2,4,8] [--layers 2,4,8,16] [--steps 40] [--products torch]

    host     time of the thread that runs the step (`time.thread_time`), median over the steps, mean over the ranks: the
             waiting for others is not in it, so it can be compared where there are more ranks than cores
    process  the same with the threads of gloo
    wall     what a step takes, its slowest rank's; beyond the cores, ranks wait for one another

    ours     Engine.train_step: ZeRO 0 to 3 over all ranks, ZeRO 1 over half of them with tp = 2
    plain    the same layers in torch modules, clip_grad_norm_, fused AdamW; every rank by itself
    ddp      the plain loop under DistributedDataParallel

The model is so small that its kernels cost next to nothing.  All use the matrix products of torch, as they would on a GPU;
`--products fastest` lets ours choose oneDNN where it does in a run, whose calls cost more when matrices are tiny.  All live
in the same ranks, one thread each, and take turns of five steps.  Lines are fitted over layers, and over buckets of ever
fewer bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import initial_weights
from benchmarks.models import PlainStage, adamw, loss_of
from benchmarks.setting import GRAD_CLIP, LR
from megazero.config import RunConfig, resolve
from megazero.engine import initialize
from megazero.layers import linear
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState, RankGrid
from megazero.plan.processes import in_processes

HIDDEN, HEADS, SEQUENCE, VOCABULARY = 32, 2, 8, 64
TURN, WARMUP_TURNS = 5, 2  # steps of a contender before the next one's
BUCKET_LAYERS, BUCKET_WORLD, BUCKET_BYTES = 8, 2, (1 << 30, 200_000, 100_000, 50_000, 25_000)
Step = Callable[[], None]


@dataclass(frozen=True)
class Cost:
    """Microseconds of a step: see the head of the file."""

    host: float
    process: float
    wall: float


@dataclass(frozen=True)
class Line:
    """cost = intercept + slope * count, by least squares."""

    intercept: float
    slope: float
    r2: float


# ---------------------------------------------------------------------------------------------------------------------
# Those that are timed


def config_of(world: int, layers: int, zero_stage: int, tp: int = 1, bucket_bytes: int | None = None) -> RunConfig:
    """megazero's configuration of the tiny model."""
    document: dict[str, Any] = {
        "model": {
            "family": "llama",
            "hidden_size": HIDDEN,
            "num_layers": layers,
            "num_heads": HEADS,
            "vocab_size": VOCABULARY,
            "seq_len": SEQUENCE,
        },
        "parallel": {"tp": tp},
        "zero": {"stage": zero_stage, **({} if bucket_bytes is None else {"bucket_bytes": bucket_bytes})},
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": LR, "grad_clip": GRAD_CLIP},
        "training": {"micro_batch_size": 1, "accumulation": 1, "seed": 7},
    }
    return resolve(RunConfig.model_validate(document), world).config


def ours(rank: int, config: RunConfig, world: int) -> tuple[Step, int]:
    """A step of the engine, and how many buckets it has."""
    grid = RankGrid(tp=config.parallel.tp, dp=world // config.parallel.tp)
    engine = initialize(config, ParallelState(grid, rank, timeout_seconds=120))
    tokens, labels = _sample(engine.state.dp.index)
    batch = MicroBatch(torch.zeros(1, dtype=torch.int64), tokens.t().contiguous(), labels.t().contiguous())
    return lambda: _drop(engine.train_step([batch], LR)), len(engine.sharded_model.parameters.buckets)


def plain(rank: int, layers: int, weights: dict[str, Tensor], *, ddp: bool) -> Step:
    """The same in torch modules."""
    model: torch.nn.Module = PlainStage(config_of(1, layers, 0).model, weights)
    model = DistributedDataParallel(model) if ddp else model
    parameters, (tokens, labels) = list(model.parameters()), _sample(rank)
    optimizer = adamw(parameters)

    def step() -> None:
        loss = loss_of(model(tokens), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def _sample(rank: int) -> tuple[Tensor, Tensor]:
    sample = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
    return sample[:, :-1].contiguous(), sample[:, 1:].contiguous()


def _drop(_: object) -> None:
    """A step's statistics are not needed."""


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def by_contender(rank: int, world: int, layers: int, steps: int, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Of every contender at these sizes, each step's (host, process, wall) seconds on this rank."""
    named = {f"ours, ZeRO {stage}": ours(rank, config_of(world, layers, stage), world)[0] for stage in range(4)}
    if world > 1:
        named["ours, ZeRO 1, tp 2"] = ours(rank, config_of(world, layers, 1, tp=2), world)[0]
        named["ddp"] = plain(rank, layers, weights, ddp=True)
    named["plain"] = plain(rank, layers, weights, ddp=False)
    return _take_turns(named, steps)


def by_buckets(rank: int, world: int, stage: int, steps: int) -> dict[str, Any]:
    """Of a ZeRO stage, the same by number of buckets."""
    named = {}
    for size in BUCKET_BYTES:
        step, count = ours(rank, config_of(world, BUCKET_LAYERS, stage, bucket_bytes=size), world)
        named[str(count)] = step
    return _take_turns(named, steps)


def _take_turns(named: dict[str, Step], steps: int) -> dict[str, list[tuple[float, float, float]]]:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in named}
    for number in range(WARMUP_TURNS + -(-steps // TURN)):
        for name in list(named)[:: -1 if number % 2 else 1]:
            for _ in range(TURN):
                if dist.get_world_size() > 1:
                    dist.barrier()
                begin = time.thread_time(), time.process_time(), time.perf_counter()
                named[name]()
                end = time.thread_time(), time.process_time(), time.perf_counter()
                if number >= WARMUP_TURNS:
                    found[name].append((end[0] - begin[0], end[1] - begin[1], end[2] - begin[2]))
    return found


def costs(world: int, body: Callable[..., Any], *arguments: Any) -> dict[str, Cost]:
    """Run a body on forked ranks and put its steps together.  Raises: ProcessFailedError."""
    ranks = in_processes(world, body, world, *arguments)
    found = {}
    for name in ranks[0]:
        host, process_, wall = np.array([rank[name] for rank in ranks]).transpose(2, 0, 1) * 1e6  # each [rank, step]
        found[name] = Cost(
            float(np.median(host, axis=1).mean()),
            float(np.median(process_, axis=1).mean()),
            float(np.median(wall.max(axis=0))),
        )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What it says


def fit(counts: Sequence[int], values: Sequence[float]) -> Line:
    """The line through (count, value)."""
    slope, intercept = np.polyfit(counts, values, 1)
    rest = np.asarray(values) - (intercept + slope * np.asarray(counts))
    spread = float(((values - np.mean(values)) ** 2).sum())
    return Line(float(intercept), float(slope), 1 - float((rest**2).sum()) / spread if spread else 1.0)


def fits(by_count: Mapping[int, Cost]) -> dict[str, Line]:
    """The lines of host, process and wall time."""
    kinds = ("host", "process", "wall")
    return {kind: fit(list(by_count), [getattr(cost, kind) for cost in by_count.values()]) for kind in kinds}


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def _heads(*names: str) -> None:
    print("\n" + _row(names) + "\n" + "|---" * len(names) + "|")


@functools.cache
def weights_of(layers: int) -> dict[str, Tensor]:
    """Initial weights of the tiny model, for the plain modules; drawn once for all worlds."""
    return initial_weights(config_of(1, layers, 0))


def over_layers(world: int, depths: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Costs of every contender by number of layers, and their lines; printed as they come."""
    measured = {depth: costs(world, by_contender, depth, steps, weights_of(depth)) for depth in depths}
    found = []
    for name in measured[depths[0]]:
        by_depth = {depth: measured[depth][name] for depth in depths}
        lines = fits(by_depth)
        host, process, wall = lines.values()
        cells = (host.slope, host.intercept, f"{host.r2:.3f}", process.slope, wall.slope, wall.intercept)
        print(_row((world, name, *(cost.host for cost in by_depth.values()), *cells)), flush=True)
        found.append({"world": world, "contender": name, **_as_json(by_depth, lines)})
    return found


def over_buckets(world: int, steps: int) -> list[dict[str, Any]]:
    """Costs of ZeRO 0 to 2 by number of buckets, and their lines; printed as they come."""
    found = []
    for stage in range(3):
        by_count = {int(count): cost for count, cost in costs(world, by_buckets, stage, steps).items()}
        lines = fits(by_count)
        host, process, wall = lines.values()
        shown = ", ".join(f"{count}: {cost.host:.0f}" for count, cost in by_count.items())
        print(_row((stage, shown, host.slope, f"{host.r2:.3f}", process.slope, wall.slope)), flush=True)
        found.append({"world": world, "layers": BUCKET_LAYERS, "zero_stage": stage, **_as_json(by_count, lines)})
    return found


def _as_json(by_count: Mapping[int, Cost], lines: Mapping[str, Line]) -> dict[str, Any]:
    return {
        "costs": {count: asdict(cost) for count, cost in by_count.items()},
        "lines": {kind: asdict(line) for kind, line in lines.items()},
    }


def main() -> None:
    """Measure, print the tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="1,2,4,8", help="comma-separated")
    parser.add_argument("--layers", default="2,4,8,16", help="comma-separated")
    parser.add_argument("--steps", type=int, default=40, help="of each contender at each size")
    parser.add_argument("--products", choices=("torch", "fastest"), default="torch")
    given = parser.parse_args()
    if given.products == "torch":
        linear.cpu_product = lambda: None  # type: ignore[assignment]
    worlds, depths = ([int(one) for one in text.split(",")] for text in (given.world, given.layers))
    document: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__, **vars(given), "by_layers": []}
    at = (f"host us, {depth} layers" for depth in depths)
    _heads("world", "contender", *at, "host/layer", "+ per step", "R2", "process/layer", "wall/layer", "+ per step")
    for world in worlds:
        document["by_layers"] += over_layers(world, depths, given.steps)
    if BUCKET_WORLD in worlds:
        _heads("ZeRO", "buckets: host us", "host/bucket", "R2", "process/bucket", "wall/bucket")
        document["by_buckets"] = over_buckets(BUCKET_WORLD, given.steps)
    print()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
