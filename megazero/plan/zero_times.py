"""What ZeRO adds to a step: weights that are gathered, gradients that are reduced, states that are stepped; in seconds.

    stage 0      all-reduce of the gradients             2 N
    stage 1, 2   reduce-scatter, all-gather               N + N       stage 2 after every micro-batch, unless reduce = "step"
    stage 3      reduce-scatter, all-gathers              N + 2 N     of every micro-batch

Weights of stages 1 and 2, and on CPUs of several hosts two thirds of stage 0's gradients, travel behind the first forward,
whose units wait for their own; those of stage 3 one unit ahead.
Where ranks copy through memory themselves (a calibrated host), nothing is behind anything.

The optimizer reads gradient, master and moments and writes masters, moments and weights; the norm reads gradients once more.
Off the device, gradients and weights cross the host's link, and the host's memory is what limits: 25 GB/s for each rank, two
sockets of DDR4 or DDR5 shared by eight; files at 3 GB/s for each rank, a local NVMe disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from megazero.config import ResolvedRun, RunConfig
from megazero.cpu.deferred_steps import BEHIND_FORWARD
from megazero.engine.outline import elements_in, optimizer_of, stages_of
from megazero.parallel_state import Axis
from megazero.plan.cluster import Cluster
from megazero.plan.collective_times import GroupLink
from megazero.schedules.action import Action, ActionKind
from megazero.zero.bucket import BLOCK, DTYPES, Placement, ShardingPolicy
from megazero.zero.bucket_sizes import bucket_sizes
from megazero.zero.quantized import WEIGHT_BITS, BlockFormat

HOST_MEMORY, NVME = 25e9, 3e9
_FP32 = 4


class ElementBytes(NamedTuple):
    """Bytes of an element: of weights as modules have them and as they are gathered; of gradients as they are summed up, as
    they are reduced, and in quantized blocks (0: they are not quantized)."""

    weights: int
    gathered: float
    accumulated: int
    reduced: int
    blocks: float


def element_bytes(config: RunConfig) -> ElementBytes:
    """Return the bytes per element of a run."""
    zero, precision = config.zero, config.precision
    weights, accumulated, reduced = (
        DTYPES[dtype].itemsize for dtype in (precision.dtype, precision.accumulate_dtype, precision.reduce_dtype)
    )
    gathered = BlockFormat(WEIGHT_BITS).nbytes(BLOCK) / BLOCK if zero.quantized_weights else weights
    blocks = BlockFormat(zero.quantized_gradients).nbytes(BLOCK) / BLOCK if zero.quantized_gradients else 0.0
    return ElementBytes(weights, gathered, accumulated, reduced, blocks)


class Matrices(NamedTuple):
    """What an optimizer of matrices steps whole: its share of a model's elements, their number, and its FLOPs."""

    share: float = 0.0
    elements: int = 0
    flops: int = 0


@lru_cache(maxsize=64)  # it builds the model, and each shape of a search asks several times
def matrices_of(config: RunConfig) -> Matrices:
    """Of a run; nothing where every element is stepped alone."""
    recipe = optimizer_of(config.optimizer)
    if recipe.matrices is None:
        return Matrices()
    (model,) = stages_of(config, tp=1)
    specs = [spec for module in model.modules() for spec in getattr(module, "specs", {}).values() if spec.matrix]
    shapes = [(section.rows, spec.shape[1]) for spec in specs for section in spec.names.rows]
    elements = sum(rows * columns for rows, columns in shapes)
    flops = sum(recipe.matrices.flops(rows, columns) for rows, columns in shapes)
    return Matrices(elements / elements_in(model), elements, flops)


def moments_of(config: RunConfig) -> float:
    """Numbers that the optimizer holds for each parameter, on average: one for those that it steps as matrices."""
    share = matrices_of(config).share
    return len(optimizer_of(config.optimizer).states) * (1 - share) + share


class Cost(NamedTuple):
    """Cost of collectives: seconds on the wire, and their number."""

    wire: float = 0.0
    calls: int = 0

    def and_also(self, other: Cost) -> Cost:
        """Return the sum of both costs."""
        return Cost(self.wire + other.wire, self.calls + other.calls)


