"""Law 1 for fp16: the loss scale is felt nowhere but in the range of fp16; an overflow on any rank skips the step on all."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from plain_model import PlainTrainer
from torch import Tensor
from worlds import (
    LLAMA,
    difference,
    engine_on,
    global_batch,
    initial_weights,
    micro_batches,
    on_one_state,
    plain_config,
    run_of,
    whole,
)

from megazero.config import ResolvedRun
from megazero.engine import Engine, NonFiniteError, Position
from megazero.zero.loss_scaler import LossScaleError

TIED = LLAMA | {"tie_embeddings": True}
UNIT_ROUNDOFF = 2.0**-11
STEPS, LR = 4, 0.25
# Adam does not see a constant factor on the gradient.  SGD without clipping, momentum or decay does, in every bit.
SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "grad_clip": 0.0}


def _fp16(**precision: Any) -> dict[str, Any]:
    return {"dtype": "fp16"} | precision


def _steps(engine: Engine, run: ResolvedRun, count: int) -> dict[str, Any]:
    """Steps one by one; the masters after each on rank 0."""
    out: dict[str, Any] = {"scales": [], "norms": [], "losses": [], "masters": [whole(engine, "master")]}
    for step in range(count):
        statistics = engine.train_step(micro_batches(run, engine.state, step), LR)
        assert not statistics.skipped
        out["scales"].append(statistics.loss_scale)
        out["norms"].append(statistics.grad_norm)
        out["losses"].append(statistics.loss)
        out["masters"].append(whole(engine, "master"))
    return out


def _updates(run: dict[str, Any]) -> list[dict[str, Tensor]]:
    """What each step added to each weight."""
    pairs = zip(run["masters"], run["masters"][1:], strict=False)
    return [{name: after[name].double() - before[name].double() for name in after} for before, after in pairs]


def _plain_sgd(run: ResolvedRun) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Updates and gradient norms of w <- w - lr g on the plain model."""
    trainer = PlainTrainer(initial_weights(run), plain_config(run), LR, (0.0, 0.0), 1.0, 0.0, 0.0)
    updates, norms = [], []
    for step in range(STEPS):
        _, gradients = trainer.gradients(*global_batch(run, step))
        norms.append(trainer.gradient_norm(gradients))
        updates.append({name: -LR * gradient for name, gradient in gradients.items()})
        with torch.no_grad():
            for name, weight in trainer.weights.items():
                weight.add_(updates[-1][name])
    return updates, norms


@pytest.mark.slow
def test_every_step_of_a_growing_scale_is_the_plain_step() -> None:
    """With window 1 the scale doubles at each step.  Unscaling with the new scale would halve each; a stage that did not
    unscale, or did twice, would be off by 2^8.  A constant scale gives the same run but for fp16's smallest numbers."""
    precisions = [_fp16(initial_scale_power=8, loss_scale_window=1), _fp16(loss_scale=2.0**10)]
    runs = [
        run_of(2, model=TIED, zero={"stage": stage}, precision=precision, optimizer=SGD)
        for stage in (0, 2, 3)
        for precision in precisions
    ]
    plain, norms = _plain_sgd(runs[0])
    results = run_world(2, on_one_state, runs, _steps, STEPS)[0]
    for run, got in zip(runs, results, strict=True):
        grows = run.config.precision.loss_scale == 0
        assert got["scales"] == ([2.0 ** (8 + step) for step in range(STEPS)] if grows else [2.0**10] * STEPS)
        assert got["norms"] == pytest.approx(norms, rel=UNIT_ROUNDOFF)
        for step, (mine, theirs) in enumerate(zip(_updates(got), plain, strict=True)):
            for name, tensor in theirs.items():
                # four roundings' worth, and as much again for the weights' own distance from the plain ones
                assert difference(mine[name], tensor) < 8 * UNIT_ROUNDOFF, (run.config.zero.stage, step, name)
    for growing, constant in zip(results[::2], results[1::2], strict=True):
        for name, tensor in constant["masters"][-1].items():
            assert difference(growing["masters"][-1][name], tensor) < UNIT_ROUNDOFF, name


# ---------------------------------------------------------------------------------------------------------------------
# Overflows


def _everything(engine: Engine) -> list[Tensor]:
    """Copies of this rank's masters, weights and moments."""
    state, copies = engine.sharded_model.sharded_state, []
    for bucket in state.buckets:
        copies += [bucket.read(array, bucket.owned).clone() for array in (bucket.master, bucket.weight_shard)]
        for _, whole_run in bucket.layout.intervals(lambda info: info.group):
            start, stop = max(whole_run.start, bucket.owned.start), min(whole_run.stop, bucket.owned.stop)
            if start < stop:
                part = replace(whole_run, start=start, stop=stop)
                copies += [state.read(kind, bucket, part).clone() for kind in engine.sharded_model.optimizer.states]
    return copies


