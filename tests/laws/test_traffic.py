"""Law 4: traffic is what the paper says (Rajbhandari et al. 2020, section 7), counted where collectives are called.

Volumes are per rank over a ring of n: a pass over Ψ elements sends Ψ (n - 1) / n of them.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from harness import run_world
from worlds import LLAMA, LR, micro_batches, on_one_state, run_of

from megazero.config import ResolvedRun
from megazero.engine import Engine

UNTIED = LLAMA | {"tie_embeddings": False, "vocab_size": 64}
TOKEN_COUNT_BYTES = 8


def _traffic_of_second_step(engine: Engine, run: ResolvedRun) -> dict[str, Any]:
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    engine.state.traffic.reset()
    engine.train_step(micro_batches(run, engine.state, 1), LR)
    traffic = engine.state.traffic
    layouts = [bucket.layout for bucket in engine.sharded_model.parameters.buckets]
    return {
        "sent": dict(traffic.sent_bytes),
        "calls": dict(traffic.calls),
        "elements": sum(layout.padded_numel for layout in layouts),
        "units": [layout.padded_numel for layout in layouts],
        "last": engine.batch_slice.labels,
    }


def _ring(elements: int, n: int) -> int:
    return 4 * elements * (n - 1) // n


@pytest.mark.parametrize(("dp", "parallel"), [(4, {}), (2, {"pp": 2})], ids=["alone", "pp 2"])
def test_bytes_over_dp_equal_the_formula(dp: int, parallel: dict[str, int]) -> None:
    """2Ψ for stages 0 and 1, ΨG + Ψ for stage 2."""
    world = dp * parallel.get("pp", 1)
    cases = [(0, 2), (1, 2), (2, 1), (2, 2)]
    runs = [
        run_of(
            world, model=UNTIED, parallel=parallel, zero={"stage": zero_stage}, training={"accumulation": accumulation}
        )
        for zero_stage, accumulation in cases
    ]
    for results in run_world(world, on_one_state, runs, _traffic_of_second_step):
        for (zero_stage, accumulation), measured in zip(cases, results, strict=True):
            psi = _ring(measured["elements"], dp)
            count = 2 * TOKEN_COUNT_BYTES * (dp - 1) // dp if measured["last"] else 0
            wanted = {
                0: {"all_reduce": 2 * psi + count},
                1: {"all_reduce": count, "reduce_scatter": psi, "all_gather": psi},
                2: {"all_reduce": count, "reduce_scatter": psi * accumulation, "all_gather": psi},
            }[zero_stage]
            got = {operation: sent for (axis, operation), sent in measured["sent"].items() if axis == "dp"}
            assert got == {operation: sent for operation, sent in wanted.items() if sent}, (zero_stage, accumulation)


@pytest.mark.parametrize(("dp", "parallel"), [(4, {}), (2, {"pp": 2})])
def test_stage_3_sends_3_psi_less_the_units_that_are_still_in_place(dp: int, parallel: dict[str, int]) -> None:
    """Ψ to gather for each forward, Ψ for each backward, Ψ to reduce each; a unit still in its buffer is not sent again."""
    world = dp * parallel.get("pp", 1)
    runs = [
        run_of(world, model=UNTIED, parallel=parallel, zero={"stage": 3}, training={"accumulation": accumulation})
        for accumulation in (1, 2)
    ]
    for results in run_world(world, on_one_state, runs, _traffic_of_second_step):
        for accumulation, measured in zip((1, 2), results, strict=True):
            units = measured["units"]
            walk = list(range(len(units))) + list(reversed(range(len(units))))
            if accumulation == 2 and parallel and not measured["last"]:
                passes = [*range(len(units)), *walk, *reversed(range(len(units)))]  # 1F1B warm-up: F0 F1 B0 B1
            else:
                passes = walk * accumulation
            buffers: dict[int, int] = {}
            gathered = 0
            for unit in passes:
                if buffers.get(unit % 2) != unit:
                    buffers[unit % 2] = unit
                    gathered += units[unit]
            psi = _ring(measured["elements"], dp)
            assert measured["sent"]["dp", "all_gather"] == _ring(gathered, dp), accumulation
            assert measured["sent"]["dp", "all_gather"] <= 2 * psi * accumulation, accumulation
            assert measured["sent"]["dp", "reduce_scatter"] == psi * accumulation, accumulation


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_sends_four_passes_per_layer_and_direction(sequence_parallel: bool) -> None:
    """Two all-reduces of the activations per layer forward and two backward (Shoeybi et al. 2019, section 3); sequence
    parallelism sends the same as gathers and scatters, and gathers the saved inputs once more (Korthikanti et al. 2022)."""
    parallel = {"tp": 2, "sequence_parallel": sequence_parallel}
    runs = [run_of(2, model=UNTIED | {"num_layers": count}, parallel=parallel) for count in (1, 2)]
    results = run_world(2, on_one_state, runs, _traffic_of_second_step)[0]
    layers = [{key: sent for key, sent in measured["sent"].items() if key[0] == "tp"} for measured in results]
    grown = {key[1]: layers[1][key] - layers[0].get(key, 0) for key in layers[1]}
    difference = {operation: sent for operation, sent in grown.items() if sent}  # the head gathers once, however deep
    activation = 8 * 16 * 32 * 4  # samples x seq x hidden, fp32
    if sequence_parallel:
        norms = 2 * (2 * 32 * 4) // 2  # one more pair of norm weights in the sum over tp
        assert difference == {
            "all_gather": (4 + 2) * activation // 2,
            "reduce_scatter": 4 * activation // 2,
            "all_reduce": norms,
        }
    else:
        assert difference == {"all_reduce": 4 * 2 * activation // 2}


def _gathered_by_kind(engine: Engine, run: ResolvedRun) -> dict[str, int]:
    """Bytes that a step's forwards, backwards and weight gradients gather over tp."""
    marks: list[tuple[str, int]] = []  # before and after each action
    gathered = engine.state.traffic.sent_bytes
    engine.on_action = lambda action: marks.append((action.op.value, gathered["tp", "all_gather"]))
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    sent = dict.fromkeys("FBW", 0)
    for (kind, before), (_, after) in zip(marks[::2], marks[1::2], strict=True):
        sent[kind] += after - before
    return sent


