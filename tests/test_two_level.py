"""Collectives in two levels: their results beside those in one, beside the computation, and how they end.

Ranks of one machine stand for those of several hosts: each block of `local_world_size` believes that it is alone on its own.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_law import assert_exact, leave, values
from harness import run_world, start_program
from torch import Tensor

from benchmarks.hosts_net import NoHostsError, network_of
from benchmarks.worlds import Given, World
from megazero.comm.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    arriving_elements,
    exchange,
    reduce_scatter,
)
from megazero.comm.messages import LostPeerError
from megazero.cpu.shared_memory import SharedMemoryBackend
from megazero.cpu.sockets import SocketBackend
from megazero.cpu.two_level import TwoLevelBackend
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid

SHAPES = [(4, 2), (6, 2), (8, 4)]  # ranks, and of them on each host
LONG = 5 * 65_536 + 40  # fp32 elements: more pieces than travel at once, and the last one short
LENGTHS = (0, 1, 7, 4_097, LONG)


def _axis(
    rank: int, world: int, local_world_size: int = 2, *, shares: bool = True, timeout_seconds: float = 60
) -> Axis:
    grid = RankGrid(dp=world)
    return ParallelState(
        grid, rank, Links(timeout_seconds=timeout_seconds, local_world_size=local_world_size, shares_memory=shares)
    ).dp


def _backend(axis: Axis) -> Any:
    assert axis.group is not None
    return axis.group.backends["cpu"]


# ---------------------------------------------------------------------------------------------------------------------
# Results


def _every_collective(rank: int, world: int, local_world_size: int) -> None:
    axis = _axis(rank, world, local_world_size)
    assert arriving_elements(64, axis) == 0
    assert isinstance(_backend(axis), TwoLevelBackend)
    assert_exact(axis, [*itertools.product((torch.float32,), LENGTHS), (torch.bfloat16, 4_097), (torch.int64, 7)])


@pytest.mark.parametrize(("world", "local_world_size"), SHAPES)
def test_collectives_are_exact(world: int, local_world_size: int) -> None:
    run_world(world, _every_collective, world, local_world_size)


def _errors_of_a_sum(rank: int, world: int, dtype: torch.dtype) -> tuple[dict[bool, float], bytes]:
    """Mean error of a sum over ranks by whether it has two levels, and the bits of the one that has."""
    every = [torch.randn(100_003, generator=torch.Generator().manual_seed(one)).to(dtype) for one in range(world)]
    exact = torch.stack(every).double().sum(0)
    errors, bits = {}, b""
    for shares in (False, True):
        axis, total = _axis(rank, world, world // 2, shares=shares), every[rank].clone()
        all_reduce(total, axis).wait()
        errors[shares] = float((total.double() - exact).abs().mean() / exact.abs().mean())
        bits = total.view(torch.uint8).numpy().tobytes()
    return errors, bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_as_close_as_a_flat_one_and_the_same_on_every_rank(dtype: torch.dtype) -> None:
    found = run_world(8, _errors_of_a_sum, 8, dtype)
    errors = found[0][0]
    assert errors[True] <= errors[False]
    assert errors[True] < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert len({bits for _, bits in found}) == 1


def _random_sequence(rank: int, seed: int) -> None:
    """Operations on three axes, two of which share the first level's kind of memory, started and waited for at random.

    Ranks agree on the order of reductions and on that of gathers over an axis, and on nothing else.
    """
    state = ParallelState(RankGrid(tp=2, dp=2), rank, Links(timeout_seconds=60, local_world_size=2))
    for axis in (state.world, state.tp, state.dp):  # all ranks choose what carries an axis at one point
        all_reduce(torch.zeros(1), axis).wait()
    own, shared = random.Random(seed * 100 + rank), random.Random(seed)
    for _ in range(6):
        started: list[tuple[Pending, Tensor, Tensor]] = []
        queues: list[list[Callable[[], tuple[Pending, Tensor, Tensor]]]] = []
        for axis in (state.world, state.tp, state.dp):
            every = [values(one + shared.randrange(9), shared.choice(LENGTHS), torch.float32) for one in axis.ranks]
            every = [one[: len(every[0])] if len(one) >= len(every[0]) else every[0] for one in every]
            count = shared.randrange(1, 4)
            queues.append([lambda axis=axis, every=every: _started_sum(axis, every) for _ in range(count)])
            queues.append([lambda axis=axis, every=every: _started_gather(axis, every) for _ in range(count)])
        while any(queues):
            queue = own.choice([one for one in queues if one])
            started.append(queue.pop(0)())
        own.shuffle(started)
        for pending, got, wanted in started:
            pending.wait()
            pending.wait()
            assert torch.equal(got, wanted)
    assert isinstance(_backend(state.world), TwoLevelBackend)
    assert isinstance(_backend(state.tp), SharedMemoryBackend)
    assert isinstance(_backend(state.dp), SocketBackend)


def _started_sum(axis: Axis, every: list[Tensor]) -> tuple[Pending, Tensor, Tensor]:
    got = every[axis.index].clone()
    return all_reduce(got, axis), got, torch.stack(every).sum(0)


def _started_gather(axis: Axis, every: list[Tensor]) -> tuple[Pending, Tensor, Tensor]:
    got = torch.zeros(axis.size * len(every[0]))
    return all_gather(got, every[axis.index], axis), got, torch.cat(every)


def test_operations_of_several_axes_end_in_any_order() -> None:
    run_world(4, _random_sequence, 1)


def _without_help(rank: int) -> None:
    axis, started = _axis(rank, 4), []
    for length in (3, LONG):
        started.append(_started_sum(axis, [values(one, length, torch.float32) for one in range(4)]))
        started.append(_started_gather(axis, [values(one, length, torch.float32) for one in range(4)]))
    end = time.monotonic() + 60
    while not all(torch.equal(got, wanted) for _, got, wanted in started):  # nobody waits for them
        assert time.monotonic() < end
        time.sleep(0.05)
    for pending, _, _ in started:
        pending.wait()


def test_both_levels_run_while_the_rank_does_something_else() -> None:
    run_world(4, _without_help)


def _in_inference_mode(rank: int) -> None:
    axis = _axis(rank, 4)
    with torch.inference_mode():
        got = torch.full((5_000,), float(rank))
        all_reduce(got, axis).wait()
    weights = torch.nn.Parameter(torch.zeros(20))
    all_gather(weights, torch.full((5,), got[0].item()), axis).wait()
    assert weights.unique().tolist() == [6.0]


def test_tensors_of_inference_mode_and_of_autograd_are_written() -> None:
    run_world(4, _in_inference_mode)


# ---------------------------------------------------------------------------------------------------------------------
# Who takes two levels


def _takes(rank: int, world: int, local_world_size: tuple[int, ...]) -> tuple[str, float]:
    axis, total = _axis(rank, world, local_world_size[rank]), torch.ones(3)
    all_reduce(total, axis).wait()
    return type(_backend(axis)).__name__, total[0].item()


@pytest.mark.parametrize(
    ("local_world_size", "wanted"),
    [
        ((2, 2, 2), "SocketBackend"),  # two and one
        ((2, 2, 1), "SocketBackend"),  # what two of them take for one host the third takes for two
        ((3, 3, 3), "SharedMemoryBackend"),
        ((2, 2, 4, 4, 4, 4), "TwoLevelBackend"),  # a host of four passes for two hosts
        ((1, 1, 1), "SharedMemoryBackend"),  # nobody has said
    ],
)
def test_hosts_with_other_numbers_of_ranks_take_one_level(local_world_size: tuple[int, ...], wanted: str) -> None:
    world = len(local_world_size)
    assert run_world(world, _takes, world, local_world_size) == [(wanted, world)] * world


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that differ, that are late, that die


def _differ_on(rank: int, differs: tuple[int, ...]) -> str:
    axis, said = _axis(rank, 4, timeout_seconds=20), ""
    try:
        all_gather(torch.empty(12), torch.ones(3), axis, "weights of a" if rank in differs else "weights of b").wait()
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("differs", [(3,), (2, 3)], ids=["within a host", "between hosts"])
def test_gathers_of_different_things_are_an_error_that_names_both(differs: tuple[int, ...]) -> None:
    said = run_world(4, _differ_on, differs)
    assert all(said)
    found = [text for text in said if text.startswith("OrderError")]
    assert found
    assert all("weights of a" in text and "weights of b" in text for text in found)
    assert said[3].startswith("OrderError")


def _lose(rank: int, dies: bool) -> list[str]:
    axis, said = _axis(rank, 4, timeout_seconds=60 if dies else 0.3), []
    all_reduce(torch.zeros(LONG), axis).wait()
    if rank == 3:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)
        return said
    pendings = [all_reduce(torch.zeros(LONG), axis) for _ in range(2)]
    for pending in [*pendings, all_reduce(torch.zeros(3), axis)]:
        with pytest.raises(LostPeerError) as caught:
            pending.wait()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "is late"])
def test_a_lost_rank_fails_all_that_is_under_way(dies: bool) -> None:
    begin = time.monotonic()
    said = run_world(4, _lose, dies, may_die=(3,))
    assert time.monotonic() - begin < 30
    for rank in range(3):
        assert len(said[rank]) == 3
        assert all(f"all_reduce over dp, as rank {rank} of (0, 1, 2, 3)" in text for text in said[rank])
    assert ("Connection closed" if dies else "Timed out") in said[2][0]


# ---------------------------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("under_way", [False, True])
def test_leaving_ends_the_threads_and_closes_everything(under_way: bool) -> None:
    run_world(4, leave, 2, under_way)


def _beside_a_fork(rank: int) -> None:
    axis = _axis(rank, 4)
    all_reduce(torch.zeros(LONG), axis).wait()
    child = os.fork()
    if not child:
        _backend(axis).close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    total = torch.ones(LONG)
    all_reduce(total, axis).wait()
    assert total.unique().tolist() == [4.0]


def test_a_forked_child_that_leaves_does_not_end_its_parents_operations() -> None:
    run_world(4, _beside_a_fork)


PROGRAM = """
import os, sys, torch, torch.distributed as dist
import megazero
from megazero.comm.collectives import all_reduce
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(os.environ["RANK"]), world_size=4)
axis = megazero.parallel_state_of(megazero.RankGrid(dp=4)).dp
total = torch.ones(70_000)
all_reduce(total, axis).wait()
dist.barrier()
if sys.argv[2] == os.environ["RANK"]:
    under_way = all_reduce(total, axis)
