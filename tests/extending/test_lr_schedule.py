"""The learning-rate schedule of docs/extending.md: the inverse square root of the step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eight_ranks import registered, run_with, steps_of
from harness import run_world
from test_any_shape import _assert_agrees
from worlds import STEPS, global_batch, micro_batches, outcome, plain_trainer, whole

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.optim.lr_schedule import learning_rate_factor
from megazero.optim.registry import LR_SCHEDULES

pytestmark = pytest.mark.slow  # starts whole runs


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered(LR_SCHEDULES, "inverse-sqrt"):
        yield


FACTORS = (0.5, 2**-0.5, 3**-0.5)  # by hand: the first of two warm-up steps, then the inverse square root


def _train(engine: Engine, run: ResolvedRun) -> dict[str, Any]:
    out: dict[str, Any] = {"initial": whole(engine, "model"), "loss": [], "norm": [], "gradients": {}}
    for step in range(STEPS):
        factor = learning_rate_factor(run.config.lr_schedule, step, run.config.training.steps)
        statistics = engine.train_step(micro_batches(run, engine.state, step), run.config.optimizer.lr * factor)
        out["loss"].append(statistics.loss)
        out["norm"].append(statistics.grad_norm)
    return out | {"weights": whole(engine, "model")}


def _plainly(run: ResolvedRun) -> dict[str, Any]:
    trainer, rate = plain_trainer(run), run.config.optimizer.lr
    steps = [trainer.step(*global_batch(run, step), rate * FACTORS[step]) for step in range(STEPS)]
    return outcome(run, trainer, steps) | {"gradients": {}}


def test_a_registered_learning_rate_schedule_gives_the_plain_models_run(tmp_path: Path) -> None:
    run = run_with(tmp_path, lr_schedule={"name": "inverse-sqrt", "warmup_steps": 2})
    _assert_agrees(steps_of(run, _train), run_world(1, lambda _: _plainly(run))[0])
