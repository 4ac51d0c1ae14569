"""Estimates the seconds that ZeRO adds to a step: gathers of weights, reductions of gradients, the optimizer.

    during passes      gathers of stage 3, reductions of every micro-batch     at the places where the engine starts them in
    after the last     reductions of the last backward of each chunk           the trace of a step (`state_trace`)
    ahead              gathers that start when the optimizer has stepped

Gathers ahead overlap with the first forward, in which each unit waits for its own weights.  On a calibrated host, where the
ranks copy through memory themselves, nothing overlaps.

The optimizer reads gradients, masters and moments, and writes masters, moments and weights; the norm reads gradients once
more.  Offloaded states cross the host's link, and the host's memory is the limit: 25 GB/s for each rank (two sockets of DDR4
or DDR5 shared by eight), files 3 GB/s for each rank (a local NVMe disk).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megazero.config import ResolvedRun, RunConfig
from megazero.engine.outline import elements_in, optimizer_of, schedule_of, stages_of
from megazero.parallel_state.grid import Coordinate
from megazero.plan.cluster import Cluster
from megazero.plan.collective_times import GroupLink
from megazero.plan.fake_tensors import Message
from megazero.plan.state_trace import END_OF_PASSES, UPDATE, trace_state
from megazero.plan.unit_trace import units_of
from megazero.schedules.action import Action, Op
from megazero.zero.matrices import copies_in_block
from megazero.zero.sharding import DTYPES

HOST_MEMORY, NVME = 25e9, 3e9
_FP32 = 4


class Matrices(NamedTuple):
    """The matrices that an optimizer such as Muon updates as a whole.

    Their share of the model's elements, the elements of each, and the FLOPs to orthogonalize each.
    """

    share: float = 0.0
    elements: int = 0
    flops: tuple[int, ...] = ()


@lru_cache(maxsize=64)  # it builds the model, and each shape of a search asks several times
def matrices_of(config: RunConfig) -> Matrices:
    """Return the matrices that the run's optimizer updates as a whole; none for an element-wise optimizer."""
    factory = optimizer_of(config.optimizer)
    if factory.matrices is None:
        return Matrices()
    (model,) = stages_of(config, tp=1)
    specs = [spec for module in model.modules() for spec in getattr(module, "specs", {}).values() if spec.matrix]
    shapes = [(section.rows, spec.shape[1]) for spec in specs for section in spec.names.rows]
    elements = sum(rows * columns for rows, columns in shapes)
    flops = tuple(factory.matrices.flops(rows, columns) for rows, columns in shapes)
    return Matrices(elements / elements_in(model), elements, flops)


def moments_of(config: RunConfig) -> float:
    """Return how many numbers the optimizer holds per parameter, on average.  Elements of whole matrices have one."""
    share = matrices_of(config).share
    return len(optimizer_of(config.optimizer).states) * (1 - share) + share


class Cost(NamedTuple):
    """The cost of collectives: their seconds on the wire, and their number."""

    wire: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class RankZero:
    """ZeRO's times on the ranks of one pipeline stage, in seconds.

    Args:
        beside: collectives that overlap with each action of a short step.
        reductions: reductions of each chunk's gradients that overlap with its last backward, one call per bucket.
        arriving: gathers that start with the step.
        elements: parameters of each unit, by chunk.
        optimizer: the update of the rank's optimizer state.
        gather_exposed: gathers after the optimizer that the rank waits for.
    """

    beside: Mapping[Action, Cost]
    reductions: Mapping[int, Cost]
    arriving: float
    elements: Mapping[int, Sequence[int]]
    optimizer: float
    gather_exposed: float

    def cost(self, action: Action, last: int) -> Cost:
        """Return the cost of the collectives that overlap with an action.  `last`: index of the step's last micro-batch."""
        played = max(known.microbatch for known in self.beside)
        number = played if action.microbatch == last else min(action.microbatch, max(0, played - 1))
        return self.beside.get(replace(action, microbatch=number), Cost())

    def arrival(self, chunk: int, seconds: float) -> float:
        """Return the earliest start of a chunk's first forward, of `seconds`, such that no unit waits for its weights."""
        each = self.arriving / sum(map(sum, self.elements.values()))
        before = each * sum(sum(units) for at, units in self.elements.items() if at < chunk)
        own = self.elements[chunk]
        return before + max(each * max(own, default=0), each * sum(own) - seconds)


@dataclass(frozen=True)
class ZeroTimes:
    """ZeRO's times of all pipeline stages.

    Args:
        overlaps: communication overlaps with computation.
        sum_seconds: seconds of the all-reduce of norm, loss and token count.
        stretch: ranks per processor, 1 or more.
    """

    ranks: tuple[RankZero, ...]
    overlaps: bool
    sum_seconds: float
    stretch: float = 1.0


