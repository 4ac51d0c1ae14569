"""A dry run finds what would let a real start fail or hang: each planted defect is told, with ranks and operations."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from worlds import LLAMA, run_of

from megazero.comm.collectives import all_reduce, gather_objects
from megazero.config import ResolvedRun
from megazero.engine import Engine, initialize
from megazero.layers.counter_rng import normal
from megazero.parallel_state import RankGrid
from megazero.plan import dry_run as dry_runs
from megazero.plan.dry_run import build_engine, dry_run, some_ranks
from megazero.plan.fake_ranks import FakeState
from megazero.plan.text import dry_run_text
from megazero.schedules.action import MessageAction, Op

SMALL = LLAMA | {"num_layers": 2}
Build: TypeAlias = Callable[[ResolvedRun, FakeState], Engine]


def _run(world: int, parallel: dict[str, Any], **sections: dict[str, Any]) -> ResolvedRun:
    return run_of(world, model=SMALL, parallel=parallel, training={"accumulation": parallel.get("pp", 1)}, **sections)


def _problem(run: ResolvedRun, build: Build = build_engine) -> str:
    with patch.object(dry_runs, "build_engine", build):
        found = dry_run(run, per_node=run.world_size, on_cuda=False)
    assert bool(found.problems) != bool(set(found.ranks) == set(found.steppers))
    said = dry_run_text(found, None)
    assert all(problem in said for problem in found.problems)
    assert f"{len(found.ranks)} of {run.world_size} ranks ran a step" in said
    if 0 not in found.ranks:
        assert f"rank 0 of {run.world_size} did not end its step" in dry_run_text(found, 0)
    return "\n".join(found.problems)


def _changed(change: Callable[[Engine, FakeState], object]) -> Build:
    """The engine, but changed."""

    def build(run: ResolvedRun, state: FakeState) -> Engine:
        engine = build_engine(run, state)
        change(engine, state)
        return engine

    return build


def test_a_dry_run_leaves_no_tensor_behind() -> None:
    """Neither in engines that nobody holds any more, nor in what the process keeps for later runs, which may be real."""

    def alive() -> list[FakeTensor]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is FakeTensor]

    before = alive()  # what torch.compile has kept
    assert _problem(_run(2, {}), lambda run, state: initialize(run.config, state)) == ""
    assert len(alive()) == len(before)
    assert type(normal(1, torch.arange(2))) is torch.Tensor


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}])
def test_a_run_that_works_has_no_problem(parallel: dict[str, int]) -> None:
    assert _problem(_run(4, parallel)) == ""


def test_one_more_collective_of_one_rank_is_told() -> None:
    def change(engine: Engine, state: FakeState) -> None:
        finish = engine.sharded_model.finish_gradients

        def more() -> None:
            all_reduce(next(iter(engine.sharded_model.parameters.buckets)).gradient, state.dp).wait()
            finish()

        if state.rank == 1:
            engine.sharded_model.finish_gradients = more  # type: ignore[method-assign]

    problem = _problem(_run(2, {}), _changed(change))
    assert re.search(r"starts all_reduce .* of ranks \(0, 1\), where rank \d starts all_reduce", problem)


def test_collectives_of_which_some_ranks_leave_one_out_are_told() -> None:
    """`any` of a generator ends at the first that is true: ranks 2 and 3 alone come to the second."""

    def change(_: Engine, state: FakeState) -> None:
        any(gather_objects(state.rank, axis)[0] == 0 for axis in (state.tp, state.dp))

    problem = _problem(_run(4, {"tp": 2}), _changed(change))
    assert "no rank can go on" in problem
    assert "ranks 2, 3 wait for gather_objects over dp" in problem


def test_ranks_with_other_bucket_sizes_are_told() -> None:
    run, other = (_run(2, {}, zero={"stage": 2, "bucket_bytes": size}) for size in (65536, 4096))
    problem = _problem(run, lambda own, state: build_engine(other if state.rank == 1 else own, state))
    assert re.search(r"rank [01] starts \w+ [\d,]+ fp32 .* over dp .* where rank [01] starts \w+ [\d,]+ fp32", problem)


def test_groups_made_in_another_order_are_told() -> None:
    def change(_: Engine, state: FakeState) -> None:
        axes = [state.tp, state.dp]
        for axis in reversed(axes) if state.rank == 3 else axes:
            state.with_own_group(axis, "more")

    problem = _problem(_run(4, {"tp": 2}), _changed(change))
    assert "its group number" in problem


def test_a_message_that_is_never_sent_is_told_with_who_waits_for_it() -> None:
    def change(engine: Engine, state: FakeState) -> None:
        executor_of = engine._executor_of

        def without_sends(*args: Any, **more: Any) -> Any:
            executor = executor_of(*args, **more)
            steps = (s for s in executor._plan.steps if not (isinstance(s, MessageAction) and s.op is Op.SEND))
            executor._plan = replace(executor._plan, steps=tuple(steps))
            return executor

        if state.rank == 0:
            engine._executor_of = without_sends  # type: ignore[method-assign]

    problem = _problem(_run(2, {"pp": 2}), _changed(change))
    assert "rank 1 waits for a message from rank 0 to rank 1" in problem


def test_of_a_large_world_every_stage_and_the_ends_of_every_axis_are_compared() -> None:
    grid = RankGrid(tp=8, cp=16, dp=8, pp=16)
    found = [grid.coordinate(rank) for rank in some_ranks(grid)]
    assert {at.pp for at in found} == set(range(16))
    assert {at.tp for at in found} == {0, 1, 7}
    assert {at.cp for at in found} == {0, 1, 15}
    assert {at.dp for at in found} == {0, 1, 7}
    assert len(found) == 16 + 2 * 3


def test_any_rank_of_a_large_world_is_one_program() -> None:
    """tp 2 x cp 16 x dp 8 x pp 2 = 512 ranks: one runs, those of its pipeline are built beside it."""
    run = run_of(512, model=SMALL, parallel={"pp": 2, "tp": 2, "cp": 16}, training={"accumulation": 1})
    found = dry_run(run, per_node=8, rank=300)
    assert found.problems == ()
    assert found.simulated == (300 - 256, 300)
    assert list(found.ranks) == [300]
    assert [one.operation for one in found.ranks[300].step if one.axis == "pp"] == ["send_recv"] * 2
    said = dry_run_text(found, 300)
    assert "\ngroup    tp: 2 ranks, 300, 301\n" in said
    assert "\ngroup    pp: 2 ranks, 44, 300\n" in said