def _expected_scales(start: float, overflows: Sequence[bool], hysteresis: int) -> list[float]:
    """Micikevicius et al. 2018 with a tolerance: the overflow that exhausts it halves the scale, and so does each later."""
    scales, scale, left = [], start, hysteresis
    for overflow in overflows:
        scales.append(scale)
        left -= overflow
        scale = scale / 2 if overflow and left < 1 else scale
    return scales


def _from_too_large_a_scale(engine: Engine, run: ResolvedRun, count: int) -> dict[str, Any]:
    out: dict[str, Any] = {"scales": [], "skipped": [], "same": [], "finite": []}
    for step in range(count):
        before = _everything(engine)
        statistics = engine.train_step(micro_batches(run, engine.state, step), 1e-3)
        after = _everything(engine)
        out["scales"].append(statistics.loss_scale)
        out["skipped"].append(statistics.skipped)
        out["finite"].append(statistics.grad_norm < float("inf"))
        out["same"].append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return out | {"count": engine.sharded_model.skipped_steps, "steps": engine.sharded_model.optimizer.steps_taken}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "cases"),
    [({}, [(1, "nvme"), (3, "none")]), ({"tp": 2, "pp": 2}, [(0, "none"), (2, "cpu")])],
    ids=["dp4", "tp2 pp2"],
)
def test_a_run_that_begins_with_overflows_skips_until_the_scale_has_fallen(
    parallel: dict[str, Any], cases: list[tuple[int, str]], tmp_path: Path
) -> None:
    """In a skipped step no bit of weights, masters and moments changes, on any rank, and Adam's step does not count."""
    steps, hysteresis = 9, 3
    runs = [
        run_of(
            4,
            model=TIED,
            parallel=parallel,
            zero={"stage": stage, "offload": {"optimizer": place, "nvme_path": str(tmp_path)}},
            precision=_fp16(initial_scale_power=25, hysteresis=hysteresis),
        )
        for stage, place in cases
    ]
    by_rank = run_world(4, on_one_state, runs, _from_too_large_a_scale, steps)
    for results in zip(*by_rank, strict=True):
        first = results[0]
        skipped = first["skipped"]
        assert first["scales"] == _expected_scales(2.0**25, skipped, hysteresis)
        assert all(skipped[:hysteresis])
        assert hysteresis < sum(skipped) < steps, "the test must see both"
        for got in results:
            assert got["scales"] == first["scales"]
            assert got["skipped"] == got["same"] == skipped
            assert got["finite"] == [not skip for skip in skipped]
            assert got["count"] == sum(skipped)
            assert got["steps"] == steps - sum(skipped)


def _poison(engine: Engine, value: float, steps: Container[int] = range(100)) -> None:
    """Have the gradients of some of the coming steps hold one bad element, on this rank only."""
    finish, done = engine.sharded_model.finish_gradients, itertools.count()

    def finish_and_poison() -> None:
        finish()
        if next(done) not in steps:
            return
        # after the reduction ranks hold different shards, so that what one of them holds no other one sees
        bucket = next(
            one
            for one in engine.sharded_model.parameters.buckets
            if not one.is_duplicate and one.counted.start < one.layout.numel
        )
        bucket.gradient[bucket.counted.start - bucket.owned.start] = value

    engine.sharded_model.finish_gradients = finish_and_poison  # type: ignore[method-assign]


def _with_one_bad_rank(engine: Engine, run: ResolvedRun, rank: int, value: float) -> tuple[bool, bool, float]:
    batches = micro_batches(run, engine.state, 0)
    engine.train_step(batches, 1e-3)
    before = _everything(engine)
    if engine.state.rank == rank:
        _poison(engine, value)
    statistics = engine.train_step(batches, 1e-3)
    same = all(torch.equal(a, b) for a, b in zip(before, _everything(engine), strict=True))
    assert engine.sharded_model.optimizer.steps_taken == 1
    return statistics.skipped, same, engine.sharded_model.scale


@pytest.mark.parametrize(("rank", "value"), [(0, float("nan")), (3, float("inf"))])
def test_an_overflow_on_one_rank_of_one_stage_skips_the_step_on_every_rank(rank: int, value: float) -> None:
    runs = [
        run_of(4, model=TIED, parallel={"pp": 2}, zero={"stage": stage}, precision=_fp16(initial_scale_power=8))
        for stage in range(4)
    ]
    for results in run_world(4, on_one_state, runs, _with_one_bad_rank, rank, value):
        assert results == [(True, True, 2.0**8)] * 4


