"""Stage 0 between CPU hosts: part of the traffic of a step overlaps the next forward.

On a slow link, a backward cannot hide an all-reduce of all gradients, while the link is idle during the forward.
Therefore the optimizer state of the buckets that a forward uses first is sharded as at stage 1.  The
bytes stay the same, but half of these buckets' bytes are sent after the update:

    backward     all-reduce(3) reduce-scatter(2) (1) (0)    update    next forward
    network      [ 3, twice  ][ 2 ][ 1 ][ 0 ]                         [ 0 ][ 1 ][ 2 ]    all-gathers of weights
"""

from collections.abc import Collection
from dataclasses import replace

import torch

from megazero.comm.collectives import largest
from megazero.parallel_state import Axis
from megazero.zero.bucket_plan import ShardingPlan
from megazero.zero.sharding import BucketLayout, ShardingPolicy
from megazero.zero.storage import Residency, StateMemory

# Leave out buckets that are larger than this many of the desired size: a reduce-scatter needs a buffer as large as the
# bucket for what arrives.
_LARGEST_BUCKETS = 4

# Shard this fraction of the elements.  A backward takes twice as long as a forward and so can hide twice the bytes: the
# reduce-scatter of all elements and the all-gather of a third.  The forward hides the all-gather of two thirds.
BEHIND_FORWARD = 2 / 3


class PartlySharded(StateMemory):
    """Memory of stage 0 in which some buckets have their state sharded as at stage 1.

    Args:
        sharded: names of these buckets.
    """

    def __init__(self, policy: ShardingPolicy, sharded: Collection[str]) -> None:
        super().__init__(policy)
        self.sharded = sharded

    def residency(self, layout: BucketLayout) -> Residency:
        return Residency.of(layout, 1 if layout.name in self.sharded else 0)


def spread_traffic(plan: ShardingPlan, world: Axis) -> ShardingPlan:
    """Return the plan with the state of the first buckets sharded if it is of stage 0.  A collective call; at the seam
    "sharding plan".
    """
    policy = plan.policy
    # In a narrower format, an all-reduce of gradients sends less than a gather of fp32 weights.
    is_wide = policy.reduce_dtype == policy.accumulate_dtype == torch.float32
    # All ranks choose alike, because the sums over tp need the same elements on all ranks of tp.
    if policy.zero_stage > 0 or not is_wide or largest([not plan.hides_gathers], world)[0]:
        return plan
    most = _LARGEST_BUCKETS * plan.sizes.elements
    able = [layout for layout in plan.layouts if _can_shard(layout) and layout.padded_numel <= most]
    forward = able[::-1]  # buckets of one unit are given in the order of its backward
    left, sharded = BEHIND_FORWARD * sum(layout.numel for layout in able), list[str]()
    for layout in sorted(forward, key=lambda layout: layout.unit):
        if left <= 0:
            break
        sharded.append(layout.name)
        left -= layout.numel
    return replace(plan, memory=PartlySharded(policy, sharded))


def _can_shard(layout: BucketLayout) -> bool:
    """Whether the ranks may shard the state of a bucket.  For a tied parameter, all stages would have to agree."""
    first = layout.first
    is_shared = layout.shards > 1 and first.placement.replica.size == 1
    return layout.trains and is_shared and layout.tie is None and not first.matrix
