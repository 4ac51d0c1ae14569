"""Objects go along a tree: every rank has few neighbours in it, and all ranks learn the same list, in rank order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_world

from megazero.comm.agreement import agree
from megazero.comm.collectives import all_reduce, from_first, gather_objects, numbers_of
from megazero.comm.messages import children, parent
from megazero.parallel_state import Links, ParallelState, RankGrid


@pytest.mark.parametrize("size", [*range(1, 34), 1000, 16384])
def test_a_tree_reaches_every_rank_once_and_nobody_has_more_than_log2_neighbours(size: int) -> None:
    levels = math.ceil(math.log2(size))
    first, depth = {0: 0}, {0: 0}
    for index in range(size):
        below = children(index, size)
        assert len(below) <= levels
        for child in below:
            assert parent(child) == index
            first[child], depth[child] = index, depth[index] + 1
    assert sorted(first) == list(range(size))
    assert max(depth.values()) <= levels


def _objects(rank: int) -> dict[str, Any]:
    state = ParallelState(RankGrid(tp=3, pp=2), rank, Links(timeout_seconds=60))
    found: dict[str, Any] = {"ranks": gather_objects(rank, state.world), "stage": gather_objects(rank, state.model)}
    found["long"] = [len(one) for one in gather_objects("x" * (1 + rank * 100_000), state.world)]
    found["first"] = from_first({"of": rank}, state.world), from_first(rank, state.pp)
    found["agreed"] = agree(lambda: rank, state.world, ValueError)
    try:
        agree(lambda: [rank][rank % 4], state.world, ValueError)
    except ValueError as error:
        found["refused"] = str(error)
    return found


def test_every_rank_learns_the_same_of_all_ranks_of_its_axis() -> None:
    for rank, found in enumerate(run_world(6, _objects)):
        assert found == {
            "ranks": list(range(6)),
            "stage": [0, 1, 2] if rank < 3 else [3, 4, 5],
            "long": [1 + other * 100_000 for other in range(6)],
            "first": ({"of": 0}, rank % 3),
            "agreed": rank,
            "refused": "list index out of range",
        }


def _sums(rank: int) -> dict[str, Any]:
    grid, given = RankGrid(tp=2, cp=2, pp=2), torch.arange(5.0, dtype=torch.float64) * (rank + 1)
    found: dict[str, Any] = {}
    for name, shares_memory in (("together", True), ("in turn", False)):
        state = ParallelState(grid, rank, Links(timeout_seconds=60, shares_memory=shares_memory))
        total, most = given.clone(), given.clone()
        all_reduce(total, state.world).wait()
        all_reduce(most, state.world, "max").wait()
        found[name] = total.tolist(), numbers_of(most, state.world)
        sent = {axis for axis, _ in state.traffic.sent_bytes if axis != "cp"}
        found[f"parts {name}"] = [axis.size for axis in state.world.factors], sent
    return found


def test_a_sum_over_the_world_goes_over_its_axes_in_turn_where_no_memory_is_shared() -> None:
    for found in run_world(8, _sums):
        expected = [36.0 * i for i in range(5)], [8.0 * i for i in range(5)]
        assert found["together"] == found["in turn"] == expected
        assert found["parts together"] == ([], {"world"})
        assert found["parts in turn"] == ([2, 2, 2], {"world"})


def _stage(rank: int) -> str:
    state = ParallelState(RankGrid(tp=2, pp=2), rank, Links(timeout_seconds=60, shares_memory=False))
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.zeros(1), group=state.model.process_group)
    return str(caught.value)


def test_the_ranks_of_a_stage_have_messages_and_no_communicator() -> None:
    assert all("process group of stage" in text for text in run_world(4, _stage))
