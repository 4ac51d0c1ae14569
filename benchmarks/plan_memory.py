"""The plan's memory and traffic beside measured ones, over random shapes of small models on gloo ranks.

    python -m benchmarks.plan_memory --shapes 200 --out page.md

Each shape is drawn from its number; a draw that is no valid run is left out.  A run's third step is measured on every
rank: all tensors that torch's allocator reports, and all bytes that the collectives count.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.engine import initialize
from megazero.layers.counter_rng import _quantiles
from megazero.parallel_state import ParallelState
from megazero.plan.cluster import Cluster
from megazero.plan.devices import Device, Link
from megazero.plan.measured_step import STATE_KINDS, _watched_step, live_memory
from megazero.plan.memory import memory_of
from megazero.plan.processes import in_processes
from megazero.plan.random_batches import random_batches
from megazero.plan.traffic import traffic_of

CPU = Device("cpu", 2**34, {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, Link("memory", 1e10, 1e-6))
BINS = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 1.0)


def cpus(ranks: int) -> Cluster:
    """One host."""
    return Cluster(CPU, ranks, ranks, CPU.link, CPU.link, processors=2)


def draw(number: int) -> tuple[str, int]:  # noqa: PLR0912, PLR0915  each key may depend on those before it
    """(overrides, ranks) of a shape; not all are valid."""
    of = random.Random(number)
    pick = of.choice
    ranks = pick([1, 2, 2, 4, 4, 4, 8, 8])
    tp, left = 1, ranks
    tp = pick([one for one in (1, 2, 4) if left % one == 0])
    left //= tp
    cp = pick([one for one in (1, 1, 2, 4) if left % one == 0])
    left //= cp
    pp = pick([one for one in (1, 2, 4) if left % one == 0])
    family = pick(["llama", "llama", "gpt2", "qwen2", "qwen3", "olmo2", "mistral"])
    hidden, heads = pick([128, 256, 384, 512]), pick([4, 8])
    accumulation = pick([1, 2, 4, 6, 8])
    schedule = pick(["gpipe", "1f1b", "1f1b", "interleaved", "zb-h1", "zbv"]) if pp > 1 else "1f1b"
    keys = {
        "model.family": family,
        "model.hidden_size": hidden,
        "model.num_heads": heads,
        "model.num_layers": pick([4, 6, 8]),
        "model.vocab_size": pick([512, 1000, 4096, 8192]),
        "model.seq_len": pick([64, 128, 256, 512]),
        "training.micro_batch_size": pick([1, 2, 4]),
        "training.accumulation": accumulation,
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.pp": pp,
        "parallel.schedule": schedule,
        "zero.stage": pick([0, 1, 2, 3]),
        "precision.dtype": pick(["fp32", "bf16", "bf16"]),
        "training.compile": "false",
        "activations.recompute": pick(
            ["none", "none", "selective", "full", '["attention"]', '["mlp"]', '["norms","attention","residual"]']
        ),
    }
    if family != "gpt2":
        keys["model.num_kv_heads"] = pick([heads, heads // 2, heads // 4])
    else:
        keys["model.dropout"] = pick([0.0, 0.1])
    if family == "mistral":
        keys["model.sliding_window"] = pick([32, 64])
    if tp > 1:
        keys["parallel.sequence_parallel"] = pick(["true", "false"])
    if schedule == "interleaved":
        keys["parallel.virtual_stages"] = 2
    if keys["zero.stage"] == 3:
        keys["zero.gather_policy"] = pick(["action", "action", "chunk", "step"])
    if keys["zero.stage"] >= 2:
        keys["zero.reduce"] = pick(["micro_batch", "micro_batch", "step"])
    if keys["precision.dtype"] == "bf16":
        keys["precision.reduce_dtype"] = pick(["fp32", "fp32", "bf16"])
        keys["precision.accumulate_dtype"] = pick(["fp32", "fp32", "bf16"])
    if of.random() < 0.2:
        keys["data.document_mask"] = "true"
    if of.random() < 0.3:
        keys["model.tie_embeddings"] = "true"
    if of.random() < 0.3:
        keys["zero.bucket_bytes"] = pick([2**20, 2**22])
    if keys["activations.recompute"] in ("full", '["attention"]') and of.random() < 0.5:
        keys["activations.keep_attention"] = "true"
    if keys["activations.recompute"] != "none" and of.random() < 0.3:
        keys["activations.layers"] = 1
    if of.random() < 0.1:
        keys["optimizer.name"] = pick(["lion", "sgd", "adagrad"])
    if of.random() < 0.15:
        keys["zero.offload.optimizer"] = pick(["cpu", "nvme"])
    if keys["zero.stage"] == 3 and of.random() < 0.2:
        keys["zero.offload.parameters"] = pick(["cpu", "nvme"])
    if "nvme" in keys.values():
        keys["zero.offload.nvme_path"] = "/tmp"
    if ranks // (tp * pp) >= 4 and keys.get("zero.gather_policy") in ("action", "chunk") and of.random() < 0.5:
        keys["zero.secondary_shard_size"] = 2
    elif ranks // (tp * pp) > 1 and ranks < 8 and of.random() < 0.3:
        ranks = ranks // 2 * 3
    return " ".join(f"{key}={value}" for key, value in keys.items()), ranks


def run_of(case: str, ranks: int) -> ResolvedRun | None:
    """None where a draw is no valid run."""
    try:
        return load_config(os.devnull, case.split(), ranks)
    except (ConfigError, ValueError):
        return None


def state_of(run: ResolvedRun, rank: int) -> ParallelState:
    """The rank's groups, all on one host."""
    size, ulysses = run.config.zero.shard_group_size, run.config.parallel.ulysses
    return ParallelState(run.grid, rank, shard_group_size=size, local_world_size=run.world_size, cp_ulysses=ulysses)


