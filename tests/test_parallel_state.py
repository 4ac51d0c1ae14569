"""Rank grids are arithmetic: groups partition the ranks, whatever the order, and a size-1 axis has no group."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero.parallel_state import Axis, Links, ParallelState, RankGrid, parallel_state_of
from megazero.parallel_state.axis import Traffic
from megazero.parallel_state.grid import AXES, Coordinate
from megazero.settings import divisors

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(AXES, size)]

degrees = st.integers(1, 4)
grids = st.builds(RankGrid, degrees, degrees, degrees, degrees, st.sampled_from(ORDERS))


def cube(grid: RankGrid) -> np.ndarray:
    """All ranks as an array with axes in the order of AXES, made by numpy's own index arithmetic."""
    outermost_first = grid.order.split("-")[::-1]
    ranks = np.arange(grid.world_size).reshape([getattr(grid, axis) for axis in outermost_first])
    return ranks.transpose([outermost_first.index(axis) for axis in AXES])


def groups_of(grid: RankGrid, *axes: str) -> list[tuple[int, ...]]:
    """Every group over `axes`, ordered by first rank."""
    groups: dict[int, tuple[int, ...]] = {}
    for rank in range(grid.world_size):
        if rank not in groups:
            group = grid.group_of(rank, *axes)
            groups |= dict.fromkeys(group, group)
    return list(dict.fromkeys(groups.values()))


