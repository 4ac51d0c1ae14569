"""The plan's memory and traffic beside measured ones, over random shapes of small models on gloo ranks.

    python -m benchmarks.plan_memory --shapes 200 > page.md

Each shape is drawn from its number; a draw that is no valid run is left out.  A run's third step is measured on every
rank: all tensors that torch's allocator reports, and all bytes that the collectives count.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from statistics import median
from typing import Any, NamedTuple

import torch

from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.engine import initialize
from megazero.layers.counter_rng import _quantiles
from megazero.parallel_state import Links, ParallelState
from megazero.plan.cluster import Cluster
from megazero.plan.devices import Device, Link
from megazero.plan.memory import memory_of
from megazero.plan.memory_report import STATE_KINDS, live_memory, watched_step
from megazero.plan.processes import in_processes
from megazero.plan.speed_probe import random_batches
from megazero.plan.traffic import traffic_of

CPU = Device("cpu", 2**34, {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, Link("memory", 1e10, 1e-6))
BINS = (0.002, 0.01, 0.05)


def cpus(ranks: int) -> Cluster:
    """One host."""
    return Cluster(CPU, ranks, ranks, CPU.link, CPU.link, processors=2)


def draw(number: int) -> tuple[str, int]:  # each key may depend on those before it
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
    sometimes = partial(_sometimes, of, keys)
    sometimes("model.num_kv_heads", family != "gpt2", heads, heads // 2, heads // 4)
    sometimes("model.dropout", family == "gpt2", 0.0, 0.1)
    sometimes("model.sliding_window", family == "mistral", 32, 64)
    sometimes("parallel.sequence_parallel", tp > 1, "true", "false")
    sometimes("parallel.virtual_stages", schedule == "interleaved", 2)
    sometimes("zero.gather_policy", keys["zero.stage"] == 3, "action", "action", "chunk", "step")
    sometimes("zero.reduce", keys["zero.stage"] >= 2, "micro_batch", "micro_batch", "step")
    sometimes("precision.reduce_dtype", keys["precision.dtype"] == "bf16", "fp32", "fp32", "bf16")
    sometimes("precision.accumulate_dtype", keys["precision.dtype"] == "bf16", "fp32", "fp32", "bf16")
    sometimes("data.document_mask", 0.2, "true")
    sometimes("model.tie_embeddings", 0.3, "true")
    sometimes("zero.bucket_bytes", 0.3, 2**20, 2**22)
    if keys["activations.recompute"] in ("full", '["attention"]'):
        sometimes("activations.keep_attention", 0.5, "true")
    if keys["activations.recompute"] != "none":
        sometimes("activations.layers", 0.3, 1)
    sometimes("optimizer.name", 0.1, "lion", "sgd", "adagrad")
    sometimes("zero.offload.optimizer", 0.15, "cpu", "nvme")
    if keys["zero.stage"] == 3:
        sometimes("zero.offload.parameters", 0.2, "cpu", "nvme")
    sometimes("zero.offload.nvme_path", "nvme" in keys.values(), "/tmp")
    if ranks // (tp * pp) >= 4 and keys.get("zero.gather_policy") in ("action", "chunk") and of.random() < 0.5:
        keys["zero.secondary_shard_size"] = 2
    elif ranks // (tp * pp) > 1 and ranks < 8 and of.random() < 0.3:
        ranks = ranks // 2 * 3
    return " ".join(f"{key}={value}" for key, value in keys.items()), ranks


def _sometimes(of: random.Random, keys: dict[str, Any], key: str, chance: bool | float, *values: object) -> None:
    """Give a key one of the values: always, never, or with a probability."""
    if chance if isinstance(chance, bool) else of.random() < chance:
        keys[key] = of.choice(values) if len(values) > 1 else values[0]


def run_of(case: str, ranks: int) -> ResolvedRun | None:
    """None where a draw is no valid run."""
    try:
        return load_config(os.devnull, case.split(), ranks)
    except (ConfigError, ValueError):
        return None


def state_of(run: ResolvedRun, rank: int) -> ParallelState:
    """The rank's groups, all on one host."""
    return ParallelState(run.grid, rank, Links(local_world_size=run.world_size))


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
        batches = random_batches(run, engine.batch_slice)
        for _ in range(3):
            counted, _ = watched_step(engine, batches, live.start)
    traffic, at = state.traffic, state.at
    sent = {
        key: (traffic.sent_bytes[key], traffic.link_bytes[key], calls)
        for key, calls in traffic.calls.items()
        if key[1] not in ("gather_objects", "from_first")
    }
    return Measured(at.pp, not (at.tp or at.cp or at.dp), live.peak, by_kind(counted), sent)


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

    @property
    def worst(self) -> float:
        """Of the pipeline rank that is furthest off."""
        return max(self.off, key=abs, default=0.0)


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
    """Compare shapes and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    found = []
    for shape in shapes(given.first, given.shapes):
        found.append(compare(*shape))
        last = found[-1]
        print(f"{last.number} {last.worst:+.2%} {last.error} {', '.join(last.wrong)}", file=sys.stderr, flush=True)
    print(page(found))


def page(found: list[Compared]) -> str:
    """What was found, as the page of results."""
    ran = sorted((one for one in found if not one.error), key=lambda one: -abs(one.worst))
    offs = [abs(off) for one in ran for off in one.off]
    exact = {kind: sum(kind not in one.wrong for one in ran) for kind in ("state", "gradient_buffers", "traffic")}
    within = ", ".join(f"{limit:.1%}: {sum(off <= limit for off in offs)}" for limit in BINS)
    worst = [
        f"- {one.worst:+.2%} of {one.peak / 1e6:.1f} MB in {one.moment}; shape {one.number}: `{one.case}`"
        for one in ran
    ]
    lines = [
        f"# The plan's memory and traffic beside measured ones\n\n{len(found)} random shapes, of which {len(ran)} ran, "
        f"on 1 to 8 gloo ranks of one host; torch {torch.__version__}. `python -m benchmarks.plan_memory`.\n",
        f"- model state, to the byte: {exact['state']} of {len(ran)} shapes",
        f"- buffers of gradients, to the byte: {exact['gradient_buffers']} of {len(ran)}",
        f"- traffic, bytes and calls by axis and operation: {exact['traffic']} of {len(ran)}",
        f"- the fullest pipeline rank named: {sum(one.fullest for one in ran)} of {len(ran)}",
        f"- live peak of {len(offs)} pipeline ranks, within {within}",
        f"- time of a plan, median {median(one.seconds for one in ran):.2f} s\n\nThe furthest off:\n",
        *worst[:8],
        *(f"- shape {one.number} did not run: {one.error}" for one in found if one.error),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
