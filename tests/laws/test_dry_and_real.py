"""A dry run is the program: what its ranks send, in which order, and what lives there, equal those of a real run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from harness import run_world
from worlds import LLAMA, LR, run_of

from megazero.config import ResolvedRun
from megazero.engine import initialize
from megazero.parallel_state import Links, ParallelState
from megazero.plan.dry_run import dry_run
from megazero.plan.fake_ranks import RecordedTraffic
from megazero.plan.fake_tensors import Event, Message
from megazero.plan.memory_report import live_memory
from megazero.plan.speed_probe import random_batches

SMALL = LLAMA | {"num_layers": 2, "num_heads": 8, "num_kv_heads": 4}
LARGE = SMALL | {"hidden_size": 128, "ffn_hidden_size": 384, "seq_len": 64}

BUCKETS = {"bucket_bytes": 2**14}  # two of a layer

QUANTIZED = {"stage": 3, "quantized_weights": True, "quantized_gradients": 4}

# (ranks, ranks of a host) -> what is not usual about each run.  Between them: every axis, stage and kind of schedule,
# sequence parallelism, second copies, and all three backends of CPU ranks.
WORLDS: dict[tuple[int, int], list[dict[str, Any]]] = {
    (4, 4): [
        {
            "parallel": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
            "zero": {"stage": 2},
            "model": {"num_layers": 4},
        }
    ],
    (4, 2): [
        {"parallel": {"tp": 2, "pp": 2, "schedule": "zb-h1"}, "training": {"accumulation": 2}},
        {
            "zero": {"stage": 3, "shard_group_size": 2},
            "precision": {"dtype": "bf16"},
            "activations": {"recompute": "full"},
        },
        {
            "parallel": {"cp": 4, "cp_ulysses": 2, "cp_method": "hybrid"},
            "zero": {"stage": 2, "bucket_bytes": "auto"},
            "training": {"accumulation": 1},
        },
        {"zero": QUANTIZED | {"secondary_shard_size": 2}, "training": {"accumulation": 2}},
    ],
    (8, 4): [
        {
            "parallel": {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True},
            "zero": {"stage": 1},
            "training": {"accumulation": 2},
        }
    ],
}


def _step(rank: int, runs: Sequence[ResolvedRun], local_world_size: int, watched: bool) -> list[Any]:
    """Of each run: what this rank sent while it was built, and in its second step, and the most that lived in that step."""
    results: list[Any] = []
    for run in runs:
        events: list[Event] = []

        class _Recording(ParallelState):
            def _new_traffic(self, events: list[Event] = events) -> RecordedTraffic:
                return RecordedTraffic(events)

        state = _Recording(run.grid, rank, Links(local_world_size=local_world_size))
        gc.collect()
        with live_memory(state.device) if watched else nullcontext() as live:
            engine = initialize(run.config, state)
            start = tuple(events)
            batches = random_batches(run, engine.batch_slice)
            engine.train_step(batches, LR)
            events.clear()
            gc.collect()
            if live is not None:
                live.start()
            engine.train_step(batches, LR)
        results.append((start, tuple(events), live and live.peak))
        engine.sharded_model.close()
        del engine, batches
    return results


def _but_choices(events: Sequence[Event]) -> list[Event]:
    """Without small values: where backends are given, ranks exchange none to choose them."""
    return [one for one in events if isinstance(one, Message) and one.operation != "gather_objects"]


@pytest.mark.parametrize(("world", "local_world_size"), WORLDS)
def test_a_dry_rank_sends_what_the_real_one_sends_in_the_same_order(world: int, local_world_size: int) -> None:
    """Operations, axes and bytes, within a host and between hosts."""
    runs = [
        run_of(world, **{**one, "model": SMALL | one.get("model", {}), "zero": BUCKETS | one.get("zero", {})})
        for one in WORLDS[world, local_world_size]
    ]
    real = run_world(world, _step, runs, local_world_size, False)
    for number, run in enumerate(runs):
        dry = dry_run(run, per_node=local_world_size, on_cuda=False)
        assert dry.problems == ()
        for rank, found in dry.ranks.items():
            start, step, _ = real[rank][number]
            assert _but_choices(found.start) == _but_choices(start), (number, rank)
            assert list(found.step) == list(step), (number, rank)


def test_live_memory_of_a_dry_rank_is_within_1_percent_of_the_real_one() -> None:
    sections: list[dict[str, Any]] = [
        {"parallel": {"pp": 2}, "zero": {"stage": 1, "bucket_bytes": 2**16}, "training": {"accumulation": 2}},
        {"zero": {"stage": 3}, "precision": {"dtype": "bf16"}},
        {"zero": QUANTIZED, "precision": {"dtype": "bf16"}},
    ]
    runs = [run_of(2, model=LARGE, **one) for one in sections]
    real = run_world(2, _step, runs, 2, True)
    for number, run in enumerate(runs):
        for rank, found in dry_run(run, per_node=2, on_cuda=False).ranks.items():
            peak = real[rank][number][2]
            assert found.peak == pytest.approx(peak, rel=0.01), (number, rank)
