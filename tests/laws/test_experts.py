"""Law 1 with experts: any shape gives the plain model's gradients, norms, losses and weights, whatever the router does."""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import Any

import pytest
import torch
from harness import run_world
from plain_model import best_experts, expert_shares, swish
from test_any_shape import _assert_agrees
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical
from worlds import MIXTRAL, STEPS, global_batch, on_one_state, pairwise, run_of, state_on, train_on, train_plainly

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.layers.experts import Balance, Choice, ExpertLinear, MixtureOfExperts, Router, has_kernel
from megazero.layers.recompute import WHOLE
from megazero.layers.sequence_shard import TokenLayout
from megazero.layers.spec import Initializer, NamedRows, expert_spec, rows_spec
from megazero.models.build_context import BuildContext
from megazero.models.gpt import GPTStage
from megazero.models.stages import cut_evenly


@lru_cache(maxsize=16)
def _plain(pattern: str = "none", **model: Any) -> dict[str, Any]:
    return train_plainly(run_of(1, model=MIXTRAL | model), pattern)


@pytest.mark.parametrize("experts", [(4, 2), (4, 1), (4, 4), (16, 3)], ids=str)
def test_one_rank_is_the_plain_model_with_any_number_of_experts(experts: tuple[int, int]) -> None:
    model = BALANCE | dict(zip(("num_experts", "experts_per_token"), experts, strict=True))
    run = run_of(1, model=MIXTRAL | model)
    _assert_agrees(run_world(1, on_one_state, [run], train_on)[0][0], _plain(**model))


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 ep2": (2, {"ep": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "cp2 ep2": (2, {"cp": 2, "ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 dp2": (4, {"pp": 2}),
}
BALANCE = {"router_aux_coef": 0.3, "router_z_coef": 0.05}
SCHEDULES = {"1f1b": {}, "interleaved": {"virtual_stages": 2}, "zb-h1": {}, "zbv": {}}
CASES = pairwise(
    shape=list(SHAPES),
    zero_stage=range(4),
    schedule=list(SCHEDULES),  # without a pipeline zb-h1 instead of one with chunks
    accumulation=[2, 4],
    recompute=["none", "selective", "full", ["mlp", "norms"]],
    balance=[{}, BALANCE],
    pattern=["none", "random"],
)


def _train(engine: Engine, run: ResolvedRun) -> dict[str, Any] | None:
    pattern = "random" if run.config.data.document_mask else "none"
    got, counted = train_on(engine, run, pattern=pattern), int((global_batch(run, STEPS - 1, pattern)[1] >= 0).sum())
    load = engine.routers.load(1)  # each counted token once on every layer, whoever computes it and however often
    assert load.tokens.sum(1).tolist() == [counted * 2] * run.config.model.num_layers
    assert load.metrics()["expert_tokens"] == {str(layer): row for layer, row in enumerate(load.tokens.tolist())}
    assert all(0 < entropy < log(4) for entropy in load.metrics()["router_entropy"].values())
    return got


