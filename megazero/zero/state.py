"""The model state of one rank by kind, as intervals of buckets: what checkpoints read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megazero.zero.bucket import Bucket, Interval, ShardingPolicy, intersect
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.storage import FlatArray

MODEL, MASTER, GRADIENT = "model", "master", "gradient"


class ShardedState:
    """Everything a rank holds for its parameters.  A kind is "model", "master", or the name of an optimizer state.

    Args:
        wait_for_step: called before every read and write, since buckets may not be updated yet; see `WeightGathers`.
    """

    def __init__(
        self,
        policy: ShardingPolicy,
        buckets: Sequence[Bucket],
        optimizer: ShardedOptimizer,
        wait_for_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy, self.buckets, self.optimizer, self._wait_for_step = policy, buckets, optimizer, wait_for_step

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds to save: the weights, fp32 masters if they are more exact than the weights, and the optimizer's
        state.
        """
        return (*self._weights, *self.optimizer.states)

    @property
    def known_kinds(self) -> tuple[str, ...]:
        """The kinds to save after the optimizer's first step."""
        return (*self._weights, *self.optimizer.known_states)

    @property
    def _weights(self) -> tuple[str, ...]:
        return (MODEL,) if self.dtype(MODEL) == torch.float32 else (MODEL, MASTER)

    def dtype(self, kind: str) -> torch.dtype:
        """Return the dtype of a kind."""
        return self.policy.dtype if kind == MODEL else torch.float32

    def holds(self, kind: str, bucket: Bucket) -> bool:
        """Whether a bucket has this kind; frozen parameters have only weights."""
        kinds = (MASTER, GRADIENT, *self.optimizer.states_of(bucket.layout))
        return kind == MODEL or (bucket.layout.trains and kind in kinds)

    def read(self, kind: str, bucket: Bucket, run: Interval) -> Tensor:
        """Return owned elements of a bucket, 1-D: a view, or a copy if they are in a file.  `kind` may also be
        "gradient".
        """
        self._wait_for_step()
        if kind == GRADIENT:
            if bucket.gradient.numel() < run.stop - run.start:
                raise RuntimeError("there is no gradient between the start of a step and its first backward")
            if intersect(run, bucket.summed) != run:
                raise RuntimeError("a rank has summed its shard of these gradients alone; read elements that it counts")
            return bucket.owned_part(bucket.gradient, run)
        array = _weights(kind, bucket)
        return self.optimizer.read(kind, bucket, run) if array is None else bucket.read(array, run)

    def memory(self, kind: str, bucket: Bucket, run: Interval) -> Tensor | None:
        """Return a view of the elements for overwriting; None if they are in a file or do not exist yet."""
        self._wait_for_step()
        array = _weights(kind, bucket)
        if array is None:
            return self.optimizer.memory(kind, bucket, run)
        array.flush()
        return None if array.tensor is None else bucket.owned_part(array.tensor, run)

    def write(self, kind: str, bucket: Bucket, run: Interval, values: Tensor) -> None:
        """Overwrite the elements."""
        self._wait_for_step()
        array = _weights(kind, bucket)
        if array is None:
            self.optimizer.write(kind, bucket, run, values)
        else:
            bucket.write(array, run, values)


def _weights(kind: str, bucket: Bucket) -> FlatArray | None:
    """Return the array of weights or masters; None for optimizer state."""
    return {MODEL: bucket.weight_shard, MASTER: bucket.master}.get(kind)
