"""The loss scale after any sequence of overflows."""

from __future__ import annotations

import json
from itertools import pairwise
from math import log2
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.config.schema import PrecisionConfig
from megazero.zero.loss_scaler import LossScaleError, LossScaler


def _scaler(**keys: Any) -> LossScaler:
    """`keys` of [precision]; `window` is short for `loss_scale_window`."""
    defaults: dict[str, Any] = {"initial_scale_power": 3, "window": 3, "hysteresis": 2}
    given = defaults | keys
    return LossScaler(PrecisionConfig(loss_scale_window=given.pop("window"), **given))


def _trace(scaler: LossScaler, steps: str) -> list[float]:
    """Scale in use during each step and after the last; `!` is an overflow."""
    scales = [scaler.scale]
    for step in steps:
        scaler.update(step == "!")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("steps", "keys", "scales"),
    [
        ("......", {}, [8, 8, 8, 16, 16, 16, 32]),
        ("!!!", {}, [8, 8, 4, 2]),
        (".....!.!!...", {}, [8, 8, 8, 16, 16, 16, 16, 16, 8, 4, 4, 4, 8]),
        ("!.!.!", {}, [8, 8, 8, 4, 4, 2]),
        ("!.!.!", {"consecutive_hysteresis": True}, [8, 8, 8, 8, 8, 8]),
        ("!!.!!", {"consecutive_hysteresis": True}, [8, 8, 4, 4, 4, 2]),
        ("!...!!", {}, [8, 8, 8, 8, 16, 16, 8]),
        ("!!", {"hysteresis": 1}, [8, 4, 2]),
        ("!!!!", {"hysteresis": 3}, [8, 8, 8, 4, 2]),
        ("..!..!...", {"hysteresis": 1}, [8, 8, 8, 4, 4, 4, 2, 2, 2, 4]),
        ("!!", {"hysteresis": 1, "min_loss_scale": 3}, [8, 4, 3]),
        ("...", {"window": 1}, [8, 16, 32, 64]),
    ],
)
def test_the_scale_follows_the_overflows(steps: str, keys: dict[str, Any], scales: list[float]) -> None:
    scaler = _scaler(**keys)
    assert _trace(scaler, steps) == scales
    assert scaler.skipped_steps == steps.count("!")


def test_an_overflow_at_the_smallest_scale_is_an_error_that_says_what_to_do() -> None:
    scaler = _scaler(min_loss_scale=4)
    assert _trace(scaler, "!!") == [8, 8, 4]
    with pytest.raises(LossScaleError, match=r"scale 4.*min_loss_scale.*3 skipped steps.*learning rate"):
        scaler.update(True)


def test_hysteresis_is_tolerated_at_the_smallest_scale_too() -> None:
    scaler = _scaler(initial_scale_power=0)
    scaler.update(True)
    with pytest.raises(LossScaleError):
        scaler.update(True)


def test_a_constant_scale_stays_and_counts_what_is_skipped() -> None:
    scaler = _scaler(loss_scale=128.0)
    assert set(_trace(scaler, "!!!!......!")) == {128.0}
    assert scaler.skipped_steps == 5
    assert not scaler.dynamic


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"loss_scale": -1}, "loss_scale"),
        ({"window": 0}, "loss_scale_window"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
    ],
)
def test_numbers_that_can_not_be_meant_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _scaler(**keys)


_KEYS = st.fixed_dictionaries(
    {
        "initial_scale_power": st.integers(2, 20),
        "window": st.integers(1, 5),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "min_loss_scale": st.sampled_from([0.25, 1, 2, 4]),
    }
)
_STEPS = st.text("..!", max_size=60)


def _trace_to_the_end(scaler: LossScaler, steps: str) -> list[float]:
    """As `_trace`, up to the overflow that is an error."""
    scales = [scaler.scale]
    for step in steps:
        try:
            scaler.update(step == "!")
        except LossScaleError:
            return [*scales, 0.0]
        scales.append(scaler.scale)
    return scales


@given(_KEYS, _STEPS)
def test_the_scale_is_a_power_of_two_and_never_below_its_minimum(keys: dict[str, Any], steps: str) -> None:
    scaler = _scaler(**keys)
    scales = _trace_to_the_end(scaler, steps)
    for before, after in pairwise(scales):
        if after:
            assert log2(after).is_integer()
            assert after >= keys["min_loss_scale"]
            assert after / before in (0.5, 1, 2)
        else:
            assert before == keys["min_loss_scale"]


@given(_KEYS, _STEPS, _STEPS)
def test_a_saved_scaler_goes_on_as_if_it_had_never_stopped(keys: dict[str, Any], before: str, after: str) -> None:
    scaler = _scaler(**keys)
    _trace_to_the_end(scaler, before)
    again = _scaler(**keys)
    again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert _trace_to_the_end(again, after) == _trace_to_the_end(scaler, after)
    assert again.state_dict() == scaler.state_dict()


def test_new_limits_count_before_saved_numbers() -> None:
    scaler = _scaler(window=10)
    _trace(scaler, "!!.......")
    tighter = _scaler(window=2, hysteresis=1, min_loss_scale=8)
    tighter.load_state_dict(scaler.state_dict())
    assert _trace(tighter, "..") == [8, 16, 16]
    constant = _scaler(loss_scale=128)
    constant.load_state_dict(scaler.state_dict())
    assert (constant.scale, constant.skipped_steps) == (128, 2)
