"""Law 1 with experts: any shape gives the plain model's gradients, norms, losses and weights, whatever the router does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from harness import run_world
from plain_model import expert_shares, swish
from test_any_shape import _assert_agrees
from worlds import MIXTRAL, on_one_state, run_of, train_on, train_plainly

from megazero.layers.experts import ExpertLinear, MixtureOfExperts, Router
from megazero.layers.spec import Initializer, NamedRows


@lru_cache(maxsize=8)
def _plain(**model: Any) -> dict[str, Any]:
    return train_plainly(run_of(1, model=MIXTRAL | model))


@pytest.mark.parametrize("experts", [(4, 2), (4, 1), (4, 4), (16, 3)], ids=str)
def test_one_rank_is_the_plain_model_with_any_number_of_experts(experts: tuple[int, int]) -> None:
    model = dict(zip(("num_experts", "experts_per_token"), experts, strict=True))
    run = run_of(1, model=MIXTRAL | model)
    _assert_agrees(run_world(1, on_one_state, [run], train_on)[0][0], _plain(**model))


HIDDEN, INNER = 12, 5
ROUTERS = {
    "any": lambda router: router,
    "all experts are equal": torch.zeros_like,
    "two are equal": lambda router: router[[0, 1, 1, 3]],
    "all tokens to one": lambda router: router + 9 * torch.eye(4)[2, :, None],
}


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("router", ROUTERS)
def test_whatever_the_router_does_gradients_are_those_of_a_sum_over_all_experts(router: str, k: int) -> None:
    """Experts without a token and with all of them, and ties: of two that are equal the first is taken."""
    torch.manual_seed(3)
    names = [NamedRows(f"{expert} {key}", INNER) for expert in range(4) for key in ("gate", "up")]
    common = {"sum_over_tp": False, "init": Initializer(std=0.5)}
    module = MixtureOfExperts(
        Router("router", (HIDDEN, 4, k), renormalize=True, **common),
        ExpertLinear(tuple(names), HIDDEN, **common),
        ExpertLinear(tuple(NamedRows(f"{expert} down", HIDDEN) for expert in range(4)), INNER, **common),
    )
    with torch.no_grad():
        module.router.weight.copy_(ROUTERS[router](module.router.weight))
    x, seed = torch.rand(7, 3, HIDDEN, requires_grad=True), torch.randn(7, 3, HIDDEN)
    module(x).backward(seed)

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, *module.parameters())]
    plain_x, plain_router, gate_up, down = exact
    shares = expert_shares(plain_x, plain_router, k)
    given = zip(gate_up.unflatten(0, (4, 2, -1)), down.unflatten(0, (4, -1)), strict=True)
    outs = [(swish(plain_x @ gate.T) * (plain_x @ up.T)) @ out.T for (gate, up), out in given]
    sum(shares[..., e, None] * out for e, out in enumerate(outs)).backward(seed.double())
    for got, wanted in zip((x, *module.parameters()), exact, strict=True):
        assert float((got.grad.double() - wanted.grad).norm()) < 1e-5 * float(exact[0].grad.norm())
