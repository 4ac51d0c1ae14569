"""Law 2 across precisions, offloading, groups that share the state, and optimizers: what is saved is what there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from test_checkpoint import Part, _stored, do_parts, losses_of
from worlds import LLAMA, run_of

TIED = LLAMA | {"tie_embeddings": True, "num_layers": 4}


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
    (2, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, 2, "none", 0),
    (4, {"pp": 2, "schedule": "zbv"}, 3, "cpu", 0),
]


def _batched(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _same_bits(a: Path, b: Path) -> None:
    stored, again = _stored(a), _stored(b)
    assert set(again) == set(stored)
    for kind, tensors in stored.items():
        for name, tensor in tensors.items():
            assert torch.equal(again[kind][name], tensor), f"{kind} of {name}, {b}"


@pytest.mark.slow
def test_a_run_goes_on_in_other_places_groups_and_virtual_stages_as_if_uninterrupted(tmp_path: Path) -> None:
    """Any place and group: with fp32 to the sums' order.  In half precision shapes round in their own ways, with or without
    a checkpoint in between; a loss is a mean over a hundred tokens, so it agrees to u / 16.  What is loaded is every bit."""
    precisions, first = {}, []
    for origin, (dtype, place) in ORIGINS.items():
        precisions[origin] = {"dtype": dtype, "initial_scale_power": 8} if dtype == "fp16" else {"dtype": dtype}
        zero = {"stage": 3, "offload": _everywhere(place, tmp_path, 3)}
        run, step = run_of(2, model=TIED, zero=zero, precision=precisions[origin]), tmp_path / origin
        first += [Part(run, range(3)), Part(run, range(1), save_to=step), Part(run, range(1, 3), step)]
    wanted = dict(zip(ORIGINS, _batched(losses_of(2, *first), 3), strict=True))
    for whole, begun, resumed in wanted.values():
        assert begun + resumed == whole, "the same shape goes on bit by bit"
    for index, (world, parallel, stage, to, group) in enumerate(DESTINATIONS):
        zero = {"stage": stage, "offload": _everywhere(to, tmp_path, stage), "shard_group_size": group}
        origins = [list(ORIGINS)[number % 4] for number in (index, index + 1)]
        again = {origin: tmp_path / f"{origin} {index}" if index in (0, 2, 5) else None for origin in origins}
        parts = [
            Part(
                run_of(world, model=TIED, parallel=parallel, zero=zero, precision=precisions[origin]),
                range(1, 3),
                tmp_path / origin,
                save_again_to=again[origin],
            )
            for origin in origins
        ]
        for origin, losses in zip(origins, losses_of(world, *parts), strict=True):
            tolerance = {"fp32": 1e-5, "bf16": 2.0**-12, "fp16": 2.0**-15}[ORIGINS[origin][0]]
            assert losses == pytest.approx(wanted[origin][0][1:], rel=tolerance), (origin, world, parallel, zero)
            if saved := again[origin]:
                _same_bits(tmp_path / origin, saved)


@pytest.mark.slow
def test_every_precision_goes_on_from_every_other(tmp_path: Path) -> None:
    """Masters and moments are fp32 in all of them, so that nothing is lost on the way."""
    precisions = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "fp16", "initial_scale_power": 8}]
    parts: list[Part] = []
    for index, precision in enumerate(precisions):
        run, origin = run_of(2, model=TIED, precision=precision), tmp_path / str(precision["dtype"])
        parts += [Part(run, range(3)), Part(run, range(1), save_to=origin)]
        for other in precisions[:index] + precisions[index + 1 :]:
            zero = {"stage": 3, "offload": _everywhere("cpu", tmp_path, 3)}
            parts.append(Part(run_of(2, model=TIED, precision=other, zero=zero), range(1, 3), origin))
    for whole, _, *resumed in _batched(losses_of(2, *parts), 4):
        for losses in resumed:
            assert losses == pytest.approx(whole[1:], rel=2.0**-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "momentum", "state", "place"), [("sgd", 0.9, "momentum_buffer", "nvme"), ("lion", 0.0, "exp_avg", "none")]
)
def test_another_optimizer_than_the_one_that_wrote_is_refused_with_what_each_keeps(
    name: str, momentum: float, state: str, place: str, tmp_path: Path
) -> None:
    """Both ways, and each on every rank; in memory and in files."""
    other = {"name": name, "momentum": momentum}
    zero = {"stage": 2, "offload": _everywhere(place, tmp_path, 2)}
    adamw, changed = (run_of(2, model=TIED, zero=zero, optimizer=one) for one in ({}, other))
    parts = [
        Part(adamw, range(1), save_to=tmp_path / "adamw"),
        Part(changed, range(1), save_to=tmp_path / name),
        Part(changed, range(1, 3), tmp_path / name),
        Part(changed, range(3)),
        Part(changed, range(1, 3), tmp_path / "adamw"),
        Part(adamw, range(1, 3), tmp_path / name),
    ]
    for _, _, (resumed, _), (whole, _), of_adamw, of_other in run_world(2, do_parts, parts):
        assert resumed == whole[1:]
        for (losses, error), held, kept in (
            (of_adamw, "exp_avg, exp_avg_sq", state),
            (of_other, state, "exp_avg, exp_avg_sq"),
        ):
            assert losses == []
            assert f"another optimizer: it holds {held}, and this one needs {kept}" in error
