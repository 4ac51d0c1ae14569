"""All-gathers of updated weights that run behind the next forward.

    update         step(0) start(0)   step(1) start(1)   step(2) start(2)
    network                [ bucket 0 ][ bucket 1 ][ bucket 2 ]
    next forward                                       wait(0) unit 0   wait(1) unit 1   wait(2) unit 2

Buckets are gathered in the order in which a forward uses them, so the first unit waits for one bucket and not for all.
On a slow link the gathers take longer than a forward.  If a model lists a unit's readers, each of these layers
therefore waits only for its own buckets, and the first layer computes while the other buckets arrive.

Invariant: between `start` and the wait for a bucket, nothing reads its full weights, and nothing writes this rank's
shard, which is being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from megazero.comm.collectives import Pending, all_gather
from megazero.zero.bucket import Bucket
from megazero.zero.sharding import Slot
from megazero.zero.units import UnitModule

if TYPE_CHECKING:
    from megazero.zero.gather import UnitGatherer

Hook = TypeVar("Hook", bound=Callable[..., Any])


class HalfSteppedError(RuntimeError):
    """An update or a load was interrupted: some weights are old and some are new."""


class WeightGathers:
    """The all-gathers that are running.  After an interrupted update or load, every wait raises, so nothing computes
    with mixed weights.

    Args:
        parameters: the parameters of each bucket, as modules see them.

    Attributes:
        gatherer: gathers the units of stage 3; None at other stages.
    """

    gatherer: UnitGatherer | None

    def __init__(self, parameters: Mapping[Bucket, Sequence[nn.Parameter]]) -> None:
        self._parameters, self.gatherer = parameters, None
        self._under_way: dict[Bucket, Pending] = {}
        self._broken: RuntimeError | None = None  # why weights are neither the old nor the new ones
        self._hooks: list[RemovableHandle] = []

    def attach(self, units: Sequence[UnitModule], places: Mapping[int, tuple[Bucket, Slot]]) -> None:
        """Let every unit, or each of its readers, wait for its weights before its forward.

        Args:
            places: bucket and slot of each parameter, by id() of the parameter.
        """
        for unit in units:
            of_unit = dict[Bucket, None]()
            for reader, parameters in unit.reads():
                every = dict.fromkeys(places[id(parameter)][0] for parameter in parameters)
                buckets = [bucket for bucket in every if bucket.gathers_weights]
                of_unit |= dict.fromkeys(buckets)
                if buckets:  # functions, not methods: a copy of the module must not copy `self`
                    self._hooks.append(reader.register_forward_pre_hook(lambda *_, own=buckets: self.wait_for(own)))
            if unit.readers and of_unit:
                hook = reading_no_weights(lambda mod, _, own=of_unit: self.wait_for(own) if is_hooked(mod) else None)
                self._hooks.append(unit.module.register_forward_pre_hook(hook))

    def detach(self) -> None:
        """Remove the hooks: no unit waits any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self, bucket: Bucket) -> None:
        """Start the all-gather of a bucket after this rank has updated its shard.  No-op if the bucket is not sharded."""
        if bucket.gathers_weights:
            mine = bucket.weights[bucket.owned.start : bucket.owned.stop]
            self._under_way[bucket] = all_gather(bucket.weights, mine, bucket.placement.shard)

    def start_behind_forward(self, bucket: Bucket) -> None:
        """Start to gather an updated bucket for the next forward."""
        self.start(bucket)
        if self.gatherer is not None:
            self.gatherer.start_first(bucket)

    def invalidate(self, buckets: Iterable[Bucket]) -> None:
        """Forget the gathered weights of these buckets: they have changed, or will change before the next forward of
        their units.
        """
        # so that autograd refuses the backward of an earlier forward
        increment_version([parameter for bucket in buckets for parameter in self._parameters[bucket]])
        if self.gatherer is not None:
            self.gatherer.forget()

    def gather(self, buckets: Iterable[Bucket]) -> None:
        """Gather these buckets and wait for them."""
        for bucket in buckets:
            self.start(bucket)
        self.wait()

    def check(self) -> None:
        """Raise if the last update or load did not finish.

        Raises:
            LostPeerError, HalfSteppedError: it did not.
        """
        if self._broken is not None:
            raise self._broken

    def wait_for(self, buckets: Iterable[Bucket]) -> None:
        """Wait until the full weights of these buckets have arrived.

        Raises:
            LostPeerError, HalfSteppedError: as `check`.
        """
        self.check()
        try:
            for bucket in buckets:
                if bucket in self._under_way:
                    self._under_way[bucket].wait()
                    del self._under_way[bucket]  # only now: after an interrupt, the next reader still has to wait
        except RuntimeError as error:
            self._under_way.clear()
            self._broken = self._broken or error
            raise

    def wait(self) -> None:
        """Wait until all weights have arrived."""
        self.wait_for(list(self._under_way))

    @contextmanager
    def changing(self, what: str = "an update") -> Iterator[None]:
        """A context in which the weights change.  If it raises, some have changed and some have not, and `check` raises
        from then on.

        Args:
            what: the change, for the error message.
        """
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
        """A context that overwrites all weights, so that an earlier failed update no longer matters."""
        for gather in self._under_way.values():
            gather.wait()
        self._under_way.clear()
        with self.changing("loading a checkpoint"):
            self._broken = None
            yield


def reading_no_weights(hook: Hook) -> Hook:
    """Mark a pre-forward hook as one that reads no weights, so that the unit's layers may still wait one by one."""
    hook.reads_no_weights = True  # type: ignore[attr-defined]
    return hook


def is_hooked(module: nn.Module) -> bool:
    """Whether a script has put pre-forward hooks on the unit, which may read all its weights."""
    return not all(hasattr(hook, "reads_no_weights") for hook in module._forward_pre_hooks.values())
