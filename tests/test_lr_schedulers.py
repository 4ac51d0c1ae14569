"""Learning rate schedules beside DeepSpeed's own classes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from math import cos, pi
from typing import Any

import pytest
import torch
from harness import run_world

from megazero.deepspeed.lr_schedulers import SCHEDULES, make_lr_scheduler


@dataclass
class _Groups:
    """All that a schedule needs of an optimizer: two groups with rates of their own."""

    param_groups: list[dict[str, Any]] = field(
        default_factory=lambda: [{"lr": 0.4, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.9, 0.999)}]
    )

    def lrs(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


LINEAR = {"warmup_type": "linear"}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": [0.5, 0.7], "cycle_first_step_size": 4}
BESIDE_DEEPSPEED: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 3}),
    ("WarmupLR", {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [1.0, 0.1], "warmup_num_steps": 4} | LINEAR),
    ("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 1} | LINEAR),
    ("WarmupDecayLR", {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_max_lr": 1.0}),
    ("WarmupDecayLR", {"warmup_num_steps": 7, "total_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 8, "warmup_min_ratio": 0.5, "warmup_num_steps": 3, "cos_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 2} | LINEAR),
    ("OneCycle", CYCLE | {"decay_step_size": 2, "decay_lr_rate": 1.0, "decay_mom_rate": -0.1}),
    ("OneCycle", CYCLE | {"cycle_second_step_size": 6, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3}),
    ("OneCycle", CYCLE | {"cycle_min_mom": 0.7, "cycle_max_mom": [0.9, 0.999]}),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 2}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": True}),
]


def _steps(make: Callable[[str, dict[str, Any], Any], Any]) -> list[list[float]]:
    """The rates and momenta of two groups after each call of `step`."""
    found = []
    for name, params in BESIDE_DEEPSPEED:
        groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.4, 0.2)]
        optimizer = torch.optim.AdamW(groups)  # type: ignore[arg-type]
        schedule = make(name, params, optimizer)
        for _ in range(14):
            schedule.step()
            assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
            found.append([value for group in optimizer.param_groups for value in (group["lr"], group["betas"][0])])
    return found


def _beside_deepspeed(rank: int) -> tuple[list[list[float]], list[list[float]]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    theirs = import_module("deepspeed.runtime.lr_schedules")
    return _steps(make_lr_scheduler), _steps(lambda name, params, optimizer: getattr(theirs, name)(optimizer, **params))


def test_every_schedule_has_deepspeeds_rates_and_momenta_from_the_first_step_on() -> None:
    ((ours, theirs),) = run_world(1, _beside_deepspeed)  # imported in the rank alone
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(wanted)


def test_before_the_first_step_groups_have_the_value_that_the_schedule_starts_from() -> None:
    groups = _Groups()
    make_lr_scheduler("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_min_ratio": 0.5}, groups)
    assert groups.lrs() == [0.2, 0.1]
    make_lr_scheduler("OneCycle", CYCLE | {"cycle_max_mom": 0.99}, groups)
    assert groups.lrs() == [0.1, 0.1]
    assert groups.param_groups[1]["betas"] == (0.99, 0.999)
    with pytest.warns(UserWarning, match="before its peak"):
        make_lr_scheduler("WarmupDecayLR", {"warmup_num_steps": 7, "total_num_steps": 5}, groups)


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
