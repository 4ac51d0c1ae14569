"""What a pipeline promises beyond equal numbers: reduction under the backward, sharding while it runs, bounded memory."""

from __future__ import annotations

import itertools
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from harness import run_world
from test_any_schedule import SCHEDULES
from worlds import LLAMA, LR, engine_on, micro_batches, on_one_state, run_of

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.models.gpt import MicroBatch
from megazero.schedules.action import Op

UNTIED = LLAMA | {"tie_embeddings": False, "vocab_size": 64}


def _watched(rank: int, run: ResolvedRun, repeat: int = 1) -> dict[str, Any]:
    """Events of the second step, or of the first, the most gradient memory at any action; batches come `repeat` times."""
    return _watched_on(engine_on(rank, run), run, repeat)


def _watched_on(engine: Engine, run: ResolvedRun, repeat: int = 1, warms_up: bool = True) -> dict[str, Any]:
    if warms_up:
        engine.train_step(micro_batches(run, engine.state, 0) * repeat, LR)
    events: list[str] = []
    peak = 0
    count = engine.state.traffic.add

    def add(axis: str, operation: str, *counted: Any) -> None:
        events.append(f"{operation} over {axis}")
        count(axis, operation, *counted)

    def watch(action: Any) -> None:
        nonlocal peak
        events.append(str(action))
        memory = engine.memory_bytes()
        peak = max(peak, memory["gradients"] + memory["gradient_buffers"])

    engine.state.traffic.reset()
    engine.state.traffic.add = add
    engine.on_action = watch
    engine.train_step(micro_batches(run, engine.state, 1) * repeat, LR)
    engine.state.traffic.add = count
    layouts = [bucket.layout for bucket in engine.sharded_model.parameters.buckets]
    return {
        "events": events,
        "peak": peak,
        "elements": sum(layout.padded_numel for layout in layouts),
        "largest": max(layout.padded_numel for layout in layouts),
        "sent": dict(engine.state.traffic.sent_bytes),
        "labels": engine.batch_slice.labels,
        "memory": engine.memory_bytes(),
    }


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_reduction_is_issued_during_the_backwards_not_after_the_last(zero_stage: int) -> None:
    """1F1B with 8 micro-batches: every backward but the first reduces between its start and the end of the last one."""
    run = run_of(4, model=UNTIED, parallel={"pp": 2}, zero={"stage": zero_stage}, training={"accumulation": 4})
    for measured in run_world(4, _watched, run, 2):
        events = measured["events"]
        backwards = [index for index, event in enumerate(events) if event.startswith(Op.BACKWARD.value)]
        reductions = [index for index, event in enumerate(events) if event == "reduce_scatter over dp"]
        spans = list(zip(backwards[::2], backwards[1::2], strict=True))
        assert len(spans) == 8
        for start, end in spans:
            assert any(start < index < end for index in reductions), "a backward issued no reduction"
        assert all(index < backwards[-1] for index in reductions), "a reduction was left for after the last backward"


# Stages that reduce once a step do it in one way under all schedules; of tp nothing depends but Ψ.
CASES = {
    1: [*product(SCHEDULES, (2, 3)), ("gpipe", 0), ("interleaved", 0), ("1f1b", 1), ("zbv", 1)],
    2: [("zb-h1", 1), ("interleaved", 3)],
}


@pytest.mark.parametrize("tp", [1, 2])
def test_traffic_over_dp_is_the_formula_under_every_schedule(tp: int) -> None:
    """2Ψ, 2Ψ, (G + 1)Ψ; stage 3 reduces GΨ and gathers at most 2GΨ."""
    cases = CASES[tp]
    runs = [
        run_of(
            4 * tp,
            model=UNTIED | {"num_layers": 4},
            parallel={"pp": 2, "tp": tp, **SCHEDULES[schedule]},
            zero={"stage": zero_stage},
            training={"accumulation": 2},
        )
        for schedule, zero_stage in cases
    ]
    for of_rank in run_world(4 * tp, on_one_state, runs, _watched_on, 1, False):
        for (_, zero_stage), measured in zip(cases, of_rank, strict=True):
            psi = 4 * measured["elements"] // 2
            count = 8 if measured["labels"] else 0
            sent = {operation: value for (axis, operation), value in measured["sent"].items() if axis == "dp"}
            assert sent.get("all_reduce", 0) == (2 * psi if zero_stage == 0 else 0) + count
            assert sent.get("reduce_scatter", 0) == psi * (0, 1, 2, 2)[zero_stage]
            if zero_stage < 3:
                assert sent.get("all_gather", 0) == (psi if zero_stage else 0)
            else:
                assert 0 < sent["all_gather"] <= 2 * 2 * psi


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_tied_embeddings_are_exchanged_but_where_one_rank_has_both(schedule: str) -> None:
    """Each of two ranks sends its copy's gradient once; in a V both copies are on the first rank and nothing is sent."""
    model = UNTIED | {"num_layers": 4, "tie_embeddings": True}
    run = run_of(2, model=model, parallel={"pp": 2, **SCHEDULES[schedule]}, training={"accumulation": 2})
    for measured in run_world(2, _watched, run):
        sent = measured["sent"].get(("embedding", "all_reduce"), 0)
        assert sent == (0 if schedule == "zbv" else 4 * 64 * 32)


