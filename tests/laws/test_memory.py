"""Law 3: memory is what the paper says (Rajbhandari et al. 2020, figure 1), measured on the tensors that exist."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from worlds import LLAMA, LR, engine_on, micro_batches, on_one_state, run_of, state_on

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.layers.spec import Initializer, NamedRows, rows_spec
from megazero.layers.vocabulary import Logits, VocabParallelHead
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import Axis

UNTIED = LLAMA | {"tie_embeddings": False, "vocab_size": 64}  # divides by tp, so that no row is padding


def _measure(engine: Engine, run: ResolvedRun) -> dict[str, Any]:
    """After a step: bytes; elements that are stored, that are padding, of the largest bucket, that this rank owns."""
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    layouts = [bucket.layout for bucket in engine.sharded_model.parameters.buckets]
    owned = sum(bucket.owned.stop - bucket.owned.start for bucket in engine.sharded_model.parameters.buckets)
    for layout in layouts:
        padding = layout.padded_numel - layout.numel
        assert padding < 16 * max(1, run.dp) or (layout.step > 16 and padding * 32 <= layout.numel)
    return {
        "bytes": engine.memory_bytes(),
        "stored": sum(layout.padded_numel for layout in layouts),
        "padding": sum(layout.padded_numel - layout.numel for layout in layouts),
        "largest": max(layout.padded_numel for layout in layouts),
        "owned": owned,
    }


@pytest.mark.parametrize(("dp", "parallel"), [(4, {}), (2, {"pp": 2})], ids=["alone", "pp 2"])
def test_model_state_bytes_equal_the_zero_formula(dp: int, parallel: dict[str, int]) -> None:
    world = dp * parallel.get("pp", 1)
    cases = [(dtype, zero_stage) for dtype in ("fp32", "bf16") for zero_stage in range(4)]
    averages = {"kind": "ema"}
    runs = [
        run_of(
            world, model=UNTIED, parallel=parallel, zero={"stage": stage}, precision={"dtype": dtype}, average=averages
        )
        for dtype, stage in cases
    ]
    for results in run_world(world, on_one_state, runs, _measure):
        for case, result in zip(cases, results, strict=True):
            dtype, zero_stage = case
            weight, master = (4, 0) if dtype == "fp32" else (2, 4)
            measured, stored, padding = result["bytes"], result["stored"], result["padding"]
            per_parameter = weight / (dp if zero_stage == 3 else 1) + master / (dp if zero_stage >= 1 else 1)
            assert measured["parameters"] == stored * per_parameter, case
            assert measured["gradients"] == stored * 4 / (dp if zero_stage >= 2 else 1), case
            # moments cover parameters, not padding: the last shard has fewer
            moments = 8 * (stored - padding) / (dp if zero_stage >= 1 else 1)
            assert abs(measured["optimizer"] - moments) <= 8 * padding, case
            assert measured["average"] == stored * 4 / (dp if zero_stage >= 1 else 1), case
            if zero_stage < 3:
                assert measured["gather_buffers"] == 0, case
            # two reductions under way hold what arrives, and from stage 2 on what they send, beside two buckets that fill
            buffers = {0: 0, 1: 2, 2: 6, 3: 6}[zero_stage]
            assert measured["gradient_buffers"] <= buffers * result["largest"] * 4, case


def test_working_buffers_of_stage_3_do_not_grow_with_depth() -> None:
    runs = [run_of(2, model=UNTIED | {"num_layers": layers}, zero={"stage": 3}) for layers in (2, 6)]
    for results in run_world(2, on_one_state, runs, _measure):
        shallow, deep = (measured["bytes"] for measured in results)
        assert shallow["gather_buffers"] == deep["gather_buffers"]
        assert shallow["gradient_buffers"] == deep["gradient_buffers"]


def _gather_buffers(engine: Engine, run: ResolvedRun) -> tuple[int, list[int]]:
    """Bytes of the gather buffers; padded parameters of each unit, in forward order."""
    buckets = engine.sharded_model.parameters.buckets
    by_unit = {bucket.layout.unit: bucket.layout.padded_numel for bucket in buckets if not bucket.holds_weights}
    return engine.memory_bytes()["gather_buffers"], [by_unit[unit] for unit in sorted(by_unit)]


def test_gather_buffers_are_the_largest_unit_of_each_parity() -> None:
    """To the byte: one buffer serves the embedding and every second unit after it, the other those between them."""
    runs = [
        run_of(2, model=UNTIED | {"num_layers": layers}, zero={"stage": 3}, precision={"dtype": dtype})
        for layers, dtype in ((2, "fp32"), (3, "bf16"))
    ]
    for results in run_world(2, on_one_state, runs, _gather_buffers):
        for (measured, units), run, nbytes in zip(results, runs, (4, 2), strict=True):
            assert len(units) == run.config.model.num_layers + 2
            assert measured == nbytes * (max(units[::2]) + max(units[1::2])), units


def test_a_stage_3_rank_never_makes_the_whole_model() -> None:
    """Parameters are made on the meta device and drawn shard by shard."""
    run = run_of(4, model=UNTIED | {"num_layers": 8}, zero={"stage": 3})
    (measured,) = run_world(4, on_one_state, [run], _measure)[0]
    parameters = measured["stored"] - measured["padding"]
    assert measured["bytes"]["parameters"] + measured["bytes"]["gather_buffers"] < 4 * parameters * 0.6


# ---------------------------------------------------------------------------------------------------------------------
# Half precision, offloading, groups that share the state


def _on_device(memory: dict[str, int]) -> int:
    return sum(size for kind, size in memory.items() if " on " not in kind and "buffers" not in kind)


@pytest.mark.parametrize(("dtype", "group"), [("bf16", 0), ("fp16", 2)], ids=["dp 4", "groups of 2"])
def test_a_parameter_takes_2_4_and_12_bytes_and_each_stage_shards_more_of_them(dtype: str, group: int) -> None:
    """2 for the weight, 4 for its fp32 gradient, 12 for master and moments; a group shares them among its own ranks."""
    shards = group or 4
    wanted = {0: 2 + 4 + 12, 1: 2 + 4 + 12 / shards, 2: 2 + (4 + 12) / shards, 3: (2 + 4 + 12) / shards}
    stages = [stage for stage in wanted if stage or not group]
    runs = [
        run_of(4, model=UNTIED, zero={"stage": stage, "shard_group_size": group}, precision={"dtype": dtype})
        for stage in stages
    ]
    for results in run_world(4, on_one_state, runs, _measure):
        for stage, measured in zip(stages, results, strict=True):
            # padding has no moments, and only the last shard has padding
            slack = 8 * measured["padding"]
            assert abs(_on_device(measured["bytes"]) - wanted[stage] * measured["stored"]) <= slack, stage


def test_what_is_offloaded_leaves_the_device_and_is_told_where_it_is(tmp_path: Path) -> None:
    """Master, moments and the gradient that steps them; at stage 3 the weights too.  At stages 0 and 1 the gradient that the
    device keeps for the backward stays, and the host has its shard of it beside."""
    cases = [(stage, place) for stage in range(4) for place in ("none", "cpu", "nvme")]
    runs = []
    for stage, place in cases:
        offload = {"optimizer": place, "nvme_path": str(tmp_path)} | ({"parameters": place} if stage == 3 else {})
        runs.append(run_of(2, model=UNTIED, zero={"stage": stage, "offload": offload}, precision={"dtype": "bf16"}))
    for results in run_world(2, on_one_state, runs, _measure):
        by_case = dict(zip(cases, results, strict=True))
        for stage, place in cases:
            if place == "none":
                assert all(" on " not in kind for kind in by_case[stage, place]["bytes"])
                continue
            before, after = by_case[stage, "none"]["bytes"], by_case[stage, place]["bytes"]
            owned = by_case[stage, place]["owned"]
            where = {"cpu": "host", "nvme": "file"}[place]
            weights = 2 * owned if stage == 3 else 0
            assert before["parameters"] - after["parameters"] == 4 * owned + weights
            assert after[f"parameters on {where}"] == 4 * owned + weights
            assert after["optimizer"] == 0
            assert after[f"optimizer on {where}"] == before["optimizer"]
            assert before["gradients"] - after["gradients"] == (4 * owned if stage >= 2 else 0)
            assert after["gradients on host"] == 4 * owned
            kinds = ("parameters", "optimizer")
            buffers = {"optimizer_buffers on host"} if place == "nvme" else set()
            assert (
                set(after) == set(before) | {"gradients on host"} | {f"{kind} on {where}" for kind in kinds} | buffers
            )


def test_half_the_ratio_offloads_half_the_optimizer_to_within_a_bucket() -> None:
    ratios = (0.0, 0.25, 0.5, 1.0)
    runs = [
        run_of(
            2,
            model=UNTIED,
            zero={"stage": 2, "offload": {"optimizer": "cpu", "ratio": ratio}},
            precision={"dtype": "bf16"},
        )
        for ratio in ratios
    ]
    for results in run_world(2, on_one_state, runs, _measure):
        every = results[0]["bytes"]["optimizer"]
        for ratio, measured in zip(ratios, results, strict=True):
            moved = measured["bytes"].get("optimizer on host", 0)
            assert moved + measured["bytes"]["optimizer"] == every
            assert ratio * every - 8 * measured["padding"] <= moved <= ratio * every + 8 * measured["largest"]


# ---------------------------------------------------------------------------------------------------------------------
# While a step runs


STEP_BEGINS = "step begins"


def _peaks(rank: int, runs: Sequence[ResolvedRun]) -> list[dict[str, Any]]:
    """For each run, most bytes that torch's allocator held at once during a step, with all that was there before."""
    state = state_on(rank, runs[0])
    model = runs[0].config.model
    tokens = torch.randint(0, model.vocab_size, (model.seq_len, 1), generator=torch.Generator().manual_seed(1))
    results = []
    gc.collect()
    gc.disable()  # what other tests have left, freed while a run is measured, would count as its own
    for run in runs:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            engine = engine_on(rank, run, state=state)
            for _ in range(3):
                with torch.profiler.record_function(STEP_BEGINS):
                    pass
                engine.train_step([MicroBatch(torch.arange(1), tokens, tokens)] * 2, LR)
        results.append(
            {
                "peak": _peak(profile),
                "bytes": sum(engine.memory_bytes().values()),
                "elements": sum(bucket.layout.padded_numel for bucket in engine.sharded_model.parameters.buckets),
                "largest": max(bucket.layout.padded_numel for bucket in engine.sharded_model.parameters.buckets),
            }
        )
        del engine
        gc.collect()
    gc.enable()
    return results


