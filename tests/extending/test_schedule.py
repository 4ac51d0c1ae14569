"""A script adds a pipeline schedule: 1F1B that runs one forward further ahead, with weight gradients apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from eight_ranks import run_with, steps_of
from test_any_shape import _assert_agrees
from worlds import train_plainly

from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.kind import ScheduleKind, alternate
from megazero.schedules.proof import program
from megazero.schedules.registry import SCHEDULES

pytestmark = pytest.mark.slow  # starts whole runs


class Eager(ScheduleKind):
    """Rank s warms up with pp - s forwards; every weight gradient follows its backward."""

    name = "eager"

    def build(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        forwards = [Action(ActionKind.FORWARD, index) for index in range(microbatches)]
        backwards = [Action(ActionKind.BACKWARD, index) for index in range(microbatches)]
        ranks = []
        for rank in range(pp):
            actions = []
            for action in alternate(forwards, backwards, min(pp - rank, microbatches)):
                actions.append(action)
                if action.kind is ActionKind.BACKWARD:
                    actions.append(Action(ActionKind.WEIGHT, action.microbatch))
            ranks.append(tuple(actions))
        return Schedule(self.name, microbatches, self.placement(pp, chunks), tuple(ranks))


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """A script says this line at its top; here the name ends with the tests of this file."""
    SCHEDULES.register("eager", Eager())
    yield
    SCHEDULES._registered.pop("eager")


def test_a_registered_schedule_gives_the_plain_models_run(tmp_path: Path) -> None:
    run = run_with(tmp_path, parallel={"schedule": "eager"})
    _assert_agrees(steps_of(run), train_plainly(run))


def test_it_is_proved_for_many_shapes() -> None:
    for pp in range(1, 6):
        for microbatches in range(1, 9):
            program(SCHEDULES["eager"].build(pp, microbatches, 1))