@dataclass(frozen=True)
class RankZero:
    """ZeRO's times of one stage, in seconds.

    Args:
        gathers: of all weights of a chunk once, or of gradients that step them; none where the optimizer waits for them.
        reductions: of all gradients of a chunk once.
        shares: largest unit's share of a chunk: what nothing hides.
        bucket_counts: of a chunk.
        each_reduces, each_gathers: after, and for, every micro-batch.
        optimizer: of the rank's own states.
        gather_exposed: of weights after the optimizer.
    """

    gathers: Mapping[int, Cost] = field(default_factory=dict)
    reductions: Mapping[int, Cost] = field(default_factory=dict)
    shares: Mapping[int, float] = field(default_factory=dict)
    bucket_counts: Mapping[int, int] = field(default_factory=dict)
    each_reduces: bool = False
    each_gathers: bool = False
    is_stage_3: bool = False
    optimizer: float = 0.0
    gather_exposed: float = 0.0

    def beside(self, action: Action, *, is_first: bool, is_last: bool) -> Cost:
        """Return the cost of the gathers and reductions that run beside an action.

        Elsewhere on the wire: weights of stages 1 and 2, see `arrival`, and a chunk's last reduction.
        """
        found, chunk, kind = Cost(), action.chunk, action.kind
        gathers = self.each_gathers or (is_first and kind is ActionKind.FORWARD)
        if self.is_stage_3 and gathers and kind is not ActionKind.WEIGHT:
            found = self.gathers.get(chunk, Cost())
        if kind is ActionKind.BACKWARD and self.each_reduces and not is_last:
            found = found.and_also(self.reductions[chunk])
        return found

    def ahead(self, action: Action, *, is_first: bool) -> float:
        """Return the part of it that a step's first action waits for: its first unit's weights."""
        if self.is_stage_3 and is_first and action.kind is ActionKind.FORWARD and action.chunk == 0:
            return self.gathers.get(0, Cost()).wire * self.shares[0]
        return 0.0

    def arrival(self, chunk: int, seconds: float) -> float:
        """Return when a chunk's first forward of `seconds` can start, so that no unit waits for its weights in the middle.

        The weights of stages 1 and 2 travel in the order of the chunks from the step's begin on.
        """
        if self.is_stage_3 or not self.gathers:
            return 0.0
        before = sum(one.wire for at, one in self.gathers.items() if at < chunk)
        own = self.gathers[chunk].wire
        return before + max(own * self.shares[chunk], own - seconds)

    @property
    def arriving(self) -> float:
        """Seconds of the weights that travel behind the first forwards."""
        return 0.0 if self.is_stage_3 else sum(one.wire for one in self.gathers.values())

    def reduction(self, chunk: int) -> float:
        """Return the seconds of reducing a chunk's last micro-batch."""
        return self.reductions.get(chunk, Cost()).wire

    def buckets(self, chunk: int) -> int:
        """Return the number of buckets of a chunk's gradients."""
        return self.bucket_counts.get(chunk, 1)


@dataclass(frozen=True)
class ZeroTimes:
    """ZeRO's times of all stages.

    Args:
        overlaps: communication runs beside computation.
        sum_seconds: of the step's numbers.
        sharing: between the ranks that share the state.
        stretch: how many ranks share a processor, where they do.
    """

    ranks: tuple[RankZero, ...]
    overlaps: bool
    sum_seconds: float
    sharing: GroupLink
    stretch: float = 1.0


def zero_times_of(
    run: ResolvedRun,
    cluster: Cluster,
    links: Mapping[str, GroupLink],
    elements: Mapping[tuple[int, int], tuple[int, ...]],
) -> ZeroTimes:
    """Return ZeRO's times of a run; `elements`: of each unit by (pipeline rank, chunk)."""
    widths = element_bytes(run.config)
    overlaps = cluster.device.calibration is None or links["shard"].crosses  # sockets have threads of their own
    busy = min(cluster.ranks, cluster.per_node)
    stretch = max(1.0, busy / cluster.processors) if cluster.processors else 1.0
    ranks = []
    for rank in range(run.config.parallel.pp):
        own = {chunk: units for (at, chunk), units in elements.items() if at == rank}
        ranks.append(_rank_zero(run, cluster, links, own, widths, overlaps=overlaps))
    world = links["world"]
    return ZeroTimes(tuple(ranks), overlaps, world.seconds("all_reduce", 80.0) * stretch, links["shard"], stretch)


