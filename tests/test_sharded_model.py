"""The end of a step: loss scaling, overflow, clipping; and where `auto` puts the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_world
from torch import Tensor, nn
from zero_worlds import Sharded, seeded

from megazero.config.schema import OffloadConfig, PrecisionConfig
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.zero.bucket import Placement, ShardingPolicy
from megazero.zero.loss_scaler import LossScaleError
from megazero.zero.offload import without_auto

STAGES = [0, 1, 2, 3]


class _Exact(nn.Module):
    """loss = sum of w * x over layers: the gradient is x, small integers, exact in fp16 times any power of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 4, bias=False) for _ in range(3))
        for layer in self.layers:
            nn.init.constant_(layer.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


def _sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.125)


def _x(step: int, rank: int, index: int, overflows: bool = False) -> Tensor:
    x = torch.arange(16).remainder(3 + step + rank).sub(index).half()[None]
    return x * (torch.inf if overflows else 1.0)


def _expected_weights(steps: list[int], lr: float = 0.125) -> Tensor:
    """A row of every weight after these steps of two ranks with two micro-batches each."""
    row = torch.full((16,), 0.5)
    for step in steps:
        row -= lr * sum(_x(step, rank, index)[0].float() for rank in range(2) for index in range(2))
    return row


def _assert_rows(sharded: Sharded, row: Tensor) -> None:
    for name, master in sharded.whole("master").items():
        assert torch.equal(master, row.expand(4, 16)), name


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("loss_scale", [1.0, 64.0, 0.0])
def test_steps_do_not_depend_on_the_loss_scale(zero_stage: int, loss_scale: float) -> None:
    """With the dynamic scale it grows after every second step; the step at which it grows is unscaled by what it used."""

    def law(rank: int) -> list[float]:
        precision = PrecisionConfig(
            dtype="fp16", loss_scale=loss_scale, initial_scale_power=4, loss_scale_window=2, hysteresis=1
        )
        sharded = Sharded(seeded(_Exact), zero_stage, rank, 2, optimizer=_sgd, precision=precision)
        scales = []
        for step in range(5):
            assert sharded.step([_x(step, rank, 0), _x(step, rank, 1)])
            scales.append(sharded.zero.scale)
            _assert_rows(sharded, _expected_weights(list(range(step + 1))))
        assert sharded.zero.skipped_steps == 0
        return scales

    expected = [loss_scale] * 5 if loss_scale else [16.0, 16.0, 32.0, 32.0, 64.0]
    assert run_world(2, law) == [expected] * 2


@pytest.mark.parametrize("zero_stage", STAGES)
def test_clipping_sees_the_norm_of_unscaled_gradients(zero_stage: int) -> None:
    def law(rank: int) -> None:
        precision = PrecisionConfig(dtype="fp16", loss_scale=32.0)
        sharded = Sharded(seeded(_Exact), zero_stage, rank, 2, optimizer=_sgd, precision=precision)
        assert sharded.step([_x(0, rank, 0), _x(0, rank, 1)], max_norm=0.25)
        gradient = (_expected_weights([]) - _expected_weights([0], lr=1.0)).expand(12, 16)
        row = 0.5 - 0.125 * gradient[0] * 0.25 / (gradient.norm() + 1e-6)
        for master in sharded.whole("master").values():
            torch.testing.assert_close(master, row.expand(4, 16))

    run_world(2, law)


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_an_overflow_on_one_rank_is_skipped_on_all_and_leaves_nothing_behind(
    zero_stage: int, place: str, tmp_path: Path
) -> None:
    def law(rank: int) -> None:
        precision = PrecisionConfig(dtype="fp16", initial_scale_power=4, hysteresis=1)
        offload = {"optimizer": place, "nvme_path": str(tmp_path)}
        sharded = Sharded(seeded(_Exact), zero_stage, rank, 2, optimizer=_sgd, precision=precision, offload=offload)
        changed = []
        for step, overflows in enumerate([False, True, False, True, False]):
            changed.append(sharded.step([_x(step, rank, 0), _x(step, rank, 1, overflows and rank == 1)]))
        assert changed == [True, False, True, False, True]
        assert sharded.zero.skipped_steps == 2
        assert sharded.zero.scaler is not None
        assert sharded.zero.scaler.scale == 4.0
        _assert_rows(sharded, _expected_weights([0, 2, 4]))
        sharded.zero.close()

    run_world(2, law)


def test_an_overflow_at_the_smallest_scale_is_an_error_on_every_rank() -> None:
    def law(rank: int) -> None:
        precision = PrecisionConfig(dtype="fp16", initial_scale_power=1, hysteresis=1, min_loss_scale=1.0)
        sharded = Sharded(seeded(_Exact), 2, rank, 2, optimizer=_sgd, precision=precision)
        assert not sharded.step([_x(0, rank, 0, rank == 0)])
        with pytest.raises(LossScaleError):
            sharded.step([_x(0, rank, 0, rank == 0)])
        _assert_rows(sharded, _expected_weights([]))

    run_world(2, law)


def test_a_loaded_loss_scale_is_used_by_the_next_step() -> None:
    precision = PrecisionConfig(dtype="fp16", initial_scale_power=4)
    saved = Sharded(seeded(_Exact), 0, optimizer=_sgd, precision=precision).zero.scaler
    assert saved is not None
    other = Sharded(seeded(_Exact), 0, optimizer=_sgd, precision=PrecisionConfig(dtype="fp16", initial_scale_power=9))
    other.zero.loaded(saved.state_dict())
    assert other.zero.scale == 16.0


# ---- where `auto` puts the state

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