def test_a_deferred_weight_gradient_gathers_its_input_and_the_backward_does_not() -> None:
    """Of the six gathers per layer W has the two for the inputs of the column-parallel layers: none comes on top."""
    parallel = {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb-h1"}
    runs = [
        run_of(4, model=UNTIED | {"num_layers": count}, parallel=parallel, training={"accumulation": 2})
        for count in (2, 4)
    ]
    gather = 8 * 16 * 32 * 4 // 2  # samples x seq x hidden, fp32, over 2 ranks
    for shallow, deep in run_world(4, on_one_state, runs, _gathered_by_kind):
        assert {kind: deep[kind] - shallow[kind] for kind in deep} == {
            "F": 2 * gather,
            "B": 2 * gather,
            "W": 2 * gather,
        }


def test_norms_of_queries_and_keys_send_their_mean_squares_or_their_gradients() -> None:
    """Over all heads: two fp32 numbers of each token forward, two backward.  Of each head: a step's sum of two weights."""
    models = [UNTIED | {"family": family, "num_layers": count} for family in ("olmo2", "qwen3") for count in (1, 2)]
    runs = [run_of(2, model=model, parallel={"tp": 2}) for model in models]
    sent = [one["sent"]["tp", "all_reduce"] for one in run_world(2, on_one_state, runs, _traffic_of_second_step)[0]]
    activation = 4 * (8 * 16 * 32) * 4  # four passes of samples x seq x hidden, fp32
    assert sent[1] - sent[0] == activation + 2 * (2 * 8 * 16) * 4
    assert sent[3] - sent[2] == activation + 2 * 8 * 4


# What the backward computes again it exchanges again, once: passes over the activation by (sequence parallelism, operation).
# An all-reduce is two passes.  The mlp's and attention's projections from the hidden size gather under sequence parallelism,
# and without it their forward sends nothing; attention's output projection, in "residual" and "block", sums.
AGAIN: dict[str, tuple[dict[str, Any], dict[tuple[bool, str], int]]] = {
    "none": ({}, {}),
    "norms": ({"recompute": ["norms"]}, {}),
    "activation": ({"recompute": ["activation"]}, {}),
    "residual": ({"recompute": ["residual"]}, {(False, "all_reduce"): 2, (True, "reduce_scatter"): 1}),
    "mlp": ({"recompute": ["mlp"]}, {(True, "all_gather"): 1}),
    "attention": ({"recompute": ["attention"]}, {(True, "all_gather"): 1}),
    "block": ({"recompute": "full"}, {(False, "all_reduce"): 2, (True, "all_gather"): 2, (True, "reduce_scatter"): 1}),
}
AGAIN["block but attention"] = AGAIN["block"][0] | {"keep_attention": True}, AGAIN["block"][1]
CUT_INPUTS = {"norms": 2, "mlp": 1, "attention": 1, "block": 1, "block but attention": 1}


def _traffic_of_a_step(engine: Engine, run: ResolvedRun) -> tuple[dict[Any, int], dict[Any, int]]:
    """Bytes and calls by (axis, operation), of those that send."""
    traffic = engine.state.traffic
    traffic.reset()
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    sent = {key: nbytes for key, nbytes in traffic.sent_bytes.items() if nbytes}
    return sent, {key: traffic.calls[key] for key in sent}


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (2, True), (4, False), (4, True)])
def test_recomputation_repeats_the_forwards_exchanges_over_tp_and_a_cut_input_is_gathered_once(
    tp: int, sequence_parallel: bool
) -> None:
    """Beside the same run without recomputation, for each layer; a cut input is gathered in one pass, 2h (t - 1) / t bytes
    of each token in 16 bits (Rajbhandari et al. 2020, section 6.1)."""
    names = [name for name in AGAIN if tp == 2 or name in ("none", "norms", "residual", "attention", "block")]
    cases = [(name, False) for name in names]
    cases += [(name, True) for name in names if name in CUT_INPUTS and not sequence_parallel]
    layers = 2
    runs = [
        run_of(
            tp,
            model=UNTIED | {"num_layers": layers},
            parallel={"tp": tp, "sequence_parallel": sequence_parallel},
            activations=AGAIN[name][0] | {"partition": cut},
        )
        for name, cut in cases
    ]
    a_pass = _ring(8 * 16 * 32, tp)  # samples x seq x hidden
    shared_heads = (
        layers * (tp - 1) * (8 * 16) * 2 * 8 // 2 * 4
    )  # halves of a key and a value head, where ranks share them
    for results in run_world(tp, on_one_state, runs, _traffic_of_a_step):
        without, _ = results[0]
        for (name, cut), (sent, _) in zip(cases, results, strict=True):
            wanted = dict(without)
            for (of, operation), passes in AGAIN[name][1].items():
                if of == sequence_parallel:
                    wanted["tp", operation] += layers * passes * a_pass
            if cut:
                wanted["tp", "all_gather"] = wanted.get(("tp", "all_gather"), 0) + layers * CUT_INPUTS[name] * a_pass
            if tp == 4 and name in ("attention", "block"):
                wanted["tp", "all_gather"] += shared_heads
            assert sent == wanted, (name, cut)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=["tp2 dp2", "pp2 dp2"])
