"""The all-gathers of stepped weights behind the next forward.

    update         step(0) start(0)   step(1) start(1)   step(2) start(2)
    network                [ bucket 0 ][ bucket 1 ][ bucket 2 ]
    next forward                                       wait(0) unit 0   wait(1) unit 1   wait(2) unit 2

Buckets start in the order in which a forward uses them, so that the first unit waits for one bucket and not for all.  On a
slow link they travel for longer than a forward takes.  So where a model names a unit's readers, each layer waits for its own
buckets, and the first computes while the others are on their way.

Invariant: from `start` to the wait for a bucket nobody reads its whole weights, and nobody writes the part that this rank
owns, which travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from megazero.comm.collectives import Pending, all_gather
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.units import UnitModule, is_hooked, reading_no_weights


class HalfSteppedError(RuntimeError):
    """Something ended an update or a load half-way: weights are neither the old nor the new ones."""


class WeightGathers:
    """Gathers that are under way; after an update or a load that did not come to its end nobody sees weights."""

    def __init__(self) -> None:
        self._under_way: dict[Bucket, Pending] = {}
        self._broken: RuntimeError | None = None  # what has left weights that are neither the old nor the new ones
        self._hooks: list[RemovableHandle] = []

    def defer_steps(self, buckets: Sequence[Bucket], bucket_elements: int, world: Axis, *, can: bool) -> None:
        """Choose the buckets that are stepped only when a forward needs them: none.  All ranks of the world call this.

        Args:
            bucket_elements: how large buckets should be.
            can: whether gathers may travel behind the next forward of this rank.
        """

    def arrives(self, bucket: Bucket) -> bool:
        """Whether a forward has to wait for a bucket."""
        return bucket.gathers_weights

    def attach(self, units: Sequence[UnitModule], home: Mapping[int, Bucket]) -> None:
        """Have every unit, or each of its readers, wait for its weights before its forward.

        `home`: bucket by identity of a parameter.
        """
        for unit in units:
            of_unit = dict[Bucket, None]()
            for reader, parameters in unit.reads():
                every = dict.fromkeys(home[id(parameter)] for parameter in parameters)
                buckets = [bucket for bucket in every if self.arrives(bucket)]
                of_unit |= dict.fromkeys(buckets)
                if buckets:
                    self._hooks.append(reader.register_forward_pre_hook(self._before_forward(buckets)))
            if unit.readers and of_unit:
                self._hooks.append(unit.module.register_forward_pre_hook(self._before_other_hooks(list(of_unit))))

    def _before_forward(self, buckets: Sequence[Bucket]) -> Any:
        return lambda *_: self.wait_for(buckets)  # a function: a copy of the module must not copy `self`

    def _before_other_hooks(self, buckets: Sequence[Bucket]) -> Any:
        return reading_no_weights(lambda module, _: self.wait_for(buckets) if is_hooked(module) else None)

    def detach(self) -> None:
        """Have no unit wait any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self, bucket: Bucket, step: Callable[[], object] | None = None) -> None:
        """Start the all-gather of a bucket after this rank has updated its shard.  No-op if the bucket is not sharded.

        `step`: of a bucket of which this rank has a part of the gradients: steps it, once, when it has them all.
        """
        assert step is None  # `defer_steps` has chosen no such bucket
        if bucket.gathers_weights:
            mine = bucket.weights[bucket.owned.start : bucket.owned.stop]
            self._under_way[bucket] = all_gather(bucket.weights, mine, bucket.placement.shard)

    def gather(self, buckets: Iterable[Bucket]) -> None:
        """Gather some buckets now."""
        for bucket in buckets:
            self.start(bucket)
        self.wait()

    def check(self) -> None:
        """Raises: LostPeerError, HalfSteppedError: the last update or load did not come to its end."""
        if self._broken is not None:
            raise self._broken

    def wait_for(self, buckets: Iterable[Bucket]) -> None:
        """Wait until the whole weights of some buckets are here.  Raises: as `check`."""
        self.check()
        try:
            for bucket in buckets:
                if bucket in self._under_way:
                    self.finish(bucket)
                    del self._under_way[bucket]  # not before: after an interrupt whoever reads it must wait
        except RuntimeError as error:
            self.forget()
            self._broken = self._broken or error
            raise

    def finish(self, bucket: Bucket) -> None:
        """Wait for the gather of a bucket."""
        self._under_way[bucket].wait()

    def forget(self) -> None:
        """Drop all gathers under way."""
        self._under_way.clear()

    def wait(self) -> None:
        """Wait until all weights are here."""
        self.wait_for(list(self._under_way))

    @contextmanager
    def changing(self, what: str = "an update") -> Iterator[None]:
        """A context that changes weights, and has changed all of them unless it raises.  `what`: for the error."""
        try:
            yield
        except BaseException as error:
            self._broken = self._broken or HalfSteppedError(
                f"{what} was interrupted half-way ({error!r}): weights are neither the old nor the new ones; "
                "load a checkpoint"
            )
            raise

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """A context that writes all weights anew: what has become of the last update does not matter."""
        for gather in self._under_way.values():
            gather.wait()
        self.forget()
        with self.changing("loading a checkpoint"):
            self._broken = None
            yield
