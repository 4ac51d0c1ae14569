"""Law 4: traffic is what the paper says (Rajbhandari et al. 2020, section 7), counted where collectives are called.

Volumes are per rank over a ring of n: a pass over Ψ elements sends Ψ (n - 1) / n of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_world
from worlds import LLAMA, LR, engine_on, micro_batches, run_of

from megazero.config import ResolvedRun

UNTIED = LLAMA | {"tie_embeddings": False, "vocab_size": 64}
TOKEN_COUNT_BYTES = 8


def _traffic_of_second_step(rank: int, run: ResolvedRun) -> dict[str, Any]:
    engine = engine_on(rank, run)
    engine.train_step(micro_batches(run, engine.state, 0), LR)
    engine.state.traffic.reset()
    engine.train_step(micro_batches(run, engine.state, 1), LR)
    traffic = engine.state.traffic
    layouts = [bucket.layout for bucket in engine.parameters.buckets]
    return {
        "sent": dict(traffic.sent_bytes),
        "calls": dict(traffic.calls),
        "elements": sum(layout.padded_numel for layout in layouts),
        "units": [layout.padded_numel for layout in layouts],
        "last": engine.share.labels,
    }


def _ring(elements: int, n: int) -> int:
    return 4 * elements * (n - 1) // n


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("parallel", [{}, {"pp": 2}], ids=["alone", "pp 2"])
@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_bytes_over_dp_equal_the_formula(zero_stage: int, dp: int, parallel: dict[str, int], accumulation: int) -> None:
    """2Ψ for stages 0 and 1, ΨG + Ψ for stage 2."""
    world = dp * parallel.get("pp", 1)
    run = run_of(
        world,
        model=UNTIED,
        parallel=parallel,
        zero={"stage": zero_stage},
        training={"accumulation": accumulation},
    )
    for measured in run_world(world, _traffic_of_second_step, run):
        psi = _ring(measured["elements"], dp)
        count = 2 * TOKEN_COUNT_BYTES * (dp - 1) // dp if measured["last"] else 0
        wanted = {
            0: {"all_reduce": 2 * psi + count},
            1: {"all_reduce": count, "reduce_scatter": psi, "all_gather": psi},
            2: {"all_reduce": count, "reduce_scatter": psi * accumulation, "all_gather": psi},
        }[zero_stage]
        got = {operation: sent for (axis, operation), sent in measured["sent"].items() if axis == "dp"}
        assert got == {operation: sent for operation, sent in wanted.items() if sent}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("dp", "parallel"), [(2, {}), (4, {}), (2, {"pp": 2})])
def test_stage_3_sends_3_psi_less_the_units_that_are_still_in_place(
    dp: int, parallel: dict[str, int], accumulation: int
) -> None:
    """Ψ to gather for each forward, Ψ for each backward, Ψ to reduce each; a unit still in its buffer is not sent again."""
    world = dp * parallel.get("pp", 1)
    run = run_of(world, model=UNTIED, parallel=parallel, zero={"stage": 3}, training={"accumulation": accumulation})
    for measured in run_world(world, _traffic_of_second_step, run):
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
        assert measured["sent"]["dp", "all_gather"] == _ring(gathered, dp)
        assert measured["sent"]["dp", "all_gather"] <= 2 * psi * accumulation
        assert measured["sent"]["dp", "reduce_scatter"] == psi * accumulation


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_sends_four_passes_per_layer_and_direction(sequence_parallel: bool) -> None:
    """Two all-reduces of the activations per layer forward and two backward (Shoeybi et al. 2019, section 3); sequence
    parallelism sends the same as gathers and scatters, and gathers the saved inputs once more (Korthikanti et al. 2022)."""
    layers = []
    for count in (1, 2):
        model = UNTIED | {"num_layers": count}
        run = run_of(2, model=model, parallel={"tp": 2, "sequence_parallel": sequence_parallel})
        sent = run_world(2, _traffic_of_second_step, run)[0]["sent"]
        layers.append({key: value for key, value in sent.items() if key[0] == "tp"})
    difference = {key[1]: layers[1][key] - layers[0].get(key, 0) for key in layers[1]}
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


def test_a_pipeline_sends_one_activation_and_one_gradient_per_micro_batch() -> None:
    run = run_of(2, model=UNTIED, parallel={"pp": 2}, training={"accumulation": 4})
    activation = 16 * 2 * 32 * 4  # seq x micro-batch x hidden, fp32
    for measured in run_world(2, _traffic_of_second_step, run):
        assert measured["sent"]["pp", "send_recv"] == 4 * activation


def test_one_rank_makes_no_call() -> None:
    for zero_stage in range(4):
        assert (
            run_world(1, _traffic_of_second_step, run_of(1, model=UNTIED, zero={"stage": zero_stage}))[0]["sent"] == {}
        )
