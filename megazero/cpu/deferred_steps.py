"""Stage 0 between hosts of CPUs: of the buckets that a forward uses first, gradients are gathered behind the next forward.

At stage 0 every rank steps all weights.  A reduce-scatter leaves each rank a shard of the sums of such a bucket; whoever
needs the bucket's weights waits for the other shards, and then steps it.

    backward     all-reduce(3) reduce-scatter(2) (1) (0)      update   next forward
    network      [ 3, twice  ][ 2 ][ 1 ][ 0 ]                          [ 0 ][ 1 ][ 2 ]  step(0) unit 0   step(1) unit 1

Invariant: from `start` to the wait for a bucket nobody reads its gradients.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megazero.comm.collectives import all_gather, largest
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, Landing, in_order_of_use
from megazero.zero.weight_gathers import WeightGathers

_LARGEST_BUCKETS = 4  # as large as so many buckets should be: what arrives of a larger one would take as much memory

# Of the gradients of stage 0.  A backward takes twice as long as a forward, so twice the bytes travel behind it: the
# reduce-scatter of all and the all-gather of a third there, that of two thirds behind the forward.
BEHIND_FORWARD = 2 / 3


class DeferredSteps(WeightGathers):
    """Gathers of weights, and of gradients whose bucket is stepped when they have arrived; at the seam "weight gathers"."""

    def __init__(self, parameters: Mapping[Bucket, Sequence[nn.Parameter]]) -> None:
        super().__init__(parameters)
        self._steps: dict[Bucket, Callable[[], object]] = {}  # of buckets whose gradients are under way

    def defer_steps(self, buckets: Sequence[Bucket], bucket_elements: int, world: Axis, *, can: bool) -> None:
        # What tp sums afterwards must be whole on all of its ranks or a shard on all, so all ranks choose alike.
        if largest([not can], world)[0]:
            return
        most = _LARGEST_BUCKETS * bucket_elements
        able = [bucket for bucket in buckets if _can_defer(bucket) and bucket.layout.padded_numel <= most]
        left = BEHIND_FORWARD * sum(bucket.layout.numel for bucket in able)
        for bucket in in_order_of_use(able):
            if left <= 0:
                break
            bucket.summed = bucket.counted
            left -= bucket.layout.numel

    def arrives(self, bucket: Bucket) -> bool:
        return super().arrives(bucket) or bucket.summed != bucket.owned

    def start(self, bucket: Bucket, step: Callable[[], object] | None = None) -> None:
        if step is None:
            super().start(bucket)
            return
        mine = bucket.owned_part(bucket.gradient, bucket.summed)
        self._under_way[bucket], self._steps[bucket] = all_gather(bucket.gradient, mine, bucket.placement.shard), step

    def finish(self, bucket: Bucket) -> None:
        super().finish(bucket)
        if (step := self._steps.get(bucket)) is not None:
            with self.changing():
                step()
            del self._steps[bucket]

    def forget(self) -> None:
        super().forget()
        self._steps.clear()


def _can_defer(bucket: Bucket) -> bool:
    """Whether a rank may sum its shard of the gradients alone: nobody needs the others' before they are stepped."""
    policy, layout = bucket.policy, bucket.layout
    is_plain = policy.zero_stage == 0 and layout.shards > 1 and bucket.placement.replica.size == 1
    # In a narrower format an all-reduce sends less than a gather of fp32 sums; the stages of a tie choose on their own.
    is_wide = bucket.landing is Landing.IN_PLACE and policy.reduce_dtype == policy.accumulate_dtype
    return is_plain and is_wide and layout.tie is None and not layout.first.matrix