def _events(profile: torch.profiler.profile) -> tuple[list[float], list[tuple[float, int]]]:
    """When steps began, and (time, bytes) of each allocation and of each release.  (A trace in a file takes longer.)"""
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    starts = sorted(event.start_ns() for event in events if event.name() == STEP_BEGINS)
    memory = ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return starts, sorted(memory, key=lambda change: change[0])


def _peak(profile: torch.profiler.profile) -> int:
    """Of the steps after the first the one with the lowest peak."""
    starts, changes = _events(profile)
    totals = list(itertools.accumulate(change for _, change in changes))
    spans = itertools.pairwise([*starts[1:], float("inf")])
    return min(
        max(total for (at, _), total in zip(changes, totals, strict=True) if start <= at < end) for start, end in spans
    )


@pytest.mark.slow
def test_while_a_step_runs_each_parameter_takes_what_the_formula_says_and_no_more() -> None:
    """bf16 over 2 ranks, really allocated bytes: 18, 12, 10 and 9 for each parameter that a deeper model has more.  Above
    state and working buffers, as `memory_bytes` tells them, there is at most a layer of fp32 (gradients on their way from
    autograd to a bucket) and what the layers save of two tokens for the backward.  gloo's threads may let go of two messages
    a moment late, in either run."""
    shallow, deep = 2, 5
    layer, saved = 9 * 128 * 128, 2 * 4096  # parameters of a layer; bytes that it saves
    wanted = {0: 2 + 4 + 12, 1: 2 + 4 + 12 / 2, 2: 2 + (4 + 12) / 2, 3: (2 + 4 + 12) / 2}
    runs = [
        run_of(
            2,
            model=UNTIED | {"hidden_size": 128, "ffn_hidden_size": 256, "num_layers": depth, "seq_len": 2},
            zero={"stage": stage, "bucket_bytes": 2**17},
            precision={"dtype": "bf16"},
        )
        for stage in wanted
        for depth in (shallow, deep)
    ]
    for results in run_world(2, _peaks, runs):
        for stage, few, many in zip(wanted, results[::2], results[1::2], strict=True):
            more = many["elements"] - few["elements"]
            assert more >= (deep - shallow) * layer
            grown, late = many["peak"] - few["peak"], 2 * 4 * many["largest"]
            assert 0.985 * wanted[stage] * more - late <= grown <= 1.015 * wanted[stage] * more + late, stage
            for depth, measured in ((shallow, few), (deep, many)):
                assert -late <= measured["peak"] - measured["bytes"] <= 4 * layer + depth * saved + late, stage