print(type(axis.group.backends["cpu"]).__name__, total[0].item())
"""


@pytest.mark.parametrize("under_way", ["nobody", "0"])
def test_a_script_that_never_leaves_ends_without_a_word(under_way: str, tmp_path: Path) -> None:
    """Nor does it wait for what it has left under way."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    where = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    programs = [
        start_program(sys.executable, script, tmp_path / "store", under_way, env={**os.environ, **where, "RANK": rank})
        for rank in "0123"
    ]
    for program in programs:
        assert program.communicate(timeout=60)[0] == "TwoLevelBackend 4.0\n"
        assert program.returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# Bytes between hosts (law 4)


def _link_bytes(rank: int, world: int, local_world_size: int, shares: bool) -> dict[str, int]:
    axis = _axis(rank, world, local_world_size, shares=shares)
    full, part = torch.zeros(world * 10_000), torch.zeros(10_000)
    all_reduce(full, axis).wait()
    all_gather(full, part, axis).wait()
    reduce_scatter(part, full, axis).wait()
    all_to_all(full.view(world, -1).clone(), full.view(world, -1), axis).wait()
    peers = [axis.ranks[(axis.index + step) % world] for step in (1, -1)]
    for pending in exchange([(part, peers[0])], [(torch.empty_like(part), peers[1])], axis):
        pending.wait()
    linked = axis.traffic.link_bytes
    ring = {"all_reduce": 2 * full.nbytes * (world - 1) // world, "all_gather": full.nbytes - part.nbytes}
    assert {key: axis.traffic.sent_bytes["dp", key] for key in ring} == ring
    return {operation: sent for (_, operation), sent in linked.items() if axis.traffic.sent_bytes["dp", operation]}


@pytest.mark.parametrize(("world", "local_world_size"), SHAPES)
def test_bytes_between_hosts_are_the_formula_and_flat_ones_are_as_many_times_more_as_a_host_has_ranks(
    world: int, local_world_size: int
) -> None:
    """F/n (H - 1) of each rank to gather or to scatter, twice that to do both; the ring of a flat all-reduce crosses from
    the last rank of each host alone."""
    hosts, part = world // local_world_size, 4 * 10_000
    two = run_world(world, _link_bytes, world, local_world_size, True)
    flat = run_world(world, _link_bytes, world, local_world_size, False)
    for rank in range(world):
        is_last = rank % local_world_size == local_world_size - 1
        exchanged = {"send_recv": is_last * part, "all_to_all": part * (world - local_world_size)}
        once = part * (hosts - 1)
        assert two[rank] == {"all_reduce": 2 * once, "all_gather": once, "reduce_scatter": once} | exchanged
        ring = is_last * 2 * part * (world - 1)
        flat_once = local_world_size * once
        assert flat[rank] == {"all_reduce": ring, "all_gather": flat_once, "reduce_scatter": flat_once} | exchanged


class _Gathers:
    """A rank that gathers and scatters 4 MB, over sockets alone or in two levels."""

    dp_index = 0

    def __init__(self, rank: int, shares: bool) -> None:
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self.axis = _axis(rank, 4, local_world_size, shares=shares)
        self.full, self.part = torch.zeros(1_000_000), torch.zeros(250_000)

    def step(self) -> None:
        all_gather(self.full, self.part, self.axis).wait()
        reduce_scatter(self.part, self.full, self.axis).wait()

    def counted(self) -> int:
        return sum(self.axis.traffic.link_bytes.values())


class _Four(Given):
    world = 4


def test_a_real_link_carries_the_bytes_that_are_counted() -> None:
    """Between two network namespaces: within 4% of what each rank counts, for headers, acknowledgements and barriers."""
    carried = {}
    try:
        with network_of(2, 1000) as network:
            for shares in (False, True):
                build = partial(_Gathers, shares=shares)
                with closing(World("gathers", build, _Four(), network)) as world:
                    world.turn(range(1))  # connects
                    counted = [sum(world.ask("counted"))]
                    carried[shares] = world.turn(range(3)).link_bytes
                    counted.append(sum(world.ask("counted")))
                each = (counted[1] - counted[0]) / 3
                assert each <= carried[shares] <= 1.04 * each
    except NoHostsError as error:
        pytest.skip(str(error))
    assert carried[True] < 0.52 * carried[False]
