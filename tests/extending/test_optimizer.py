"""The optimizers of docs/extending.md: a soft sign of the momentum, element by element, and matrices of unit norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from eight_ranks import registered, run_with, steps_of
from harness import run_world
from plain_model import PlainTrainer, decays
from test_any_shape import _assert_agrees
from torch import Tensor
from worlds import plain_steps

from megazero.config import ConfigError
from megazero.optim.optimizers import ElementwiseOptimizer
from megazero.optim.registry import OPTIMIZERS

pytestmark = pytest.mark.slow  # starts whole runs

MOMENTUM, SOFTNESS = 0.8, 1e-2


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered(OPTIMIZERS, "softsign", "unit-norm"):
        yield


class PlainSoftSign(PlainTrainer):
    """The same on whole tensors."""

    @torch.no_grad()
    def _adamw(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        for name, weight in self.weights.items():
            momentum = self.first_moment[name]
            momentum.copy_(MOMENTUM * momentum + gradients[name])
            decay = self.weight_decay if decays(name, tuple(weight.shape)) else 0.0
            weight.copy_(weight - lr * (momentum / (momentum.abs() + SOFTNESS) + decay * weight))


def test_a_registered_optimizer_steps_shards_as_whole_tensors(tmp_path: Path) -> None:
    options = {"momentum": MOMENTUM, "softness": SOFTNESS}
    run = run_with(tmp_path, optimizer={"name": "softsign", "eps": 1e-8, "options": options})
    _assert_agrees(steps_of(run), run_world(1, lambda _: plain_steps(run, PlainSoftSign))[0])


class PlainUnitNorm(PlainTrainer):
    """The same on whole tensors: what AdamW makes of the matrices is undone."""

    @torch.no_grad()
    def _adamw(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        matrices = [name for name in self.weights if name.endswith("proj.weight")]
        before = {name: (self.weights[name].clone(), self.first_moment[name].clone()) for name in matrices}
        super()._adamw(gradients, lr)
        for name, (weight, old) in before.items():
            momentum = MOMENTUM * old + (1 - MOMENTUM) * gradients[name]
            nesterov = MOMENTUM * momentum + (1 - MOMENTUM) * gradients[name]
            self.first_moment[name].copy_(momentum)
            update = 3.0 * nesterov / nesterov.norm() + self.weight_decay * weight
            self.weights[name].copy_(weight - lr * update)


def test_a_registered_optimizer_of_matrices_steps_them_whole(tmp_path: Path) -> None:
    run = run_with(tmp_path, optimizer={"name": "unit-norm", "matrix_momentum": MOMENTUM, "options": {"scale": 3.0}})
    _assert_agrees(steps_of(run), run_world(1, lambda _: plain_steps(run, PlainUnitNorm))[0])
    with pytest.raises(ConfigError, match=r"unit-norm has no parameter 'scales' \(did you mean scale\?\)"):
        run_with(tmp_path, optimizer={"name": "unit-norm", "options": {"scales": 3.0}})


def test_options_are_for_registered_optimizers_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.options = .* only an optimizer of your own has options"):
        run_with(tmp_path, optimizer={"options": {"amsgrad": True}})
    wrong = r"optimizer\.options = .*: softsign has no parameter 'momentun' \(did you mean momentum\?\)"
    with pytest.raises(ConfigError, match=wrong):
        run_with(tmp_path, optimizer={"name": "softsign", "eps": 1e-8, "options": {"momentun": 0.5}})
    for key in ("lr", "weight_decay"):  # which the engine would set anew in every step
        with pytest.raises(
            ConfigError, match=rf"optimizer\.options = .* must not have {key}: .*; write optimizer\.{key}"
        ):
            run_with(tmp_path, optimizer={"name": "softsign", "eps": 1e-8, "options": {key: 0.5}})


def test_a_key_that_it_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'optimizer\.betas = .* where optimizer\.name = "softsign"'):
        run_with(tmp_path, optimizer={"name": "softsign", "eps": 1e-8, "betas": [0.8, 0.9]})


def test_a_registration_says_that_it_acts_element_by_element() -> None:
    with pytest.raises(ValueError, match="pass elementwise=True"):
        ElementwiseOptimizer(torch.optim.SGD, elementwise=False)
    with pytest.raises(ValueError, match="'adamw' is already registered"):
        OPTIMIZERS.register("adamw", ElementwiseOptimizer(torch.optim.SGD, elementwise=True))
