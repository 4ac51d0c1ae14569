"""Experts over ranks: who meets whom, rows that travel, and runs that equal a plain model on every shape."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import run_world

from megazero.comm.autograd import exchange_rows
from megazero.comm.collectives import all_to_all_rows
from megazero.cpu.shared_memory import HALF_BYTES, SharedMemoryBackend
from megazero.cpu.sockets import SocketBackend
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.settings import divisors

# ---------------------------------------------------------------------------------------------------------------------
# Groups


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "dp-pp-tp-cp", "pp-cp-dp-tp"])
def test_a_stage_is_blocks_of_consecutive_ranks_with_all_experts_each(order: str) -> None:
    for tp, cp, dp, pp in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2)):
        for ep in divisors(tp * cp * dp):
            grid = RankGrid(tp, cp, dp, pp, order, ep)
            for rank in range(grid.world_size):
                stage, table = grid.group_of(rank, "tp", "cp", "dp"), grid.expert_table(rank)
                assert [len(row) for row in table] == [len(stage) // ep] * ep
                blocks = [stage[start : start + ep] for start in range(0, len(stage), ep)]
                assert [tuple(column) for column in zip(*table, strict=True)] == blocks
    with pytest.raises(ValueError, match=r"ep=3 must divide tp\*cp\*dp=4"):
        RankGrid(tp=2, dp=2, ep=3)


# ---------------------------------------------------------------------------------------------------------------------
# Rows that travel

LONG = HALF_BYTES // 8 + 40  # rows of two fp32: several rounds where ranks share memory
TABLES = {  # rows that rank i sends to rank j
    "some": lambda i, j: (3 * i + 5 * j) % 4,
    "all to one, of which one rank has none": lambda i, j: 3 * i * (j == 1),
    "none": lambda i, j: 0,
    "many from one": lambda i, j: LONG * (i == 0) + j,
}


def _rows_arrive(rank: int, world: int, shares: bool) -> None:
    axis = ParallelState(RankGrid(dp=world, ep=world), rank, shares_memory=shares).ep
    for table in TABLES.values():
        counts = [[table(source, target) for target in range(world)] for source in range(world)]
        sends, receives = counts[rank], [row[rank] for row in counts]
        rows = [torch.arange(2.0 * sum(row)).view(-1, 2) + 1e5 * source for source, row in enumerate(counts)]
        mine = rows[rank].requires_grad_()
        axis.traffic.reset()
        arrived = exchange_rows(mine, sends, receives, axis)
        wanted = [one.detach().split(row)[rank] for one, row in zip(rows, counts, strict=True)]
        assert torch.equal(arrived, torch.cat(wanted))
        arrived.backward(2 * arrived.detach())
        assert mine.grad is not None
        assert torch.equal(mine.grad, 2 * mine.detach())
        kept = sends[rank]
        assert axis.traffic.by_axis() == {"ep": 8 * (sum(sends) + sum(receives) - 2 * kept)}
    assert axis.group is not None
    assert isinstance(axis.group.backends["cpu"], SharedMemoryBackend if shares else SocketBackend)


@pytest.mark.parametrize(("world", "shares"), [(2, True), (3, True), (3, False)])
def test_rows_arrive_in_rank_order_and_gradients_go_back(world: int, shares: bool) -> None:
    run_world(world, _rows_arrive, world, shares)


def test_counts_that_do_not_make_up_the_rows_are_refused_before_anything_is_sent() -> None:
    axis, rows = Axis("ep", (0, 1)), torch.zeros(3, 2)
    for sends, receives in (([1, 1], [1, 2]), ([1, 2], [1, 1]), ([3], [3])):
        with pytest.raises(ValueError, match="over ep of 2 ranks"):
            all_to_all_rows(torch.zeros(3, 2), rows, axis, sends, receives)
    assert not axis.traffic.calls
