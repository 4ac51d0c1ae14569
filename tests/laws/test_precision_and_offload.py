"""Law 1 for half precision and for offloading: where state lies changes no bit, and half precision only rounds.

Which runs are bit-equal follows from the order of sums alone:
    a place       none: the same tensors in the same order                     -> bit-equal always
    a stage       with one micro-batch per step every gradient is rank 0's + rank 1's              -> bit-equal
                  with more, stages 0 and 1 add micro-batches before ranks, 2 and 3 ranks first    -> bit-equal in pairs
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import DEVICE, run_world
from plain_model import PlainTrainer, decays
from torch import Tensor
from worlds import (
    GPT2,
    LLAMA,
    LR,
    STEPS,
    difference,
    global_batch,
    initial_weights,
    micro_batches,
    on_one_state,
    plain_config,
    run_of,
    train_on,
    train_plainly,
    whole,
)

from megazero.config import ResolvedRun
from megazero.engine import Engine

TIED, UNTIED = LLAMA | {"tie_embeddings": True}, LLAMA | {"tie_embeddings": False}
TOLERANCE = 1e-5  # of fp32 sums in another order
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SCALE_POWER = 8  # far from overflow, and gradients are far from fp16's subnormal numbers
PLACES = ("none", "cpu", "nvme")
UNCLIPPED = {"grad_clip": 0.0}  # stages lay buckets out in other ways, by which the norm is rounded
DTYPES = ("fp32", "bf16", "fp16")
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2 dp2": (8, {"tp": 2, "pp": 2}),
}
CASES = [*product(("dp2", "tp2", "pp2"), DTYPES), ("tp2 pp2 dp2", "bf16")]


def _offload(stage: int, place: str, folder: Path) -> dict[str, Any]:
    """Everything that may leave the device leaves it."""
    parameters = {"parameters": place} if stage == 3 else {}
    return {"optimizer": place, "nvme_path": str(folder)} | parameters


def _precision(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype} | ({"initial_scale_power": SCALE_POWER} if dtype == "fp16" else {})


def _train_each(world: int, runs: list[ResolvedRun]) -> list[dict[str, Any]]:
    return run_world(world, on_one_state, runs, train_on, False, True)[0]


def _assert_same_bits(a: dict[str, Any], b: dict[str, Any], what: object) -> None:
    assert a["loss"] == b["loss"], what
    for kind in ("gradients", "masters", "weights"):
        for name, tensor in a[kind].items():
            assert torch.equal(tensor, b[kind][name]), f"{kind} of {name}, {what}"


def _assert_plain(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE)
    assert got["norm"] == pytest.approx(wanted["norm"], rel=TOLERANCE)
    for name, tensor in wanted["weights"].items():
        assert difference(got["masters"][name], tensor) < TOLERANCE, name


@lru_cache(maxsize=1)
def _plain() -> dict[str, Any]:
    return train_plainly(run_of(1, model=TIED, optimizer=UNCLIPPED))


@lru_cache(maxsize=16)
def _runs(shape: str, dtype: str, folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """What (stage, place)s of a shape and dtype give, in one world.

    Each stage has one place, and over the dtypes all three; beside the cases that the others are compared with.
    """
    world, parallel = SHAPES[shape]
    places = {stage: PLACES[(stage + DTYPES.index(dtype)) % 3] for stage in range(4) if world < 8 or stage != 1}
    cases = sorted({*places.items(), (0, "none"), (2, "none")} if world == 8 else {*places.items(), (0, "none")})
    runs = [
        run_of(
            world,
            model=TIED,
            parallel=parallel | {"dp": 2 if world == 8 else "auto"},
            zero={"stage": stage, "offload": _offload(stage, place, folder)},
            precision=_precision(dtype),
            optimizer=UNCLIPPED,
            training={"accumulation": 2 if "pp" in parallel else 1},
        )
        for stage, place in cases
    ]
    return dict(zip(cases, _train_each(world, runs), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvme")


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_neither_the_place_nor_the_stage_changes_a_bit(shape: str, dtype: str, folder: Path) -> None:
    world, parallel = SHAPES[shape]
    runs = _runs(shape, dtype, folder)
    ranks_and_micro_batches = world == 8 and "pp" in parallel
    for (stage, place), got in runs.items():
        first = (stage // 2 * 2 if ranks_and_micro_batches else 0, "none")
        tolerance = 1e-6
        if place == "none" or DEVICE.type == "cpu":
            _assert_same_bits(got, runs[first], (stage, place))
        else:  # a GPU's AdamW rounds otherwise than the host's, and now and then a weight goes the other way
            tolerance += UNIT_ROUNDOFF.get(dtype, 0.0) / 8
        for name, tensor in runs[0, "none"]["masters"].items():
            assert difference(got["masters"][name], tensor) < tolerance, (stage, place, name)


@pytest.mark.parametrize("shape", [shape for shape, dtype in CASES if dtype == "fp32"])
def test_an_offloaded_fp32_run_is_the_plain_models(shape: str, folder: Path) -> None:
    for got in _runs(shape, "fp32", folder).values():
        _assert_plain(got, _plain())


@pytest.mark.parametrize(("shape", "dtype"), [case for case in CASES if case[1] != "fp32"])
def test_half_precision_is_the_plain_run_but_for_its_rounding(shape: str, dtype: str, folder: Path) -> None:
    """u is the unit roundoff.  A gradient passes ten to twenty roundings, each independent: 4u.  The norm is a mean of many
    elements, in fp32: u; the loss one over a hundred tokens: u / 16.  Adam moves an element by about lr whatever the size of
    its gradient, so one whose sign is rounded away moves the wrong way: what has moved is compared as a whole, and no
    element by more than 2 lr a step."""
    u, plain = UNIT_ROUNDOFF[dtype], _plain()
    scale = 2.0**SCALE_POWER if dtype == "fp16" else 1.0
    got = _runs(shape, dtype, folder)[0, "none"]
    assert got["loss"] == pytest.approx(plain["loss"], rel=u / 16)
    assert got["norm"] == pytest.approx(plain["norm"], rel=u)
    for name, tensor in plain["gradients"].items():
        assert difference(got["gradients"][name] / scale, tensor) < 4 * u, f"gradient of {name}"
    moved = error = 0.0
    for name, tensor in plain["weights"].items():
        step = got["masters"][name] - tensor
        assert step.abs().max() < 2 * LR * STEPS, name
        error += float(step.double().square().sum())
        moved += float((tensor - plain["initial"][name]).double().square().sum())
        assert torch.equal(got["weights"][name], got["masters"][name].to(got["weights"][name].dtype)), name
    assert math.sqrt(error / moved) < 16 * u


def _steps_with_an_overflow(engine: Engine, run: ResolvedRun) -> tuple[list[Any], dict[str, Tensor] | None]:
    """Loss, norm and whether it was skipped of each step, and the masters."""
    if engine.offload is not None:
        engine.offload.smallest_bytes = 64
    done = [engine.train_step(micro_batches(run, engine.state, step), LR, raises_non_finite=False) for step in range(4)]
    assert engine.offload is None or engine.offload.pool.nbytes > engine.offload.pool.nbytes_in_use == 0
    return [(one.loss, repr(one.grad_norm), one.skipped) for one in done], whole(engine, "master")


def test_a_step_that_overflows_is_skipped_with_activations_on_the_host_too() -> None:
    activations: list[dict[str, Any]] = [{}, {"offload": "host"}, {"recompute": "selective", "offload": "host"}]
    runs = [
        run_of(
            2,
            model=TIED,
            zero={"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
            precision={"dtype": "fp16", "initial_scale_power": 20},
            training={"accumulation": 2},
            activations=one,
        )
        for one in activations
    ]
    (steps, masters), *others = run_world(2, on_one_state, runs, _steps_with_an_overflow)[0]
    assert {skipped for *_, skipped in steps} == {False, True}
    for other_steps, other_masters in others:
        assert other_steps == steps
        assert all(torch.equal(tensor, other_masters[name]) for name, tensor in masters.items())


@pytest.mark.slow
def test_how_long_units_stay_and_what_is_offloaded_changes_no_bit(folder: Path) -> None:
    """Stage 3 under every gather policy, with small parameters whole, with part of the state offloaded."""
    everything = [_offload(3, place, folder) for place in PLACES]
    cases: list[dict[str, Any]] = [{"offload": everything[0]}]
    cases += [{"gather_policy": policy, "offload": one} for policy in ("chunk", "step") for one in everything]
    cases += [{"persistent_elements": 40, "offload": one} for one in everything]
    cases += [{"offload": {**one, "ratio": 0.5}} for one in everything[1:]]
    cases += [{"offload": {"parameters": "nvme", "optimizer": "cpu", "nvme_path": str(folder)}}]
    cases += [{"offload": {"parameters": "cpu", "optimizer": "nvme", "nvme_path": str(folder)}}]
    cases += [{"offload": {"parameters": place, "nvme_path": str(folder)}} for place in PLACES[1:]]
    for number, dtype in enumerate(("fp32", "bf16")):
        own = [cases[0], *cases[1 + number :: 2]]
        runs = [run_of(2, model=TIED, zero={"stage": 3, **case}, precision=_precision(dtype)) for case in own]
        results = _train_each(2, runs)
        for case, got in zip(own, results, strict=True):
            _assert_same_bits(got, results[0], (dtype, case))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parallel"), [(4, {}), (8, {"pp": 2})], ids=["dp4", "pp2 dp4"])
def test_groups_of_two_that_share_the_state_give_the_plain_models_run(
    world: int, parallel: dict[str, Any], folder: Path
) -> None:
    cases = [(3, "none"), (3, "nvme"), (1, "none"), (2, "cpu")] if world == 4 else [(2, "cpu"), (3, "none")]
    runs = [
        run_of(
            world,
            model=TIED if world == 4 else GPT2,
            parallel=parallel,
            zero={"stage": stage, "shard_group_size": 2, "offload": _offload(stage, place, folder)},
        )
        for stage, place in cases
    ]
    results, plain = _train_each(world, runs), train_plainly(runs[0])
    for got in results:
        _assert_plain(got, plain)
    if world == 4:
        _assert_same_bits(results[1], results[0], "stage 3 in files")


@pytest.mark.parametrize("zero_stage", [0, 2, 3])  # 1 reduces as 0
def test_gradients_that_add_up_or_travel_in_bf16_are_rounded_and_no_more(zero_stage: int) -> None:
    """Two micro-batches and two ranks make at most three sums, each with one rounding of u, beside one of each addend."""
    u = UNIT_ROUNDOFF["bf16"]
    kinds = [(accumulate, reduce) for accumulate in ("fp32", "bf16") for reduce in ("fp32", "bf16")]
    runs = [
        run_of(
            2,
            model=UNTIED,
            zero={"stage": zero_stage},
            precision={"dtype": "bf16", "accumulate_dtype": accumulate, "reduce_dtype": reduce},
            training={"accumulation": 2},
        )
        for accumulate, reduce in kinds
    ]
    results = dict(zip(kinds, _train_each(2, runs), strict=True))
    exact = results["fp32", "fp32"]
    for kind, got in results.items():
        assert got["loss"] == pytest.approx(exact["loss"], rel=u)
        for name, tensor in exact["gradients"].items():
            assert difference(got["gradients"][name], tensor) < 2 * u, (kind, name)
    matrix = "lm_head.weight"
    for kind in kinds[1:]:
        if zero_stage in (2, 3) and kind == ("bf16", "fp32"):
            continue  # a round holds one bf16 gradient of each parameter, and its sums are of fp32
        assert not torch.equal(results[kind]["gradients"][matrix], exact["gradients"][matrix]), f"{kind} had no effect"


# ---------------------------------------------------------------------------------------------------------------------
# Other optimizers


class _Plain(PlainTrainer):
    """The other optimizers in plain formulas; each adds the decay to the gradient but Lion, which shrinks the weight."""

    name, momentum = "", 0.9

    def _decayed(self, name: str, p: Tensor, g: Tensor) -> Tensor:
        return g + self.weight_decay * p if decays(name, tuple(p.shape)) else g

    @torch.no_grad()
    def _adamw(self, gradients: Any, lr: float) -> None:
        self.steps_taken += 1
        for name, p in self.weights.items():
            m, v = self.first_moment[name], self.second_moment[name]
            getattr(self, f"_{self.name}")(p, gradients[name], m, v, name, lr)

    def _sgd(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, name: str, lr: float) -> None:
        m.copy_(self.momentum * m + self._decayed(name, p, g))
        p.copy_(p - lr * m)

    def _adagrad(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, name: str, lr: float) -> None:
        g = self._decayed(name, p, g)
        v.copy_(v + g * g)
        p.copy_(p - lr * g / (v.sqrt() + self.eps))

    def _adam(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, name: str, lr: float) -> None:
        g, (b1, b2), t = self._decayed(name, p, g), self.betas, self.steps_taken
        m.copy_(b1 * m + (1 - b1) * g)
        v.copy_(b2 * v + (1 - b2) * g * g)
        p.copy_(p - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + self.eps))

    def _lion(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, name: str, lr: float) -> None:
        b1, b2 = self.betas
        if decays(name, tuple(p.shape)):
            p.copy_(p * (1 - lr * self.weight_decay))
        p.copy_(p - lr * (b1 * m + (1 - b1) * g).sign())
        m.copy_(b2 * m + (1 - b2) * g)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "lion"])
def test_every_optimizer_follows_its_formula_on_every_stage_and_place(name: str, folder: Path) -> None:
    cases = [(0, "none"), (1, "cpu") if name in ("sgd", "lion") else (2, "nvme"), (3, "none"), (3, "nvme")]
    optimizer = {"name": name} | ({"momentum": _Plain.momentum} if name == "sgd" else {})
    runs = [
        run_of(2, model=UNTIED, zero={"stage": stage, "offload": _offload(stage, place, folder)}, optimizer=optimizer)
        for stage, place in cases
    ]
    given = runs[0].config.optimizer
    trainer = _Plain(
        initial_weights(runs[0]), plain_config(runs[0]), LR, given.betas, given.eps, given.weight_decay, given.grad_clip
    )
    trainer.name = name
    results = _train_each(2, runs)  # before this process computes a gradient, which starts CUDA where there is a device
    for step in range(STEPS):
        trainer.step(*global_batch(runs[0], step))
    by_units = results[
        cases.index((3, "none"))
    ]  # buckets of stage 3 are cut otherwise, which rounds the norm otherwise
    for case, got in zip(cases, results, strict=True):
        if case[1] == "none" or DEVICE.type == "cpu":  # a GPU's optimizers round otherwise than the host's
            _assert_same_bits(got, by_units if case[0] == 3 else results[0], case)
        elements = strays = 0
        for key, tensor in trainer.weights.items():
            if name != "lion":
                assert difference(got["masters"][key], tensor.detach()) < TOLERANCE, (case, key)
            # Lion steps by the sign, which for a gradient of nothing but rounding noise is a matter of taste.
            strays += int(((got["masters"][key] - tensor.detach()).abs() > LR / 100).sum())
            elements += tensor.numel()
        assert strays <= (elements // 1000 if name == "lion" else 0)
