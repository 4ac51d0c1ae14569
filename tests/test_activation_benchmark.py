"""The comparison of activation policies counts bytes and compares points as its tables say."""

from __future__ import annotations

from math import inf

import pytest
import torch

from benchmarks.activations import Curve, Point, _check, contenders, table
from megazero.layers import linear

LENGTH, HIDDEN, INNER, HEADS, BYTES = 8, 512, 1536, 8, 4


def curve(**points: tuple[int, float]) -> Curve:
    """Of kept bytes and milliseconds; names of peers begin with `their`."""
    named = {name.replace("their", "their, "): figures for name, figures in points.items()}
    made = {name: Point(name, "none", kept, ms, ms, ms) for name, (kept, ms) in named.items()}
    return Curve(256, "fp32", 4, 3, made)


def test_a_policy_is_ahead_if_it_keeps_no_more_and_takes_no_more() -> None:
    ours = {"none": (100, 10.0), "some": (60, 11.0), "most": (20, 14.0)}
    found = curve(**ours, their1=(60, 11.5), their2=(50, 13.0), their3=(20, 15.0))
    ahead = {name: found.ahead(found.points[f"their, {name}"]) for name in "123"}
    assert {name: None if one is None else one.name for name, one in ahead.items()} == {
        "1": "some",
        "2": None,
        "3": "most",
    }


def test_freed_bytes_are_divided_by_added_time() -> None:
    found = curve(none=(100, 10.0), some=(60, 12.0), quick=(90, 9.0), more=(110, 11.0))
    rates = [found.rate(found.points[name], "none") for name in ("some", "quick", "more")]
    assert rates == [pytest.approx(20.0), inf, 0.0]
    assert len(table(found).splitlines()) == 2 + len(found.points)


def test_contenders_give_the_same_gradients_and_keep_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "cpu_product", lambda: None)  # torch's own operations are what the set names
    x, slope = torch.randn(2, LENGTH, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    kept = _check(contenders(LENGTH, "fp32", 1), x, slope, "fp32")
    hidden, inner = (
        LENGTH * HIDDEN * BYTES,
        LENGTH * INNER * BYTES,
    )  # bytes of one tensor; the block's input is not counted
    result = hidden  # of the forward
    assert kept["block"] == result
    assert kept["norms+activation"] - kept["norms+activation+residual"] == hidden
    assert kept["none"] - kept["activation"] == inner
    # q | k | v, attention's output, lse, gate | up; its second and fourth products are computed again
    assert kept["our blocks, selective ops"] == result + 4 * hidden + LENGTH * HEADS * BYTES + 2 * inner
