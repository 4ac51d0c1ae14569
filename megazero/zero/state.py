"""The model state of one rank by state kind, as intervals of buckets: what checkpoints read and write."""

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
    """Everything a rank holds for its parameters.  A state kind is "model", "master", "average", or the name of an
    optimizer's state.

    Args:
        average: of the masters; None where the run keeps none.
    """

    def __init__(
        self, parameters: ShardedParameters, optimizer: ShardedOptimizer, average: WeightAverage | None = None
    ) -> None:
        self.parameters, self.optimizer, self.average = parameters, optimizer, average
        self.policy, self.buckets = parameters.policy, parameters.buckets
        # before every access: a shard that is being sent must not change
        self._wait_for_gathers = parameters.gathers.wait

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The state kinds to save: weights, fp32 masters if more exact, the optimizer's state, an average that has begun."""
        average = (AVERAGE,) if self.average is not None and self.average.has_begun else ()
        return (*self._weights, *self.optimizer.states, *average)

    @property
    def known_state_kinds(self) -> tuple[str, ...]:
        """The state kinds to save after the optimizer's first step."""
        return (*self._weights, *self.optimizer.known_states, *([] if self.average is None else [AVERAGE]))

    @property
    def _weights(self) -> tuple[str, ...]:
        return (MODEL,) if self.policy.dtype == torch.float32 else (MODEL, MASTER)

    def dtype(self, state_kind: str, bucket: Bucket) -> torch.dtype:
        """Return the dtype of a state kind."""
        return bucket.dtype if state_kind == MODEL else torch.float32

    def holds(self, state_kind: str, bucket: Bucket) -> bool:
        """Whether a bucket has this state kind; frozen parameters have only weights."""
        kinds = (MASTER, GRADIENT, AVERAGE, *self.optimizer.states_of(bucket.layout))
        return state_kind == MODEL or (bucket.layout.trains and state_kind in kinds)

    def read(self, state_kind: str, bucket: Bucket, interval: Interval) -> Tensor:
        """Return owned elements of a bucket, 1-D: a view, or a copy if they are in a file.  `state_kind` may also be
        "gradient".
        """
        self._wait_for_gathers()
        if state_kind == GRADIENT:
            if bucket.gradient.numel() < interval.stop - interval.start:
                raise RuntimeError("there is no gradient between the start of a step and its first backward")
            return bucket.owned_slice(bucket.gradient, interval)
        array = self._array(state_kind, bucket)
        return self.optimizer.read(state_kind, bucket, interval) if array is None else bucket.read(array, interval)

    def memory(self, state_kind: str, bucket: Bucket, interval: Interval) -> Tensor | None:
        """Return a view of the elements for overwriting; None if they are in a file or do not exist yet."""
        self._wait_for_gathers()
        array = self._array(state_kind, bucket)
        if array is None:
            return self.optimizer.memory(state_kind, bucket, interval)
        array.flush()
        return None if array.tensor is None else bucket.owned_slice(array.tensor, interval)

    def write(self, state_kind: str, bucket: Bucket, interval: Interval, values: Tensor) -> None:
        """Overwrite elements `interval` of one state kind in a bucket."""
        self._wait_for_gathers()
        array = self._array(state_kind, bucket)
        if array is None:
            self.optimizer.write(state_kind, bucket, interval, values)
        else:
            bucket.write(array, interval, values)

    def _array(self, state_kind: str, bucket: Bucket) -> FlatArray | None:
        """The array of weights, masters or averages; None for state of the optimizer."""
        if state_kind == AVERAGE and self.average is not None:
            return self.average.arrays[bucket]
        return {MODEL: bucket.weight_shard, MASTER: bucket.master}.get(state_kind)
