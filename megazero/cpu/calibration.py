"""Measure the collectives of CPU ranks on this host, for `megazero calibrate`.

all_reduce 4  |  64 B  16 KiB  128 KiB  512 KiB  2 MiB  8 MiB      several calls in a row, several times: the median
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from megazero.comm.collectives import all_gather, all_reduce, all_to_all, exchange, reduce_scatter, ring_shift, wait_all
from megazero.parallel_state import Axis, Links, ParallelState, RankGrid

_SIZES = (64, 16_384, 131_072, 524_288, 2_097_152, 8_388_608)  # bytes of the whole buffer
_CALLS = 8


def collective_samples(rank: int, rounds: int = 12) -> dict[str, tuple[tuple[float, float], ...]]:
    """Measure every collective over the default process group, whose ranks are all on this host.

    Returns:
        (bytes, seconds) of each size, averaged over the ranks, by collective and number of ranks, such as "all_reduce 4".
    """
    world = dist.get_world_size()
    axis = ParallelState(RankGrid(dp=world), rank, Links(local_world_size=world)).dp
    by_size = [_calls(size // 4 // world * world or world, axis) for size in _SIZES]
    return {
        f"{name} {world}": tuple((float(calls[name][1]), _seconds(calls[name][0], rounds)) for calls in by_size)
        for name in by_size[0]
    }


def _seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the seconds of a call: the median over rounds of several calls in a row, averaged over the ranks."""

    def taken() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return (time.perf_counter() - begin) / _CALLS

    taken()
    found = torch.tensor(median(taken() for _ in range(rounds)), dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def _calls(count: int, axis: Axis) -> dict[str, tuple[Callable[[], object], int]]:
    """Return, for each collective, a function that runs it on `count` fp32 elements, and the bytes that a rank sends."""
    whole, other, shard = torch.zeros(count), torch.zeros(count), torch.zeros(count // axis.size)
    x, out, sent = whole.view(axis.size, -1), other.view(axis.size, -1), 4 * count * (axis.size - 1) // axis.size
    found: dict[str, tuple[Callable[[], object], int]] = {
        "all_reduce": (lambda: all_reduce(whole, axis).wait(), 2 * sent),
        "all_gather": (lambda: all_gather(whole, shard, axis).wait(), sent),
        "reduce_scatter": (lambda: reduce_scatter(shard, whole, axis).wait(), sent),
        "all_to_all": (lambda: all_to_all(out, x, axis).wait(), sent),
        "ring_shift": (lambda: ring_shift(other, whole, axis).wait(), 4 * count),
    }
    if axis.size == 2:  # both directions at once, as between pipeline stages
        peer = axis.ranks[1 - axis.index]
        found["send_recv"] = (lambda: wait_all(exchange([(whole, peer)], [(other, peer)], axis)), 4 * count)
    return found
