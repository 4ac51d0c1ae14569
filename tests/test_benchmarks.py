"""The comparison with other frameworks runs, and its figures follow from what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.contenders import floor_seconds, idle_share
from benchmarks.rows import FLOOR, KINDS, OURS, SHIPPED, measure, possible, setting_of
from benchmarks.setting import Setting
from benchmarks.worlds import Work

pytestmark = pytest.mark.slow  # starts whole runs


def test_contenders_that_do_the_same_work_are_measured_side_by_side() -> None:
    setting = setting_of(KINDS["dp"], "smoke", 2)
    lines = measure(setting, [SHIPPED, "ddp"], rounds=1, steps=1)
    assert [line.name for line in lines] == [OURS, SHIPPED, "ddp", FLOOR]
    ours, _, peer, floor = (json.loads(json.dumps(asdict(line))) for line in lines)
    assert peer["loss_difference"] < 1e-5
    assert ours["ratio"] is None
    assert peer["ratio"][0] == pytest.approx(ours["ms"][0] / peer["ms"][0])
    assert peer["over_floor"] == pytest.approx(peer["ms"][0] / floor["ms"][0])
    assert ours["tokens_per_second"] == pytest.approx(setting.tokens / ours["ms"][0] * 1e3)
    assert min(ours["state_bytes"], peer["state_bytes"], peer["loopback_bytes"], ours["metered_bytes"]) > 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 8), (4, 4)])
def test_a_pipeline_idles_for_pp_minus_1_of_its_micro_batches(schedule: str, pp: int, microbatches: int) -> None:
    setting = Setting("small", pp, pp=pp, schedule=schedule, accumulation=microbatches)
    assert idle_share(setting) == pytest.approx((pp - 1) / microbatches)


def test_zero_bubble_idles_a_third_of_1f1b() -> None:
    assert idle_share(Setting("small", 4, pp=4, schedule="zb-h1", accumulation=8)) == pytest.approx(3 / 8 / 3)


def test_a_floor_stretches_equal_work_by_its_idle_share_and_adds_the_rest() -> None:
    assert floor_seconds([Work(2.0, 0.5)] * 4, 3 / 8) == pytest.approx(2.0 * (8 + 3) / 8 + 0.5)
    assert floor_seconds([Work(3.0), Work(1.0, 0.25)], 0.5) == pytest.approx(3.0 + 0.5 * 1.0 + 0.25)


def test_a_model_has_a_layer_for_each_stage_and_a_head_for_each_part() -> None:
    assert possible(KINDS["1f1b"], "tiny", 4)
    assert not possible(KINDS["interleaved"], "tiny", 4)  # 8 stages, 4 layers
    assert not possible(KINDS["tp"], "tiny", 8)  # 4 heads
    assert not possible(KINDS["3d"], "small", 2)  # tp 2 x pp 2