LARGE = UNTIED | {"vocab_size": 10_000, "num_layers": 1, "seq_len": 2}


def _gradient_buffers(rank: int, runs: Sequence[ResolvedRun], shares_memory: bool) -> list[int]:
    """Bytes of the working buffers after a step of each run."""
    state = state_on(rank, runs[0], shares_memory=shares_memory)
    found = []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        engine.train_step(micro_batches(run, state, 0), LR)
        found.append(engine.memory_bytes()["gradient_buffers"])
    return found


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "gloo"])
def test_gradients_pass_through_two_buckets_of_memory_however_large_the_vocabulary(shares_memory: bool) -> None:
    """Counted are what fills, what is sent, what arrives and what is cast."""
    size, half = 2**17, {"dtype": "bf16", "reduce_dtype": "bf16"}
    cases = [(2, {}), (3, {}), (2, half), (3, half), (2, half | {"accumulate_dtype": "bf16"})]
    runs = [
        run_of(
            2,
            model=LARGE,
            zero={"stage": stage, "bucket_bytes": size},
            precision=precision,
            training={"accumulation": 2},
        )
        for stage, precision in cases
    ]
    for results in run_world(2, _gradient_buffers, runs, shares_memory):
        for case, found in zip(cases, results, strict=True):
            assert 0 < found <= 2 * size, case


