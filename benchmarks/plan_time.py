"""Predicted step times beside measured ones: 60 shapes of 1 to 8 ranks, on one host and over two at 1 Gbit/s.

    python -m benchmarks.plan_time --measure        calibrates, then runs every shape; needs root for the two hosts
    python -m benchmarks.plan_time                  predicts, and writes the table

Every shape trains the same global batch of the same model, so that shapes of one world compete.  Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.activations import REUSED_MEMORY
from benchmarks.hosts_net import network_of
from benchmarks.report import machine, markdown, write_whole
from benchmarks.setting import Setting
from benchmarks.worlds import ContenderFailedError, Given, World
from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine import initialize
from megazero.parallel_state import Links, ParallelState
from megazero.plan.calibrate import calibrate
from megazero.plan.calibration import Calibration, read_calibration, write_calibration
from megazero.plan.cluster import cluster_of
from megazero.plan.speed_probe import SpeedProbe, random_batches
from megazero.plan.step_time import StepTime, step_time_of

CONDITIONS = """\
Two cores of a virtual machine that nothing else of this machine used. Calibrated directly before: operators of 44 small
models, collectives of 2, 4 and 8 ranks on one host, and whole steps of five runs of another model, which say how much
longer a step takes than its parts (that calibration also measured operators on both cores at once and waits for the
last rank; plans do not use them any more, and their median error fell from 5.5% to 5.0%). Two hosts are network
namespaces with a core each, and what links them is planned as 1 Gbit/s. None of the shapes was calibrated. The rounds
go through all shapes, every other one backwards, each time in new processes; steps count in rows of three, behind one
or two that do not. Two of the four rounds were measured in the hour before this calibration. `malloc` keeps what it
has, in huge pages.