def zero_times_of(run: ResolvedRun, cluster: Cluster, links: Mapping[str, GroupLink]) -> ZeroTimes:
    """Return ZeRO's times of a run, from the collectives that its engine starts in a trace."""
    overlaps = cluster.calibration is None or links["shard"].crosses  # sockets have threads of their own
    busy = min(cluster.ranks, cluster.per_node)
    stretch = max(1.0, busy / cluster.processors) if cluster.processors else 1.0
    units = units_of(run.config, schedule_of(run))
    found: list[RankZero] = []
    for stage, own in enumerate(units):
        first = units.index(own)  # stages of the same units send the same
        found.append(found[first] if first < stage else _rank_zero(run, cluster, links, stage, overlaps=overlaps))
    world = links["world"]
    return ZeroTimes(tuple(found), overlaps, world.seconds("all_reduce", 80.0) * stretch, stretch)


def _rank_zero(
    run: ResolvedRun, cluster: Cluster, links: Mapping[str, GroupLink], stage: int, *, overlaps: bool
) -> RankZero:
    rank = run.grid.rank(Coordinate(0, 0, 0, stage))
    trace = trace_state(run, rank, per_node=cluster.per_node, on_cuda=cluster.processors == 0)

    def cost(messages: Iterable[Message]) -> Cost:
        seconds = [links[sent.axis].seconds(sent.operation, sent.sent_bytes) for sent in messages if sent.axis in links]
        return Cost(sum(seconds), len(seconds))

    passes = {action: sent for action, sent in trace.messages.items() if isinstance(action, Action)}
    ends = {action.chunk: action for action in passes if action.op is not Op.FORWARD}
    reduced = {action: _but_gathers(passes[action]) for action in ends.values()}
    reduced[[*reduced][-1]] += _but_gathers(trace.messages[END_OF_PASSES])
    beside = {
        action: cost(message for message in sent if action not in reduced or message.operation == "all_gather")
        for action, sent in passes.items()
    }
    gathers = [message for message in trace.messages[UPDATE] if message.operation == "all_gather"]
    arriving, of_matrices = cost(gathers).wire, matrix_seconds(run, cluster, links)
    return RankZero(
        beside,
        {action.chunk: cost(sent) for action, sent in reduced.items()},
        arriving if overlaps else 0.0,
        trace.elements,
        optimizer=optimizer_seconds(run, cluster, trace.stepped) + of_matrices,
        gather_exposed=0.0 if overlaps else arriving,
    )


def _but_gathers(messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if message.operation != "all_gather"]


def matrix_seconds(run: ResolvedRun, cluster: Cluster, links: Mapping[str, GroupLink]) -> float:
    """Return the seconds in which matrices are sent to their owners, orthogonalized, and sent back.

    They are sent back to every copy of the state in a block.  The busiest owner has at least the largest matrix.
    """
    matrices, parallel, device = matrices_of(run.config), run.config.parallel, cluster.device
    if not matrices.elements:
        return 0.0
    group, of_stage = run.shards * parallel.tp, -(-len(matrices.flops) // parallel.pp)
    copies = copies_in_block(run.dp * parallel.cp // run.shards, group, of_stage)
    ranks, name = parallel.pp * group * copies, "fp32" if run.config.precision.dtype == "fp32" else "bf16"
    own = matrices.elements / ranks * DTYPES[name].itemsize
    products = max(*matrices.flops, sum(matrices.flops) / ranks) / (device.peak_flops[name] * device.product_share)
    within = links["shard"].seconds("send_recv", own * (group - 1) / group)
    return products + 2 * within + links["replica"].seconds("send_recv", own * (copies - 1))


def optimizer_seconds(run: ResolvedRun, cluster: Cluster, own: int) -> float:
    """Return the seconds to update a rank's optimizer state of `own` elements."""
    zero, device = run.config.zero, cluster.device
    weights = DTYPES[run.config.precision.dtype].itemsize
    numbers = 3 + 2 * (moments_of(run.config) + 1)  # gradient for the norm, then all; weights are written
    numbers += 3 * (run.config.average.kind == "ema")  # master and average are read, the average is written
    moved = own * _FP32 * (numbers - 1) + own * weights
    if (table := cluster.table) is not None and (known := table.operator("optimizer", own)) is not None:
        return known
    if zero.offload.optimizer == "none":
        return moved / (device.memory_bandwidth * device.memory_share)
    ratio = zero.offload.ratio
    crossing = own * ratio * (_FP32 + weights) / device.host_bandwidth
    slow = NVME if zero.offload.optimizer == "nvme" else HOST_MEMORY
    here = moved * (1 - ratio) / (device.memory_bandwidth * device.memory_share)
    return crossing + moved * ratio / slow + here
