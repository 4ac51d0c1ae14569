"""Law 1 between hosts: ranks that reduce and gather in two levels give the run of an independent plain model.

Each block of ranks believes that it is alone on its host; see tests/test_two_level.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from harness import run_world
from worlds import LLAMA, difference, engine_on, run_of, train_on, train_plainly

from megazero.comm.two_level import TwoLevelBackend
from megazero.config import ResolvedRun
from megazero.parallel_state import ParallelState, RankGrid

MODEL = LLAMA | {"tie_embeddings": True}
TOLERANCE = 1e-5


@lru_cache(maxsize=1)
def _plain() -> dict[str, Any]:
    return train_plainly(run_of(1, model=MODEL))


def _train(rank: int, runs: list[ResolvedRun], neighbours: int, two_levels: list[str]) -> list[dict[str, Any] | None]:
    parallel = runs[0].config.parallel
    grid = RankGrid(tp=parallel.tp, pp=parallel.pp, dp=runs[0].dp)
    state = ParallelState(grid, rank, timeout_seconds=60, neighbours=neighbours)
    results = []
    for run in runs:
        engine = engine_on(rank, run, state=state)
        results.append(train_on(engine, run))
        engine.sharded_model.close()
    for name in two_levels:
        axis = getattr(state, name)
        assert isinstance(axis.group.backends["cpu"], TwoLevelBackend), name
        assert any(sent for (over, _), sent in state.traffic.link_bytes.items() if over == name), name
    state.leave()
    return results


@pytest.mark.parametrize(
    ("world", "neighbours", "parallel", "stages", "two_levels"),
    [
        (4, 2, {}, (0, 1, 2, 3), ["dp"]),
        (8, 4, {"tp": 2, "pp": 2}, (1, 3), ["world"]),
        (8, 4, {"tp": 2}, (2,), ["dp", "world"]),
    ],
    ids=["dp4", "tp2 pp2 dp2", "tp2 dp4"],
)
def test_a_run_on_two_hosts_is_the_same_run(
    world: int, neighbours: int, parallel: dict[str, Any], stages: tuple[int, ...], two_levels: list[str]
) -> None:
    runs = [run_of(world, model=MODEL, parallel=parallel, zero={"stage": stage}) for stage in stages]
    wanted = _plain()
    for stage, got in zip(stages, run_world(world, _train, runs, neighbours, two_levels)[0], strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE), stage
        assert got["norm"] == pytest.approx(wanted["norm"], rel=TOLERANCE), stage
        for name, tensor in wanted["weights"].items():
            assert difference(got["weights"][name], tensor) < TOLERANCE, (stage, name)
