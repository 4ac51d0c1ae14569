"""The plan's memory and traffic beside measured ones, over random shapes of small models on gloo ranks.

    python -m benchmarks.plan_memory --shapes 200 --out benchmarks/results/plan_memory.md

Each shape is drawn from its number; a draw that is no valid run is drawn again.  A run's second step is measured on every
rank: all tensors that torch's allocator reports, and all bytes that the collectives count.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.ranks import RankFailedError, run_ranks
from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.engine import initialize
from megazero.layers.counter_rng import _quantiles
from megazero.parallel_state import ParallelState, RankGrid
from megazero.plan.cluster import Cluster
from megazero.plan.devices import Device, Link
from megazero.plan.memory import memory_of
from megazero.plan.traffic import traffic_of
from megazero.tools.measured_step import STATE_KINDS, _random_batches, _watched_step, live_memory

CPU = Device("cpu", 2**34, {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, Link("memory", 1e10, 1e-6))
BINS = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 1.0)


def cpus(ranks: int) -> Cluster:
    """One host."""
    return Cluster(CPU, ranks, ranks, CPU.link, CPU.link, processors=2)


def draw(number: int) -> tuple[str, int]:  # noqa: PLR0912  each key may depend on those before it
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
    return " ".join(f"{key}={value}" for key, value in keys.items()), ranks


def run_of(case: str, ranks: int) -> ResolvedRun | None:
    """None where a draw is no valid run."""
    try:
        return load_config(os.devnull, case.split(), ranks)
    except (ConfigError, ValueError):
        return None


def state_of(run: ResolvedRun, rank: int) -> ParallelState:
    """The rank's groups, all on one host."""
    parallel = run.config.parallel
    grid = RankGrid(tp=parallel.tp, cp=parallel.cp, dp=run.dp, pp=parallel.pp, order=parallel.order)
    size = run.config.zero.shard_group_size
    return ParallelState(grid, rank, shard_group_size=size, neighbours=run.world_size, cp_ulysses=parallel.ulysses)


@dataclass(frozen=True)
class Measured:
    """One rank's second step."""

    stage: int
    peak: int
    kinds: dict[str, int]
    sent: dict[tuple[str, str], tuple[int, int, int]]
    is_first: bool  # of its pipeline rank


def measure(rank: int, run: ResolvedRun) -> Measured:
    """On every rank."""
    _quantiles()  # a table of the first random numbers of a process
    state = state_of(run, rank)
    gc.collect()
    with live_memory(state.device) as live:
        engine = initialize(run.config, state)
        batches = _random_batches(run, engine.share)
        for _ in range(2):
            counted, _ = _watched_step(engine, batches, live.mark)
    traffic = state.traffic
    sent = {
        key: (traffic.sent_bytes[key], traffic.link_bytes[key], calls)
        for key, calls in traffic.calls.items()
        if key[1] not in ("gather_objects", "from_first")
    }
    is_first = (state.at.tp, state.at.cp, state.at.dp) == (0, 0, 0)
    return Measured(state.at.pp, live.peak, counted["step"], sent, is_first)


@dataclass(frozen=True)
class Compared:
    """The plan of one shape beside its measure."""

    number: int
    ranks: int
    case: str
    error: str = ""
    off: tuple[float, ...] = ()  # of each pipeline rank, predicted / measured - 1 of its fullest rank
    state_off: int = 0  # bytes
    buffers_off: int = 0
    traffic_off: int = 0  # bytes and calls
    fullest: bool = False
    moment: str = ""
    peak: int = 0
    seconds: float = 0.0
    detail: str = ""


