"""Attention of one layer under context parallelism, beside other ways to do it: step, memory and bytes.

    python -m benchmarks.context [--worlds 2,4] [--lengths 2048,4096,8192,16384] [--dtypes fp32,bf16] [--out context]
    python -m benchmarks.context --hosts 2 --mbit 1000 --out context_two_hosts

Forward and backward of causal attention of the same sequence, one thread a rank, each contender in its own processes, in
turns; what each computes is first compared with torch's attention of the whole sequence in fp32.

megazero ...             ring, Ulysses, and Ulysses of 2 within a ring of the rest (from 4 ranks on); on one host Ulysses
                         exchanges through shared memory, over gloo it takes the peers' sockets
torch ring               `_templated_ring_attention`, zigzag; keys and values gathered (its default) or rotated
DeepSpeed Ulysses        `DistributedAttention` around torch's attention
gathered keys            keys and values all-gathered, their gradients reduce-scattered; zigzag
floor, heads | tiles     a rank's share of the work, as Ulysses or as a ring has it, with nothing to send

above the floor          milliseconds of a step beyond the faster floor's in the same round, the median of the rounds
processor                the same of processor time: per rank, all threads. What waits for a core is not in it, nor is what
                         waits for a peer
peak MB                  memory of the rank that has most, above that before the contender was built: its own queries, keys,
                         values and their gradients, its share of what ranks share, not the code of libraries; in ranks of
                         their own, whose allocator keeps nothing
sent MB                  of a step, per rank, as the interfaces count; what ranks exchange through shared memory is not in it
over the link MB         of a step, all ranks together

With --hosts 2 half of the ranks are in another network namespace; see benchmarks/hosts_net.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch

from benchmarks.attention_work import AttentionWork, worst_error
from benchmarks.hosts_net import LOOPBACK, Network, NoHostsError, network_of
from benchmarks.report import machine, markdown, megabytes, middle_of, number, spread
from benchmarks.setting import DTYPES, positive, whole_numbers
from benchmarks.worlds import Build, ContenderFailedError, Turn, World, imported, started

RESULTS = Path(__file__).parent / "results"
LENGTHS = (2048, 4096, 8192, 16384)
LEAST_ROUNDS, WARMUP_STEPS = 3, 2
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
WORDS = "What contenders and columns are: the head of [context.py](../context.py).\n"
FLOORS = ("floor, heads", "floor, tiles")
HYBRID = "megazero 2 x ring"

# Where each contender is made: module and name; imported on first use, since the peers are optional.
BUILDERS = {
    "megazero ring": "context_attention:ring",
    "megazero Ulysses": "context_attention:ulysses",
    "megazero Ulysses over gloo": "context_attention:ulysses_over_gloo",
    HYBRID: "context_attention:hybrid",
    "torch ring, gathered": "peers.context_parallel:torch_ring_gathered",
    "torch ring, rotated": "peers.context_parallel:torch_ring_rotated",
    "DeepSpeed Ulysses": "peers.deepspeed_ulysses:DeepSpeedUlysses",
    "gathered keys": "peers.context_parallel:GatheredKeys",
    FLOORS[0]: "peers.context_parallel:HeadFloor",
    FLOORS[1]: "peers.context_parallel:TileFloor",
}


@dataclass(frozen=True)
class Line:
    """One contender of a row.

    Args:
        ms: milliseconds of a step: median, least, most.
        above_floor: milliseconds beyond the faster floor.
        processor_ms: of a step, per rank: median.
        processor_above: milliseconds beyond the floor that takes least.
        peak_bytes: of the rank that has most; see `Memory.own_peak`.
        sent_bytes, link_bytes: of a step: see `Turn`.
        metered_bytes: of a step, per rank, as the contender itself counts.
        error: largest difference from attention of the whole sequence, in parts of the largest element; None for a floor.
        failure: why there are no figures.
    """

    name: str
    ms: tuple[float, float, float] | None = None
    above_floor: float | None = None
    processor_ms: float | None = None
    processor_above: float | None = None
    peak_bytes: int | None = None
    sent_bytes: float | None = None
    link_bytes: float | None = None
    metered_bytes: float | None = None
    error: float | None = None
    failure: str | None = None


class ResultsDifferError(RuntimeError):
    """A contender does not compute attention."""


def peaks_of(work: AttentionWork, names: Sequence[str], network: Network = LOOPBACK) -> dict[str, int | None]:
    """`Memory.own_peak` of each contender, in ranks that are not timed; None for one that cannot run.

    To be called before this process has computed anything: ranks are forked, and would fill what it has freed.
    """
    peaks: dict[str, int | None] = {}
    build_of = partial(_builder, work)
    for name in names:  # one at a time
        with started([name], build_of, work, network, steps=WARMUP_STEPS, keeps_no_gaps=True) as (worlds, _):
            peaks[name] = worlds[name].memory().own_peak if name in worlds else None
    return peaks


def measure(
    work: AttentionWork, peaks: Mapping[str, int | None], *, seconds: float, network: Network = LOOPBACK
) -> tuple[list[Line], int]:
    """All contenders of one row, and how many rounds there were.

    Args:
        work: the row.
        peaks: of `peaks_of`, by keys of `BUILDERS`.
        seconds: the rounds take about so long; there are three at least.
        network: where the ranks are.

    Raises:
        ResultsDifferError: a contender computes something else.
        ContenderFailedError: one failed after its first steps; one that fails in them has a line that says so.
    """
    names = list(peaks)
    with started(names, partial(_builder, work), work, network, steps=WARMUP_STEPS) as (worlds, failures):
        errors = _errors(work, worlds)
        turns: dict[str, list[Turn]] = {name: [] for name in worlds}
        end, rounds = time.monotonic() + seconds, 0
        while rounds < LEAST_ROUNDS or time.monotonic() < end:
            first = rounds % len(worlds)
            for name in [*worlds][first:] + [*worlds][:first]:  # everyone comes after everyone
                turns[name].append(worlds[name].turn(range(1)))
            rounds += 1
    taken = {name: [turn.seconds[0] * 1e3 for turn in found] for name, found in turns.items()}
    worked = {name: [turn.processor_seconds * 1e3 for turn in found] for name, found in turns.items()}
    floor, least = (
        min((them[name] for name in FLOORS if name in them), key=median, default=None) for them in (taken, worked)
    )
    lines = []
    for name in names:
        if name in failures:
            lines.append(Line(name, failure=failures[name]))
            continue
        its, last = taken[name], turns[name][-1]
        lines.append(
            Line(
                name,
                middle_of(its),
                None if floor is None else median(a - b for a, b in zip(its, floor, strict=True)),
                median(worked[name]),
                None if least is None else median(a - b for a, b in zip(worked[name], least, strict=True)),
                peaks[name],
                median(turn.loopback_bytes for turn in turns[name]),
                median(turn.link_bytes for turn in turns[name]) if network.namespaces else None,
                last.metered_bytes,
                errors.get(name),
            )
        )
    return lines, rounds


def _builder(work: AttentionWork, name: str) -> Build:
    return partial(imported(BUILDERS[name]), work)


def _errors(work: AttentionWork, worlds: dict[str, World]) -> dict[str, float]:
    expected = work.expected()
    errors = {name: worst_error(world.ask("part"), expected) for name, world in worlds.items() if name not in FLOORS}
    for name, error in errors.items():
        if not error <= TOLERANCE[work.dtype]:
            raise ResultsDifferError(f"{name} is {error:.1e} off, so its time would be that of other work")
    return errors


def table(lines: Sequence[Line]) -> str:
    """One row's contenders."""
    heads = (
        "contender", "step ms (least to most)", "above the floor ms", "processor ms", "above", "peak MB", "sent MB",
        "over the link MB", "own meter MB", "error",
    )  # fmt: skip

    rows = []
    for line in lines:
        if line.ms is None:
            rows.append((line.name, f"cannot run: {line.failure}", *[""] * (len(heads) - 2)))
            continue
        rows.append(
            (
                line.name,
                spread(line.ms, 1),
                *(number(ms, 1) for ms in (line.above_floor, line.processor_ms, line.processor_above)),
                *(
                    megabytes(sent, 2)
                    for sent in (line.peak_bytes, line.sent_bytes, line.link_bytes, line.metered_bytes)
                ),
                "" if line.error is None else f"{line.error:.1e}",
            )
        )
    return markdown(heads, rows)


