"""Where `auto` puts the state of offloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world

from megazero.config.schema import OffloadConfig
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.zero.offload import without_auto
from megazero.zero.sharding import Placement, ShardingPolicy

DEVICE, HOST = torch.device("meta"), torch.device("cpu")


def _choose(  # a model of 1000 elements under AdamW
    stage: int,
    device: float,
    host: float,
    *,
    dtype: torch.dtype = torch.float32,
    disk: Path | None = None,
    world: Axis | None = None,
    shards: int = 1,
    local_world_size: int = 1,
    **config: Any,
) -> tuple[str, str]:
    """What is chosen with so many free bytes of the device and the host, before the tenth that stays free."""
    axis = Axis("dp", tuple(range(shards)))
    policy = ShardingPolicy(stage, dtype, Placement(axis, Axis("replica")), DEVICE)
    wanted = OffloadConfig(**{"optimizer": "auto", "parameters": "auto", "nvme_path": disk and str(disk)} | config)
    free: Callable[[torch.device], int] = lambda place: int((device if place == DEVICE else host) / 0.9) + 1  # noqa: E731
    found = without_auto(wanted, policy, 1000, 2, world or Axis("world"), local_world_size, free)
    assert found.model_copy(update={"optimizer": "auto", "parameters": "auto"}) == wanted.model_copy(
        update={"optimizer": "auto", "parameters": "auto"}
    )
    return found.optimizer, found.parameters


def test_auto_takes_the_fastest_place_that_has_room(tmp_path: Path) -> None:
    """fp32, one rank, stage 3: weights 4000 bytes, gradients 4000, moments 8000; on the host masters take 4000 more."""
    assert _choose(3, 16_000, 0) == ("none", "none")
    assert _choose(3, 15_000, 18_000, parameters="none") == ("cpu", "none")
    assert _choose(3, 4_000, 18_000) == ("cpu", "none")  # the weights may stay
    assert _choose(3, 1_000, 23_000) == ("cpu", "cpu")
    assert _choose(3, 1_000, 1_000, disk=tmp_path) == ("nvme", "nvme")
    with pytest.raises(
        ValueError, match=r"zero.offload.nvme_path=.*/none cannot be used \(No such file or directory\)"
    ):
        _choose(3, 1_000, 1_000, disk=tmp_path / "none")
    assert _choose(0, 16_000, 0) == ("none", "none")
    assert _choose(0, 8_000, 18_000) == ("cpu", "none")


def test_auto_counts_the_shard_and_the_machine(tmp_path: Path) -> None:
    """bf16, stage 3 over four ranks: weights 500 bytes, gradients 1000, masters and moments 3000."""
    kind = {"dtype": torch.bfloat16, "shards": 4}
    assert _choose(3, 4_500, 0, **kind) == ("none", "none")
    assert _choose(3, 4_400, 4_500, **kind) == ("cpu", "none")
    assert _choose(3, 4_400, 4 * 4_500, local_world_size=4, **kind) == ("cpu", "none")
    with pytest.raises(ValueError, match="fits nowhere"):
        _choose(3, 4_400, 4_500, local_world_size=4, **kind)


def test_auto_needs_room_for_no_more_than_it_moves() -> None:
    """Weights that may stay on the device need no room on the host."""
    assert _choose(3, 6_000, 18_000) == ("cpu", "none")


def test_what_is_set_is_not_chosen() -> None:
    assert _choose(3, 100_000, 100_000, optimizer="cpu") == ("cpu", "none")
    assert _choose(3, 100_000, 100_000, optimizer="cpu", parameters="none") == ("cpu", "none")
    assert _choose(2, 100_000, 100_000, optimizer="none") == ("none", "none")


def test_auto_is_refused_where_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"zero\.offload auto: the state fits nowhere.*no disk is set"):
        _choose(3, 1_000, 1_000)


def test_auto_is_what_the_poorest_rank_needs_on_all(tmp_path: Path) -> None:
    def law(rank: int) -> list[Any]:
        world = ParallelState(RankGrid(dp=2), rank).world
        answers: list[Any] = [_choose(3, [100_000, 4_000][rank], 18_000, world=world)]
        answers.append(_choose(3, 1_000, [1_000, 20_000][rank], world=world, disk=tmp_path))
        with pytest.raises(ValueError, match="fits nowhere") as caught:
            _choose(3, [1_000, 100_000][rank], [1_000, 100_000][rank], world=world)
        return [*answers, str(caught.value)]

    first, second = run_world(2, law)
    assert first == second
    assert first[:2] == [("cpu", "none"), ("nvme", "nvme")]
