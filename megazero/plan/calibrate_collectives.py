"""Times of collectives by what each rank sends, among ranks that compute between them, as those of a run do.

    bare     | product | product | product |
    with     | product | all-reduce | product | all-reduce |        the difference is the collective's

Two ranks that compute the same never take equally long: whoever comes first waits.  So a collective between products takes a
multiple of one that follows another, and grows with the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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
_LEAST = 1e-6  # seconds; what the difference of noisy times may fall below


def collective_samples(rank: int, per_node: int = 0, rounds: int = 12) -> dict[str, Samples]:
    """ "all_reduce 4" and so on, for the ranks of the default process group; over hosts of so many ranks "all_reduce 4/2".

    What a rank's processor does for it is in "all_reduce 4/2 work": it is taken from the computation that it runs beside.
    The collective's times are the mean of those of its ranks: `mean_of`.
    """
    world = dist.get_world_size()
    state = ParallelState(RankGrid(dp=world), rank, neighbours=per_node or world)
    group = f"{world}/{per_node}" if per_node else f"{world}"
    sizes, found = (_SIZES[:-1] if per_node else _SIZES), {}

    def sample(name: str, calls: Iterable[tuple[Callable[[], None], int]]) -> None:
        every = [(float(sent), *_seconds(call, rounds)) for call, sent in calls]
        found[f"{name} {group}"] = tuple((sent, seconds) for sent, seconds, _ in every)
        if per_node:
            found[f"{name} {group} work"] = tuple((sent, work) for sent, _, work in every)

    for name, make in _CALLS_OF.items():
        sample(name, (make(size // 4 // world * world or world, state.dp) for size in sizes))
    if world == 2:
        sample("send_recv", ((_message(size // 4, state.dp), size) for size in sizes))
    return found


def mean_of(ranks: Sequence[dict[str, Samples]]) -> dict[str, Samples]:
    """What `collective_samples` found on all ranks."""

    def over_ranks(name: str) -> Samples:
        columns = zip(*(found[name] for found in ranks), strict=True)
        return tuple((column[0][0], max(_LEAST, mean(seconds for _, seconds in column))) for column in columns)

    return {name: over_ranks(name) for name in ranks[0]}


def _seconds(call: Callable[[], None], rounds: int) -> tuple[float, float]:
    """What a call adds to the computation that it stands between, and to the processor's work; the median round."""
    rows, inner, columns = _WORK
    a, b = torch.rand(rows, inner), torch.rand(inner, columns)

    def taken(*what: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        begin, work = time.perf_counter(), time.process_time()
        for _ in range(_CALLS):
            for one in what:
                one()
        return (time.perf_counter() - begin) / _CALLS, (time.process_time() - work) / _CALLS

    def compute() -> object:
        return a @ b

    taken(compute, call)
    found = [(taken(compute), taken(compute, call)) for _ in range(rounds)]
    seconds, work = (median(more[at] - bare[at] for bare, more in found) for at in (0, 1))
    return seconds, work


def _reduced(count: int, axis: Axis) -> tuple[Callable[[], None], int]:
    x = torch.zeros(count)
    return lambda: all_reduce(x, axis).wait(), 2 * 4 * count * (axis.size - 1) // axis.size


def _gathered(count: int, axis: Axis) -> tuple[Callable[[], None], int]:
    whole, shard = torch.zeros(count), torch.zeros(count // axis.size)
    return lambda: all_gather(whole, shard, axis).wait(), 4 * count * (axis.size - 1) // axis.size


def _scattered(count: int, axis: Axis) -> tuple[Callable[[], None], int]:
    whole, shard = torch.zeros(count), torch.zeros(count // axis.size)
    return lambda: reduce_scatter(shard, whole, axis).wait(), 4 * count * (axis.size - 1) // axis.size


def _exchanged(count: int, axis: Axis) -> tuple[Callable[[], None], int]:
    x, out = (torch.zeros(axis.size, count // axis.size) for _ in range(2))
    return lambda: all_to_all(out, x, axis).wait(), 4 * count * (axis.size - 1) // axis.size


def _shifted(count: int, axis: Axis) -> tuple[Callable[[], None], int]:
    x, out = torch.zeros(count), torch.zeros(count)
    return lambda: ring_shift(out, x, axis).wait(), 4 * count


_CALLS_OF: dict[str, Callable[[int, Axis], tuple[Callable[[], None], int]]] = {
    "all_reduce": _reduced,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
    "ring_shift": _shifted,
}


def _message(count: int, axis: Axis) -> Callable[[], None]:
    """To the other rank and back again: half of it is a message."""
    x, out = torch.zeros(count), torch.zeros(count)
    peer = axis.ranks[1 - axis.index]

    def wait(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        for pending in exchange(sends, receives, axis):
            pending.wait()

    return lambda: wait([(x, peer)], [(out, peer)])  # both directions at once, as neighbours of a pipeline have