def shapes(first: int, size: int) -> Iterator[tuple[int, str, ResolvedRun]]:
    """Valid draws from a number on."""
    drawn = ((number, *draw(number)) for number in count(first))
    valid = ((number, case, run) for number, case, ranks in drawn if (run := run_of(case, ranks)) is not None)
    return islice(valid, size)


class Measured(NamedTuple):
    """A rank's third step; `sent`: bytes, bytes to other hosts and calls by (axis, operation)."""

    stage: int
    is_first: bool  # of the ranks of its pipeline rank; others have less state where their shard ends in padding
    peak: int
    state: dict[str, int]
    sent: dict[tuple[str, str], tuple[int, ...]]


def measure(rank: int, run: ResolvedRun) -> Measured:
    """One rank's third step: buffers exist after one or two.  Called on every rank."""
    _quantiles()  # a table of the first random numbers of a process
    state = state_of(run, rank)
    gc.collect()
    with live_memory(state.device) as live:
        engine = initialize(run.config, state)
        batches = random_batches(run, engine.share)
        for _ in range(3):
            counted, _ = _watched_step(engine, batches, live.mark)
    traffic, at = state.traffic, state.at
    sent = {
        key: (traffic.sent_bytes[key], traffic.link_bytes[key], calls)
        for key, calls in traffic.calls.items()
        if key[1] not in ("gather_objects", "from_first")
    }
    return Measured(at.pp, not (at.tp or at.cp or at.dp), live.peak, by_kind(counted["step"]), sent)


def by_kind(state: Mapping[str, int]) -> dict[str, int]:
    """Bytes of state and buffers, wherever they lie."""
    found = Counter[str]()
    for name, nbytes in state.items():
        found[name.split(" on ")[0]] += nbytes
    return {kind: found[kind] for kind in (*STATE_KINDS, "gather_buffers", "gradient_buffers")}


@dataclass(frozen=True)
class Compared:
    """The plan of one shape beside its measure."""

    number: int
    case: str
    error: str = ""
    off: tuple[float, ...] = ()  # of each pipeline rank, predicted / measured - 1 of its fullest rank
    wrong: frozenset[str] = frozenset()  # of `state`, `gradient_buffers` and `traffic`, what is not exact
    fullest: bool = False
    moment: str = ""
    peak: int = 0
    seconds: float = 0.0  # that the plan took


