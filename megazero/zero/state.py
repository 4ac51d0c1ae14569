"""The model state of one rank by kind, as intervals of buckets: what checkpoints read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.zero.bucket import Bucket
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.parameters import ShardedParameters
from megazero.zero.sharding import Interval
from megazero.zero.storage import FlatArray

if TYPE_CHECKING:
    from megazero.zero.average import WeightAverage

MODEL, MASTER, GRADIENT, AVERAGE = "model", "master", "gradient", "average"


class ShardedState:
    """Everything a rank holds for its parameters.  A kind is "model", "master", "average", or an optimizer state's name.

    Args:
        average: of the masters; None where the run keeps none.
    """

    def __init__(
        self, parameters: ShardedParameters, optimizer: ShardedOptimizer, average: WeightAverage | None = None
    ) -> None:
        self.parameters, self.optimizer, self.average = parameters, optimizer, average
        self.policy, self.buckets = parameters.policy, parameters.buckets
        self._wait_for_gathers = (
            parameters.gathers.wait
        )  # before every access: a shard that is being sent must not change

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds to save: weights, fp32 masters if more exact, the optimizer's state, an average that has begun."""
        average = (AVERAGE,) if self.average is not None and self.average.has_begun else ()
        return (*self._weights, *self.optimizer.states, *average)

    @property
    def known_kinds(self) -> tuple[str, ...]:
        """The kinds to save after the optimizer's first step."""
        return (*self._weights, *self.optimizer.known_states, *([] if self.average is None else [AVERAGE]))

    @property
    def _weights(self) -> tuple[str, ...]:
        return (MODEL,) if self.policy.dtype == torch.float32 else (MODEL, MASTER)

    def dtype(self, kind: str, bucket: Bucket) -> torch.dtype:
        """Return the dtype of a kind."""
        return bucket.dtype if kind == MODEL else torch.float32

    def holds(self, kind: str, bucket: Bucket) -> bool:
        """Whether a bucket has this kind; frozen parameters have only weights."""
        kinds = (MASTER, GRADIENT, AVERAGE, *self.optimizer.states_of(bucket.layout))
        return kind == MODEL or (bucket.layout.trains and kind in kinds)

    def read(self, kind: str, bucket: Bucket, run: Interval) -> Tensor:
        """Return owned elements of a bucket, 1-D: a view, or a copy if they are in a file.  `kind` may also be
        "gradient".
        """
        self._wait_for_gathers()
        if kind == GRADIENT:
            if bucket.gradient.numel() < run.stop - run.start:
                raise RuntimeError("there is no gradient between the start of a step and its first backward")
            return bucket.owned_part(bucket.gradient, run)
        array = self._array(kind, bucket)
        return self.optimizer.read(kind, bucket, run) if array is None else bucket.read(array, run)

    def memory(self, kind: str, bucket: Bucket, run: Interval) -> Tensor | None:
        """Return a view of the elements for overwriting; None if they are in a file or do not exist yet."""
        self._wait_for_gathers()
        array = self._array(kind, bucket)
        if array is None:
            return self.optimizer.memory(kind, bucket, run)
        array.flush()
        return None if array.tensor is None else bucket.owned_part(array.tensor, run)

    def write(self, kind: str, bucket: Bucket, run: Interval, values: Tensor) -> None:
        """Overwrite elements `run` of one kind of state in a bucket."""
        self._wait_for_gathers()
        array = self._array(kind, bucket)
        if array is None:
            self.optimizer.write(kind, bucket, run, values)
        else:
            bucket.write(array, run, values)

    def _array(self, kind: str, bucket: Bucket) -> FlatArray | None:
        """The array of weights, masters or averages; None for state of the optimizer."""
        if kind == AVERAGE and self.average is not None:
            return self.average.arrays[bucket]
        return {MODEL: bucket.weight_shard, MASTER: bucket.master}.get(kind)
