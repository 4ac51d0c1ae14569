"""Times of collectives by what each rank sends, and of the wait for the last rank by what ranks computed before it.

    all_reduce 4   | all-reduce | all-reduce | all-reduce |               ranks that meet anyway
    wait 4         | product | product | all-reduce | product ...         beyond both: whoever comes first waits

Two ranks that compute the same never take equally long, and ranks that share processors less so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.collectives import all_gather, all_reduce, all_to_all, exchange, reduce_scatter, ring_shift
from megazero.parallel_state import Axis, ParallelState, RankGrid
from megazero.plan.calibration import Samples

_SIZES = (64, 16_384, 131_072, 524_288, 2_097_152, 8_388_608)  # bytes of the whole buffer
_CALLS = 8
_WORK = (256, 512, 512)  # a product of about 2 ms on a core
_BEHIND = (1, 4, 16, 64)  # products between two meetings
_LEAST = 1e-6  # seconds; what a difference of noisy times may fall below


def collective_samples(rank: int, rounds: int = 12) -> dict[str, Samples]:
    """ "all_reduce 4" and so on, for the ranks of the default process group, which are on one host.

    "wait 4" has seconds of a rank's own computation, and of the wait for the last rank behind it.
    A collective's times are the mean of those of its ranks: `mean_of`.
    """
    world = dist.get_world_size()
    state = ParallelState(RankGrid(dp=world), rank, local_world_size=world)
    found = {f"wait {world}": tuple(_waits(state.dp, rounds))}

    def sample(name: str, calls: Iterable[tuple[Callable[[], None], int]]) -> None:
        found[f"{name} {world}"] = tuple(
            (float(sent), _seconds([call] * _CALLS, rounds)[0] / _CALLS) for call, sent in calls
        )

    by_size = [_calls(size // 4 // world * world or world, state.dp) for size in _SIZES]
    for name in by_size[0]:
        sample(name, [calls[name] for calls in by_size])
    if world == 2:
        sample("send_recv", ((_message(size // 4, state.dp), size) for size in _SIZES))
    return found


def mean_of(ranks: Sequence[dict[str, Samples]]) -> dict[str, Samples]:
    """Average what `collective_samples` found on all ranks."""

    def over_ranks(name: str) -> Samples:
        columns = zip(*(found[name] for found in ranks), strict=True)
        return tuple((column[0][0], max(_LEAST, mean(seconds for _, seconds in column))) for column in columns)

    return {name: over_ranks(name) for name in ranks[0]}


def _waits(axis: Axis, rounds: int) -> Iterator[tuple[float, float]]:
    rows, inner, columns = _WORK
    a, b = torch.rand(rows, inner), torch.rand(inner, columns)
    meet, _ = _calls(axis.size, axis)["all_reduce"]
    alone, _ = _seconds([meet] * _CALLS, rounds)
    for products in _BEHIND:
        meetings = max(1, 2 * _CALLS // products)
        work: list[Callable[[], object]] = [lambda: a @ b] * products
        bare, behind = _seconds(work * meetings, rounds)
        both, _ = _seconds([*work, meet] * meetings, rounds)
        yield behind / meetings, (both - bare) / meetings - alone / _CALLS


def _seconds(calls: Sequence[Callable[[], object]], rounds: int) -> tuple[float, float]:
    """Return seconds and processor seconds of these calls in a row, of the median round."""

    def taken() -> tuple[float, float]:
        dist.barrier()
        begin, work = time.perf_counter(), time.process_time()
        for call in calls:
            call()
        return time.perf_counter() - begin, time.process_time() - work

    taken()
    found = [taken() for _ in range(rounds)]
    return median(seconds for seconds, _ in found), median(work for _, work in found)


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
        for pending in exchange(sends, receives, axis):
            pending.wait()

    return lambda: wait([(x, peer)], [(out, peer)])  # both directions at once, as neighbours of a pipeline have
