"""Learning rate schedules against the formulas that DeepSpeed documents, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import cos, log, pi
from typing import Any

import pytest
import torch

from megazero.deepspeed.lr_schedulers import SCHEDULES, cycle_height, make_lr_scheduler


@dataclass
class _Groups:
    """All that a schedule needs of an optimizer: two groups with rates of their own."""

    param_groups: list[dict[str, Any]] = field(
        default_factory=lambda: [{"lr": 0.4, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.9, 0.999)}]
    )

    def lrs(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


def _run(name: str, params: dict[str, Any], steps: int) -> list[list[float]]:
    """Rates of each group during each optimizer step, the engine's call of `step` after each one."""
    optimizer = _Groups()
    scheduler = make_lr_scheduler(name, params, optimizer)
    seen = [optimizer.lrs()]
    for _ in range(steps):
        scheduler.step()
        assert scheduler.get_last_lr() == scheduler.get_lr() == optimizer.lrs()
        seen.append(optimizer.lrs())
    return [list(group) for group in zip(*seen, strict=True)]


def _rates_at(name: str, params: dict[str, Any], steps: Iterable[int]) -> list[float]:
    schedule = make_lr_scheduler(name, params, _Groups([{"lr": 1.0, "betas": (0.9, 0.95)}]))
    return [schedule.lr_at(step)[0] for step in steps]


def test_decays() -> None:
    params = {"warmup_num_steps": 2, "total_num_steps": 6}
    linear = _rates_at("WarmupDecayLR", params | {"warmup_max_lr": 1.0}, (2, 3, 5, 6, 9))
    assert linear == [1, 0.75, 0.25, 0, 0]
    cosine = _rates_at("WarmupCosineLR", params | {"cos_min_ratio": 0.0}, (2, 3, 4, 5, 6, 9))
    assert cosine == pytest.approx([(1 + cos(pi / 4)) / 2, 0.5, (1 - cos(pi / 4)) / 2, 0, 0, 0])
    short = {"warmup_num_steps": 7, "total_num_steps": 5}
    for name, more in (("WarmupDecayLR", {}), ("WarmupCosineLR", {"cos_min_ratio": 0.0})):
        with pytest.warns(UserWarning, match="before its peak"):
            rates = _rates_at(name, short | more, [7])
        assert rates == [0]


def test_the_height_of_a_cycle() -> None:
    assert [cycle_height(step, 2, 4, 0, 0) for step in range(-1, 6)] == [0, 0.5, 1, 0.75, 0.5, 0.25, 0]
    stairs = [cycle_height(step, 4, 4, 2, 1) for step in range(-1, 8)]
    assert stairs == [0, 0, 0.5, 0.5, 1, 0, 0, 0, 0]
    assert [cycle_height(step, 3, 0, 0, 0) for step in range(-1, 3)] == pytest.approx([0, 1 / 3, 2 / 3, 0])


def test_warmup_lr_grows_to_the_greatest_rate_and_stays() -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    first, second = _run("WarmupLR", params, 7)
    assert first == second == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_warmup_lr_takes_rates_for_each_group_or_the_groups_own() -> None:
    first, second = _run("WarmupLR", {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [1.0, 0.1]}, 1001)
    assert (first[0], first[-1], second[0], second[-1]) == (0, 1, 0.1, 0.1)
    first, second = _run("WarmupLR", {"warmup_num_steps": 3}, 4)
    assert first == pytest.approx([0, 0, 0.4 * log(2) / log(3), 0.4, 0.4])
    assert second == pytest.approx([lr / 2 for lr in first])


def test_a_warm_up_of_one_step_counts_as_two() -> None:
    assert _run("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, 3)[0] == [0, 0, 0.2, 0.4]


def test_warmup_cosine_lr_keeps_the_ratio_between_groups() -> None:
    params = {"total_num_steps": 6, "warmup_min_ratio": 0.5, "warmup_num_steps": 2, "cos_min_ratio": 0.1}
    first, second = _run("WarmupCosineLR", params | {"warmup_type": "linear"}, 8)
    cosine = [0.1 + 0.9 * (1 + cos(pi * k / 4)) / 2 for k in range(1, 5)]
    assert first == pytest.approx([0.4 * ratio for ratio in [0.5, 0.5, 0.75, *cosine, 0.1, 0.1]])
    assert second == pytest.approx([lr / 2 for lr in first])


def test_one_cycle_goes_up_down_and_decays_and_momentum_the_other_way() -> None:
    optimizer = _Groups()
    scheduler = make_lr_scheduler(
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.5,
            "cycle_first_step_size": 2,
            "decay_step_size": 2,
            "decay_lr_rate": 1.0,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": [0.9, 1 - 1e-3],
            "decay_mom_rate": -0.1,
        },
        optimizer,
    )
    lrs, momenta = [optimizer.lrs()[0]], [optimizer.param_groups[0]["betas"][0]]
    for _ in range(6):
        scheduler.step()
        lrs.append(optimizer.lrs()[0])
        momenta.append(optimizer.param_groups[0]["betas"][0])
    assert lrs == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2])
    assert momenta == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.9 * 0.95, 0.9 * 0.9])
    assert [group["betas"][1] for group in optimizer.param_groups] == [0.95, 0.999]
    assert scheduler.get_mom() == [group["betas"] for group in optimizer.param_groups]