def slices(grid: RankGrid, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The groups over `axes`, by moving those axes of the cube last."""
    others = [index for index, axis in enumerate(AXES) if axis not in axes]
    moved = cube(grid).transpose(others + [AXES.index(axis) for axis in axes])
    flat = moved.reshape(-1, int(np.prod([getattr(grid, axis) for axis in axes])))
    return sorted(tuple(sorted(row)) for row in flat.tolist())


# ---- RankGrid


@settings(deadline=None)
@given(grid=grids)
def test_coordinates_and_ranks_are_inverse(grid):
    ranks = cube(grid)
    for tp, cp, dp, pp in np.ndindex(ranks.shape):
        at = Coordinate(tp, cp, dp, pp)
        assert grid.rank(at) == ranks[tp, cp, dp, pp]
        assert grid.coordinate(int(ranks[tp, cp, dp, pp])) == at


@settings(deadline=None)
@given(grid=grids, axes=st.sampled_from(SUBSETS))
def test_groups_of_any_axes_partition_the_ranks(grid, axes):
    groups = groups_of(grid, *axes)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    assert groups == slices(grid, axes)
    assert all(grid.group_of(rank, *axes) == group for group in groups for rank in group)


def test_a_grid_of_16384_ranks_lists_all_its_groups_in_a_second():
    grid = RankGrid(tp=8, cp=2, dp=64, pp=16)
    start = time.process_time()
    groups = {axis: groups_of(grid, axis) for axis in AXES}
    assert time.process_time() - start < 1
    assert not dist.is_initialized()
    assert {axis: len(listed) for axis, listed in groups.items()} == {"tp": 2048, "cp": 8192, "dp": 256, "pp": 1024}


@settings(deadline=None)
@given(grid=grids, block=st.integers(1, 40))
def test_an_axis_lies_within_blocks_of_ranks_if_each_of_its_groups_does(grid, block):
    for axis in AXES:
        groups = groups_of(grid, axis)
        assert grid.lies_within(axis, block) == all(group[0] // block == group[-1] // block for group in groups)
        for size in divisors(grid.size(axis)):
            cut = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
            inside = all(group[0] // block == group[-1] // block for group in cut)
            assert grid.lies_within(axis, block, size) == inside


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("degree", [0, -3])
def test_a_degree_below_one_is_an_error_with_the_number(axis, degree):
    with pytest.raises(ValueError, match=rf"{axis}={degree} must be at least 1"):
        RankGrid(**{axis: degree})


@pytest.mark.parametrize("order", ["", "tp-cp-dp", "tp-tp-dp-pp"])
def test_an_order_that_is_no_permutation_is_an_error_that_quotes_it(order):
    with pytest.raises(ValueError, match=rf"order='{order}' must name each of tp, cp, dp, pp once"):
        RankGrid(order=order)


@pytest.mark.parametrize("rank", [-1, 12, 1000])
def test_a_rank_outside_the_grid_is_an_error_with_both_numbers(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is outside the grid of 12 ranks"):
        RankGrid(tp=2, dp=3, pp=2).coordinate(rank)


# ---- ParallelState


@pytest.fixture
def started():
    """Starts a world of pretended ranks in this process."""

    def start(rank: int, world: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def axes_of(state: ParallelState) -> list[Axis]:
    cut = [state.cp_ulysses, state.cp_ring, state.dp_cp, state.shard, state.replica]
    return [state.tp, state.cp, state.dp, state.pp, state.model, state.world, *cut]


def test_one_rank_alone_needs_no_process_group():
    state = ParallelState(RankGrid())
    assert [(axis.size, axis.index, axis.group) for axis in axes_of(state)] == [(1, 0, None)] * 11
    assert not dist.is_initialized()


def test_a_state_on_another_device_than_the_current_one_is_an_error_with_both(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in (None, torch.device("cuda"), torch.device("cuda", 1)):
        ParallelState(RankGrid(), links=Links(device))
    assert ParallelState(RankGrid(), links=Links(torch.device("cuda"))).device == torch.device(
        "cuda:1"
    )  # as tensors say it
    with pytest.raises(ValueError, match=r"cuda:0.* current device is cuda:1.* torch\.cuda\.set_device\(0\)"):
        ParallelState(RankGrid(), links=Links(torch.device("cuda", 0)))


@pytest.mark.parametrize("rank", range(12))
def test_an_axis_has_a_group_exactly_when_it_has_peers(started, rank):
    started(rank, 12)
    grid = RankGrid(tp=2, dp=2, pp=3)
    state = ParallelState(grid, rank)
    for axis in axes_of(state):
        assert axis.ranks[axis.index] == rank
        assert (axis.group is None) == (axis.size == 1)
        if axis.group is not None and axis is not state.model:
            assert dist.get_process_group_ranks(axis.process_group) == list(axis.ranks)
            assert axis.host_group is axis.process_group
    assert state.model.host_group is dist.group.WORLD
    assert (state.tp.ranks, state.dp.ranks, state.pp.ranks) == tuple(grid.group_of(rank, a) for a in ("tp", "dp", "pp"))
    assert state.cp.size == 1
    assert state.dp_cp is state.shard is state.dp
    assert state.model.ranks == tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
    first_and_last = state.among_stages([0, 2], "embedding")
    assert first_and_last.ranks == ((rank % 4, rank % 4 + 8) if rank // 4 != 1 else (rank,))


# (grid, Ulysses degree, shard group size)
CUTS = [
    (RankGrid(cp=6), 2, 0),
    (RankGrid(cp=4), 4, 2),
    (RankGrid(cp=3, dp=2), 1, 2),
    (RankGrid(tp=2, cp=4, dp=2), 2, 4),
    (RankGrid(tp=2, cp=2, dp=3, pp=2, order="pp-dp-cp-tp"), 2, 2),
    (RankGrid(cp=6, dp=2, pp=2, order="dp-pp-tp-cp"), 3, 6),
]


@pytest.mark.parametrize(("grid", "ulysses", "shards"), CUTS)
def test_cp_is_cut_into_ulysses_and_ring_and_dp_cp_into_shard_and_replica(started, grid, ulysses, shards):
    """Against an enumeration of every coordinate: cp index = ring index * u + ulysses index."""
    ranks, cut = cube(grid), shards or grid.dp * grid.cp
    for tp, cp, dp, pp in np.ndindex(ranks.shape):
        rank = int(ranks[tp, cp, dp, pp])
        started(rank, grid.world_size)
        state = ParallelState(replace(grid, cp_ulysses=ulysses, shard_group_size=shards), rank)
        same = sorted(ranks[tp, :, :, pp].flatten().tolist())  # the ranks with these parameters, nearest first
        place = same.index(rank)
        expected = {
            "cp_ulysses": [c for c in range(grid.cp) if c // ulysses == cp // ulysses],
            "cp_ring": [c for c in range(grid.cp) if c % ulysses == cp % ulysses],
            "dp_cp": same,
            "shard": [other for at, other in enumerate(same) if at // cut == place // cut],
            "replica": [other for at, other in enumerate(same) if at % cut == place % cut],
        }
        for name in ("cp_ulysses", "cp_ring"):
            expected[name] = [int(ranks[tp, c, dp, pp]) for c in expected[name]]
        for name, wanted in expected.items():
            axis = getattr(state, name)
            assert list(axis.ranks) == wanted, name
            assert axis.ranks[axis.index] == rank
            assert (axis.group is None) == (axis.size == 1)
            assert axis.traffic is state.traffic
        assert (state.cp_ulysses.name, state.cp_ring.name, state.dp_cp.name) == ("cp", "cp", "dp_cp")
        assert state.shard is state.dp_cp or shards
        dist.destroy_process_group()


@pytest.mark.parametrize(("grid", "ulysses", "shards"), CUTS)
def test_context_parallelism_makes_no_communicator_that_nothing_is_sent_over(started, grid, ulysses, shards):
    """Gradients are summed over dp_cp, attention exchanges over the parts of cp; on a GPU every further one takes memory."""
    started(0, grid.world_size)
    state = ParallelState(replace(grid, cp_ulysses=ulysses, shard_group_size=shards), 0)
    assert (state.dp.group, state.cp.group) == (None, None)
    assert (state.dp.size, state.cp.size, state.dp.index, state.cp.index) == (grid.dp, grid.cp, 0, 0)
    used = (state.tp, state.pp, state.pp_up, state.model, state.world)
    cut = (state.cp_ulysses, state.cp_ring, state.dp_cp, state.shard, state.replica)
    assert {*state.groups.values()} == {axis.group for axis in (*used, *cut)} - {None}


@pytest.mark.parametrize("ulysses", [0, -1, 3, 8])
def test_a_ulysses_degree_that_does_not_divide_cp_is_an_error_with_both_numbers(started, ulysses):
    started(0, 4)
    with pytest.raises(ValueError, match=f"cp_ulysses={ulysses} must divide cp=4"):
        ParallelState(RankGrid(cp=4, cp_ulysses=ulysses))


def test_a_shard_group_that_does_not_divide_the_ranks_with_the_same_parameters_is_an_error(started):
    started(0, 6)
    with pytest.raises(ValueError, match=r"shard_group_size=4 must divide dp\*cp=2\*3=6"):
        ParallelState(RankGrid(cp=3, dp=2, shard_group_size=4))
    with pytest.raises(ValueError, match="shard_group_size=4 must divide dp=6"):
        ParallelState(RankGrid(dp=6, shard_group_size=4))


def test_states_of_another_ulysses_degree_have_groups_of_their_own(started):
    started(1, 4)
    first = parallel_state_of(RankGrid(cp=4), torch.device("cpu"), cp_ulysses=2)
    assert parallel_state_of(RankGrid(cp=4), torch.device("cpu"), cp_ulysses=2).groups is first.groups
    other = parallel_state_of(RankGrid(cp=4), torch.device("cpu"), cp_ulysses=4)
    assert other.groups is not first.groups
    assert (first.cp_ulysses.size, other.cp_ulysses.size) == (2, 4)


def test_equal_sets_of_ranks_share_one_group(started):
    started(1, 4)
    state = ParallelState(RankGrid(dp=2, pp=2), 1)
    first_and_last = state.among_stages([0, 1])
    assert state.pp.ranks == first_and_last.ranks
    assert state.pp.group is first_and_last.group
    assert state.world.process_group is dist.group.WORLD


@pytest.mark.parametrize(("world", "parts"), [(16, []), (32, [2, 8, 2])])
def test_a_world_of_more_ranks_than_may_share_memory_is_the_product_of_its_axes(started, world, parts):
    started(5, world)
    state = ParallelState(RankGrid(tp=2, cp=2, dp=world // 8, pp=2), 5)
    assert [axis.size for axis in state.world.factors] == parts
    assert {axis.name for axis in state.world.factors} <= {"world"}
    assert state.world.host_group is dist.group.WORLD
    if parts:
        with pytest.raises(RuntimeError, match="left the process group of world, or never joined one"):
            _ = state.world.process_group


@pytest.mark.parametrize("running", [1, 4])
def test_a_grid_of_another_size_than_the_world_is_an_error_with_both_numbers(started, running):
    if running > 1:
        started(0, running)
    with pytest.raises(ValueError, match=f"6 ranks are described but {running} were started"):
        ParallelState(RankGrid(tp=2, dp=3))


def test_traffic_of_all_axes_of_a_rank_is_counted_in_one_place():
    state = ParallelState(RankGrid())
    assert all(axis.traffic is state.traffic for axis in axes_of(state))
    traffic = Traffic()
    for axis, operation, sent in (("dp", "sum", 3), ("dp", "gather", 5), ("tp", "sum", 7), ("dp", "sum", 11)):
        traffic.add(axis, operation, sent)
    assert traffic.by_axis() == {"dp": 19, "tp": 7}
    assert (traffic.sent_bytes["dp", "sum"], traffic.calls["dp", "sum"]) == (14, 2)
    traffic.reset()
    assert traffic.by_axis() == {}
