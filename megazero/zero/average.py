"""An average of the master weights over the steps of a run, sharded and placed as they are.

update(weight)     average += weight * (master - average)       on each rank, of the elements that it owns
EMA                weight 1 - decay after each step             the first update copies
mean of n          weight 1 / n after the n-th                  Source: torch.optim.swa_utils.AveragedModel
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from megazero.zero.bucket import Bucket
from megazero.zero.parameters import memory_key
from megazero.zero.storage import FILE_SLICE_ELEMENTS, FlatArray, StateMemory


class WeightAverage:
    """The moving average of this rank's masters, fp32, stored where the optimizer's state is: device, host or file.

    Attributes:
        arrays: the average of each bucket that trains.
        has_begun: the average holds weights, because it was updated or loaded.
    """

    def __init__(self, buckets: Sequence[Bucket], memory: StateMemory) -> None:
        trained = [bucket for bucket in buckets if bucket.layout.trains]
        self.arrays = {b: memory.allocate(b.residency.state_on, b.master.numel, torch.float32) for b in trained}
        self.has_begun = False

    def update(self, weight: float) -> None:
        """Move the average towards the masters by the fraction `weight` of their difference.  The first update copies
        them.
        """
        weight = weight if self.has_begun else 1.0
        for master, average, start, stop in self._slices():
            average.flush()
            values = average.read(start, stop)
            values.lerp_(master.read(start, stop).to(values.device), weight)
            if average.tensor is None:  # in a file: `values` is a copy
                average.write(start, values)
        self.has_begun = True

    def swap(self) -> None:
        """Exchange masters and averages."""
        for master, average, start, stop in self._slices():
            values = master.read(start, stop).clone()
            master.write(start, average.read(start, stop))
            average.write(start, values)

    def _slices(self) -> Iterator[tuple[FlatArray, FlatArray, int, int]]:
        for bucket, average in self.arrays.items():
            for start in range(0, average.numel, FILE_SLICE_ELEMENTS):
                yield bucket.master, average, start, min(start + FILE_SLICE_ELEMENTS, average.numel)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the average, by location."""
        sizes = Counter[str]()
        for average in self.arrays.values():
            sizes[memory_key("average", average.location)] += average.nbytes
        return dict(sizes)
