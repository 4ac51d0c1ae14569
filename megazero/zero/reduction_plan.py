"""Which bucket is reduced how, with which buffers, and what is summed after the reductions: decided once, from values.

As many reductions run at once as there are buffers for: on a slow network, a backward that waited for the first would
stand still.  If sums over replicas follow, or the host adds results, two run at once.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch

from megazero.comm.collectives import runs_by_itself
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, Landing
from megazero.zero.reductions import AllReduce, ReduceScatter, Reduction, ReductionPlan, ReductionQueue
from megazero.zero.sharding import Interval, Placement, ShardingPolicy, intersect

_IN_FLIGHT = 2  # if the host adds results, or this rank takes part itself: more in flight would hide no more


def reduction_queue(policy: ShardingPolicy, buckets: Sequence[Bucket], bucket_bytes: int) -> ReductionQueue:
    """Return the queue that reduces these buckets.  Every rank must call this.

    Args:
        bucket_bytes: `zero.bucket_bytes`; working buffers take at most twice as much, or twice the largest
            bucket chunk.
    """
    plan, replicas = plan_reductions(policy, buckets, bucket_bytes), None
    if any(bucket.placement.replica.size > 1 for bucket in buckets):
        from megazero.zero.replica_sums import ReplicaSums  # few runs need it

        replicas = ReplicaSums(policy, buckets)
    if not any(bucket.landing is Landing.HOST for bucket in buckets):
        return ReductionQueue(plan, policy, replicas)
    from megazero.zero.host_gradients import OffloadedReductions  # few runs need it

    return OffloadedReductions(plan, policy, replicas)


def plan_reductions(policy: ShardingPolicy, buckets: Sequence[Bucket], bucket_bytes: int) -> ReductionPlan:
    """Return how to reduce these buckets.  A collective call: every rank of an axis must take part."""
    way = cache(partial(_reduction, policy))
    ways = {bucket: way(bucket.placement, bucket.owned != bucket.layout.interval) for bucket in buckets}
    # A sum over replicas starts when a reduction has ended.
    stays = all(bucket.master.location == "device" and bucket.placement.replica.size == 1 for bucket in buckets)
    axes = dict.fromkeys(way.axis for way in ways.values()) if stays else ()
    by_themselves = [runs_by_itself(axis) for axis in axes]  # no short-circuit: every rank of an axis must take part
    hides = stays and all(by_themselves)
    sizes = {bucket: max(chunk.size for chunk in bucket.gradient_chunks) * bucket.layout.shards for bucket in buckets}
    largest, accumulate_bytes = max(sizes.values(), default=0), policy.accumulate_dtype.itemsize
    sent = max((way.working_bytes(largest) for way in ways.values()), default=0)
    if all(bucket.sums_full for bucket in buckets):
        usual = max((sizes[bucket] for bucket in buckets if len(bucket.layout.slots) > 1), default=largest)
        most_bytes = max(_IN_FLIGHT * sent, 2 * bucket_bytes if sent and hides else 0)
    else:
        usual, itemsize = largest, max(policy.reduce_dtype.itemsize, accumulate_bytes)
        most_bytes = max(2 * max(bucket_bytes, largest * itemsize), largest * accumulate_bytes + sent)
    return ReductionPlan(ways, sys.maxsize if hides else _IN_FLIGHT, usual, most_bytes)


def _reduction(policy: ShardingPolicy, placement: Placement, shards: bool) -> Reduction:
    """Return the reduction after which each rank has its shard of a bucket's sum (`shards`), or all of it."""
    if policy.gradient_bits and shards:
        from megazero.zero.quantized import QuantizedScatter  # few runs need it

        return QuantizedScatter(placement, policy)
    way = ReduceScatter if shards else AllReduce
    return way(placement.shard, policy.accumulate_dtype, policy.reduce_dtype)


def plan_last_sums(
    buckets: Sequence[Bucket], tp: Axis, ties: Mapping[str, Axis], device: torch.device
) -> list[Callable[[], None]]:
    """Return the functions to call, in order, after the reductions of a step; see `replica_sums`."""
    if tp.size == 1 and not any(bucket.layout.tie for bucket in buckets):
        return []
    from megazero.zero.replica_sums import sum_partial_over_tp, sum_tied  # few runs need it

    return [partial(sum_partial_over_tp, buckets, tp, device), partial(sum_tied, buckets, ties, device)]


def plan_square_sum(buckets: Sequence[Bucket], tp: Axis) -> list[tuple[Bucket, Interval]]:
    """Return the elements that this rank counts in the squared gradient norm.

    Over all ranks, every logical element counts once: each rank counts its own shards, only the first tp rank counts
    parameters that all tp ranks hold, and only the first copy of a tied parameter counts.
    """
    return [
        (bucket, counted)
        for bucket in buckets
        if not bucket.is_duplicate
        for replicated, interval in bucket.layout.intervals(lambda info: info.spec.split is None)
        if (counted := intersect(interval, bucket.counted)) is not None and not (replicated and tp.index > 0)
    ]
