"""A module's parameters in flat buckets, and, for ZeRO-3, gathered unit by unit around their use.

    forward      need(0) prefetch(1) | need(1) prefetch(2) | ...          backward: the same, downward
    buffers      A: 0     B: 1         A: 2                 B: 3 ...      two buffers serve all units

[Note: fixed addresses]  Autograd saves weights as views of the gather buffer.  Each unit therefore always comes back to the
same buffer: even units to A, odd units to B.  Neighbours never collide, and between two uses of a unit its buffer may hold
any other unit of the same parity.  A bucket that several units use (a tied embedding) has a buffer of its own.

A policy is which units share a buffer, and with it how long a gathered unit stays:
    action    two buffers for all units: every forward and backward gathers anew; least memory
    chunk     units at the same place of different chunks: a chunk stays until another chunk runs
    step      each unit its own: gathered once per step; the memory of whole weights
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending, all_gather
from megazero.layers.spec import ParamSpec
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, BucketLayout, ParamInfo, intersect, plan_buckets

GatherPolicy: TypeAlias = Literal["action", "chunk", "step"]


class ShardedParameters:
    """Moves a module's parameters into buckets and keeps the buckets.

    Args:
        chunks: per model chunk of this rank the modules that ZeRO-3 gathers one at a time, in forward order; together they
            hold every parameter.
        described: (qualified name, parameter, spec) of every parameter once, in forward order.  Parameters may be on the
            meta device: their values are drawn or loaded shard by shard.
        zero_stage: 0 ... 3.
        dtype: of the weights that modules compute with.
        bucket_bytes: size of a bucket, in bytes of fp32 gradients.
        dp: the axis over which ZeRO shards.
        embedding: the ranks that hold a copy of a tied embedding.
        device: where buckets lie.
        gather_policy: how long ZeRO-3 keeps a gathered unit; see [Note: fixed addresses].
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Module]],
        described: Sequence[tuple[str, nn.Parameter, ParamSpec]],
        *,
        zero_stage: int,
        dtype: torch.dtype,
        bucket_bytes: int,
        dp: Axis,
        embedding: Axis,
        device: torch.device,
        gather_policy: GatherPolicy = "action",
    ) -> None:
        self.dp = dp
        units = [unit for chunk in chunks for unit in chunk]
        chunk_of = [index for index, chunk in enumerate(chunks) for _ in chunk]
        used = [{id(parameter) for parameter in unit.parameters()} for unit in units]
        infos = []
        for name, parameter, spec in described:
            first = next((index for index, members in enumerate(used) if id(parameter) in members), None)
            if first is None:
                raise ValueError(f"parameter {name} belongs to no unit; every parameter must lie in one of the units")
            infos.append(ParamInfo(name, tuple(parameter.shape), spec, first, chunk_of[first]))
        by_unit = zero_stage == 3 and dp.size > 1
        layouts = plan_buckets(infos, by_unit=by_unit, bucket_elements=bucket_bytes // 4, shards=dp.size)
        starts = [chunk_of.index(chunk) for chunk in chunk_of]  # the first unit of each unit's chunk
        self._buffer_of = {layout.name: _buffer_key(layout, gather_policy, starts) for layout in layouts}
        self.gather_buffers = self._make_gather_buffers(layouts, dtype, device) if by_unit else {}
        self.buckets: list[Bucket] = []
        for layout in layouts:
            second = layout.tied and (embedding.index > 0 or any(bucket.layout.tied for bucket in self.buckets))
            weights = self._weights_of(layout)
            self.buckets.append(Bucket(layout, zero_stage, dtype, dp, weights, device, second))
        self.by_name: dict[str, nn.Parameter] = {}
        self._bind({id(parameter): name for name, parameter, _ in described}, units)
        self.gatherer = None
        if by_unit:
            names = {id(parameter): name for name, parameter in self.by_name.items()}
            home = {slot.info.name: bucket for bucket in self.buckets for slot in bucket.layout.slots}
            needs = [
                list(dict.fromkeys(home[names[id(parameter)]] for parameter in unit.parameters())) for unit in units
            ]
            self.gatherer = UnitGatherer(units, needs, chunk_of, dp)

    def _make_gather_buffers(
        self, layouts: Sequence[BucketLayout], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        sizes: dict[str, int] = {}
        for layout in layouts:
            key = self._buffer_of[layout.name]
            sizes[key] = max(sizes.get(key, 0), layout.padded_numel)
        return {key: torch.zeros(size, dtype=dtype, device=device) for key, size in sizes.items()}

    def _weights_of(self, layout: BucketLayout) -> Tensor | None:
        buffer = self.gather_buffers.get(self._buffer_of[layout.name])
        return None if buffer is None else buffer[: layout.padded_numel]

    def _bind(self, names: dict[int, str], units: Sequence[nn.Module]) -> None:
        """Make every module's parameter a view of its bucket; a shared parameter stays shared."""
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                self.by_name[slot.info.name] = nn.Parameter(bucket.module_view(slot))
        for unit in units:
            for part in unit.modules():
                for key, parameter in list(part._parameters.items()):
                    if parameter is not None:
                        part._parameters[key] = self.by_name[names[id(parameter)]]

    def draw(self, seed: int, tp: Axis) -> None:
        """Give every parameter its initial value, a function of (seed, canonical name, element) alone."""
        for bucket in self.buckets:
            bucket.master.zero_()
            for slot in bucket.layout.slots:
                run = intersect(slot.run, bucket.owned)
                if run is not None:
                    part = bucket.owned_part(bucket.master, run)
                    slot.info.spec.draw(part, run.start - slot.start, tp.index, tp.size, seed)
        self.publish()

    def publish(self) -> None:
        """Let modules see the master weights: cast, then gather what every rank keeps whole."""
        gathers = []
        for bucket in self.buckets:
            if bucket.weight_shard is not bucket.master:
                bucket.weight_shard.copy_(bucket.master)
            if bucket.keeps_weights and bucket.owned != bucket.layout.whole:
                gathers.append(all_gather(bucket.weights, bucket.weight_shard, self.dp))
        for pending in gathers:
            pending.wait()
        if self.gatherer is not None:
            self.gatherer.forget()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this rank holds between steps: parameters (with masters), gradients, gather buffers."""
        parameters = [b.weights for b in self.buckets if b.keeps_weights]
        parameters += [b.weight_shard for b in self.buckets if not b.keeps_weights]
        parameters += [b.master for b in self.buckets if b.master is not b.weight_shard]
        gradients = [b.gradient if b.full_gradient is None else b.full_gradient for b in self.buckets]
        return {
            "parameters": sum(tensor.nbytes for tensor in parameters),
            "gradients": sum(tensor.nbytes for tensor in gradients),
            "gather_buffers": sum(buffer.nbytes for buffer in self.gather_buffers.values()),
        }


def _buffer_key(layout: BucketLayout, policy: GatherPolicy, starts: Sequence[int]) -> str:
    """Which gather buffer a bucket comes to."""
    if layout.tied or policy == "step":
        return layout.name
    place = layout.unit - starts[layout.unit]
    return f"unit {place} of any chunk" if policy == "chunk" else f"unit {place % 2} of two"


class UnitGatherer:
    """Brings each unit's weights before its forward and before its backward, and starts on the next unit's.

    Args:
        units: in forward order, chunk after chunk.
        needs: the buckets that each unit uses.
        chunk_of: the chunk of each unit; the next unit is fetched ahead within a chunk.
        dp: the axis over which they are sharded.
    """

    def __init__(
        self, units: Sequence[nn.Module], needs: Sequence[Sequence[Bucket]], chunk_of: Sequence[int], dp: Axis
    ) -> None:
        self._needs, self._chunk_of, self._dp = needs, chunk_of, dp
        self._following: int | None = None
        self._holds: dict[int, Bucket] = {}  # address of a gather buffer -> the bucket whose weights are in it
        self._pending: dict[int, Pending] = {}
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(self._before_forward(index))
            unit.register_forward_hook(self._after_forward(index))

    def forget(self) -> None:
        """The shards have changed: nothing that was gathered is valid any more."""
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
        self._holds.clear()
        self._following = None

    def expect(self, chunk: int, is_forward: bool) -> None:
        """Say what runs after the chunk that runs now, so that its first unit is fetched during the last one's work."""
        members = [index for index, owner in enumerate(self._chunk_of) if owner == chunk]
        self._following = members[0] if is_forward else members[-1]

    def need(self, index: int) -> None:
        """Have a unit's weights in place."""
        for bucket in self._needs[index]:
            self._start(bucket)
            self._pending.pop(bucket.weights.data_ptr(), Pending()).wait()

    def _prefetch(self, index: int, after: int) -> None:
        """Fetch the next unit of the chunk, or after its last one the first unit of what the schedule runs next."""
        if not (0 <= index < len(self._needs) and self._chunk_of[index] == self._chunk_of[after]):
            if self._following is None:
                return
            index, self._following = self._following, None
        in_use = {bucket.weights.data_ptr() for bucket in self._needs[after]}
        for bucket in self._needs[index]:
            if bucket.weights.data_ptr() not in in_use:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        address = bucket.weights.data_ptr()
        if self._holds.get(address) is bucket:
            return
        self._pending.pop(address, Pending()).wait()
        self._holds[address] = bucket
        self._pending[address] = all_gather(bucket.weights, bucket.weight_shard, self._dp)

    def _before_forward(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            self.need(index)
            self._prefetch(index + 1, index)

        return hook

    def _after_forward(self, index: int) -> Any:
        def before_backward(gradient: Tensor) -> None:
            self.need(index)
            self._prefetch(index - 1, index)

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(before_backward)

        return hook
