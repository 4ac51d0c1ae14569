"""tp above the number of key and value heads: ranks share a head, and the run stays that of the plain model.

loss, norm, gradients, weights     as on one rank, with every axis, schedule and ZeRO stage beside it
checkpoints                        whole tensors; any other shape resumes them
traffic                            k and v once more over tp, forward and backward
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from test_any_shape import _assert_agrees
from test_traffic import _traffic_of_second_step
from worlds import LLAMA, LR, engine_on, micro_batches, on_one_state, run_of, state_on, train_on, train_plainly, whole

from megazero.config import ConfigError, ResolvedRun
from megazero.engine import Position

pytestmark = pytest.mark.slow  # starts whole runs

EIGHT_HEADS = LLAMA | {"num_heads": 8, "tie_embeddings": False}  # of 4 elements; LLAMA has 2 kv heads
ONE_KV_HEAD = EIGHT_HEADS | {"num_kv_heads": 1, "num_layers": 4, "tie_embeddings": True}
CASES: dict[str, list[tuple[dict[str, Any], dict[str, Any], int]]] = {  # (model, [parallel], ZeRO stage)
    "tp4 dp2": [(EIGHT_HEADS, {"sequence_parallel": True}, 3), (ONE_KV_HEAD, {}, 1)],
    "tp4 pp2": [
        (EIGHT_HEADS, {"schedule": "zb-h1"}, 2),
        (ONE_KV_HEAD, {"schedule": "zbv", "sequence_parallel": True}, 0),
    ],
}


@pytest.fixture(scope="module")
def plain() -> dict[int, dict[str, Any]]:
    return {model["num_kv_heads"]: train_plainly(run_of(1, model=model)) for model in (EIGHT_HEADS, ONE_KV_HEAD)}


@pytest.mark.parametrize("shape", CASES)
def test_ranks_that_share_a_head_give_the_plain_models_run(shape: str, plain: dict[int, dict[str, Any]]) -> None:
    pp = 2 if "pp" in shape else 1
    runs = [
        run_of(
            8,
            model=model,
            parallel={"tp": 4, "pp": pp, **parallel},
            zero={"stage": stage},
            training={"accumulation": pp},
        )
        for model, parallel, stage in CASES[shape]
    ]
    for run, got in zip(runs, run_world(8, on_one_state, runs, train_on)[0], strict=True):
        _assert_agrees(got, plain[run.config.model.num_kv_heads], str(run.config.parallel))


def _go_on(rank: int, run: ResolvedRun, origin: Path | None, save_to: Path) -> tuple[Any, float]:
    """Load or draw, save after a step; the weights then, and the loss of the next step."""
    engine = engine_on(rank, run, init_weights=origin is None, state=state_on(rank, run, on_one_machine=True))
    if origin is None:
        engine.train_step(micro_batches(run, engine.state, 0), LR)
    else:
        engine.load(origin, "data")
    engine.save(save_to, Position(1, 8, 0), "data")
    weights = whole(engine, "model")
    return weights, engine.train_step(micro_batches(run, engine.state, 1), LR).loss


def test_a_checkpoint_does_not_know_that_heads_were_shared(tmp_path: Path) -> None:
    """From one rank to tp 4 with ZeRO-3, and on to tp 2: bit-equal weights, the same next loss."""
    shared = {"parallel": {"tp": 4, "sequence_parallel": True}, "zero": {"stage": 3}}
    runs = [run_of(1, model=EIGHT_HEADS), run_of(4, model=EIGHT_HEADS, **shared)]
    runs.append(run_of(2, model=EIGHT_HEADS, parallel={"tp": 2}))
    origin, found = None, []
    for run in runs:
        found.append(run_world(run.world_size, _go_on, run, origin, tmp_path / str(run.world_size))[0])
        origin = tmp_path / str(run.world_size)
    (wanted, loss), *others = found
    for got, next_loss in others:
        assert next_loss == pytest.approx(loss, rel=1e-5)
        assert set(got) == set(wanted)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_shared_heads_cost_one_more_pass_of_k_and_v_over_tp_each_way() -> None:
    """A layer gathers k and v, 2 x kv heads x head size features of each token, and scatters their gradients: what tp 2
    sends beside grows by that and by nothing else."""
    runs = [run_of(4, model=EIGHT_HEADS | {"num_layers": count}, parallel={"tp": 4}) for count in (1, 2)]
    results = run_world(4, on_one_state, runs, _traffic_of_second_step)[0]
    few, many = ({key[1]: sent for key, sent in one["sent"].items() if key[0] == "tp"} for one in results)
    tokens, hidden, kv_features = 8 * 16, 32, 2 * 2 * 4
    passed = 4 * tokens * kv_features * 3 // 4
    assert {operation: sent - few.get(operation, 0) for operation, sent in many.items()} == {
        "all_reduce": 4 * 2 * (4 * tokens * hidden) * 3 // 4,
        "all_gather": passed,
        "reduce_scatter": passed,
    }


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"num_heads": 12, "hidden_size": 48, "num_kv_heads": 6}, "must divide num_heads=12 and be a multiple of par"),
        ({"num_heads": 8, "hidden_size": 16, "num_kv_heads": 1}, "split a head of 2 evenly; the nearest is 2"),
    ],
)
def test_heads_that_tp_cannot_share_evenly_are_refused(overrides: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run_of(4, model=EIGHT_HEADS | overrides, parallel={"tp": 4})
