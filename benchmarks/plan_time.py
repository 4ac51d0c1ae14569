"""Predicted step times beside measured ones: 60 shapes of 1 to 8 ranks, on one host and over two at 1 Gbit/s.

    python -m benchmarks.plan_time --measure        calibrates, then runs every shape; needs root for the two hosts
    python -m benchmarks.plan_time                  predicts, and writes the table

Every shape trains the same global batch of the same model, so that shapes of one world compete.  Ratios hold within one
quiet run only: calibration and steps are measured one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks.activations import REUSED_MEMORY
from benchmarks.hosts_net import network_of
from benchmarks.report import machine, markdown, write_whole
from benchmarks.worlds import ContenderFailedError, World
from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine import initialize
from megazero.parallel_state import ParallelState, RankGrid
from megazero.plan.calibrate import calibrate
from megazero.plan.calibrate_collectives import collective_samples
from megazero.plan.calibration import Samples, write_calibration
from megazero.plan.cluster import cluster_of
from megazero.plan.step_time import StepTime, step_time_of
from megazero.tools.measured_step import _random_batches

RESULTS = Path(__file__).parent / "results"
CALIBRATION, MEASURED, TABLE = (RESULTS / name for name in ("plan_time_cpu.json", "plan_time.jsonl", "plan_time.md"))
MBIT, GLOBAL_BATCH, RUN_IN, STEPS, ROUNDS = 1000, 16, 2, 5, 2
MEMORY = REUSED_MEMORY | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
CONDITIONS = (
    "Two cores of a virtual machine that nothing else used. Calibrated at once before: operators of 44 small models alone "
    "and on both cores, whole steps of two of them in 4 and in 8 processes, collectives of 2, 4 and 8 ranks on one host, "
    f"and of 1, 2 and 4 ranks on each of two hosts (network namespaces, {MBIT} Mbit/s). None of the shapes below was "
    f"calibrated. All shapes ran in {ROUNDS} rounds, every other one backwards, each in processes of its own: medians of "
    f"{STEPS} steps behind {RUN_IN}; a shape's time is the median of its rounds. malloc keeps what it has, in huge pages."
)
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"family": "llama", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "seq_len": 128},
    "wide": {"family": "llama", "hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 512, "seq_len": 128},
    "gpt2": {"family": "gpt2", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "seq_len": 128},
}


@dataclass(frozen=True)
class Shape:
    """One run.  `dp` is what the other degrees leave."""

    world: int
    hosts: int = 1
    model: str = "tiny"
    tp: int = 1
    cp: int = 1
    pp: int = 1
    zero: int = 1
    sp: bool = False
    schedule: str = "1f1b"
    micro: int = 2
    recompute: str = "none"

    @property
    def title(self) -> str:
        """For tables."""
        words = [self.model, f"{self.world} ranks" + (f" on {self.hosts} hosts" if self.hosts > 1 else "")]
        words += [
            f"{axis} {degree}" for axis, degree in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp)) if degree > 1
        ]
        words += ["sp"] if self.sp else []
        words += [self.schedule] if self.pp > 1 else []
        words += [f"ZeRO {self.zero}", f"micro-batch {self.micro}"]
        return ", ".join(words + (["full recomputation"] if self.recompute == "full" else []))

    def run(self) -> ResolvedRun:
        """Its run file."""
        parallel: dict[str, Any] = {"tp": self.tp, "cp": self.cp, "pp": self.pp}
        if self.tp > 1:
            parallel["sequence_parallel"] = self.sp
        if self.pp > 1:
            parallel["schedule"] = self.schedule
            if self.schedule == "interleaved":
                parallel["virtual_stages"] = 2
        document = {
            "model": MODELS[self.model],
            "parallel": parallel,
            "zero": {"stage": self.zero},
            "activations": {"recompute": self.recompute},
            "precision": {"dtype": "fp32"},
            "training": {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": self.micro, "compile": False},
        }
        return resolve(RunConfig.model_validate(document), self.world)

    def batch(self, step: int, dp_index: int) -> tuple[Tensor, ...]:
        """Ranks draw their own."""
        return ()


def shapes() -> Iterator[Shape]:
    """The 60."""
    yield from (Shape(1, micro=micro) for micro in (1, 2, 4, 8))
    yield from (Shape(1, model="gpt2"), Shape(1, model="wide"), Shape(1, recompute="full"))
    yield from (Shape(2, zero=zero) for zero in range(4))
    yield from (Shape(2, tp=2), Shape(2, tp=2, sp=True), Shape(2, cp=2))
    yield from (Shape(2, pp=2, schedule=name) for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv"))
    yield from (Shape(2, model="wide"), Shape(2, model="wide", tp=2), Shape(2, model="wide", pp=2))
    yield from (Shape(4, zero=zero) for zero in (0, 1, 3))
    yield from (Shape(4, tp=4), Shape(4, tp=4, sp=True), Shape(4, tp=2), Shape(4, tp=2, pp=2))
    yield from (Shape(4, pp=4), Shape(4, pp=4, schedule="zb-h1"), Shape(4, pp=2), Shape(4, cp=2), Shape(4, tp=2, cp=2))
    yield from (Shape(8), Shape(8, tp=2), Shape(8, tp=4), Shape(8, tp=2, pp=2), Shape(8, tp=2, pp=2, zero=3))
    yield from (Shape(8, pp=2), Shape(8, pp=4), Shape(8, tp=4, pp=2), Shape(8, tp=2, cp=2))
    yield from (Shape(2, 2, zero=zero) for zero in (0, 1, 3))
    yield from (Shape(2, 2, pp=2), Shape(2, 2, tp=2))
    yield from (Shape(4, 2, zero=zero) for zero in (0, 1, 3))
    yield from (Shape(4, 2, tp=2), Shape(4, 2, pp=2), Shape(4, 2, tp=2, pp=2), Shape(4, 2, pp=4))
    yield from (Shape(8, 2), Shape(8, 2, tp=4), Shape(8, 2, tp=2, pp=2), Shape(8, 2, pp=2), Shape(8, 2, tp=4, pp=2))


class Rank:
    """One rank of a shape."""

    def __init__(self, shape: Shape, rank: int) -> None:
        run = shape.run()
        parallel = run.config.parallel
        grid = RankGrid(parallel.tp, parallel.cp, run.dp, parallel.pp)
        state = ParallelState(
            grid, rank, timeout_seconds=120, neighbours=int(os.environ["LOCAL_WORLD_SIZE"]), cp_ulysses=parallel.ulysses
        )
        self.dp_index = 0
        self.engine = initialize(run.config, state)
        self._batches = _random_batches(run, self.engine.share)

    def step(self, *_: Tensor) -> float:
        """One step on the same batch."""
        return self.engine.train_step(self._batches, 1e-4).loss


def measured(shape: Shape) -> list[float]:
    """Seconds of steps, of the slowest rank each."""
    with network_of(shape.hosts, MBIT) as network:
        world = World(shape.title, lambda rank: Rank(shape, rank), shape, network)
        try:
            return world.turn(range(RUN_IN + STEPS), RUN_IN).seconds
        finally:
            world.close()


@dataclass(frozen=True)
class Hosts:
    """Ranks over two hosts that measure collectives."""

    world: int

    def batch(self, step: int, dp_index: int) -> tuple[Tensor, ...]:
        """None."""
        return ()


class Links:
    """One of them."""

    dp_index = 0

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self._hosts, self._rank = hosts, rank

    def step(self, *_: Tensor) -> None:
        """None."""

    def samples(self) -> dict[str, Samples]:
        """Seconds by operation."""
        return collective_samples(self._rank, self._hosts.world // 2)


def between_hosts() -> dict[str, Samples]:
    """Collectives of 2, 4 and 8 ranks over two hosts."""
    found = dict[str, Samples]()
    for hosts in map(Hosts, (2, 4, 8)):
        with network_of(2, MBIT) as network:
            world = World(f"{hosts.world} ranks", lambda rank, hosts=hosts: Links(hosts, rank), hosts, network)
            try:
                found |= world.ask("samples")[0]
            finally:
                world.close()
    return found


def predicted(shape: Shape, calibration: Path) -> StepTime:
    """The plan's step."""
    cluster = cluster_of(str(calibration), shape.world, shape.world // shape.hosts, "1gbit")
    processors = max(1, cluster.processors // shape.hosts)  # the hosts are namespaces of one machine
    return step_time_of(shape.run(), replace(cluster, processors=processors))


def measure(limit: int | None) -> None:
    """Calibrate, run all shapes in rounds, every other one backwards, write after every shape."""
    bare = calibrate()
    write_calibration(replace(bare, collectives=dict(bare.collectives) | between_hosts()), CALIBRATION)
    every, rounds = list(shapes())[:limit], dict[Shape, list[list[float]]]()
    for number in range(ROUNDS):
        for shape in every[:: -1 if number % 2 else 1]:
            try:
                seconds = measured(shape)
            except ContenderFailedError as error:
                print(f"{shape.title}: {error}", flush=True)
                continue
            print(f"{shape.title}: {median(seconds) * 1e3:.1f} ms", flush=True)
            rounds.setdefault(shape, []).append(seconds)
            lines = [{"shape": asdict(one), "rounds": each, "machine": machine()} for one, each in rounds.items()]
            write_whole(MEASURED, "".join(json.dumps(line) + "\n" for line in lines))


def report() -> str:
    """The table, the errors and the search's best."""
    rows, errors, apart, best = [], [], [], dict[tuple[object, ...], list[tuple[float, float, str]]]()
    for line in MEASURED.read_text("utf-8").splitlines():
        one = json.loads(line)
        shape, rounds = Shape(**one["shape"]), [median(each) for each in one["rounds"]]
        found, plan = median(rounds), predicted(shape, CALIBRATION)
        errors.append(plan.seconds / found - 1)
        apart.append(max(rounds) / min(rounds) - 1)
        waits = ", ".join(f"{axis} {seconds * 1e3:.1f}" for axis, seconds in plan.exposed.items() if seconds > 1e-4)
        each = [" ".join(f"{one * 1e3:.1f}" for one in rounds), f"{found * 1e3:.1f}", f"{plan.seconds * 1e3:.1f}"]
        rows.append([shape.title, *each, f"{errors[-1]:+.1%}", f"{plan.compute * 1e3:.1f}", waits])
        best.setdefault((shape.world, shape.hosts, shape.model), []).append((plan.seconds, found, shape.title))
    sizes = sorted(map(abs, errors))
    parts = [
        f"# Predicted and measured step times\n\n{len(sizes)} shapes: median error {median(sizes):.1%}, "
        f"{sum(size <= 0.05 for size in sizes)} within 5%, {sum(size <= 0.1 for size in sizes)} within 10%, "
        f"largest {sizes[-1]:.0%}; median signed {median(errors):+.1%}. "
        f"Two medians of a shape lie {median(apart):.1%} apart (median over the shapes), at most {max(apart):.0%}.",
        CONDITIONS,
        markdown(["shape", "ms of each round", "ms", "plan's ms", "error", "compute", "exposed ms"], rows),
        "## The best of each world",
    ]
    chosen = []
    for (world, hosts, model), found_here in best.items():
        if len(found_here) > 2:
            _, took, title = min(found_here)
            _, least, fastest = min(found_here, key=lambda one: one[1])
            where, slower = f"{model}, {world} ranks on {hosts}", f"{took / least - 1:.1%}"
            chosen.append([where, title, f"{took * 1e3:.1f}", fastest, f"{least * 1e3:.1f}", slower])
    parts.append(markdown(["world", "plan's best", "its ms", "best measured", "ms", "slower by"], chosen))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--limit", type=int, help="only the first so many shapes")
    given = parser.parse_args()
    if given.measure:
        if not MEMORY.items() <= os.environ.items():  # malloc reads them when a process starts
            os.execve(
                sys.executable, [sys.executable, "-m", "benchmarks.plan_time", *sys.argv[1:]], os.environ | MEMORY
            )
        measure(given.limit)
    text = report()
    print(text)
    write_whole(TABLE, text)


if __name__ == "__main__":
    main()
