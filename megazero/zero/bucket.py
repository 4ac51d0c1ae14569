"""What one rank stores of a bucket: weights, master weights and gradients, each in one flat array."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from megazero.zero.sharding import BucketLayout, Interval
from megazero.zero.storage import Extent, FlatArray, InMemory, StateMemory


class Landing(Enum):
    """Where the reduced gradients of a bucket arrive."""

    IN_PLACE = "where they add up: `gradient` is a view of `full_gradient` and exists only together with it"
    DEVICE = "in memory of their own, which a collective may write to"
    HOST = "on the host, by a copy that runs beside the backward"


class Bucket:
    """The tensors of one bucket on one rank.

    Args:
        memory: allocates what this rank holds.
        weights: the buffer that holds the full weights, [padded]; stage 3 passes a gather buffer.  None: allocate one.

    Attributes:
        is_duplicate: holds a tied parameter whose first copy is elsewhere; not counted in the norm and not saved.
        placement: the ranks that share the bucket.
        residency: what this rank holds of it.
        owned: the elements for which this rank holds master weights and moments.
        dtype: of the weights.
        counted: the elements that this rank counts in the gradient norm and writes to a checkpoint; ranks do not
            overlap.
        gather_axis: the axis over which stage 3 gathers the weights.
        weights: [padded]; if weights are sharded, valid only while they are gathered.
        weight_shard: [owned], in the weights' dtype.
        master: fp32 [owned]; the same memory as `weight_shard` for fp32 or frozen weights.
        full_gradient: [padded] in the accumulation dtype, if gradients are not sharded; exists from a step's first
            gradient on.
        gradient: fp32 [owned], the reduced gradient for the optimizer, in the same location as the master weights.
        holds_weights: this rank always holds the full weights.
        sums_full: a step's gradients add up in `full_gradient` and are reduced at its end.
        gathers_weights: this rank updates a shard but holds the full weights, which are gathered after every step.
        landing: where reduced gradients arrive.
    """

    def __init__(self, layout: BucketLayout, memory: StateMemory, weights: Tensor | None = None) -> None:
        self.layout, self.placement = layout, layout.first.placement
        self.policy = policy = memory.policy
        self.dtype = torch.float32 if layout.first.spec.buffer else policy.dtype
        self.is_duplicate = False
        self.residency = held = memory.residency(layout)
        own = layout.shard(self.placement.shard.index)
        self.counted = own if self.placement.replica.index == 0 else Interval(0, 0)
        self.owned = own if held.state is Extent.SHARD else layout.interval
        self.gather_axis = self.placement.gather or self.placement.shard
        self.holds_weights = held.weights is Extent.FULL
        self.sums_full = layout.trains and held.gradients is Extent.FULL
        self.gathers_weights = self.holds_weights and self.owned != layout.interval
        if weights is None:
            weights = torch.zeros(layout.padded_numel, dtype=self.dtype, device=policy.device)
        self.weights = weights
        self.weight_shard: FlatArray
        if self.holds_weights:
            self.weight_shard = InMemory(weights[self.owned.start : self.owned.stop], "device")
        else:
            self.weight_shard = memory.allocate(held.weights_on, self.owned.size, policy.dtype)
        self.master = self.weight_shard
        # fp32 weights in the same memory are their own master weights
        if layout.trains and not (policy.dtype == torch.float32 and held.weights_on == held.state_on != "file"):
            self.master = memory.allocate(held.state_on, self.owned.size, torch.float32)
        on_device = held.state_on == "device"
        self.landing = Landing.DEVICE if on_device or policy.on_cpu or not layout.trains else Landing.HOST
        if self.sums_full and on_device and policy.accumulate_dtype == torch.float32:
            self.landing = Landing.IN_PLACE
        self.full_gradient: Tensor | None = None
        self.gradient = torch.zeros(0)
        if layout.trains and self.landing is not Landing.IN_PLACE:
            array = memory.allocate("device" if on_device else "host", self.owned.size, torch.float32)
            self.gradient = array.read(0, self.owned.size)

    @property
    def gradient_chunks(self) -> tuple[Interval, ...]:
        """The bucket chunks that are reduced one at a time, each as an interval within every shard."""
        return (self.layout.shard(0),) if self.sums_full else self.layout.chunks

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of `full_gradient` while it exists."""
        return self.layout.padded_numel * self.policy.accumulate_dtype.itemsize if self.sums_full else 0

    def allocate_gradient(self) -> Tensor:
        """Return memory for a step's full gradients, [padded], with undefined content."""
        full = torch.empty(self.weights.numel(), dtype=self.policy.accumulate_dtype, device=self.policy.device)
        self.full_gradient = full
        if self.landing is Landing.IN_PLACE:
            self.gradient = full[self.owned.start : self.owned.stop]
        return full

    def free_gradient(self) -> None:
        """Free the gradients' memory if the gradient is in place, so that a forward can use the memory for activations.

        On a CPU the memory of buckets that are sent stays allocated, because mapping large blocks again page by page is
        slow.
        """
        if self.landing is Landing.IN_PLACE and not (self.policy.on_cpu and self.placement.sends):
            self.full_gradient, self.gradient = None, torch.zeros(0)

    def owned_slice(self, flat: Tensor, interval: Interval) -> Tensor:
        """Return elements `interval` of a tensor that covers the owned elements."""
        return flat[interval.start - self.owned.start : interval.stop - self.owned.start]

    def read(self, array: FlatArray, interval: Interval) -> Tensor:
        """Return elements `interval` of an array that covers the owned elements; a copy if the array is in a file."""
        return array.read(interval.start - self.owned.start, interval.stop - self.owned.start)

    def write(self, array: FlatArray, interval: Interval, values: Tensor) -> None:
        """Overwrite elements `interval` of an array that covers the owned elements."""
        array.write(interval.start - self.owned.start, values)


def in_order_of_use(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Sort buckets in the order in which a forward uses them.  Buckets of one unit are given in the order of its
    backward.
    """
    forward = buckets[::-1]
    return sorted(forward, key=lambda bucket: bucket.layout.unit)