The speed of these cores changes within minutes. So a probe, always the same small step, runs beside every model that is
calibrated, and before and behind every row of steps: `speed` is the calibrated probe's time over the probe's at that moment,
`ms at 1.00` is the median of the steps at the calibrated speed. The error is that of the plan against it. Furthest off: tp 4
and pp 2 on two hosts of one core are planned 22% too slow, eight ranks of tp and cp on two cores 18% too fast."""
RESULTS = Path(__file__).parent / "results"
CALIBRATION, MEASURED, TABLE = (RESULTS / name for name in ("plan_time_cpu.json", "plan_time.jsonl", "plan_time.md"))
MBIT, GLOBAL_BATCH, TURNS, ROUNDS = 1000, 16, 2, 4
RUN_IN, STEPS = (2, 1), 3  # of the first turn and of the others; steps that count of each
MEMORY = REUSED_MEMORY | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"family": "llama", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "seq_len": 128},
    "wide": {"family": "llama", "hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 512, "seq_len": 128},
    "gpt2": {"family": "gpt2", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "seq_len": 128},
}


@dataclass(frozen=True)
class Shape(Given):
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
        stay_on_host(shape.hosts, rank, shape.world)
        run, here = shape.run(), int(os.environ["LOCAL_WORLD_SIZE"])
        state = ParallelState(run.grid, rank, Links(timeout_seconds=120, local_world_size=here))
        self.dp_index = 0
        self.engine = initialize(run.config, state)
        self._batches = random_batches(run, self.engine.batch_slice)

    def step(self, *_: Tensor) -> float:
        """One step on the same batch."""
        return self.engine.train_step(self._batches, 1e-4).loss


def stay_on_host(hosts: int, rank: int, world: int) -> None:
    """Give this process, with gloo's threads, its host's part of the processors."""
    if hosts == 1:
        return
    every = sorted(os.sched_getaffinity(0))
    each, host = max(1, len(every) // hosts), rank // (world // hosts)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), every[host * each :][:each])


class Probe:
    """How fast the machine is now."""

    dp_index = 0

    def __init__(self, *_: object) -> None:
        self._probe = SpeedProbe(torch.device("cpu"))

    def step(self, *_: Tensor) -> None:
        """A few steps."""
        self._probe.seconds()

    def seconds(self) -> float:
        """Of a step."""
        return self._probe.seconds()


@dataclass(frozen=True)
class Part:
    """Steps in a row.

    Args:
        seconds: of steps, of the slowest rank each.
        probe: mean seconds of the probes before and after them.
    """

    seconds: list[float]
    probe: float


def measured(shape: Shape, probes: World) -> list[Part]:
    """Some turns, with probes between them."""
    build = partial(Rank, shape)
    with network_of(shape.hosts, MBIT) as network, closing(World(shape.title, build, shape, network)) as world:
        found, before = [], mean(probes.ask("seconds"))
        for turn in range(TURNS):
            run_in = RUN_IN[min(turn, 1)]
            seconds = world.turn(range(run_in + STEPS), run_in).seconds
            after = mean(probes.ask("seconds"))
            found.append(Part(seconds, (before + after) / 2))
            before = after
        return found


def predicted(shape: Shape, calibration: Path) -> StepTime:
    """The plan's step."""
    cluster = cluster_of(str(calibration), shape.world, shape.world // shape.hosts, "1gbit")
    processors = max(1, cluster.processors // shape.hosts)  # the hosts are namespaces of one machine
    return step_time_of(shape.run(), replace(cluster, processors=processors))


def measure() -> None:
    """Calibrate, run all shapes in rounds, every other one backwards, write after every shape."""
    bare = calibrate()
    write_calibration(bare, CALIBRATION)
    every, rounds = list(shapes()), dict[Shape, list[list[Part]]]()
    probes = [World("probe", Probe, Setting("smoke", count)) for count in (1, bare.processors)]
    for number in range(ROUNDS):
        for shape in every[:: -1 if number % 2 else 1]:
            try:
                parts = measured(shape, probes[shape.world > 1])
            except ContenderFailedError as error:
                print(f"{shape.title}: {error}", flush=True)
                continue
            rounds.setdefault(shape, []).append(parts)
            seconds, speed = found_of([parts], bare, shape)
            print(f"{shape.title}: {seconds * 1e3:.1f} ms, {speed:.2f} of the calibrated speed", flush=True)
            found = {one: [[vars(part) for part in parts] for parts in each] for one, each in rounds.items()}
            lines = [{"shape": asdict(one), "rounds": each, "machine": machine()} for one, each in found.items()]
            write_whole(MEASURED, "".join(json.dumps(line) + "\n" for line in lines))
    for world in probes:
        world.close()


def found_of(rounds: list[list[Part]], calibration: Calibration, shape: Shape) -> tuple[float, float]:
    """Median seconds of steps at the speed that was calibrated, and the speed of the machine in units of that."""
    reference = calibration.probe_seconds[shape.world > 1]
    parts = [part for each in rounds for part in each]
    seconds = median(one * reference / part.probe for part in parts for one in part.seconds)
    return seconds, reference / mean(part.probe for part in parts)


def report() -> str:
    """The table, the errors and the search's best."""
    calibration = read_calibration(CALIBRATION)
    rows, errors, raw_errors, apart = [], [], [], []
    best = dict[tuple[object, ...], list[tuple[float, float, str]]]()
    for line in MEASURED.read_text("utf-8").splitlines():
        one = json.loads(line)
        shape, rounds = Shape(**one["shape"]), [[Part(**part) for part in each] for each in one["rounds"]]
        found, speed = found_of(rounds, calibration, shape)
        raw = median(seconds for each in rounds for part in each for seconds in part.seconds)
        plan = predicted(shape, CALIBRATION)
        errors.append(plan.seconds / found - 1)
        raw_errors.append(abs(plan.seconds / raw - 1))
        medians = [found_of([each], calibration, shape)[0] for each in rounds]
        apart += [max(medians) / min(medians) - 1] if len(medians) > 1 else []
        waits = ", ".join(f"{axis} {seconds * 1e3:.1f}" for axis, seconds in plan.exposed.items() if seconds > 1e-4)
        times = [f"{raw * 1e3:.1f}", f"{speed:.2f}", " ".join(f"{one * 1e3:.1f}" for one in medians)]
        times += [f"{found * 1e3:.1f}", f"{plan.seconds * 1e3:.1f}", f"{errors[-1]:+.1%}"]
        rows.append([shape.title, *times, f"{max(kinds['compute'] for kinds in plan.by_activity) * 1e3:.1f}", waits])
        best.setdefault((shape.world, shape.hosts, shape.model), []).append((plan.seconds, found, shape.title))
    sizes = sorted(map(abs, errors))
    parts = [
        f"# Predicted and measured step times\n\n{len(sizes)} shapes: median error {median(sizes):.1%}, "
        f"{sum(size <= 0.05 for size in sizes)} within 5%, {sum(size <= 0.1 for size in sizes)} within 10%, "
        f"largest {sizes[-1]:.0%}; median signed {median(errors):+.1%}. "
        f"Without regard to the machine's speed at that moment: median error {median(raw_errors):.1%}. "
        f"Two rounds lie {median(apart):.1%} apart (median of {len(apart)} shapes), at most {max(apart):.0%}.",
        CONDITIONS,
        markdown(["shape", "ms", "speed", "rounds", "ms at 1.00", "plan's ms", "error", "compute", "exposed ms"], rows),
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
    given = parser.parse_args()
    if given.measure:
        if not MEMORY.items() <= os.environ.items():  # malloc reads them when a process starts
            os.execve(
                sys.executable, [sys.executable, "-m", "benchmarks.plan_time", *sys.argv[1:]], os.environ | MEMORY
            )
        measure()
    text = report()
    print(text)
    write_whole(TABLE, text)


if __name__ == "__main__":
    main()
