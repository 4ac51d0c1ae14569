"""Stage 3: each unit's weights gathered before its forward and before its backward, those of the next units meanwhile.

    forward      unshard(0) wait(0) unshard(1) | wait(1) unshard(2) | ...      backward: the same, downward
    buffers      A: 0                B: 1        A: 2                          few buffers serve all units (`gather_buffers`)

A unit of several buckets starts all of them, and in a forward each of its layers waits for its own (`Unit.readers`).

An offloaded shard comes to the device first, into a staging buffer: `read_ahead`, then `unshard`, then `wait_for_unshard`.

[Note: fixed addresses]  A unit always comes to the same buffer, and its neighbours to others.  Between two uses of a unit
its buffer may hold any other unit that shares it.

[Note: gathers ahead]  When a unit is to run, those that follow are gathered, in the order of their use: the next one
always, and as many more as `prefetch_bytes` hold and have buffers that no unit before them needs.  So the network always has
a gather to carry, also where a unit computes for longer than its neighbours' weights travel, or shorter.  What follows is a
guess (`visit_history`); a wrong one costs a gather.

[Note: a unit's own results]  A unit's backward begins when the gradient of one of its results arrives, so a hook on the
result gathers the unit in time, and the next one.  A result that another unit has made, passed on or returned by an inner
unit, gets a node of its own first: a hook on the maker's node would gather this unit's weights, and perhaps the next unit's,
just before the maker runs.  Where a change in place or a result in an attribute goes past the hook, the unit is gathered
later, when autograd asks for its weights: `saved_weights.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import compress, islice
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from megazero.comm.collectives import Pending, all_gather, check_order
from megazero.comm.memory import storage_of
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, ShardingPolicy, Slot
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.param_proxy import UngatheredParameter
from megazero.zero.quantized import WEIGHT_BITS, BlockFormat, QuantizedGather
from megazero.zero.saved_weights import SavingForward
from megazero.zero.second_copy import SecondCopy
from megazero.zero.storage import PendingCopy
from megazero.zero.units import Unit, in_backward, is_hooked, reading_no_weights
from megazero.zero.visit_history import VisitHistory

P = ParamSpec("P")
R = TypeVar("R")


def _beneath_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Let no dispatch mode of a script see the operations of a gather: a recomputation gathers other things.

    Fake tensors have no values without their mode.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return function(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)

    return run


class BucketGatherer:
    """Gathers whole buckets, each over the axis of its placement, into their buffers.

    `checks_order`: what is gathered goes with the gather, so that ranks that gather different buckets raise an OrderError.
    What buffers hold may have been quantized on its way; copies have not.
    """

    def __init__(self, buckets: Sequence[Bucket], policy: ShardingPolicy, *, checks_order: bool) -> None:
        self._device, self._checks_order = policy.device, checks_order
        self._axes = list(dict.fromkeys(bucket.placement.gathers_over for bucket in buckets))
        # The number comes first, since a long label is cut.
        self._labels = {bucket: f"weights {at}, {bucket.layout.name}" for at, bucket in enumerate(buckets)}
        self._marks: list[Pending] = []
        self._buffer_bytes = {  # by address of the buffer, as `storage_of` tells it
            storage_of(bucket.weights): bucket.weights.untyped_storage().nbytes() for bucket in buckets
        }
        self._gathered: dict[int, Bucket] = {}  # by address of a buffer: the bucket whose weights it holds or gets
        self._gathering: dict[int, Pending] = {}  # by address
        self._reading: dict[Bucket, tuple[PendingCopy, Tensor]] = {}
        self._staging = BufferPool(policy.device)
        self.second_copy = SecondCopy(buckets)
        self.generation = 0  # how often the shards have changed
        self._largest_shard = max((bucket.weight_shard.numel for bucket in buckets), default=0)
        self._all_gather: Callable[..., Pending] = all_gather
        self._is_exact = not policy.quantizes_weights or all(axis.size == 1 for axis in self._axes)
        if not self._is_exact:
            largest = max(bucket.layout.padded_numel for bucket in buckets)
            self._all_gather = QuantizedGather(BlockFormat.on(policy, WEIGHT_BITS), self._staging, largest).start

    @property
    def nbytes(self) -> int:
        """Bytes of the gather buffers, and of those through which offloaded shards and quantized weights pass to them."""
        return sum(self._buffer_bytes.values()) + self._staging.nbytes

    @property
    def is_full(self) -> bool:
        """Whether every buffer holds weights, or a gather that brings them is under way."""
        return len(self._gathered) == len(self._buffer_bytes)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a gather buffer."""
        return _address_of(tensor) in self._buffer_bytes

    def bucket_at(self, tensor: Tensor) -> Bucket | None:
        """The bucket that the buffer in which a tensor lies holds now; None if the tensor lies in none."""
        address = _address_of(tensor)
        return None if address is None else self._gathered.get(address)

    def is_unsharded(self, bucket: Bucket) -> bool:
        """Whether a bucket's buffer holds its weights, or a gather that brings them is under way."""
        return self._gathered.get(storage_of(bucket.weights)) is bucket

    def holds_exactly(self, bucket: Bucket) -> bool:
        """Whether a copy of a bucket's weights costs no gather."""
        return self._is_exact and self.is_unsharded(bucket)

    @_beneath_modes
    def read_ahead(self, bucket: Bucket) -> None:
        """Start copying an offloaded shard to the device, unless the next gather takes the second copy."""
        if not (_is_on_device(bucket) or self.second_copy.is_fresh(bucket)):
            self._start_read(bucket)

    def _start_read(self, bucket: Bucket) -> None:
        shard = bucket.weight_shard
        if bucket not in self._reading:
            staging = self._staging.acquire(self._largest_shard, shard.dtype)
            self._reading[bucket] = (shard.start_read(staging[: shard.numel], 0), staging)

    @_beneath_modes
    def unshard(self, bucket: Bucket) -> None:
        """Start gathering a bucket's weights, unless its buffer holds them."""
        if self.is_unsharded(bucket):
            return
        address = storage_of(bucket.weights)
        self._wait_for(address)
        self._gathered.pop(address, None)  # until a gather has begun: one that fails leaves nothing in the buffer
        self._gathering[address] = self._gather(bucket, bucket.weights, self._labels[bucket])
        self._gathered[address] = bucket

    @_beneath_modes
    def wait_for_unshard(self, bucket: Bucket) -> None:
        """Wait for the gather into the bucket's buffer, if one is under way."""
        self._wait_for(storage_of(bucket.weights))

    def _wait_for(self, address: int) -> None:
        if address in self._gathering:
            bucket = self._gathered.pop(address)  # a wait that fails leaves nothing in the buffer
            self._gathering.pop(address).wait()
            self._gathered[address] = bucket
            self.second_copy.keep(bucket)

    def _gather(self, bucket: Bucket, out: Tensor, label: str, *, is_copy: bool = False) -> Pending:
        """Start gathering a bucket's weights into `out`; from the second copy where it has them."""
        label, gather = label if self._checks_order else "", all_gather if is_copy else self._all_gather
        axis = bucket.placement.gathers_over
        if self.second_copy.is_fresh(bucket) and (self._is_exact or not is_copy):
            # Ranks of other hosts may be about to gather another bucket over the whole axis: the label goes to them too.
            told = self._tell(label, axis) if label else Pending()
            return Pending(told.wait, self.second_copy.gather(bucket, out, label).wait)
        shard, staging = self._shard_of(bucket)
        pending = gather(out, shard, axis, label)
        return pending if staging is None else Pending(pending.wait, partial(self._staging.release, staging))

    def _tell(self, label: str, axis: Axis) -> Pending:
        """Compare a label over an axis without any weights."""
        nothing = torch.empty(0, device=self._device)
        return all_gather(nothing, nothing.clone(), axis, label)

    def _compare_labels(self) -> None:
        """Raises: OrderError: ranks have gathered different buckets."""
        for axis in self._axes:
            check_order(axis)
        self.second_copy.check_order()

    def whole_copy(self, bucket: Bucket, slot: Slot) -> Tensor:
        """A whole copy of one parameter, in memory of its own; from the bucket's buffer while its weights are there."""
        if self.holds_exactly(bucket):
            self.wait_for_unshard(bucket)
            return _part_of(bucket.weights, slot).clone()
        return _part_of(self.whole_bucket(bucket, slot.info.name), slot).clone()

    @_beneath_modes
    def whole_bucket(self, bucket: Bucket, label: str) -> Tensor:
        """[padded]: a copy of a bucket's weights, in memory of its own."""
        flat = torch.empty_like(bucket.weights)
        self._gather(bucket, flat, f"a copy of {label}", is_copy=True).wait()
        self._compare_labels()  # a copy may go anywhere
        return flat

    def mark_end_of_pass(self) -> None:
        """Let ranks that gather more in this forward and backward than this one find that out: they would wait for it."""
        if not self._checks_order:
            return
        self._wait_for_marks()
        self._marks = [self._tell("nothing, at the end of a backward", axis) for axis in self._axes if axis.size > 1]

    def _wait_for_marks(self) -> None:
        for mark in self._marks:
            mark.wait()
        self._compare_labels()

    def forget(self) -> None:
        """The shards have changed: nothing that was gathered or read is valid any more, also where a wait is interrupted."""
        gathering, self._gathering = self._gathering, {}
        reading, self._reading = self._reading, {}
        self._gathered.clear()
        self.second_copy.forget()
        self.generation += 1
        self._wait_for_marks()
        for pending in gathering.values():
            pending.wait()
        for copy, staging in reading.values():
            copy.wait()
            self._staging.release(staging)

    def _shard_of(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """This rank's shard on the device, and the staging buffer that holds it where it is offloaded."""
        tensor = bucket.weight_shard.tensor
        if tensor is not None and _is_on_device(bucket):
            return tensor, None
        self._start_read(bucket)
        copy, staging = self._reading.pop(bucket)
        copy.wait()
        return staging[: bucket.weight_shard.numel], staging


def _part_of(flat: Tensor, slot: Slot) -> Tensor:
    return flat[slot.start : slot.stop].view(slot.info.shape)


def _address_of(tensor: Tensor) -> int | None:
    """Where a tensor's memory begins; None if it has none, like the zeros of forward-mode differentiation."""
    if tensor.layout is not torch.strided or tensor._is_zerotensor() or not torch._C._has_storage(tensor):
        return None
    return storage_of(tensor)


def _is_on_device(bucket: Bucket) -> bool:
    location = bucket.weight_shard.location
    return location == "device" or (location == "host" and bucket.policy.on_cpu)


class _Running(NamedTuple):
    """A forward of a unit that is under way."""

    unit: int
    saving: SavingForward
    versions: list[int]  # of its parameters when it began


class UnitGatherer:
    """Gathers weights into their buffers in time, and hides them from modules at all other times.

    `units`: in forward order, chunk after chunk.  `home`: the bucket of each parameter, by name.  `prefetch_bytes`: of the
    units that are gathered ahead of the one in use; the next one always is.

    Attributes:
        on_backward: called with the chunk and the index of a unit before its backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        home: Mapping[str, Bucket],
        parameters: Mapping[str, nn.Parameter],
        policy: ShardingPolicy,
        prefetch_bytes: int,
        *,
        checks_order: bool,
    ) -> None:
        gathered = [bucket for bucket in dict.fromkeys(home.values()) if not bucket.holds_weights]
        self._gatherer = BucketGatherer(gathered, policy, checks_order=checks_order)
        self.mark_end_of_pass = self._gatherer.mark_end_of_pass
        self._gathered, self._hooks, self._prefetch_bytes = gathered, list[RemovableHandle](), prefetch_bytes
        self.on_backward: Callable[[int, int], None] = lambda *_: None
        self._chunk_of, self._modules = [unit.chunk for unit in units], [unit.module for unit in units]
        self._history = VisitHistory(self._chunk_of)
        self._buckets: list[list[Bucket]] = []  # of each unit
        self._owner: dict[int, Bucket] = {}  # by identity of a parameter
        self._running: list[_Running] = []  # the forwards under way, outermost first
        users = Counter(storage_of(bucket.weights) for bucket in gathered)
        self._shares: list[bool] = []  # whether another unit may take a buffer of this one
        self._attributes: list[list[tuple[nn.Module, str, nn.Parameter, UngatheredParameter]]] = []
        self._waits_by_reader: list[bool] = []  # whether in a forward each layer of a unit waits for its own weights
        names = {id(parameter): name for name, parameter in parameters.items()}
        proxies: dict[str, UngatheredParameter] = {}
        for index, unit in enumerate(units):
            buckets, attributes = [], []
            for part, key in unit.attributes:
                parameter = part._parameters[key]
                assert parameter is not None
                bucket = home[name := names[id(parameter)]]
                if bucket.holds_weights:
                    continue
                if name not in proxies:
                    slot = next(slot for slot in bucket.layout.slots if slot.info.name == name)
                    copy = partial(self._gatherer.whole_copy, bucket, slot)
                    is_there = partial(self._gatherer.holds_exactly, bucket)
                    proxies[name] = UngatheredParameter.of(name, parameter, copy, is_there)
                buckets.append(bucket)
                self._owner[id(parameter)] = bucket
                attributes.append((part, key, parameter, proxies[name]))
            self._buckets.append(list(dict.fromkeys(buckets)))
            self._shares.append(any(users[storage_of(bucket.weights)] > 1 for bucket in buckets))
            self._attributes.append(attributes)
            if buckets:
                # A module that torch.compile runs breaks its graph here: what gathers is not traced.
                before, after = map(torch.compiler.disable, (self._before_forward(index), self._after_forward(index)))
                self._hooks.append(unit.module.register_forward_pre_hook(reading_no_weights(before)))
                self._hooks.append(unit.module.register_forward_hook(after, always_call=True))
            self._waits_by_reader.append(len(self._buckets[index]) > 1 and bool(unit.readers))
            for reader, read in unit.reads() if self._waits_by_reader[index] else ():
                own = dict.fromkeys(self._owner[id(one)] for one in read if id(one) in self._owner)
                self._hooks.append(reader.register_forward_pre_hook(self._before_reader(list(own))))
        self._bytes_of = [sum(bucket.weights.nbytes for bucket in buckets) for buckets in self._buckets]
        self._first = frozenset(self._first_of_a_forward())
        for index in range(len(units)):
            self.reshard(index)

    def forget(self) -> None:
        """The shards have changed: nothing that was gathered is valid any more."""
        self._gatherer.forget()
        self._history.forget_announcement()

    def begin_step(self) -> None:
        """Forget the forwards that an interrupt has left: torch calls no hook after one."""
        while self._running:
            self._running.pop().saving.leave()

    def detach(self) -> None:
        """Gather for no more forwards; whoever uses a proxy gets a whole copy."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def whole_bytes(self) -> int:
        """Bytes of all weights that are gathered."""
        return sum(bucket.weights.nbytes for bucket in self._gathered)

    def restore(self) -> None:
        """Give the modules their parameters back, with whole weights in memory of their own.  A collective call."""
        attributes = [one for unit in self._attributes for one in unit]
        parameters = {proxy.label: (parameter, proxy) for _, _, parameter, proxy in attributes}
        for bucket in self._gathered:
            flat = self._gatherer.whole_bucket(bucket, bucket.layout.name)
            for slot in bucket.layout.slots:
                parameter, proxy = parameters[slot.info.name]
                parameter.data, proxy.whole = _part_of(flat, slot), parameter
        for part, key, parameter, proxy in attributes:
            if part._parameters[key] is proxy:
                part._parameters[key] = parameter

    def expect(self, chunk: int, is_forward: bool) -> None:
        """Say what runs after the chunk that runs now: its first unit is gathered while the last one of this chunk runs."""
        self._history.expect(chunk, is_forward)

    @property
    def nbytes(self) -> int:
        """Bytes of the working buffers."""
        return self._gatherer.nbytes

    @property
    def second_copy_bytes(self) -> int:
        """Bytes of this rank's part of the second copy within its host."""
        return self._gatherer.second_copy.nbytes

    def is_unsharded(self, index: int) -> bool:
        """Whether a unit's weights are in their buffers, or on their way."""
        return all(map(self._gatherer.is_unsharded, self._buckets[index]))

    def unshard(self, index: int) -> None:
        """Have a unit's weights in their buffers, or on their way."""
        for bucket in self._buckets[index]:
            self._gatherer.unshard(bucket)

    def wait_for_unshard(self, index: int) -> None:
        """Have a unit's weights in their buffers."""
        self.unshard(index)
        for bucket in self._buckets[index]:
            self._gatherer.wait_for_unshard(bucket)

    def unshard_next(self, index: int) -> None:
        """Start gathering the units that will probably follow `index`; bring the shards of the first that has to wait."""
        if self._gatherer.is_full and not any(self._shares):
            return  # every unit has a buffer of its own and is there
        running = [*(one.unit for one in self._running), index]  # where they share a buffer, `index` has it
        needed = {storage_of(bucket.weights): bucket for one in running for bucket in self._buckets[one]}
        ahead, waiting = self._fitting(needed, islice(self._history.upcoming(), len(self._buckets)))
        for bucket in ahead:
            self._gatherer.unshard(bucket)
        for bucket in waiting:
            if not self._gatherer.is_unsharded(bucket):
                self._gatherer.read_ahead(bucket)

    def _fitting(self, needed: dict[int, Bucket], following: Iterable[int]) -> tuple[list[Bucket], list[Bucket]]:
        """The buckets to gather ahead for the units that follow, and those of the first unit that has to wait.

        `needed`: by address the buckets whose buffers no other may have; those to gather are added.
        """
        fitting, nbytes = list[Bucket](), 0
        for index in following:
            buckets = self._buckets[index]
            if nbytes and nbytes + self._bytes_of[index] > self._prefetch_bytes:
                return fitting, buckets
            nbytes += self._bytes_of[index]
            fits = [needed.setdefault(storage_of(bucket.weights), bucket) is bucket for bucket in buckets]
            fitting += compress(buckets, fits)
            if not all(fits):
                return fitting, buckets
        return fitting, []

    def _first_of_a_forward(self) -> list[Bucket]:
        """As many of the buckets that a forward uses first as it has under way at once: staging buffers hold no more."""
        chunk = [index for index, owner in enumerate(self._chunk_of) if owner == self._chunk_of[0]]
        own = self._buckets[chunk[0]] if chunk else []
        ahead, _ = self._fitting({storage_of(bucket.weights): bucket for bucket in own}, chunk[1:])
        return [*own, *ahead][: max(len(own), len(ahead))]

    def unshard_stepped(self, bucket: Bucket) -> None:
        """Start gathering a bucket that has been stepped, if it is one of the first that a forward uses."""
        if bucket in self._first:
            self._gatherer.unshard(bucket)

    def reshard(self, index: int) -> None:
        """Hide a unit's weights from its modules; another unit may take their buffers."""
        for part, key, parameter, proxy in self._attributes[index]:
            if part._parameters[key] is parameter:
                part._parameters[key] = proxy

    def _show(self, index: int) -> list[tuple[nn.Module, str, UngatheredParameter]]:
        """Give a unit's modules its weights; the attributes that had hidden them."""
        hidden = []
        for part, key, parameter, proxy in self._attributes[index]:
            if part._parameters[key] is proxy:  # else a script has put a tensor of its own there (functional_call)
                part._parameters[key] = parameter
                hidden.append((part, key, proxy))
        return hidden

    @contextmanager
    def _shown(self, index: int) -> Iterator[None]:
        """A context in which a part of a unit's forward is run again, for its backward."""
        if not self.is_unsharded(index):
            self.visit("backward", index)
        self.wait_for_unshard(index)
        hidden = self._show(index)
        try:
            yield
        finally:
            for part, key, proxy in hidden:
                part._parameters[key] = proxy

    def visit(self, direction: str, index: int) -> None:
        """Have a unit's weights, or on their way in a forward whose layers wait for theirs; start on what follows."""
        closes = direction == "backward"
        if closes and not self.is_unsharded(index):  # before a wait for ranks that may wait for its reductions
            self.on_backward(self._chunk_of[index], index)
            closes = False
        if (
            self._waits_by_reader[index]
            and direction in ("forward", "evaluation")
            and not is_hooked(self._modules[index])
        ):
            self.unshard(index)
        else:
            self.wait_for_unshard(index)
        self._history.record((direction, index))
        self.unshard_next(index)
        if closes:
            self.on_backward(self._chunk_of[index], index)

    def _before_forward(self, index: int) -> Any:  # a function, since a deep copy of the module must not copy `self`
        def hook(module: nn.Module, args: Any) -> None:
            if not in_backward():
                self.visit("forward" if torch.is_grad_enabled() else "evaluation", index)
            elif self._history.is_in_backward_of(index):  # what follows has been started
                self.wait_for_unshard(index)
            else:
                self.visit("recomputation", index)
            self._show(index)
            bring, shown = partial(self.visit, "backward", index), partial(self._shown, index)
            saving = SavingForward(self._gatherer, self._owner, self._shares[index], bring, shown)
            saving.enter()
            versions = [parameter._version for _, _, parameter, _ in self._attributes[index]]
            self._running.append(_Running(index, saving, versions))

        return hook

    def _before_reader(self, buckets: Sequence[Bucket]) -> Any:
        def hook(*_: Any) -> None:
            for bucket in buckets:
                self._gatherer.wait_for_unshard(bucket)

        return hook

    def _after_forward(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            self.reshard(index)
            if self._running and self._running[-1].unit == index:  # else it has not begun
                ended = self._running.pop()
                ended.saving.leave()
                if self._running:
                    self.wait_for_unshard(self._running[-1].unit)
                self._refuse_changes(index, ended.versions)
            return tree_map(partial(self._watch, index, module), output)

        return hook

    def _refuse_changes(self, index: int, versions: Sequence[int]) -> None:
        """Raises: RuntimeError, a forward has changed a weight in place: only its copy in the gather buffer."""
        for (_, _, parameter, proxy), version in zip(self._attributes[index], versions, strict=True):
            if parameter._version != version:
                self.forget()  # what the buffers hold
                raise RuntimeError(
                    f"{proxy.label} was changed in place within a forward; its weights are spread over the ranks (ZeRO "
                    "stage 3): the change would be lost. Change a copy, or change it between steps inside `with "
                    "megazero.zero.GatheredParameters(...)`"
                )

    def _watch(self, index: int, module: nn.Module, value: Any) -> Any:
        """Gather the unit again when the gradient of this result arrives; see [Note: a unit's own results]."""
        if not isinstance(value, Tensor):
            held = getattr(value, "__dict__", {}).values()
            if any(isinstance(one, Tensor) and self._gatherer.holds(one) for one in held):
                raise TypeError(
                    f"{type(module).__name__} returned its weights within a {type(value).__name__}; under ZeRO stage 3 they "
                    "are there only within its forward: return a copy (weight.clone())"
                )
            return value
        if self._gatherer.holds(value):
            value = value.clone()  # of the gather buffer, which the next unit will use
        if value.requires_grad and torch.is_grad_enabled():
            if value.grad_fn is None or value.grad_fn.metadata.setdefault(id(self), index) != index:
                value = value.view_as(value)
                value.grad_fn.metadata[id(self)] = index
            value.register_hook(lambda _: self.visit("backward", index))
        return value