def _rank_zero(
    run: ResolvedRun,
    cluster: Cluster,
    links: Mapping[str, GroupLink],
    own: Mapping[int, tuple[int, ...]],
    widths: ElementBytes,
    *,
    overlaps: bool,
) -> RankZero:
    zero = run.config.zero
    counts = {chunk: sum(units) for chunk, units in own.items()}
    most = _bucket_elements(run, links, sum(counts.values()), on_cpu=cluster.processors > 0, hides=overlaps)
    buckets = {chunk: sum(-(-unit // most) for unit in units) for chunk, units in own.items()}
    if zero.stage < 3:
        buckets = {chunk: -(-count // most) for chunk, count in counts.items()}
    hidden = 0.0  # part of stage 0's gradients that is gathered behind the next forward
    if zero.stage == 0 and run.shards > 1 and overlaps and cluster.processors:
        hidden = BEHIND_FORWARD if widths.reduced == widths.accumulated else 0.0
    reductions = {chunk: _reduction(run, links, counts[chunk], widths, buckets[chunk], hidden) for chunk in counts}
    gathers, is_stage_3 = {}, zero.stage == 3
    if hidden:
        sizes = {chunk: count * hidden * widths.reduced for chunk, count in counts.items()}
        gathers = {chunk: _pieces(links["shard"], "all_gather", sizes[chunk], buckets[chunk]) for chunk in counts}
    if zero.stage and run.shards > 1:
        axis, nbytes = links["shard"], widths.gathered
        if zero.secondary_shard_size and is_stage_3:
            axis, nbytes = links["secondary"], widths.weights
        gathers = {chunk: _pieces(axis, "all_gather", counts[chunk] * nbytes, buckets[chunk]) for chunk in counts}
    stepped = optimizer_seconds(run, cluster, sum(counts.values())) + matrix_seconds(run, cluster, links["shard"])
    waits = 0.0 if overlaps or is_stage_3 else sum(one.wire for one in gathers.values())
    return RankZero(
        {} if waits else gathers,
        reductions,
        {chunk: max(units, default=0) / max(1, counts[chunk]) for chunk, units in own.items()},
        buckets,
        each_reduces=zero.stage >= 2 and zero.reduce == "micro_batch" and run.shards > 1,
        each_gathers=is_stage_3 and zero.gather_policy == "action" and not _stays(run, own, widths.weights),
        is_stage_3=is_stage_3,
        optimizer=stepped,
        gather_exposed=waits,
    )


def _stays(run: ResolvedRun, own: Mapping[int, tuple[int, ...]], weight_bytes: int) -> bool:
    """Whether all weights fit into the gather buffers, so that none is gathered twice."""
    units = own.get(0, (0,))
    return len(own) == 1 and (sum(units) - max(units, default=0)) * weight_bytes <= run.config.zero.prefetch_bytes


def _bucket_elements(run: ResolvedRun, links: Mapping[str, GroupLink], own: int, *, on_cpu: bool, hides: bool) -> int:
    """Return the elements of a bucket, as the engine decides them."""
    zero = run.config.zero
    shard, replica = (Axis(axis, tuple(range(links[axis].ranks))) for axis in ("shard", "replica"))
    policy = ShardingPolicy(zero.stage, torch.float32, Placement(shard, replica), torch.device("cpu"), on_cpu=on_cpu)
    cuts = zero.stage >= 2 and (run.shards > 1 or zero.offload.optimizer != "none")
    return bucket_sizes(zero.bucket_bytes, policy, own, cuts=cuts, hides=hides).elements


def _reduction(
    run: ResolvedRun,
    links: Mapping[str, GroupLink],
    elements: int,
    widths: ElementBytes,
    pieces: int,
    hidden: float = 0.0,
) -> Cost:
    """Return the cost of reducing gradients over the shard axis, then over the replica axis."""
    shards, same, size = run.shards, run.dp * run.config.parallel.cp, elements * widths.reduced
    if run.config.zero.stage == 0:
        whole = _pieces(links["shard"], "all_reduce", 2 * size * (1 - hidden), pieces)
        return whole.and_also(_pieces(links["shard"], "reduce_scatter", size * hidden, pieces)) if hidden else whole
    shared = _pieces(links["shard"], "reduce_scatter", size, pieces)
    if widths.blocks:
        host = links["host"]
        shared = _pieces(links["hosts"], "all_to_all", elements / host.ranks * widths.blocks, pieces)
        if host.ranks > 1:
            inner = _pieces(host, "reduce_scatter", elements * _FP32, pieces)
            shared = shared.and_also(inner)
    if same == shards:
        return shared
    summed = _pieces(links["replica"], "all_reduce", 2 * size / shards, pieces)
    return shared.and_also(summed)


def _pieces(axis: GroupLink, operation: str, size: float, pieces: int) -> Cost:
    """Return the cost of a collective over buffers of `size` bytes in all, in equal pieces."""
    sent = size * (axis.ranks - 1) / axis.ranks / max(1, pieces)  # a chunk without a layer has none
    return Cost(pieces * axis.seconds(operation, sent), pieces)


def matrix_seconds(run: ResolvedRun, cluster: Cluster, shard: GroupLink) -> float:
    """Of whole matrices that go to their owners, are iterated once and come back; owners have equal work."""
    matrices, parallel, device = matrices_of(run.config), run.config.parallel, cluster.device
    if not matrices.elements:
        return 0.0
    ranks, name = run.shards * parallel.tp, "fp32" if run.config.precision.dtype == "fp32" else "bf16"
    own = matrices.elements / parallel.pp / ranks
    sent = own * DTYPES[name].itemsize * (ranks - 1) / ranks
    products = matrices.flops / parallel.pp / ranks / (device.peak_flops[name] * device.product_share)
    return products + 2 * shard.seconds("send_recv", sent)


def optimizer_seconds(run: ResolvedRun, cluster: Cluster, elements: int) -> float:
    """Return the seconds for stepping a rank's optimizer state."""
    zero, device = run.config.zero, cluster.device
    own = elements / (run.shards if zero.stage else 1)
    weights = element_bytes(run.config).weights
    numbers = 3 + 2 * (moments_of(run.config) + 1)  # gradient for the norm, then all; weights are written
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
