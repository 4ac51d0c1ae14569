"""What people add to the loss and to the step is the same on every shape: that of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_world
from plain_model import logits
from test_any_shape import _assert_agrees
from worlds import (
    GPT2,
    LLAMA,
    global_batch,
    initial_weights,
    micro_batches,
    on_one_state,
    plain_config,
    run_of,
    train_on,
    train_plainly,
)

from megazero.config import ResolvedRun
from megazero.engine import Engine

SHAPES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, {"parallel": {"tp": 2, "sequence_parallel": True}, "zero": {"stage": 3}}),
    (4, {"parallel": {"pp": 2, "schedule": "zb-h1"}, "zero": {"stage": 2}}),
    (4, {"parallel": {"tp": 2, "cp": 2}}),
]
HEADS = [
    (LLAMA | {"tie_embeddings": False, "final_logit_softcapping": 0.3}, {"z_loss_coef": 0.02}),
    (GPT2, {"z_loss_coef": 0.02, "logits_chunk_bytes": 4096}),
    (LLAMA | {"tie_embeddings": True, "final_logit_softcapping": 0.3}, {"logits_chunk_bytes": 4096}),
]


def _with_z_loss(engine: Engine, run: ResolvedRun) -> Any:
    z_loss = engine.compute_gradients(micro_batches(run, engine.state, 0)).z_loss
    found = train_on(engine, run)
    return found and found | {"z": z_loss}


def _plain_z_loss(run: ResolvedRun) -> float:
    tokens, labels = global_batch(run, 0)
    scores = logits(initial_weights(run), plain_config(run), tokens)[labels != -100]
    return run.config.training.z_loss_coef * float(scores.logsumexp(-1).square().mean())


def test_a_soft_cap_and_a_z_loss_are_those_of_the_plain_model_on_every_shape() -> None:
    def runs(world: int, **sections: dict[str, Any]) -> list[ResolvedRun]:
        return [run_of(world, model=model, **sections, training=training) for model, training in HEADS]

    wanted = [train_plainly(run) | {"z": _plain_z_loss(run)} for run in runs(1)]
    for world, sections in SHAPES:
        found = run_world(world, on_one_state, runs(world, **sections), _with_z_loss)[0]
        for got, plain in zip(found, wanted, strict=True):
            _assert_agrees(got, plain, str(sections))
            assert got["z"] == pytest.approx(plain["z"], rel=1e-5)
