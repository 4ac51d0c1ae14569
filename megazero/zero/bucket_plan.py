"""Which bucket holds each parameter, how large buckets are, and which buffer stage 3 gathers each bucket into.

[Note: sizes]  Buckets are large enough for the network, small enough that the backward hides all reductions but the last.

    backward     | w3 w2 | w1 | w0 |
    network              [ bucket 1  ][ bucket 0  ]        exposed: the time of the last bucket
    with more buckets
    backward     | w3 | w2 | w1 | w0 |
    network           [ 3 ][ 2 ][ 1 ][ 0 ]

`zero.bucket_bytes = "auto"` is computed from the number of ranks, the size of the model and the transport, never from a
measured time: the gradient norm is rounded bucket by bucket, so a run with a measured layout could not be repeated.

If the network sends without the rank's help, a bucket is no larger than it needs to be.  In the memory of one host
ranks copy the data themselves while they wait: nothing is hidden, and large buckets cost least.

[Note: gather buffers]  Units take turns in the buffers into which stage 3 gathers their weights:

    position of a unit in its stage    0   1   2   3   4   5   6
    three buffers                      A   B   C   A   B   C   A

While one buffer's unit computes, the other buffers are filled with the next units.  All buffers together hold the
largest unit and at most `prefetch_bytes` more; there are at least two.  Each is as large as the largest of its units:

    bytes = sum over buffers of the largest unit in it

If units have several buckets, the i-th buckets of all units share a buffer; if that would take 1/32 more memory, each
unit has a single bucket.

The gather policy decides how long a gathered unit stays:
    action    units take turns in the buffers: every forward and backward gathers what was overwritten; least memory
    chunk     units at the same position of different virtual stages share: a virtual stage stays until another runs
    step      each unit has its own buffer: gathered once per step; memory of the full weights
A parameter that several units use, or that is in use while other units run, has a buffer of its own.  Virtual stages
that run at the same time share no buffers, so each has this many.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf, lcm, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_objects, largest, runs_by_itself
from megazero.config.schema import ZeroConfig
from megazero.parallel_state import Axis, ParallelState
from megazero.registry import added
from megazero.zero.sharding import BLOCK, BucketLayout, ParamInfo, ShardingPolicy, ShardingSettings, Slot
from megazero.zero.storage import StateMemory
from megazero.zero.units import RankModel, UnitModule, check_parameters, logical_rows

_SMALL_FRACTION = 1 / 16  # together with an oversized parameter, others may fill at most this fraction of a bucket
_ROWS_OF_PADDING = 32  # cut a bucket only if padding to whole rows adds at most 1/32 to it: see shapes.md
_MORE_FOR_BUCKETS = 1 / 32  # gather buffers may grow by this fraction so that units have several buckets
_FP32_BYTES = 4
DEFAULT_BYTES = 40 * 2**20
# What one rank sends another of a bucket.  Over sockets, with half a megabyte, links of 0.3 and 1 Gbit/s stay busy beside a
# computation; a sixteenth more, so that matrices of a power of two fit with their vectors.  NCCL's rings want more
# (Megatron-LM's buckets grow by 4 MB with each rank).
_SOCKET_BYTES, _DEVICE_BYTES = 2**19 + 2**15, 2**20
_MOST_BUCKETS = 64  # each costs the host about 0.1 ms
# What many ranks would send gives way to this: one bucket hides nothing, and stage 2's buffers would hold full gradients.
_FEWEST_BUCKETS = 8
# A CPU finds memory for gradients up to this size where the backward has freed activations; larger blocks are mapped anew.
_UNSENT_BYTES = 4 * 2**20
# From stage 2 on gradients pass through two buckets' worth of buffers: one that fills, two that are sent, and over gloo two
# for what arrives.
_BUFFERS = 5
# A larger chunk costs less: the product of a matrix that is cut into many chunks is slower by more than smaller chunks
# hide.
_CHUNK_BUCKETS = 4


@dataclass(frozen=True)
class BucketSizes:
    """Bucket sizes, and the size of the working buffers.

    Args:
        elements: most elements of a bucket; a larger parameter gets its own bucket, which it may share with small ones.
        chunk_elements: such a parameter is reduced in bucket chunks of at most so many elements, if it can be cut; None:
            `elements`.
        bucket_bytes: `zero.bucket_bytes`, or the choice of "auto"; working buffers take at most twice as much.
        cuts_units: the units of stage 3 are also cut into buckets of this size.
    """

    elements: int
    bucket_bytes: int
    chunk_elements: int | None = None
    cuts_units: bool = False


def bucket_sizes(
    setting: int | Literal["auto"], policy: ShardingPolicy, numel: int, *, cuts: bool, hides: bool
) -> BucketSizes:
    """Return the sizes for buckets that together hold `numel` parameters.  All ranks must pass the same `numel` and
    `hides`.

    Args:
        cuts: large buckets are reduced chunk by chunk through working buffers.
        hides: the network sends messages without this rank's help.
    """
    ranks, on_cpu = policy.placement.shard.size * policy.placement.replica.size, policy.on_cpu
    if setting != "auto":
        bucket_bytes = setting
    else:
        sent = _DEVICE_BYTES if not on_cpu else _SOCKET_BYTES if hides else 0
        most = numel * _FP32_BYTES // _FEWEST_BUCKETS
        bucket_bytes = max(DEFAULT_BYTES, min(_with_buffers(sent * ranks, cuts), most))
    if on_cpu and not policy.placement.sends:
        bucket_bytes = min(bucket_bytes, _UNSENT_BYTES)
    elements = bucket_bytes // _FP32_BYTES
    elements = elements * 2 // _BUFFERS if cuts else elements
    smallest = policy.align * policy.placement.shard.size if cuts else 1
    chunk = max(elements // smallest, 1) * smallest
    if setting != "auto" or not on_cpu or not hides:
        return BucketSizes(chunk, bucket_bytes)
    elements = min(elements, max(_SOCKET_BYTES * ranks // _FP32_BYTES, numel // _MOST_BUCKETS))
    elements = max(elements // smallest, 1) * smallest
    return BucketSizes(elements, bucket_bytes, min(chunk, _CHUNK_BUCKETS * elements), cuts_units=True)


def _with_buffers(nbytes: int, cuts: bool) -> int:
    """Return the bucket size at which `nbytes` are sent at once."""
    return nbytes * _BUFFERS // 2 if cuts else nbytes


def _over_tp(info: ParamInfo) -> tuple[bool, bool]:
    """Return whether the parameter is split over tp, and whether its gradient must be summed over tp."""
    return info.spec.split is not None, info.spec.sum_over_tp


def _layout(members: Sequence[ParamInfo], limit: int, *, cuts: bool, align: int) -> BucketLayout:
    slots, start, shards = list[Slot](), 0, members[0].placement.shard.size
    for info in sorted(members, key=lambda info: (info.group, info.spec.split is not None, not info.spec.sum_over_tp)):
        if align == BLOCK and slots and _over_tp(slots[-1].info) != _over_tp(info):
            start += -start % BLOCK
        slots.append(Slot(info, start))
        start = slots[-1].stop
    first = min(members, key=lambda info: info.unit)
    step = align if shards > 1 else 1
    is_cut, largest = False, max(slots, key=lambda slot: slot.stop - slot.start)
    if cuts and first.trains and start > limit >= start - (largest.stop - largest.start):
        width = prod(largest.info.shape[1:])
        padding = -start % (shards * lcm(step, width))
        if largest.start % width == 0 and padding * _ROWS_OF_PADDING <= start:
            step, is_cut = lcm(step, width), True
    layout = BucketLayout(f"bucket of {first.name}", tuple(slots), step)
    return layout.in_chunks_of(limit) if is_cut else layout


def _fits(members: Sequence[ParamInfo], limit: int) -> bool:
    """Whether parameters may share a bucket: all fit, or one is larger and the others are small enough to lie in one
    chunk.

    If more shared a bucket with the large parameter, they would wait for its gradient, and it for theirs.
    """
    sizes, shards = [prod(info.shape) for info in members], members[0].placement.shard.size
    return sum(sizes) <= limit or sum(sizes) - max(sizes) <= min(limit / shards, limit * _SMALL_FRACTION)


def plan_buckets(
    parameters: Sequence[ParamInfo],
    *,
    by_unit: bool,
    bucket_elements: int,
    cuts: bool = False,
    chunk_elements: int | None = None,
    cuts_units: bool = False,
    align: int,
) -> tuple[BucketLayout, ...]:
    """Assign every parameter to one bucket.

    No bucket spans two virtual stages or placements, or holds both frozen and trainable parameters.  A tied
    parameter has its own bucket, with an equal layout on all stages that hold it.

    Args:
        parameters: in forward order.
        by_unit: one bucket per unit, in forward order: what ZeRO-3 gathers at once.  Otherwise, and for persistent
            parameters, buckets are filled in the order in which the backward completes gradients.  A parameter larger
            than a bucket shares one only with small ones (`_fits`).
        bucket_elements: most elements of a bucket, all shards together.
        cuts: reduce an oversized bucket that is nearly all one parameter chunk by chunk.
        chunk_elements: most elements of a bucket chunk, all shards together, but at least one row of each shard, or the
            largest bucket that cannot be cut; None: `bucket_elements`.
        cuts_units: `by_unit` gives a unit several buckets of at most `bucket_elements`, in the order of its backward.
        align: shards are a multiple of this.  With `BLOCK`, parameters that tp splits begin at a multiple, too.
    """
    single = [[info] for info in parameters if info.spec.tied or (by_unit and info.alone)]
    free = [info for info in parameters if [info] not in single]
    most = bucket_elements if chunk_elements is None else chunk_elements

    def is_cut(members: Sequence[ParamInfo]) -> bool:
        is_large = cuts and sum(prod(member.shape) for member in members) > most
        return is_large and _layout(members, most, cuts=cuts, align=align).chunk_count > 1

    def may_share(last: list[ParamInfo], info: ParamInfo) -> bool:
        together = [*last, info]
        loses_cut = (is_cut(last) or is_cut([info])) and not is_cut(together)
        return last[0].virtual_stage == info.virtual_stage and _fits(together, bucket_elements) and not loses_cut

    placements = list(dict.fromkeys(info.placement for info in parameters))

    def scope(info: ParamInfo) -> tuple[float, int, bool, bool, bool, bool]:
        """Return what all parameters of a bucket have in common."""
        unit, spec = info.unit if by_unit and not info.persistent else inf, info.spec
        in_own_type = unit == inf or not spec.in_fp8_squares  # large buckets first: they share large gather buffers
        alone = spec.of_experts, info.trains, info.matrix or spec.buffer
        return unit, placements.index(info.placement), in_own_type, *alone

    groups, backward = list[list[ParamInfo]](), free[::-1]
    for (unit, *_), members in groupby(sorted(backward, key=scope), key=scope):
        last = list[ParamInfo]()
        if unit < inf and not cuts_units:
            groups.append(list(members)[::-1])
            continue
        for info in members:
            if not last or not may_share(last, info):
                groups.append(last := [])
            last.append(info)
    layouts = [_layout(members, most, cuts=cuts, align=align) for members in [*groups, *single]]
    largest = max((layout.chunks[0].stop * layout.shards for layout in layouts if layout.trains), default=0)
    limit = max(most, largest)
    return tuple(layout.in_chunks_of(limit) if layout.chunk_count > 1 else layout for layout in layouts)


@dataclass(frozen=True)
class BufferPlan:
    """The gather buffers of stage 3, each with the buckets that take turns in it."""

    buffers: tuple[tuple[BucketLayout, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each buffer."""
        return tuple(max(layout.padded_numel for layout in members) for members in self.buffers)

    @property
    def elements(self) -> int:
        """Number of elements of all buffers together."""
        return sum(self.sizes)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Allocate the buffers and return, by the name of each bucket, the buffer [padded] that it is gathered into."""
        found = {}
        for members, size in zip(self.buffers, self.sizes, strict=True):
            buffer = torch.zeros(size, dtype=dtype, device=device)
            found.update({layout.name: buffer[: layout.padded_numel] for layout in members})
        return found


def plan_buffers(
    layouts: Sequence[BucketLayout], units: Sequence[UnitModule], gather_policy: str, prefetch_elements: int
) -> BufferPlan:
    """Assign a buffer to every bucket that is gathered.

    Args:
        layouts: all buckets; persistent ones are not gathered.
        units: in forward order.
        gather_policy: "action", "chunk" or "step".
        prefetch_elements: elements that the buffers may hold beyond the largest unit, for each set of units that share
            buffers.
    """
    stages = [unit.virtual_stage for unit in units]
    alone, sharing = list[BucketLayout](), list[_Shared]()
    of_units = Counter[tuple[int, bool]]()
    for layout in layouts:
        if layout.tie is not None or gather_policy == "step" or layout.first.alone:
            alone += [] if layout.first.persistent else [layout]
        elif not layout.first.persistent:
            unit, number = units[layout.unit], of_units[layout.unit, layout.trains]
            sharing.append(_Shared(unit.beside, layout.unit - stages.index(unit.virtual_stage), number, layout))
            of_units[layout.unit, layout.trains] += 1
    count = max((shared.position + 1 for shared in sharing), default=0)
    if gather_policy == "action":
        elements = Counter[int]()
        for shared in sharing:
            elements[shared.layout.unit] += shared.layout.padded_numel
        most = (max(elements.values(), default=0) + prefetch_elements) * len({shared.beside for shared in sharing})
        count = next((n for n in range(count, 2, -1) if sum(_in_turn(sharing, n).sizes) <= most), 2)
    return BufferPlan((*_in_turn(sharing, count).buffers, *((layout,) for layout in alone)))


class _Shared(NamedTuple):
    """A bucket that shares its buffer with the bucket of the same number in other units."""

    beside: int  # `beside` of its unit
    position: int  # position of its unit in the virtual stage
    number: int  # its index among the unit's buckets
    layout: BucketLayout


def _in_turn(sharing: Sequence[_Shared], count: int) -> BufferPlan:
    """Let every unit reuse the buffer of the unit `count` positions before it.  Frozen and trainable buckets have
    separate buffers.
    """
    members: dict[tuple[int, int, int, bool], list[BucketLayout]] = {}
    for beside, position, number, layout in sharing:
        members.setdefault((beside, position % count, number, layout.trains), []).append(layout)
    return BufferPlan(tuple(map(tuple, members.values())))


@dataclass(frozen=True)
class ShardingPlan:
    """The buckets and buffers that this rank allocates for its stages of a model.

    Args:
        buffers: gather buffers of stage 3; None if no weights are gathered.
        prefetch_bytes: limit for the weights that stage 3 gathers ahead.
        memory: allocates the buckets, after it has been opened.
        hides_gathers: gathers of updated weights overlap the next forward.
    """

    policy: ShardingPolicy
    sizes: BucketSizes
    layouts: tuple[BucketLayout, ...]
    buffers: BufferPlan | None
    prefetch_bytes: int
    memory: StateMemory
    hides_gathers: bool


def plan_sharding(
    model: RankModel, state: ParallelState, settings: ShardingSettings, *, hides_gathers: bool = True
) -> ShardingPlan:
    """Plan the buckets of a model.  A collective call.

    Args:
        hides_gathers: gathers of updated weights overlap the next forward, if the network sends without this rank's
            help: nothing but a unit's own forward reads its weights without a wait.

    Raises:
        ValueError: on every rank: the configuration does not fit the model or this machine.
    """
    params, zero, factory = model.params, settings.zero, settings.factory
    held = gather_objects((state.at.pp, logical_rows(params, model.ties)), state.pp)
    agree(lambda: check_parameters(params, state.at.pp, dict(held)), state.world, ValueError)
    policy = settings.policy(state)
    # Ask every axis, without short-circuiting: all of its ranks must take part, and the axes may disagree.
    axes = dict.fromkeys((param.placement or policy.placement).shard for param in params)
    by_themselves = [runs_by_itself(axis) for axis in axes]
    hides_gathers = hides_gathers and all(by_themselves)
    if zero.offload.optimizer == zero.offload.parameters == "none":
        sizes, layouts, buffers = _plan_layouts(model, policy, zero, state.world)
        plan = ShardingPlan(policy, sizes, layouts, buffers, zero.prefetch_bytes, StateMemory(policy), hides_gathers)
        adapt = added("sharding plan").get(state.device_type)
        return plan if adapt is None else adapt(plan, state.world)
    from megazero.zero.offload import Offload, give_cores, without_auto  # few runs need it

    elements, moments = sum(param.parameter.numel() for param in params), len(factory.states)
    moments += settings.averages  # which needs as much space as another one
    offload = without_auto(zero.offload, policy, elements, moments, state.world, state.local_world_size)
    give_cores(offload, state.device, state.local_world_size)
    zero = zero.model_copy(update={"offload": offload})
    sizes, layouts, buffers = _plan_layouts(model, policy, zero, state.world)
    memory = Offload(offload, policy, layouts, moments)
    return ShardingPlan(policy, sizes, layouts, buffers, zero.prefetch_bytes, memory, hides_gathers)


def _plan_layouts(
    model: RankModel, policy: ShardingPolicy, zero: ZeroConfig, world: Axis
) -> tuple[BucketSizes, tuple[BucketLayout, ...], BufferPlan | None]:
    infos = param_infos(model, policy, zero)
    shards = max(info.placement.shard.size for info in infos)
    by_unit = policy.zero_stage == 3 and (shards > 1 or zero.offload.parameters != "none")
    cuts = policy.zero_stage >= 2 and (shards > 1 or zero.offload.optimizer != "none")
    sizes = _agreed_sizes(policy, zero, sum(prod(info.shape) for info in infos), world, cuts=cuts)
    planned = partial(
        plan_buckets, bucket_elements=sizes.elements, chunk_elements=sizes.chunk_elements, align=policy.align
    )
    layouts = planned(infos, by_unit=by_unit, cuts=cuts)
    if not by_unit:
        return sizes, layouts, None
    ahead = zero.prefetch_bytes // policy.dtype.itemsize
    buffers = plan_buffers(layouts, model.units, zero.gather_policy, ahead)
    if sizes.cuts_units:
        finer = planned(infos, by_unit=by_unit, cuts=cuts, cuts_units=True)
        finer_buffers = plan_buffers(finer, model.units, zero.gather_policy, ahead)
        if finer_buffers.elements <= (1 + _MORE_FOR_BUCKETS) * buffers.elements:
            return sizes, finer, finer_buffers
    return sizes, layouts, buffers


def _agreed_sizes(policy: ShardingPolicy, zero: ZeroConfig, elements: int, world: Axis, *, cuts: bool) -> BucketSizes:
    """Return bucket sizes that are the same on all ranks, even if only some ranks share their host's memory.

    They must agree because collectives over dp, replicas, tp and ties sum over whole buckets.
    """
    placement, hides = policy.placement, False
    if zero.bucket_bytes == "auto":
        # Call both, without short-circuiting: every rank of an axis must take part, and the axes may disagree.
        by_themselves = any([runs_by_itself(placement.shard), runs_by_itself(placement.replica)])
        most, some_wait = largest([elements, not by_themselves], world)
        elements, hides = int(most), not some_wait
    return bucket_sizes(zero.bucket_bytes, policy, elements, cuts=cuts, hides=hides)


def param_infos(model: RankModel, policy: ShardingPolicy, zero: ZeroConfig) -> list[ParamInfo]:
    """Return the description of each parameter from which buckets are planned.

    Raises:
        ValueError: a parameter belongs to no unit, or its dtype is not floating-point.
    """
    units, params = model.units, model.params
    users: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        for module, key in unit.attributes:
            users.setdefault(id(module._parameters[key]), set()).add(index)
    # Beside matrices that travel in fp8, vectors would need messages of their own, so every rank holds all of them.
    in_fp8 = {min(users.get(id(param.parameter), [-1])) for param in params if param.spec.in_fp8_squares}
    infos = []
    for param in params:
        used_by = users.get(id(param.parameter))
        if not used_by:
            raise ValueError(f"parameter {param.name} belongs to no unit; every parameter must lie in one of the units")
        if not param.parameter.is_floating_point():
            raise ValueError(
                f"parameter {param.name} is {param.parameter.dtype}; only floating-point parameters can train"
            )
        shape, index, trains = tuple(param.parameter.shape), min(used_by), param.parameter.requires_grad
        placement = param.placement or policy.placement
        is_alone = param.spec.buffer or (placement.shard.size == 1 and zero.offload.parameters == "none")
        is_small = prod(shape) <= zero.persistent_elements or (len(shape) == 1 and index in in_fp8)
        persistent = policy.zero_stage == 3 and (is_alone or is_small)
        alone = not persistent and (len(used_by) > 1 or units[index].spans_others)
        place = index, units[index].virtual_stage, param.group, trains, persistent, alone, param.matrix, placement
        infos.append(ParamInfo(param.name, shape, param.spec, *place))
    return infos
