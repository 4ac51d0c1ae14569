"""Times of collectives by what each rank sends.

all_reduce 4   | all-reduce | all-reduce | all-reduce |
"""

import time
from collections.abc import Callable, Iterable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.collectives import all_gather, all_reduce, all_to_all, exchange, reduce_scatter, ring_shift, wait_all
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.plan.calibration import Samples

_SIZES = (64, 16_384, 131_072, 524_288, 2_097_152, 8_388_608)  # bytes of the whole buffer
_CALLS = 8


def collective_samples(rank: int, rounds: int = 12) -> dict[str, Samples]:
    """ "all_reduce 4" and so on, for the ranks of the default process group, which are on one host.

    A collective's times are the mean of those of its ranks.
    """
    world = dist.get_world_size()
    state = ParallelState(RankGrid(dp=world), rank, local_world_size=world)
    found = dict[str, Samples]()

    def sample(name: str, calls: Iterable[tuple[Callable[[], None], int]]) -> None:
        found[f"{name} {world}"] = tuple((float(sent), _seconds(call, rounds)) for call, sent in calls)

    by_size = [_calls(size // 4 // world * world or world, state.dp) for size in _SIZES]
    for name in by_size[0]:
        sample(name, [calls[name] for calls in by_size])
    if world == 2:
        sample("send_recv", ((_message(size // 4, state.dp), size) for size in _SIZES))
    return found


def _seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the seconds of a call among several in a row, of the median round, on average over the ranks."""

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


def _calls(count: int, axis: Axis) -> dict[str, tuple[Callable[[], None], int]]:
    """Return each collective over a buffer of `count` fp32 elements, and the bytes that a rank sends in it."""
    whole, other, shard = torch.zeros(count), torch.zeros(count), torch.zeros(count // axis.size)
    x, out, sent = whole.view(axis.size, -1), other.view(axis.size, -1), 4 * count * (axis.size - 1) // axis.size
    return {
        "all_reduce": (lambda: all_reduce(whole, axis).wait(), 2 * sent),
        "all_gather": (lambda: all_gather(whole, shard, axis).wait(), sent),
        "reduce_scatter": (lambda: reduce_scatter(shard, whole, axis).wait(), sent),
        "all_to_all": (lambda: all_to_all(out, x, axis).wait(), sent),
        "ring_shift": (lambda: ring_shift(other, whole, axis).wait(), 4 * count),
    }


def _message(count: int, axis: Axis) -> Callable[[], None]:
    """Return a call that sends a message to the other rank and receives one from it."""
    x, out = torch.zeros(count), torch.zeros(count)
    peer = axis.ranks[1 - axis.index]

    def wait(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        wait_all(exchange(sends, receives, axis))

    return lambda: wait([(x, peer)], [(out, peer)])  # both directions at once, as neighbours of a pipeline have
