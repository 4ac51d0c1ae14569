"""Stage 3: each unit's weights gathered before its forward and before its backward, the next unit's meanwhile.

    forward      need(0) prefetch(1) | need(1) prefetch(2) | ...          backward: the same, downward
    buffers      A: 0     B: 1         A: 2                 B: 3 ...      two buffers serve all units

[Note: fixed addresses]  Autograd saves weights as views of the gather buffer.  Each unit therefore always comes back to the
same buffer: even units to A, odd units to B.  Neighbours never collide, and between two uses of a unit its buffer may hold
any other unit of the same parity.

[Note: results of one's own]  A unit's backward begins when the gradient of one of its results arrives, so a hook on the
result gathers the unit.  A result that another unit has made, handed on or returned by an inner one, gets a node of its
own first: a hook on the maker's node would fetch this unit's weights, and perhaps the next one's, just before the maker's
run.

[Note: what comes next]  Which unit follows is recorded as the model runs, keyed by the two visits before, and used from the
second pass on.  A wrong guess costs one gather; all ranks make the same guesses, since they run the same code.  At the edge
of a pipeline's chunk the schedule knows better and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megazero.comm.collectives import Pending, all_gather
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, Slot
from megazero.zero.param_proxy import UngatheredParameter
from megazero.zero.storage import Transfer
from megazero.zero.units import Unit

Visit: TypeAlias = tuple[str, int]  # ("forward", "evaluation" or "backward", unit)


class UnitGatherer:
    """Brings weights to the gather buffers in time, and hides them from modules at all other times.

    Args:
        units: in forward order, chunk after chunk.
        home: the bucket of each parameter, by name.
        parameters: the parameters that modules compute with, by name.
        axis: the ranks over which buckets are sharded.
    """

    def __init__(
        self, units: Sequence[Unit], home: Mapping[str, Bucket], parameters: Mapping[str, nn.Parameter], axis: Axis
    ) -> None:
        self._axis = axis
        self._chunk_of = [unit.chunk for unit in units]
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._needs: list[list[Bucket]] = []
        self._places: list[list[tuple[nn.Module, str, nn.Parameter, UngatheredParameter]]] = []
        stand_ins: dict[str, UngatheredParameter] = {}
        for unit in units:
            needs, places = [], []
            for part, key in unit.places:
                parameter = part._parameters[key]
                assert parameter is not None
                name = names[id(parameter)]
                bucket = home[name]
                if bucket.keeps_weights:
                    continue
                if name not in stand_ins:
                    slot = next(slot for slot in bucket.layout.slots if slot.info.name == name)
                    stand_ins[name] = UngatheredParameter.of(name, parameter, partial(self._copy_of, bucket, slot))
                needs.append(bucket)
                places.append((part, key, parameter, stand_ins[name]))
            self._needs.append(list(dict.fromkeys(needs)))
            self._places.append(places)
        self._buffers = {bucket.weights.untyped_storage().data_ptr() for buckets in self._needs for bucket in buckets}
        self._holds: dict[int, Bucket] = {}  # address of a gather buffer -> the bucket whose weights are in it
        self._pending: dict[int, tuple[Pending, Tensor | None]] = {}  # with the staging that the gather reads from
        self._reading: dict[Bucket, tuple[Transfer, Tensor]] = {}
        self._staging: list[Tensor] = []
        self._largest_shard = max((one.weight_shard.numel for needs in self._needs for one in needs), default=0)
        self._following: int | None = None
        self._is_scheduled = False
        self._trail: tuple[Visit | None, Visit | None] = (None, None)
        self._successor: dict[tuple[Visit | None, Visit | None], Visit] = {}
        for index, unit in enumerate(units):
            self._hide(index)
            if self._needs[index]:
                unit.module.register_forward_pre_hook(self._before_forward(index), with_kwargs=True)
                unit.module.register_forward_hook(self._after_forward(index), always_call=True)

    def forget(self) -> None:
        """The shards have changed: nothing that was gathered or read is valid any more."""
        for address in list(self._pending):
            self._finish(address)
        for transfer, staging in self._reading.values():
            transfer.wait()
            self._staging.append(staging)
        self._reading.clear()
        self._holds.clear()
        self._following = None

    def expect(self, chunk: int, is_forward: bool) -> None:
        """Say what runs after the chunk that runs now, so that its first unit is fetched during the last one's work."""
        members = [index for index, owner in enumerate(self._chunk_of) if owner == chunk]
        self._following = members[0] if is_forward else members[-1]
        self._is_scheduled = True

    def need(self, index: int) -> None:
        """Have a unit's weights in place."""
        for bucket in self._needs[index]:
            self._start(bucket)
            self._finish(bucket.weights.data_ptr())

    def staging_bytes(self) -> int:
        """Bytes through which offloaded shards pass on their way to the gather buffers."""
        busy = [staging for _, staging in self._reading.values()]
        busy += [staging for _, staging in self._pending.values() if staging is not None]
        return sum(staging.nbytes for staging in [*self._staging, *busy])

    def _visit(self, direction: str, index: int) -> None:
        """Have a unit's weights, note the visit, and start on what is likely to come next."""
        self.need(index)
        visit = (direction, index)
        self._successor[self._trail] = visit
        self._trail = (self._trail[1], visit)
        following = self._next_of(direction, index)
        if following is None:
            return
        in_use = {bucket.weights.data_ptr() for bucket in self._needs[index]}
        for bucket in self._needs[following]:
            if bucket.weights.data_ptr() not in in_use:
                self._start(bucket)
        after = self._successor.get((self._trail[1], (direction, following)))
        if after is not None:
            for bucket in self._needs[after[1]]:
                if self._holds.get(bucket.weights.data_ptr()) is not bucket:
                    self._read_ahead(bucket)

    def _next_of(self, direction: str, index: int) -> int | None:
        """The unit after this one; see [Note: what comes next]."""
        edge = index + (-1 if direction == "backward" else 1)
        inside = 0 <= edge < len(self._chunk_of) and self._chunk_of[edge] == self._chunk_of[index]
        if self._is_scheduled and not inside:
            following, self._following = self._following, None
            return following
        visit = self._successor.get(self._trail)
        return None if visit is None else visit[1]

    def _start(self, bucket: Bucket) -> None:
        address = bucket.weights.data_ptr()
        if self._holds.get(address) is bucket:
            return
        self._finish(address)
        self._holds[address] = bucket
        shard, staging = self._shard_of(bucket)
        self._pending[address] = (all_gather(bucket.weights, shard, self._axis), staging)

    def _finish(self, address: int) -> None:
        pending, staging = self._pending.pop(address, (None, None))
        if pending is not None:
            pending.wait()
        if staging is not None:
            self._staging.append(staging)

    def _shard_of(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """This rank's shard on the device, and the staging that holds it where it lies elsewhere."""
        tensor = bucket.weight_shard.tensor
        if tensor is not None and tensor.device == bucket.weights.device:
            return tensor, None
        self._read_ahead(bucket)
        transfer, staging = self._reading.pop(bucket)
        transfer.wait()
        return staging[: bucket.weight_shard.numel], staging

    def _read_ahead(self, bucket: Bucket) -> None:
        """Start bringing an offloaded shard to the device."""
        array = bucket.weight_shard
        if bucket in self._reading or (array.tensor is not None and array.tensor.device == bucket.weights.device):
            return
        staging = self._staging.pop() if self._staging else bucket.weights.new_empty(self._largest_shard)
        self._reading[bucket] = (array.start_read(staging[: array.numel], 0), staging)

    def _copy_of(self, bucket: Bucket, slot: Slot) -> Tensor:
        """A whole copy of one parameter, in memory of its own."""
        flat = torch.empty_like(bucket.weights)
        shard, staging = self._shard_of(bucket)
        all_gather(flat, shard, self._axis).wait()
        if staging is not None:
            self._staging.append(staging)
        return flat[slot.start : slot.stop].view(slot.info.shape).clone()

    def _show(self, index: int) -> None:
        for part, key, parameter, _ in self._places[index]:
            part._parameters[key] = parameter

    def _hide(self, index: int) -> None:
        for part, key, _, stand_in in self._places[index]:
            part._parameters[key] = stand_in

    def _before_forward(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._visit("forward" if torch.is_grad_enabled() else "evaluation", index)
            self._show(index)

        return hook

    def _after_forward(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            self._hide(index)
            return tree_map(partial(self._watch, index, module), output)

        return hook

    def _watch(self, index: int, module: nn.Module, value: Any) -> Any:
        """Have the unit's weights back when the gradient of this result arrives; see [Note: results of one's own]."""
        if not isinstance(value, Tensor):
            if torch.is_grad_enabled() and any(map(_trains, getattr(value, "__dict__", {}).values())):
                raise TypeError(
                    f"{type(module).__name__} returned a {type(value).__name__}, in which no tensor can be found, so ZeRO-3 "
                    "cannot tell when its backward begins; return tensors in tuples, lists, dicts, or a class registered "
                    "with torch.utils._pytree"
                )
            return value
        if value.untyped_storage().data_ptr() in self._buffers:
            value = value.clone()  # of the gather buffer, which the next unit will use
        if value.requires_grad and torch.is_grad_enabled():
            if value.grad_fn is None or value.grad_fn.metadata.setdefault(id(self), index) != index:
                value = value.view_as(value)
                value.grad_fn.metadata[id(self)] = index
            value.register_hook(lambda _: self._visit("backward", index))
        return value


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
