"""Muon on any shape: equal gradients give the plain optimizer's weights, bit for bit the same however state is sharded."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import DEVICE, run_world
from torch import Tensor
from worlds import (
    GPT2,
    LLAMA,
    MIXTRAL,
    difference,
    engine_on,
    initial_weights,
    micro_batches,
    run_of,
    state_on,
    train,
    whole,
)

from megazero.config import ResolvedRun
from megazero.engine import Engine
from megazero.engine.phases import Position
from megazero.optim import muon
from megazero.zero.matrices import copies_in_block

LR, DECAY, BETA, STEPS = 0.02, 0.1, 0.95, 3
MUON = {"name": "muon", "grad_clip": 0.0, "weight_decay": DECAY, "adamw_lr": 0.004, "lr": LR}
UNEVEN = LLAMA | {"num_layers": 3, "ffn_hidden_size": 72}
MODELS, EXPERTS = {"llama": UNEVEN, "gpt2": GPT2}, MIXTRAL | {"ffn_hidden_size": 40}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def _run(world: int, name: str = "llama", **sections: dict[str, Any]) -> ResolvedRun:
    return run_of(world, **{"model": MODELS.get(name, EXPERTS)} | sections, optimizer=MUON)


def gradients(run: ResolvedRun, step: int) -> dict[str, Tensor]:
    """The gradients of a step by name, the same on every shape."""
    training = run.config.training.model_copy(update={"seed": 100 + step})
    return initial_weights(replace(run, config=run.config.model_copy(update={"training": training})))


def _orthogonal(x: Tensor) -> Tensor:
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def _is_matrix(name: str) -> bool:
    return name.endswith(
        ("proj.weight", "c_attn.weight", "c_proj.weight", "c_fc.weight", "w1.weight", "w2.weight", "w3.weight")
    )


def plain(run: ResolvedRun, steps: int = STEPS) -> dict[str, Tensor]:
    """The weights after some steps, in fp64, by Hugging Face names."""
    weights = {name: value.double() for name, value in initial_weights(run).items()}
    state = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in weights.items()}
    eps, betas = run.config.optimizer.eps, run.config.optimizer.betas
    for step in range(1, steps + 1):
        for name, gradient in gradients(run, step).items():
            weight, (first, second), g = weights[name], state[name], gradient.double()
            if _is_matrix(name):
                first.mul_(BETA).add_((1 - BETA) * g)
                nesterov = BETA * first + (1 - BETA) * g
                fused = 3 if "c_attn" in name else 1  # GPT-2 stores q | k | v as columns of one tensor
                for number, part in enumerate(nesterov.chunk(fused, 1)):
                    update = _orthogonal(part if part.shape[0] <= part.shape[1] else part.T)
                    update = update if part.shape[0] <= part.shape[1] else update.T
                    target = weight.chunk(fused, 1)[number]
                    target.sub_(LR * (0.2 * sqrt(max(part.shape)) * update + DECAY * target))
                continue
            first.mul_(betas[0]).add_((1 - betas[0]) * g)
            second.mul_(betas[1]).add_((1 - betas[1]) * g * g)
            weight.mul_(1 - 0.004 * (DECAY if weight.ndim > 1 else 0.0))
            scale = (second / (1 - betas[1] ** step)).sqrt() + eps
            weight.sub_(0.004 * first / (1 - betas[0] ** step) / scale)
    return weights


def _step(engine: Engine, run: ResolvedRun, step: int) -> None:
    """One update with the gradients of `step` in place of those that the batch gives."""
    engine.compute_gradients(micro_batches(run, engine.state, step))
    engine._grad_norm = 1.0
    for bucket in engine.sharded_model.reducer.buckets:
        for slot in bucket.layout.slots:
            values, axis = torch.empty(slot.stop - slot.start), slot.info.spec.axis(engine.state)
            slot.info.spec.init_weights(values, 0, axis.index, axis.size, 100 + step)
            start, stop = max(slot.start, bucket.owned.start), min(slot.stop, bucket.owned.stop)
            if start < stop:
                part = values[start - slot.start : stop - slot.start]
                bucket.gradient[start - bucket.owned.start : stop - bucket.owned.start] = part
    engine.update(LR)


def _steps(rank: int, runs: list[ResolvedRun]) -> list[Any]:
    state, found = state_on(rank, runs[0]), []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        for step in range(1, STEPS + 1):
            _step(engine, run, step)
        found.append(whole(engine, "model"))
        engine.sharded_model.close()
    return found


STAGES = [{"zero": {"stage": stage}} for stage in range(4)]
OFFLOADED = [{"zero": {"stage": stage, "offload": {"optimizer": "cpu"}}} for stage in (1, 3)]


def _check(found: list[dict[str, Tensor]], wanted: dict[str, Tensor], first: dict[str, Tensor]) -> None:
    for got in found:
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert difference(got[name], value) < 1e-5, name
            assert torch.equal(got[name], first[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_equal_gradients_give_bit_equal_weights_on_every_dp_stage_offload_and_schedule(
    name: str, tmp_path: Path
) -> None:
    in_file = {"stage": 2, "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    kinds, at_home = [*STAGES, *OFFLOADED, {"zero": in_file}], len(STAGES)
    found = run_world(1, _steps, [_run(1, name, **kind) for kind in kinds])[0]
    # a GPU's AdamW rounds otherwise than the host's
    first, away = found[0], found[0 if DEVICE.type == "cpu" else at_home]
    wanted = plain(_run(1, name))
    for world, more in ((1, kinds), (2, kinds), (4, [*STAGES, *OFFLOADED])):
        found = found if world == 1 else run_world(world, _steps, [_run(world, name, **kind) for kind in more])[0]
        _check(found[:at_home], wanted, first)
        _check(found[at_home:], wanted, away)
    in_groups = {"zero": {"stage": 1, "shard_group_size": 2}}
    _check(run_world(4, _steps, [_run(4, name, **in_groups)])[0], wanted, first)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("parallel", [{"tp": 2, "sequence_parallel": True}, {"pp": 2, "schedule": "zb-h1"}])
def test_a_matrix_that_ranks_share_is_stepped_whole(name: str, parallel: dict[str, Any]) -> None:
    wanted = plain(_run(1, name))
    runs = [_run(4, name, parallel=parallel, **kind) for kind in STAGES]
    found = run_world(4, _steps, runs)[0]
    _check(found, wanted, found[0])


def test_each_matrix_of_an_expert_is_stepped_whole_wherever_it_is() -> None:
    wanted, first = plain(_run(1, "mixtral")), run_world(1, _steps, [_run(1, "mixtral")])[0][0]
    tp = {"tp": 2, "sequence_parallel": True}
    for parallel in ({"ep": 4}, {"ep": 2, "pp": 2, "schedule": "zb-h1"}, tp | {"ep": 2}):
        stages = STAGES if "pp" in parallel else STAGES[1::2]
        runs = [_run(4, "mixtral", parallel=parallel, **stage) for stage in stages]
        _check(run_world(4, _steps, runs)[0], wanted, first)
    in_groups = {"zero": {"stage": 1, "shard_group_size": 2}, "parallel": {"ep": 2}}
    _check(run_world(4, _steps, [_run(4, "mixtral", **in_groups)])[0], wanted, first)


def _save(rank: int, run: ResolvedRun, path: str) -> Any:
    engine = engine_on(rank, run)
    for step in (1, 2):
        _step(engine, run, step)
    engine.save(path, Position(step=2, samples=16), "data")
    _step(engine, run, 3)
    return whole(engine, "model")


def _load(rank: int, run: ResolvedRun, path: str) -> Any:
    engine = engine_on(rank, run, init_weights=False)
    engine.load(path, "data")
    _step(engine, run, 3)
    return whole(engine, "model")


def test_a_resume_on_another_shape_goes_on_bit_equal(tmp_path: Path) -> None:
    path = str(tmp_path / "step-2")
    wanted = run_world(2, _save, _run(2, zero={"stage": 1}), path)[0]
    for world, stage, parallel in ((1, 0, {}), (4, 3, {}), (4, 2, {"tp": 2})):
        got = run_world(world, _load, _run(world, zero={"stage": stage}, parallel=parallel), path)[0]
        assert all(torch.equal(got[name], value) for name, value in wanted.items())


def _measured(rank: int, run: ResolvedRun) -> dict[str, Any]:
    engine, shapes = engine_on(rank, run), list[tuple[int, ...]]()
    iteration = muon.orthogonalize
    muon.orthogonalize = lambda x, scale: (shapes.append(tuple(x.shape)), iteration(x, scale))[1]
    _step(engine, run, 1)
    engine.state.traffic.reset()
    shapes.clear()
    _step(engine, run, 2)
    buckets, owned, elements = engine.sharded_model.reducer.buckets, {True: 0, False: 0}, 0
    for bucket in buckets:
        size = min(bucket.owned.stop, bucket.layout.numel) - bucket.owned.start
        owned[bucket.layout.first.matrix] += max(size, 0)
        elements += bucket.layout.numel * bucket.layout.first.matrix
    sent, optimizer = engine.state.traffic.sent_bytes, engine.memory_bytes()["optimizer"]
    sent_bytes = sent.get(("matrices", "send_recv"), 0)
    return {"sent": sent_bytes, "optimizer": optimizer, "owned": owned, "elements": elements, "shapes": shapes}


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3}, {"stage": 1, "shard_group_size": 2}])
@pytest.mark.parametrize("world", [2, 4])
def test_matrices_have_8_bytes_of_state_travel_once_each_way_and_are_iterated_once(
    world: int, zero: dict[str, Any]
) -> None:
    """Master and momentum; of a matrix on s shards (s - 1) / s go to its owner, at most, and back to all c copies."""
    run = _run(world, zero=zero | {"bucket_bytes": 1 << 20})
    found = run_world(world, _measured, run)
    for one in found:
        assert one["optimizer"] == 4 * one["owned"][True] + 8 * one["owned"][False]
    shards = zero.get("shard_group_size", world)
    formula = found[0]["elements"] * 4 * ((shards - 1) / shards + world // shards - 1 / shards)
    assert 0 < sum(one["sent"] for one in found) <= 1.25 * formula  # few matrices: owners hold uneven parts
    _assert_balanced(run, found, 1)


def test_blocks_of_copies_share_matrices_so_that_every_rank_owns_some() -> None:
    """7 matrices on 4 copies of 2 shards: two blocks of 4 ranks, each of which iterates every matrix once."""
    run = _run(8, model=LLAMA | {"num_layers": 1}, zero={"stage": 1, "shard_group_size": 2, "bucket_bytes": 1 << 20})
    found = run_world(8, _measured, run)
    for first in (0, 4):
        _assert_balanced(run, found[first : first + 4], 1)
    assert [copies_in_block(n, 8, 224) for n in (1, 6, 7, 11, 64, 256)] == [1, 6, 7, 1, 8, 8]


def test_each_experts_matrix_is_iterated_once_by_owners_balanced_over_its_replicas() -> None:
    run = _run(4, "mixtral", parallel={"ep": 2}, zero={"stage": 1, "bucket_bytes": 1 << 20})
    _assert_balanced(run, run_world(4, _measured, run), 2)  # those of experts, and all others


def _assert_balanced(run: ResolvedRun, found: list[dict[str, Any]], kinds: int) -> None:
    """No rank iterates more than the mean and a matrix of each kind more."""
    shapes = [tuple(value.shape) for name, value in initial_weights(run).items() if _is_matrix(name)]
    assert sorted(shape for one in found for shape in one["shapes"]) == sorted(shapes)
    work = [sum(20 * min(one) ** 2 * max(one) + 10 * min(one) ** 3 for one in rank["shapes"]) for rank in found]
    largest = max(20 * min(one) ** 2 * max(one) + 10 * min(one) ** 3 for one in shapes)
    assert max(work) <= sum(work) / len(found) + kinds * largest


def test_a_run_has_the_same_losses_on_every_shape() -> None:
    """From the gradients of real batches: these differ by rounding, which the iteration enlarges where they are smallest."""
    wanted = run_world(1, train, _run(1))[0]
    shapes = [(2, {}, 3), (2, {"tp": 2, "sequence_parallel": True}, 0), (4, {"tp": 2, "pp": 2, "schedule": "zb-h1"}, 1)]
    for world, parallel, stage in shapes:
        got = run_world(world, train, _run(world, parallel=parallel, zero={"stage": stage}))[0]
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert got["norm"] == pytest.approx(wanted["norm"], rel=1e-5)


def test_bf16_runs_send_and_iterate_in_bf16(tmp_path: Path) -> None:
    """As published; every stage gives the same bits, from masters that are near those of an iteration in fp32."""
    runs = [_run(2, precision={"dtype": "bf16"}, **kind) for kind in [*STAGES, *OFFLOADED]]
    first, *others = run_world(2, _steps, runs)[0]
    for got in others:
        assert all(torch.equal(got[name], value) for name, value in first.items())
    assert all(difference(first[name], value) < 0.05 for name, value in plain(runs[0]).items())