def test_one_cycle_leaves_groups_without_betas_alone_and_says_so() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], momentum=0.7)
    with pytest.warns(UserWarning, match="momentum alone"):
        make_lr_scheduler("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5}, optimizer).step()
    assert optimizer.param_groups[0]["momentum"] == 0.7


def test_a_momentum_that_grows_to_one_is_an_error() -> None:
    params = {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 1, "decay_step_size": 1}
    scheduler = make_lr_scheduler("OneCycle", params | {"decay_mom_rate": 0.1}, _Groups())
    scheduler.step()
    scheduler.step()
    with pytest.raises(ValueError, match=r"decay_mom_rate=0\.1 takes momentum to .* at step 3"):
        scheduler.step(3)


def test_range_test() -> None:
    params = {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
    first, second = _run("LRRangeTest", params, 4)
    assert first == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    assert second == pytest.approx([2 * lr for lr in first])


_EXAMPLES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 8},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_min_ratio": [0.1, 0.2]},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 3, "decay_step_size": 2},
    "LRRangeTest": {"lr_range_test_step_size": 2},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_saved_schedule_goes_on_as_if_it_had_never_stopped(name: str) -> None:
    one, other = _Groups(), _Groups()
    scheduler = make_lr_scheduler(name, _EXAMPLES[name], one)
    for _ in range(4):
        scheduler.step()
    again = make_lr_scheduler(name, _EXAMPLES[name], other)
    again.load_state_dict(scheduler.state_dict())
    assert other.lrs() == one.lrs()
    for _ in range(6):
        scheduler.step()
        again.step()
        assert [(g["lr"], g["betas"]) for g in other.param_groups] == [(g["lr"], g["betas"]) for g in one.param_groups]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_starts_in_the_middle_by_argument_or_by_step(name: str) -> None:
    one, other = _Groups(), _Groups()
    scheduler = make_lr_scheduler(name, _EXAMPLES[name], one)
    scheduler.step(4)
    make_lr_scheduler(name, _EXAMPLES[name] | {"last_batch_iteration": 4}, other)
    assert other.lrs() == one.lrs()
    # On groups that a schedule has moved already, a new one finds the rates they came with.
    make_lr_scheduler(name, _EXAMPLES[name] | {"last_batch_iteration": 4}, one)
    assert other.lrs() == one.lrs()


def test_rates_in_tensors_are_filled_in_place() -> None:
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=lr)
    scheduler = make_lr_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, optimizer)
    scheduler.step(1)
    assert optimizer.param_groups[0]["lr"] is lr
    assert (lr.item(), scheduler.get_last_lr()) == (0.25, [0.25])


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("WarmupLr", {}, r"unknown scheduler type 'WarmupLr': did you mean WarmupLR.*OneCycle.*StepLR"),
        (
            "WarmupLR",
            {"warmup_steps": 5},
            r"WarmupLR has no parameter 'warmup_steps' \(did you mean warmup_num_steps\?\)",
        ),
        ("WarmupDecayLR", {}, "WarmupDecayLR needs the parameter 'total_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "WarmupLR\nwarmup_num_steps\n.*greater than or equal to 1"),
        ("WarmupLR", {"warmup_max_lr": [0.1]}, "warmup_max_lr has 1 numbers for 2 parameter groups"),
        ("WarmupLR", {"warmup_type": "lin"}, "warmup_type\n.*'log' or 'linear'"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_name(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_lr_scheduler(name, params, _Groups())


def test_schedules_of_torch_are_made_by_name() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = make_lr_scheduler("CosineAnnealingLR", {"T_max": 4}, optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx((1 + cos(pi / 4)) / 2)