def _until_no_scale_is_left(engine: Engine, run: ResolvedRun) -> list[str]:
    if engine.state.rank == 2:
        _poison(engine, float("inf"))
    before, said = _everything(engine), []
    for _ in range(4):
        try:
            said.append(
                "skipped" if engine.train_step(micro_batches(run, engine.state, 0), 1e-3).skipped else "stepped"
            )
        except LossScaleError as error:
            said.append(str(error))
            break
    assert all(torch.equal(a, b) for a, b in zip(before, _everything(engine), strict=True))
    return said


def test_an_overflow_at_the_smallest_scale_is_an_error_on_every_rank() -> None:
    precision = _fp16(initial_scale_power=5, min_loss_scale=16.0, hysteresis=2)
    runs = [run_of(4, model=TIED, parallel={"pp": 2}, zero={"stage": stage}, precision=precision) for stage in range(4)]
    for results in run_world(4, on_one_state, runs, _until_no_scale_is_left):
        for first, second, error in results:
            assert (first, second) == ("skipped", "skipped")
            assert "loss scale 16" in error
            assert "3 skipped" in error


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


OVERFLOWS = {0, 1, 2, 4, 9}
# Powers of 2, with a tolerance of 3, refilled by the growth after step 7.
TRACE = [10, 10, 10, 9, 9, 8, 8, 8, 9, 9, 9, 9, 9, 10, 10]
SKIPPED = [step in OVERFLOWS for step in range(len(TRACE))]


def _scaled_run(
    rank: int, run: ResolvedRun, origin: Path | None, steps: range, saves: dict[int, Path]
) -> dict[str, Any]:
    """Some of these steps overflow on rank 0; some are saved."""
    engine = engine_on(rank, run, init_weights=origin is None)
    if origin is not None:
        assert engine.load(origin, "data").step == steps.start
    if rank == 0:
        _poison(engine, float("inf"), {step - steps.start for step in OVERFLOWS})
    done = []
    for step in steps:
        if step in saves:
            engine.save(saves[step], Position(step), "data")
        done.append(engine.train_step(micro_batches(run, engine.state, step), 1e-3))
    assert engine.sharded_model.scaler is not None
    return {
        "scales": [one.loss_scale for one in done],
        "skipped": [one.skipped for one in done],
        "losses": [one.loss for one in done],
        "scaler": engine.sharded_model.scaler.state_dict(),
        "optimizer_steps": engine.sharded_model.optimizer.steps_taken,
    }


@pytest.mark.slow
def test_the_loss_scale_goes_on_where_a_checkpoint_left_it(tmp_path: Path) -> None:
    """Saved with the tolerance half used up, and a step before a growth."""
    precision = _fp16(initial_scale_power=10, hysteresis=3, loss_scale_window=3)
    steps = len(TRACE)
    run = run_of(2, model=TIED, zero={"stage": 3}, precision=precision)
    saves = {2: tmp_path / "2", 7: tmp_path / "7"}
    wanted = run_world(2, _scaled_run, run, None, range(steps), saves)[0]
    assert wanted["scales"] == [2.0**power for power in TRACE]
    assert wanted["skipped"] == SKIPPED
    assert wanted["optimizer_steps"] == steps - len(OVERFLOWS)
    for after, world, parallel, stage in ((2, 2, {"pp": 2}, 2), (2, 1, {}, 0), (7, 4, {"pp": 2}, 2), (7, 2, {}, 3)):
        other = run_of(world, model=TIED, parallel=parallel, zero={"stage": stage}, precision=precision)
        for got in run_world(world, _scaled_run, other, saves[after], range(after, steps), {}):
            assert got["scales"] == wanted["scales"][after:]
            assert got["skipped"] == wanted["skipped"][after:]
            assert got["losses"] == pytest.approx(wanted["losses"][after:], rel=UNIT_ROUNDOFF / 16)
            assert got["scaler"] == wanted["scaler"]
            assert got["optimizer_steps"] == wanted["optimizer_steps"]


def test_an_evaluation_that_is_not_finite_is_an_error_under_fp16_too() -> None:
    """The loss scale takes care of gradients; here there are none."""
    run = run_of(1, model=TIED, precision=_fp16())
    engine = engine_on(0, run)
    batches = micro_batches(run, engine.state, 0)
    engine.evaluate(batches)
    with torch.no_grad():
        for parameter in engine.chunks.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        engine.evaluate(batches)
