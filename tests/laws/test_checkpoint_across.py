"""Law 2 across precisions, offloading, groups that share the state, and optimizers: what is saved is what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from test_checkpoint import _stored
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, state_on

from megazero.checkpoint.index import CheckpointError
from megazero.config import ResolvedRun
from megazero.engine import Position

TIED = LLAMA | {"tie_embeddings": True, "num_layers": 4}


def _go_on(
    rank: int, run: ResolvedRun, origin: Path | None, steps: range, save_to: Path | None
) -> tuple[list[float], str]:
    """Load or draw, do some steps, save; the losses, or why the checkpoint was refused."""
    engine = engine_on(rank, run, init_weights=origin is None, state=state_on(rank, run, on_one_machine=True))
    if origin is not None:
        try:
            assert engine.load(origin, "data") == Position(steps.start, steps.start * 8, 0)
        except CheckpointError as error:
            return [], str(error)
    losses = [engine.train_step(micro_batches(run, engine.state, step), LR).loss for step in steps]
    if save_to is not None:
        engine.save(save_to, Position(steps.stop, steps.stop * 8, 0), "data")
    return losses, ""


def _losses(
    world: int, run: ResolvedRun, origin: Path | None, steps: range, save_to: Path | None = None
) -> list[float]:
    ((losses, error), *others) = run_world(world, _go_on, run, origin, steps, save_to)
    assert all(one == (losses, error) for one in others)
    assert not error
    return losses


def _everywhere(place: str, folder: Path, stage: int) -> dict[str, Any]:
    parameters = {"parameters": place} if stage == 3 else {}
    return {"optimizer": place, "nvme_path": str(folder), **parameters}


ORIGINS = {
    "fp32": ("fp32", "none"),
    "bf16 in memory": ("bf16", "cpu"),
    "bf16 in files": ("bf16", "nvme"),
    "fp16": ("fp16", "none"),
}
# world, parallel, stage, place, shard_group_size
DESTINATIONS: list[tuple[int, dict[str, Any], int, str, int]] = [
    (2, {"tp": 2, "sequence_parallel": True}, 1, "nvme", 0),
    (4, {"pp": 2}, 2, "cpu", 0),
    (4, {}, 3, "nvme", 2),
    (4, {}, 1, "none", 2),
    (1, {}, 0, "none", 0),
    (2, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, 2, "none", 0),
    (4, {"pp": 2, "schedule": "zbv"}, 3, "cpu", 0),
]


@pytest.mark.slow
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_run_goes_on_in_other_places_groups_and_virtual_stages_as_if_uninterrupted(
    origin: str, tmp_path: Path
) -> None:
    """Any place and group: with fp32 to the sums' order.  In half precision shapes round in their own ways, with or without
    a checkpoint in between; a loss is a mean over a hundred tokens, so it agrees to u / 16.  What is loaded is every bit."""
    dtype, place = ORIGINS[origin]
    tolerance = {"fp32": 1e-5, "bf16": 2.0**-12, "fp16": 2.0**-15}[dtype]
    precision = {"dtype": dtype, "initial_scale_power": 8} if dtype == "fp16" else {"dtype": dtype}
    zero = {"stage": 3, "offload": _everywhere(place, tmp_path, 3)}
    run = run_of(2, model=TIED, zero=zero, precision=precision)
    wanted = _losses(2, run, None, range(5))
    assert _losses(2, run, None, range(3), tmp_path / "step") == wanted[:3]
    assert _losses(2, run, tmp_path / "step", range(3, 5)) == wanted[3:], "the same shape goes on bit by bit"
    stored = _stored(tmp_path / "step")
    for index, (world, parallel, stage, to, group) in enumerate(DESTINATIONS):
        zero = {"stage": stage, "offload": _everywhere(to, tmp_path, stage), "shard_group_size": group}
        other = run_of(world, model=TIED, parallel=parallel, zero=zero, precision=precision)
        losses = _losses(world, other, tmp_path / "step", range(3, 5))
        assert losses == pytest.approx(wanted[3:], rel=tolerance), (world, parallel, zero)
        if index in (0, 2, 5):
            _losses(world, other, tmp_path / "step", range(3, 3), tmp_path / str(index))
            again = _stored(tmp_path / str(index))
            assert set(again) == set(stored)
            for kind, tensors in stored.items():
                for name, tensor in tensors.items():
                    assert torch.equal(again[kind][name], tensor), f"{kind} of {name}, {(world, parallel, zero)}"


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_run_goes_on_over_two_then_one_then_four_ranks(zero_stage: int, tmp_path: Path) -> None:
    wanted = _losses(1, run_of(1, model=TIED), None, range(6))
    origin: Path | None = None
    for part, world in enumerate((2, 1, 4)):
        steps = range(2 * part, 2 * part + 2)
        run = run_of(world, model=TIED, zero={"stage": zero_stage})
        losses = _losses(world, run, origin, steps, tmp_path / f"after {world}")
        assert losses == pytest.approx(wanted[steps.start : steps.stop], rel=1e-5), world
        origin = tmp_path / f"after {world}"


@pytest.mark.slow
def test_every_precision_goes_on_from_every_other(tmp_path: Path) -> None:
    """Masters and moments are fp32 in all of them, so that nothing is lost on the way."""
    precisions = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "fp16", "initial_scale_power": 8}]
    for precision in precisions:
        origin = tmp_path / str(precision["dtype"])
        wanted = _losses(2, run_of(2, model=TIED, precision=precision), None, range(5), None)[3:]
        _losses(2, run_of(2, model=TIED, precision=precision), None, range(3), origin)
        for other in precisions:
            if other != precision:
                zero = {"stage": 3, "offload": _everywhere("cpu", tmp_path, 3)}
                losses = _losses(2, run_of(2, model=TIED, precision=other, zero=zero), origin, range(3, 5))
                assert losses == pytest.approx(wanted, rel=2.0**-12), (precision, other)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["none", "nvme"])
@pytest.mark.parametrize(("name", "momentum", "state"), [("sgd", 0.9, "momentum_buffer"), ("lion", 0.0, "exp_avg")])
def test_another_optimizer_than_the_one_that_wrote_is_refused_with_what_each_keeps(
    name: str, momentum: float, state: str, place: str, tmp_path: Path
) -> None:
    """Both ways, and each on every rank."""
    other = {"name": name, "momentum": momentum}
    zero = {"stage": 2, "offload": _everywhere(place, tmp_path, 2)}
    adamw, changed = (run_of(2, model=TIED, zero=zero, optimizer=one) for one in ({}, other))
    _losses(2, adamw, None, range(2), tmp_path / "adamw")
    _losses(2, changed, None, range(2), tmp_path / name)
    assert _losses(2, changed, tmp_path / name, range(2, 3)) == _losses(2, changed, None, range(3))[2:]
    for run, origin, held, kept in (
        (changed, "adamw", "exp_avg, exp_avg_sq", state),
        (adamw, name, state, "exp_avg, exp_avg_sq"),
    ):
        for losses, error in run_world(2, _go_on, run, tmp_path / origin, range(2, 3), None):
            assert losses == []
            assert f"another optimizer: it holds {held}, this one keeps {kept}" in error
