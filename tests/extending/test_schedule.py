"""The pipeline schedule of docs/extending.md: 1F1B that runs one forward further ahead, with weight gradients apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from eight_ranks import registered, run_with, steps_of
from test_any_shape import _assert_agrees
from worlds import train_plainly

from megazero.schedules.proof import program
from megazero.schedules.registry import SCHEDULES

pytestmark = pytest.mark.slow  # starts whole runs


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered(SCHEDULES, "eager"):
        yield


def test_a_registered_schedule_gives_the_plain_models_run(tmp_path: Path) -> None:
    run = run_with(tmp_path, parallel={"schedule": "eager"})
    _assert_agrees(steps_of(run), train_plainly(run))


def test_it_is_proved_for_many_shapes() -> None:
    for pp in range(1, 6):
        for microbatches in range(1, 9):
            program(SCHEDULES["eager"].build(pp, microbatches, 1))
