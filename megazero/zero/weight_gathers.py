"""The all-gathers that bring stepped weights to every rank, behind whatever does not read them yet.

    update         step(0) start(0)   step(1) start(1)   step(2) start(2)
    network                [ bucket 0 ][ bucket 1 ][ bucket 2 ]
    next forward                                       wait(0) unit 0   wait(1) unit 1   wait(2) unit 2

Buckets start in the order in which a forward uses them, so that the first unit waits for one bucket and not for all.  On a
slow link weights travel for longer than a forward takes: a unit that tells which of its layers reads what waits layer by
layer, and computes with the first while the others are on their way.

Where every rank steps all weights (stage 0), the gradients that step them travel in the same way, those that a forward
needs first: each rank has summed a shard of them, and steps a bucket when the others' shards have come.

    backward     all-reduce(3) reduce-scatter(2) (1) (0)      update   next forward
    network      [ 3 ][ 3 ][ 2 ][ 1 ][ 0 ]                             [ 0 ][ 1 ][ 2 ]  step(0) unit 0   step(1) unit 1

Invariant: from `start` to the wait for a bucket nobody reads its whole weights, and nobody writes the part that this rank
owns, which travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from megazero.comm.collectives import LostPeerError, Pending, all_gather
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.units import Unit


class WeightGathers:
    """Gathers of whole weights over `axis` that are under way, by bucket."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._under_way: dict[Bucket, Pending] = {}
        self._hooks: list[RemovableHandle] = []

    def attach(self, units: Sequence[Unit], home: Mapping[int, Bucket]) -> None:
        """Have every unit, or each of its readers, wait for its weights before its forward.

        `home`: bucket by identity of a parameter.
        """
        for reader, parameters in [one for unit in units for one in unit.reads()]:
            every = dict.fromkeys(home[id(parameter)] for parameter in parameters)
            buckets = [bucket for bucket in every if bucket.gathers_weights or bucket.can_gather_gradients]
            if buckets:
                self._hooks.append(reader.register_forward_pre_hook(self._before_forward(buckets)))

    def _before_forward(self, buckets: Sequence[Bucket]) -> Any:
        return lambda *_: self.wait_for(buckets)  # a function: a copy of the module must not copy `self`

    def detach(self) -> None:
        """Have no unit wait any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self, bucket: Bucket, step: Callable[[], object] | None = None) -> None:
        """Start to gather a bucket whose part on this rank is complete, if other ranks step other parts of it.

        `step`: takes the step of a bucket whose gradients are gathered.
        """
        if step is not None:
            gathered = all_gather(bucket.gradient, bucket.summed_gradient, self._axis)
            self._under_way[bucket] = Pending(gathered.wait, step)
        elif bucket.gathers_weights:
            mine = bucket.weights[bucket.owned.start : bucket.owned.stop]
            self._under_way[bucket] = all_gather(bucket.weights, mine, self._axis)

    def wait_for(self, buckets: Iterable[Bucket]) -> None:
        """Wait until the whole weights of some buckets are here.  Raises: LostPeerError: nothing is under way any more."""
        try:
            for bucket in buckets:
                if (pending := self._under_way.get(bucket)) is not None:
                    pending.wait()
                    del self._under_way[bucket]  # not before: after an interrupt whoever reads it must wait
        except LostPeerError:
            self._under_way.clear()
            raise

    def wait(self) -> None:
        """Wait until all weights are here."""
        self.wait_for(list(self._under_way))