def compare(number: int, case: str, run: ResolvedRun) -> Compared:
    """Plan and measure one shape."""
    ranks = run.world_size
    started = time.perf_counter()
    try:
        planned, traffic = memory_of(run, cpus(ranks)), traffic_of(run, cpus(ranks))
    except Exception as error:
        return Compared(number, ranks, case, f"plan: {error!r}", detail=traceback.format_exc())
    seconds = time.perf_counter() - started
    try:
        measured = run_ranks(ranks, measure, run, timeout=120)
    except RankFailedError as error:
        return Compared(number, ranks, case, f"run: {error}")
    peaks = [max(one.peak for one in measured if one.stage == stage) for stage in range(len(planned))]
    off = tuple(plan.peak / peak - 1 for plan, peak in zip(planned, peaks, strict=True))
    state_off = traffic_off = buffers_off = 0
    detail = []
    for one in measured:
        plan = planned[one.stage]
        if not one.is_first:  # a shard that ends in padding has less optimizer state
            continue
        for kind in (*STATE_KINDS, "gather_buffers", "gradient_buffers"):
            wanted = sum(count for name, count in one.kinds.items() if name.split(" on ")[0] == kind)
            found = plan.state.get(kind, 0)
            if wanted != found and kind == "gradient_buffers":
                buffers_off += abs(wanted - found)
                detail.append(f"{kind} of stage {one.stage}: {found} planned, {wanted} measured")
            elif wanted != found:
                state_off += abs(wanted - found)
                detail.append(f"{kind} of stage {one.stage}: {found} planned, {wanted} measured")
        theirs = {key: tuple(sent) for key, sent in traffic[one.stage].items()}
        for key in {*theirs, *one.sent}:
            a, b = theirs.get(key, (0, 0, 0)), one.sent.get(key, (0, 0, 0))
            if a != b:
                traffic_off += sum(abs(x - y) for x, y in zip(a, b, strict=True))
                detail.append(f"{key} of stage {one.stage}: {a} planned, {b} measured")
    most = max(range(len(peaks)), key=lambda stage: planned[stage].peak)
    named = peaks[most] >= max(peaks) * (1 - 1e-3)
    worst = max(range(len(peaks)), key=lambda stage: abs(off[stage]))
    return Compared(
        number,
        ranks,
        case,
        "",
        off,
        state_off,
        buffers_off,
        traffic_off,
        named,
        planned[worst].moment,
        max(peaks),
        seconds,
        "; ".join(dict.fromkeys(detail)),
    )


def main() -> None:
    """Run all shapes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: list[Compared] = []
    number, started = arguments.first, time.perf_counter()
    while len(found) < arguments.shapes and time.perf_counter() - started < 60 * arguments.minutes:
        case, ranks = draw(number)
        if (run := run_of(case, ranks)) is not None:
            found.append(one := compare(number, case, run))
            most = max(one.off, key=abs, default=0.0)
            print(f"{number:4d} {one.ranks} ranks {most:+.2%} {one.error}", flush=True)
            if one.error or one.state_off or one.traffic_off or abs(most) > 0.005 or not one.fullest:
                print(f"     {case}\n     {one.moment} {one.peak} {one.fullest} {one.detail}", flush=True)
        number += 1
    text = page(found, time.perf_counter() - started)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def page(found: list[Compared], seconds: float) -> str:
    """What was found, as the page of results."""
    ran = [one for one in found if not one.error]
    offs = [abs(off) for one in ran for off in one.off]
    bins = Counter(next(limit for limit in BINS if off <= limit) for off in offs)
    low = 0.0
    lines = [
        "# The plan's memory and traffic beside measured ones",
        "",
        f"{len(found)} random shapes, of which {len(ran)} ran, on 1 to 8 gloo ranks of one host; torch {torch.__version__}; "
        f"{seconds / 60:.1f} minutes. `python -m benchmarks.plan_memory`.",
        "",
        f"- model state, to the byte: {sum(not one.state_off for one in ran)} of {len(ran)} shapes",
        f"- buffers of gradients, to the byte: {sum(not one.buffers_off for one in ran)} of {len(ran)}",
        f"- traffic, bytes and calls by axis and operation: {sum(not one.traffic_off for one in ran)} of {len(ran)}",
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
    worst = sorted(ran, key=lambda one: -max(map(abs, one.off)))[:12]
    lines += ["", "The furthest off:", "", "| shape | off | measured MB | fullest at | keys |", "|---|---|---|---|---|"]
    for one in worst:
        most = max(one.off, key=abs)
        lines.append(f"| {one.number} | {most:+.2%} | {one.peak / 1e6:.1f} | {one.moment} | `{one.case}` |")
    errors = [f"- shape {one.number}: {one.error}" for one in found if one.error]
    return "\n".join([*lines, *(["", "Not run:", "", *errors] if errors else []), ""])


if __name__ == "__main__":
    main()
