"""What every backend's collectives give, on whole numbers, whose sums are exact in every format."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from harness import assert_nothing_is_left, open_files
from torch import Tensor

from megazero.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, ring_shift
from megazero.comm.messages import LostPeerError
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid


def values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """A rank's whole numbers."""
    return ((torch.arange(length) * 7 + rank * 3) % 11 - 5).to(dtype)


def assert_exact(axis: Axis, cases: Iterable[tuple[torch.dtype, int]]) -> None:
    """Each collective of tensors of these formats and lengths has its exact result on this rank."""
    rank, world = axis.index, axis.size
    for dtype, length in cases:
        every = [values(one, length, dtype) for one in range(world)]
        for op, wanted in (("sum", torch.stack(every).sum(0)), ("max", torch.stack(every).amax(0))):
            got = every[rank].clone()
            all_reduce(got, axis, op).wait()
            assert torch.equal(got, wanted.to(dtype)), (dtype, length, op)
        shifted = torch.zeros(length, dtype=dtype)
        ring_shift(shifted, every[rank], axis).wait()
        assert torch.equal(shifted, every[rank - 1]), (dtype, length)
        whole = torch.zeros(world * length, dtype=dtype)
        all_gather(whole, every[rank], axis, "weights").wait()
        assert torch.equal(whole, torch.cat(every)), (dtype, length)
        full = values(rank, world * length, dtype)
        wanted = sum(values(one, world * length, dtype) for one in range(world)).chunk(world)[rank]
        apart = torch.zeros(length, dtype=dtype)
        reduce_scatter(apart, full, axis).wait()
        assert torch.equal(apart, wanted), (dtype, length)
        assert torch.equal(full, values(rank, world * length, dtype)), "it is the caller's"
        inside = full.chunk(world)[rank]
        reduce_scatter(inside, full, axis).wait()
        assert torch.equal(inside, wanted), (dtype, length)
        sent, got = torch.stack([every[rank] + to for to in range(world)]), torch.zeros(world, length, dtype=dtype)
        all_to_all(got, sent, axis).wait()
        assert torch.equal(got, torch.stack([one + rank for one in every])), (dtype, length)


def leave(rank: int, local_world_size: int, under_way: bool) -> None:
    """A rank that leaves its groups ends their threads and closes everything, and what it left under way is lost."""
    gc.disable()  # what waits for the collector stays, in a process that has switched it off
    grid = RankGrid(dp=dist.get_world_size())
    state = ParallelState(grid, rank, Links(timeout_seconds=20, local_world_size=local_world_size))
    before = open_files()
    all_reduce(torch.zeros(3), state.dp).wait()
    if under_way and rank == 0:
        pending = all_reduce(torch.zeros(3), state.dp)
    if rank > 0:
        dist.barrier()  # rank 0 goes first
    begin = time.monotonic()
    state.leave()
    assert time.monotonic() - begin < 10
    if rank == 0:
        dist.barrier()
    if under_way and rank == 0:
        with pytest.raises(LostPeerError, match="has left"):
            pending.wait()
        del pending
        gc.collect()  # the frames of the error
    assert_nothing_is_left(before)
    assert not [one for one in threading.enumerate() if one.name.startswith("channel")]