def main() -> None:
    """Measure, print a table for each row, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=whole_numbers, default=(2, 4), help="comma-separated")
    parser.add_argument("--lengths", type=whole_numbers, default=LENGTHS, help="comma-separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated")
    parser.add_argument("--seconds", type=positive, default=60, help="of each row's rounds; there are three at least")
    parser.add_argument("--contenders", default=";".join(BUILDERS), help="separated by semicolons")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--mbit", type=positive, default=1000, help="rate of the link between two hosts, each direction"
    )
    parser.add_argument("--out", help="write benchmarks/results/NAME.md and NAME.jsonl")
    given = parser.parse_args()
    names = given.contenders.split(";")
    if unknown := [name for name in names if name not in BUILDERS]:
        parser.error(f"--contenders: {unknown[0]!r} is none of {'; '.join(BUILDERS)}")
    torch.set_num_threads(1)
    try:
        _measure_all(given, names)
    except (ContenderFailedError, ResultsDifferError, NoHostsError) as error:
        raise SystemExit(str(error)) from error


def _measure_all(given: argparse.Namespace, names: Sequence[str]) -> None:
    cases = product(given.dtypes.split(","), given.worlds, given.lengths)
    works = [AttentionWork(length, world, dtype) for dtype, world, length in cases]
    peaks = []
    for work in works:
        with network_of(given.hosts, given.mbit) as network:
            peaks.append(peaks_of(work, [name for name in names if name != HYBRID or work.world > 2], network))
    lines, pages = [json.dumps({"machine": machine(), **vars(given)})], [WORDS]
    for work, of_row in zip(works, peaks, strict=True):
        with network_of(given.hosts, given.mbit) as network:
            found, rounds = measure(work, of_row, seconds=given.seconds, network=network)
        joined = f", two hosts at {given.mbit} Mbit/s" if given.hosts == 2 else ""
        shape = f"{work.heads} heads of {work.head_size}, {work.kv_heads} of keys and values"
        title = f"## {work.dtype}, {work.world} ranks, {work.length} tokens, {shape}{joined}, {rounds} rounds"
        pages.append(f"{title}\n\n{table(found)}\n")
        lines.append(json.dumps({**asdict(work), "rounds": rounds, "lines": [asdict(line) for line in found]}))
        print(pages[-1], flush=True)
        if given.out:  # after every row, so that an interrupted run loses one
            (RESULTS / f"{given.out}.md").write_text("\n".join(pages), encoding="utf-8")
            (RESULTS / f"{given.out}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