def _run_of(case: dict[str, Any]) -> ResolvedRun:
    (world, parallel), schedule = SHAPES[case["shape"]], case["schedule"]
    if "pp" not in parallel and schedule in ("interleaved", "zbv"):
        schedule = "zb-h1"
    return run_of(
        world,
        model=MIXTRAL | case["balance"] | {"num_layers": 4 if "pp" in parallel else 2},
        parallel=parallel | {"schedule": schedule} | SCHEDULES[schedule],
        zero={"stage": case["zero_stage"]},
        training={"accumulation": case["accumulation"]},
        activations={"recompute": case["recompute"]},
        data={"document_mask": case["pattern"] != "none"},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_with_experts_is_the_plain_model(shape: str) -> None:
    """Shapes, ZeRO stages, schedules, micro-batches, recomputation and documents, pairwise."""
    cases = [case for case in CASES if case["shape"] == shape]
    runs = [_run_of(case) for case in cases]
    for case, run, got in zip(cases, runs, run_world(SHAPES[shape][0], on_one_state, runs, _train)[0], strict=True):
        _assert_agrees(
            got, _plain(case["pattern"], num_layers=run.config.model.num_layers, **case["balance"]), str(case)
        )


HIDDEN, INNER = 12, 5
ROUTERS = {
    "any": lambda router: router,
    "all experts are equal": torch.zeros_like,
    "two are equal": lambda router: router[[0, 1, 1, 3]],
    "all tokens to one": lambda router: router + 9 * torch.eye(4)[2, :, None],
}


def _layer(rank: int, world: int, router: str, k: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Of a rank with its samples: input and weights, their gradients, and the tokens of each expert with the entropy."""
    torch.manual_seed(3)
    ep = state_on(rank, run_of(world, model=MIXTRAL, parallel={"ep": world})).ep
    inner = [(NamedRows(f"{expert} gate", INNER), NamedRows(f"{expert} up", INNER)) for expert in range(4)]
    outer, init = [(NamedRows(f"{expert} down", HIDDEN),) for expert in range(4)], Initializer(std=0.5)
    module = MixtureOfExperts(
        Router(rows_spec((NamedRows("router.weight", 4),), HIDDEN, None, init), Choice(k, renormalize=True), ep),
        ExpertLinear(expert_spec(inner, HIDDEN, init), ep),
        ExpertLinear(expert_spec(outer, INNER, init), ep),
    )
    with torch.no_grad():
        module.router.weight.copy_(ROUTERS[router](module.router.weight))
    x, seed = (tensor.chunk(world, 1)[rank] for tensor in (torch.rand(7, 4, HIDDEN), torch.randn(7, 4, HIDDEN)))
    module.router.balance = Balance(0.0, 0.0, [], WHOLE, torch.zeros(7))
    labels = torch.zeros(7, 4 // world, dtype=torch.int64)
    module(x.requires_grad_(), TokenLayout(torch.arange(4 // world), labels=labels)).backward(seed)
    tensors = [x, *module.parameters()]
    return [one.detach() for one in (*tensors, seed)], [one.grad for one in tensors], module.router.balance.tally[:5]


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("router", ROUTERS)
def test_whatever_the_router_does_gradients_are_those_of_a_sum_over_all_experts(router: str, k: int) -> None:
    """Experts, and ranks, without a token and with all of them; and ties: of two that are equal the first is taken."""
    results = [run_world(world, _layer, world, router, k) for world in (1, 2)]  # nothing is forked after a backward
    for of_ranks in results:
        values, gradients, tallies = zip(*of_ranks, strict=True)
        x, weight, gate_up, down, seed = (list(each) for each in zip(*values, strict=True))
        exact = [torch.cat(x, 1), weight[0], torch.cat(gate_up), torch.cat(down)]
        plain_x, plain_router, gate_up, down = exact = [tensor.double().requires_grad_() for tensor in exact]
        shares = expert_shares(plain_x @ plain_router.T, k)
        given = zip(gate_up.unflatten(0, (4, 2, -1)), down.unflatten(0, (4, -1)), strict=True)
        outs = [(swish(plain_x @ gate.T) * (plain_x @ up.T)) @ out.T for (gate, up), out in given]
        sum(shares[..., e, None] * out for e, out in enumerate(outs)).backward(torch.cat(seed, 1).double())
        scores, tally = (plain_x @ plain_router.T).detach(), sum(tallies)
        assert tally[:4].tolist() == best_experts(scores, k).sum((0, 1)).tolist()
        entropy = float(Categorical(logits=scores).entropy().sum())
        assert float(tally[4]) == pytest.approx(entropy, rel=1e-5, abs=1e-6)
        x, weight, gate_up, down = (list(each) for each in zip(*gradients, strict=True))
        found = torch.cat(x, 1), sum(weight), torch.cat(gate_up), torch.cat(down)
        for got, wanted in zip(found, exact, strict=True):
            assert float((got.double() - wanted.grad).norm()) < 1e-5 * float(exact[0].grad.norm())


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (8, 12), (12, 8), (16, 1)])
def test_the_grouped_kernel_takes_matrices_only_where_every_row_in_memory_is_aligned(rows: int, columns: int) -> None:
    """cuBLAS and CUTLASS read 16 bytes at a time.  Matrices come as they lie in memory and, for the backward, transposed."""
    with FakeTensorMode():
        weights = torch.empty(4, rows, columns, dtype=torch.bfloat16, device="cuda")
        assert has_kernel(weights) == has_kernel(weights.transpose(1, 2)) == (columns % 8 == 0)


def test_each_layer_of_a_block_waits_for_its_own_weights() -> None:
    context = BuildContext(run_of(1, model=MIXTRAL).config.model, WHOLE, False, 0, torch.device("cpu"))
    stage = GPTStage(context, cut_evenly(2, 1)[0])
    block = stage.blocks[0]
    read = [weight for reader in stage.readers(block) for weight in reader.parameters()]
    assert set(read) == set(block.parameters())