def test_whole_step_policy_gathers_each_unit_once_and_reduces_once() -> None:
    """Stage 3 with gather_policy and reduce "step": Ψ to gather, Ψ to reduce, whatever the number of micro-batches."""
    zero = {"stage": 3, "gather_policy": "step", "reduce": "step"}
    run = run_of(4, model=UNTIED, parallel={"pp": 2}, zero=zero, training={"accumulation": 4})
    for measured in run_world(4, _watched, run):
        psi = 4 * measured["elements"] // 2
        assert measured["sent"]["dp", "all_gather"] == psi
        assert measured["sent"]["dp", "reduce_scatter"] == psi


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_stage_shards_between_steps_and_while_the_pipeline_runs(zero_stage: int) -> None:
    """At every action gradients are a rank's shard and the buckets that fill or travel; weights of stage 3 are a shard and
    the two units in the gather buffers."""
    schedules = ("1f1b", "interleaved", "zbv") if zero_stage == 3 else ("gpipe", "zb-h1", "zbv")
    runs = [
        run_of(
            4,
            model=UNTIED | {"num_layers": 28 if zero_stage == 3 else 12},
            parallel={"pp": 2, **SCHEDULES[schedule]},
            zero={"stage": zero_stage},
            training={"accumulation": 2},
        )
        for schedule in schedules
    ]
    for of_rank in run_world(4, on_one_state, runs, _watched_on):
        for schedule, measured in zip(schedules, of_rank, strict=True):
            shard, buffer = 4 * measured["elements"] // 2, 4 * measured["largest"]
            assert 6 * buffer < shard, "the bound would say nothing"
            assert measured["peak"] <= shard + 6 * buffer, schedule
            memory = measured["memory"]
            assert memory["gradients"] == shard
            assert memory["parameters"] == (shard if zero_stage == 3 else 2 * shard)
            assert memory["gather_buffers"] <= (2 * buffer if zero_stage == 3 else 0)


def _peak_bytes(rank: int, run: ResolvedRun, microbatches: int) -> int:
    """Most bytes that torch's allocator held at once during a step, above what it held before."""
    engine = engine_on(rank, run)
    model = run.config.model
    tokens = torch.randint(0, model.vocab_size, (model.seq_len, 4), generator=torch.Generator().manual_seed(1))
    batches = [MicroBatch(torch.arange(4), tokens, tokens)] * microbatches
    engine.train_step(batches, LR)  # makes every lasting buffer
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        engine.train_step(batches, LR)
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()  # a trace in a file takes longer
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


@lru_cache
def _peak(schedule: str, microbatches: int) -> int:
    """Most that a step adds on any rank."""
    model = UNTIED | {"hidden_size": 64, "num_layers": 4, "ffn_hidden_size": 192, "seq_len": 256}
    parallel = {"pp": 2, **SCHEDULES[schedule]}
    run = run_of(2, model=model, parallel=parallel, training={"accumulation": 2})
    return max(run_world(2, _peak_bytes, run, microbatches))


@pytest.mark.slow
def test_peak_memory_of_1f1b_does_not_grow_with_the_micro_batches() -> None:
    """Under gpipe the same model grows with each micro-batch."""
    few, many = _peak("1f1b", 2), _peak("1f1b", 8)
    assert many < 1.05 * few
    assert _peak("gpipe", 8) > 3 * few


@pytest.mark.slow
def test_zb_h1_has_the_peak_memory_of_1f1b() -> None:
    assert _peak("zb-h1", 8) < 1.05 * _peak("1f1b", 8)