def _parts_and_buffers(engine: Engine, run: ResolvedRun) -> dict[str, Any]:
    """After a step: in how many parts each bucket is reduced; the largest bucket of one part; bytes of working buffers."""
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    buckets = engine.sharded_model.parameters.buckets
    return {
        "parts": [len(bucket.gradient_chunks) for bucket in buckets],
        "block": max(bucket.layout.padded_numel for bucket in buckets if len(bucket.gradient_chunks) == 1),
        "buffers": engine.memory_bytes()["gradient_buffers"],
    }


def test_stage_3_cuts_a_large_vocabulary_no_finer_than_its_blocks() -> None:
    """Small buckets change neither the messages nor the memory, which is that of two blocks."""
    runs = [run_of(2, model=LARGE, zero={"stage": 3, "bucket_bytes": size}) for size in (2**10, 2**14)]
    vocabulary = LARGE["vocab_size"] * 32
    for small, large in run_world(2, on_one_state, runs, _parts_and_buffers):
        assert small == large
        assert sorted(small["parts"]) == [1, *[-(-vocabulary // small["block"])] * 2]
        assert 0 < small["buffers"] <= 2 * 4 * small["block"]


def test_stage_2_saves_the_gradients_of_a_large_vocabulary_too() -> None:
    """Really allocated bytes, at the peak of a step: half of the gradients less, but for two buckets."""
    size = 2**17
    runs = [run_of(2, model=LARGE, zero={"stage": stage, "bucket_bytes": size}) for stage in (1, 2)]
    for whole, sharded in run_world(2, _peaks, runs):
        assert whole["peak"] - sharded["peak"] >= 4 * whole["elements"] / 2 - 2 * size


# ---------------------------------------------------------------------------------------------------------------------
# What a block keeps for its backward


# ---------------------------------------------------------------------------------------------------------------------
# What waits between a backward and its weight gradients


# ---------------------------------------------------------------------------------------------------------------------
# Step after step


def _resident_bytes(engine: Engine, run: ResolvedRun) -> list[int]:
    """After each of 32 steps, whose micro-batch has 1 to 4 samples in turns."""
    found, model, pages = [], run.config.model, Path("/proc/self/statm")
    for step in range(32):
        ids = torch.randint(0, model.vocab_size, (model.seq_len, step % 4 + 1))
        engine.train_step([MicroBatch(torch.arange(step % 4 + 1), ids, ids)], LR)
        found.append(int(pages.read_text().split()[1]) * 4096)
    return found


def test_micro_batches_of_varying_size_do_not_raise_the_memory_of_a_process() -> None:
    """Once each size was there: less than half a MiB in 20 steps, each of which allocates some MiB."""
    run = run_of(2, model=UNTIED | {"num_layers": 1, "seq_len": 128}, parallel={"tp": 2, "sequence_parallel": True})
    for (resident,) in run_world(2, on_one_state, [run], _resident_bytes):
        assert max(resident[12:]) - max(resident[:12]) < 2**19


# ---------------------------------------------------------------------------------------------------------------------
# The logits


@pytest.mark.parametrize("keeps", [True, False])
def test_the_passes_over_16_bit_logits_take_the_logits_and_two_blocks(keeps: bool) -> None:
    """Forward and backward, not compiled; kept between them are the logits, or some numbers for each token."""
    tokens, vocab, hidden = 1024, 8192, 16
    spec = rows_spec((NamedRows("head", vocab),), hidden, 0, Initializer())
    head = VocabParallelHead(Logits(spec, Axis("tp")), sequence_parallel=False).bfloat16()
    head.saves_logits = keeps
    torch.nn.init.normal_(head.weight)
    head.weight.grad = torch.zeros_like(head.weight)
    x = torch.randn(tokens, 1, hidden, dtype=torch.bfloat16, requires_grad=True)
    labels, profiles = torch.zeros(tokens, 1, dtype=torch.int64), []
    for _ in range(2):
        profiles.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True))
    with profiles[0]:
        loss = head(x, labels)
    with profiles[1]:
        loss.backward()
    forward, backward = ([*itertools.accumulate(change for _, change in _events(one)[1])] for one in profiles)
    logits, numbers, two_blocks = 2 * tokens * vocab, 64 * tokens, 2 * 2**22
    products = 4 * hidden * (tokens + vocab)  # the gradients
    assert 0 <= forward[-1] - keeps * logits <= numbers
    assert logits <= max(forward) <= logits + numbers + two_blocks
    assert logits <= max(backward) + forward[-1] <= logits + numbers + two_blocks + products


def _saves_logits(engine: Engine, run: ResolvedRun) -> list[bool]:
    found = []
    for micro_batches_of_a_step in (micro_batches(run, engine.state, 0), micro_batches(run, engine.state, 1)[:1]):
        engine.compute_gradients(micro_batches_of_a_step)
        found += [one.saves_logits for one in engine.chunks.modules() if isinstance(one, VocabParallelHead)]
    return found


def test_logits_are_kept_where_those_of_one_micro_batch_at_most_wait() -> None:
    """Under gpipe with several micro-batches they are computed again; with one, and under other schedules, they are kept."""
    schedules = {"gpipe": [False, True], "1f1b": [True, True], "zb-h1": [True, True], "zbv": [True, True]}
    runs = [
        run_of(2, model=UNTIED | {"num_layers": 4}, parallel={"pp": 2, "schedule": name}, training={"accumulation": 4})
        for name in schedules
    ]
    for name, by_rank in zip(
        schedules, zip(*run_world(2, on_one_state, runs, _saves_logits), strict=True), strict=True
    ):
        assert sorted(by_rank) == [[], schedules[name]]
