"""The all-gathers behind the next forward: of stepped weights, or of gradients whose step is still to be taken (stage 0).

    update         step(0) start(0)   step(1) start(1)   step(2) start(2)
    network                [ bucket 0 ][ bucket 1 ][ bucket 2 ]
    next forward                                       wait(0) unit 0   wait(1) unit 1   wait(2) unit 2

Buckets start in the order in which a forward uses them, so that the first unit waits for one bucket and not for all.  On a
slow link they travel for longer than a forward takes.  So where a model names a unit's readers, each layer waits for its own
buckets, and the first computes while the others are on their way.

At stage 0 every rank steps all weights.  Of the buckets that a forward uses first, a reduce-scatter leaves each rank a shard
of the sums; whoever needs such a bucket's weights waits for the other shards, and then steps it.

    backward     all-reduce(3) reduce-scatter(2) (1) (0)      update   next forward
    network      [ 3, twice  ][ 2 ][ 1 ][ 0 ]                          [ 0 ][ 1 ][ 2 ]  step(0) unit 0   step(1) unit 1

Invariant: from `start` to the wait for a bucket nobody reads its whole weights (at stage 0: gradients), and nobody writes
the part that this rank owns, which travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from megazero.comm.collectives import Pending, all_gather
from megazero.zero.bucket import Bucket
from megazero.zero.units import UnitModule, is_hooked, reading_no_weights


class HalfSteppedError(RuntimeError):
    """Something ended an update or a load half-way: weights are neither the old nor the new ones."""


class WeightGathers:
    """Gathers that are under way; after an update or a load that did not come to its end nobody sees weights."""

    def __init__(self) -> None:
        self._under_way: dict[Bucket, tuple[Pending, Callable[[], object] | None]] = {}  # and what steps it then
        self._broken: RuntimeError | None = None  # what has left weights that are neither the old nor the new ones
        self._hooks: list[RemovableHandle] = []

    def attach(self, units: Sequence[UnitModule], home: Mapping[int, Bucket]) -> None:
        """Have every unit, or each of its readers, wait for its weights before its forward.

        `home`: bucket by identity of a parameter.
        """
        for unit in units:
            of_unit = dict[Bucket, None]()
            for reader, parameters in unit.reads():
                every = dict.fromkeys(home[id(parameter)] for parameter in parameters)
                buckets = [bucket for bucket in every if bucket.gathers_weights or bucket.gathers_gradients]
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
        """Start to gather a bucket whose part on this rank is complete, if other ranks step other parts of it.

        `step`: steps the bucket, whose gradients are gathered instead, when the others' are here; once.
        """
        if step is None and not bucket.gathers_weights:
            return
        whole, mine = bucket.weights, bucket.weights[bucket.owned.start : bucket.owned.stop]
        if step is not None:
            whole, mine = bucket.gradient, bucket.gradient_shard
        self._under_way[bucket] = all_gather(whole, mine, bucket.placement.shard), step

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
                    gather, step = self._under_way[bucket]
                    gather.wait()
                    if step is not None:
                        with self.changing():
                            step()
                    del self._under_way[bucket]  # not before: after an interrupt whoever reads it must wait
        except RuntimeError as error:
            self._under_way.clear()
            self._broken = self._broken or error
            raise

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
        for gather, _ in self._under_way.values():
            gather.wait()
        self._under_way.clear()
        with self.changing("loading a checkpoint"):
            self._broken = None
            yield