def test_recomputation_sends_nothing_more_over_dp_nor_between_stages(parallel: dict[str, int]) -> None:
    """Under every ZeRO stage that gathers or scatters: the bytes and the calls of the run without it."""
    policies = [AGAIN[name][0] for name in ("none", "block", "norms")]
    policies[2] = policies[2] | {"partition": "tp" in parallel}
    zeros: list[dict[str, Any]] = [{"stage": 2}, {"stage": 3}]
    runs = [
        run_of(4, model=UNTIED, parallel=parallel, zero=zero, training={"accumulation": 2}, activations=policy)
        for zero, policy in itertools.product(zeros, policies)
    ]
    for results in run_world(4, on_one_state, runs, _traffic_of_a_step):
        for first in range(0, len(results), len(policies)):
            without, *others = [
                tuple({key: number for key, number in one.items() if key[0] != "tp"} for one in result)
                for result in results[first : first + len(policies)]
            ]
            assert without[0]
            for other in others:
                assert other == without, zeros[first // len(policies)]


def test_a_pipeline_sends_one_activation_and_one_gradient_per_micro_batch() -> None:
    run = run_of(2, model=UNTIED, parallel={"pp": 2}, training={"accumulation": 4})
    activation = 16 * 2 * 32 * 4  # seq x micro-batch x hidden, fp32
    for (measured,) in run_world(2, on_one_state, [run], _traffic_of_second_step):
        assert measured["sent"]["pp", "send_recv"] == 4 * activation


def test_one_rank_makes_no_call() -> None:
    runs = [run_of(1, model=UNTIED, zero={"stage": zero_stage}) for zero_stage in range(4)]
    for measured in run_world(1, on_one_state, runs, _traffic_of_second_step)[0]:
        assert measured["sent"] == {}


# ---------------------------------------------------------------------------------------------------------------------
# Half precision, groups that share the state, how often stages gather and reduce, offloading


def _second_step(engine: Engine, run: ResolvedRun) -> dict[str, Any]:
    """As above, on an engine that is there; bytes by (axis, operation) without the count of tokens."""
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    traffic, state = engine.state.traffic, engine.state
    traffic.reset()
    engine.train_step(micro_batches(run, state, 1), LR)
    sent = dict(traffic.sent_bytes)
    sent["dp", "all_reduce"] = sent.get(("dp", "all_reduce"), 0) - 2 * TOKEN_COUNT_BYTES * (run.dp - 1) // run.dp
    ranks = (
        run.world_size
    )  # one all-reduce tells norm, loss, tokens, z-loss, whether a rank wants to stop, and whether documents agree
    assert sent.pop(("world", "all_reduce")) == 2 * 5 * 8 * (ranks - 1) // ranks
    layouts = [bucket.layout for bucket in engine.sharded_model.parameters.buckets]
    return {
        "sent": {key: value for key, value in sent.items() if value},
        "elements": sum(layout.padded_numel for layout in layouts),
        "units": [layout.padded_numel for layout in layouts],
    }


def _runs(world: int, cases: list[dict[str, Any]], **sections: Any) -> list[ResolvedRun]:
    return [run_of(world, model=UNTIED, zero=zero, **sections) for zero in cases]


def test_a_group_gathers_and_scatters_within_itself_and_sums_its_shard_over_the_groups() -> None:
    """Over the 2 ranks of a group what ZeRO sends over 2 ranks, and 2Ψ/2 (1/2) to sum the shard over 2 groups, once a step:
    hybrid sharding (Zhao et al. 2023, section 3.2.2)."""
    accumulation, cases = 2, [{"stage": stage, "shard_group_size": 2} for stage in (1, 2, 3)]
    runs = _runs(4, cases, training={"accumulation": accumulation})
    for results in run_world(4, on_one_state, runs, _second_step):
        for case, measured in zip(cases, results, strict=True):
            psi = _ring(measured["elements"], 2)
            sent = dict(measured["sent"])
            assert sent.pop(("replica", "all_reduce")) == 2 * (4 * measured["elements"] // 2) // 2
            assert sent.pop(("shard", "reduce_scatter")) == psi * (1 if case["stage"] == 1 else accumulation)
            gathered = sent.pop(("shard", "all_gather"))
            if case["stage"] < 3:
                assert gathered == psi
            else:
                assert psi <= gathered <= 2 * psi * accumulation
            assert sent == {}


def test_gradients_that_travel_in_bf16_are_half_the_bytes_and_weights_are_gathered_in_their_own() -> None:
    runs = [
        run_of(
            2,
            model=UNTIED,
            zero={"stage": zero_stage},
            precision={"dtype": "bf16", "reduce_dtype": dtype},
            training={"accumulation": 2},
        )
        for zero_stage in range(4)
        for dtype in ("fp32", "bf16")
    ]
    for results in run_world(2, on_one_state, runs, _second_step):
        for zero_stage, (first, second) in enumerate(zip(results[::2], results[1::2], strict=True)):
            assert set(first["sent"]) == set(second["sent"])
            reduction = ("dp", "all_reduce") if zero_stage == 0 else ("dp", "reduce_scatter")
            psi, rounds = _ring(first["elements"], 2), 2 if zero_stage >= 2 else 1
            assert first["sent"].pop(reduction) == (2 * psi if zero_stage == 0 else psi * rounds)
            assert second["sent"].pop(reduction) == (2 * psi if zero_stage == 0 else psi * rounds) // 2
            assert first["sent"] == second["sent"]
            if zero_stage in (1, 2):
                assert first["sent"] == {("dp", "all_gather"): psi // 2}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_stage_2_that_reduces_once_per_step_sends_2_psi_whatever_the_accumulation(accumulation: int) -> None:
    runs = _runs(2, [{"stage": 2, "reduce": "step"}], training={"accumulation": accumulation})
    for (measured,) in run_world(2, on_one_state, runs, _second_step):
        psi = _ring(measured["elements"], 2)
        assert measured["sent"] == {("dp", "reduce_scatter"): psi, ("dp", "all_gather"): psi}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_units_that_stay_gathered_are_gathered_once(accumulation: int) -> None:
    """Stage 3 with one chunk per rank: under "chunk" and "step" Ψ to gather for any number of passes; under "action" each
    pass gathers all but the two units that the pass before left in the buffers."""
    cases = [{"stage": 3, "gather_policy": policy} for policy in ("action", "chunk", "step")]
    runs = _runs(2, cases, training={"accumulation": accumulation})
    for action, chunk, step in run_world(2, on_one_state, runs, _second_step):
        psi, passes = _ring(action["elements"], 2), 2 * accumulation
        assert chunk["sent"]["dp", "all_gather"] == step["sent"]["dp", "all_gather"] == psi
        units = action["units"]
        kept = [units[-1] + units[-2] if index % 2 else units[0] + units[1] for index in range(1, passes)]
        assert action["sent"]["dp", "all_gather"] == passes * psi - _ring(sum(kept), 2)
        for measured in (action, chunk, step):
            assert measured["sent"]["dp", "reduce_scatter"] == psi * accumulation


def test_offloading_sends_the_same_bytes(tmp_path: Path) -> None:
    """What lies on the host or in a file is read by its owner; between ranks it travels as ever."""
    for stage, dtype in ((1, "fp32"), (3, "bf16")):
        cases = []
        for place in ("none", "cpu", "nvme"):
            offload = {"optimizer": place, "nvme_path": str(tmp_path)} | ({"parameters": place} if stage == 3 else {})
            cases.append({"stage": stage, "offload": offload})
        runs = _runs(2, cases, precision={"dtype": dtype}, training={"accumulation": 2})
        for kept, in_memory, in_files in run_world(2, on_one_state, runs, _second_step):
            assert kept["sent"]
            assert kept["sent"] == in_memory["sent"] == in_files["sent"]