def compare(number: int, case: str, run: ResolvedRun) -> Compared:
    """Plan a shape and run it."""
    started, cluster = time.perf_counter(), cpus(run.world_size)
    try:
        plans, sent = memory_of(run, cluster), traffic_of(run, cluster)
        seconds = time.perf_counter() - started
        ranks: list[Measured] = in_processes(run.world_size, measure, run, timeout=240)
    except Exception as error:
        return Compared(number, case, f"{type(error).__name__}: {error}")
    peaks = [max(rank.peak for rank in ranks if rank.stage == stage) for stage in range(len(plans))]
    off = tuple(plan.peak / peak - 1 for plan, peak in zip(plans, peaks, strict=True))
    wrong = set[str]()
    for rank in ranks:
        if rank.is_first:
            planned = by_kind(plans[rank.stage].state)
            differ = {kind for kind, nbytes in planned.items() if nbytes != rank.state[kind]}
            wrong |= {kind if kind == "gradient_buffers" else "state" for kind in differ}
            wrong |= {"traffic"} if {key: tuple(one) for key, one in sent[rank.stage].items()} != rank.sent else set()
    most = max(range(len(peaks)), key=lambda stage: plans[stage].peak)
    worst = max(range(len(peaks)), key=lambda stage: abs(off[stage]))
    fullest = peaks[most] >= max(peaks) * (1 - 1e-3)
    return Compared(number, case, "", off, frozenset(wrong), fullest, plans[worst].moment, peaks[worst], seconds)


def main() -> None:
    """Compare shapes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = []
    for shape in shapes(arguments.first, arguments.shapes):
        found.append(one := compare(*shape))
        most = max(one.off, key=abs, default=0.0)
        print(f"{one.number:4d} {most:+.2%} {one.error} {', '.join(one.wrong)}", flush=True)
    text = page(found)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def page(found: list[Compared]) -> str:
    """What was found, as the page of results."""
    ran = [one for one in found if not one.error]
    offs = [abs(off) for one in ran for off in one.off]
    bins = Counter(next(limit for limit in BINS if off <= limit) for off in offs)
    low = 0.0
    lines = [
        "# The plan's memory and traffic beside measured ones",
        "",
        f"{len(found)} random shapes, of which {len(ran)} ran, on 1 to 8 gloo ranks of one host; torch {torch.__version__}. "
        "`python -m benchmarks.plan_memory`.",
        "",
        f"- model state, to the byte: {sum('state' not in one.wrong for one in ran)} of {len(ran)} shapes",
        f"- buffers of gradients, to the byte: {sum('gradient_buffers' not in one.wrong for one in ran)} of {len(ran)}",
        f"- traffic, bytes and calls by axis and operation: {sum('traffic' not in one.wrong for one in ran)} of {len(ran)}",
        f"- the fullest pipeline rank named: {sum(one.fullest for one in ran)} of {len(ran)}",
        f"- live peak within 1%: {sum(off <= 0.01 for off in offs)} of {len(offs)} pipeline ranks",
        f"- time of a plan, median {sorted(one.seconds for one in ran)[len(ran) // 2]:.2f} s" if ran else "",
        "",
        "| off by at most | pipeline ranks |",
        "|---|---|",
    ]
    for limit in BINS:
        lines.append(f"| {low:.2%} to {limit:.2%} | {bins.get(limit, 0)} |")
        low = limit
    worst = sorted(ran, key=lambda one: -max(map(abs, one.off)))[:8]
    lines += ["", "The furthest off:", "", "| shape | off | measured MB | fullest at | keys |", "|---|---|---|---|---|"]
    for one in worst:
        most = max(one.off, key=abs)
        lines.append(f"| {one.number} | {most:+.2%} | {one.peak / 1e6:.1f} | {one.moment} | `{one.case}` |")
    errors = [f"- shape {one.number}: {one.error}" for one in found if one.error]
    return "\n".join([*lines, *(["", "Not run:", "", *errors] if errors else []), ""])


if __name__ == "__main__":
    main()
