"""Gathering the shards of a pipeline stage's ranks into whole logical tensors, each on one writer.

    dp 0 tp 0  [===]                    local flat, tp 0  [======]      sections -> q_proj
    dp 1 tp 0     [===]   -- send -->                                               k_proj
    dp 0 tp 1  [===]        writer      local flat, tp 1  [======]                  v_proj
    dp 1 tp 1     [===]

Each element of the state is sent once.  The plan is a pure function of the layouts, so every rank knows every message.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, exchange
from megazero.layers.spec import ParamSpec, numel
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.bucket import Bucket, BucketLayout, Interval, Slot
from megazero.zero.state import ShardedState

_SENDS_IN_FLIGHT = 16  # parameters whose parts are being sent at the same time
_RECEIVED_AHEAD = 2  # parameters that may arrive while their writer works on earlier ones
_SLACK = 1.1  # a writer may have so many times its fair share of elements if that saves sending them

Messages: TypeAlias = list[tuple[Tensor, int]]  # (tensor, the other rank)


@dataclass(frozen=True)
class Assignment:
    """One parameter and the rank that writes it."""

    bucket: int
    slot: Slot
    writer: int
    parts: tuple[tuple[int, int, Interval], ...]  # (rank, tp index, elements of the bucket), once each


def assign_writers(buckets: Sequence[Bucket], at: ParallelState) -> tuple[Assignment, ...]:
    """Spread the parameters of this rank's stage over its ranks: the largest first, to the rank that holds most of it.

    If that rank already has its fair share, the least loaded rank gets the parameter.  Second copies of tied parameters
    are not written.  All ranks of the stage find the same assignments; each gets those in which it takes part, in bucket
    order.  Called once per run: the time grows with the number of parts.
    """
    load = dict.fromkeys(at.model.ranks, 0)
    loads = [(0, rank) for rank in load]  # a heap; entries that are not those of `load` are out of date
    heapify(loads)
    found = []
    first_copies = [(index, bucket) for index, bucket in enumerate(buckets) if not bucket.is_duplicate]
    slots = [(index, slot, bucket.layout) for index, bucket in first_copies for slot in bucket.layout.slots]
    same = cache(lambda tp: at.grid.group_of(at.grid.rank(replace(at.at, tp=tp)), "dp", "cp"))  # as `at.dp_cp`
    most = _SLACK * sum(numel(slot.info.shape) for _, slot, _ in slots) / len(load)
    for index, slot, layout in sorted(slots, key=lambda entry: -numel(entry[1].info.shape)):
        size, parts = numel(slot.info.shape), tuple(_parts(slot, layout, at.tp.size, same))
        held: Counter[int] = Counter()
        for rank, _, run in parts:
            held[rank] += run.stop - run.start
        writer = max(held, key=lambda rank: (held[rank], -load[rank], -rank), default=None)
        if writer is None or load[writer] + size > most:
            while loads[0][0] != load[loads[0][1]]:
                heappop(loads)
            writer = loads[0][1]
        load[writer] += size
        heappush(loads, (load[writer], writer))
        if at.rank == writer or at.rank in held:
            found.append(Assignment(index, slot, writer, parts))
    return tuple(sorted(found, key=lambda entry: (entry.bucket, entry.slot.start)))


def _parts(
    slot: Slot, layout: BucketLayout, tp_size: int, same: Callable[[int], tuple[int, ...]]
) -> Iterator[tuple[int, int, Interval]]:
    """(rank, tp index, elements of the bucket) of each shard of a parameter, each once."""
    each = layout.shard_numel
    for tp in range(1 if slot.info.spec.split is None else tp_size):
        # the ranks of the first group that shares one copy of the state
        for index in range(slot.start // each, -(-slot.stop // each)):
            run = Interval(max(slot.start, index * each), min(slot.stop, (index + 1) * each))
            yield same(tp)[index], tp, run


class HostBuffers:
    """A pool of host memory: the first write to new memory takes several times as long, as the system maps each page."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []  # what is no longer in use goes back here

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes, with arbitrary content."""
        self.free.sort(key=len)
        for index, memory in enumerate(self.free):
            if len(memory) >= size:
                return self.free.pop(index)
        if self.free:
            self.free.pop()  # all are too small: drop one, so that there are never more than were in use at once
        return torch.empty(size, dtype=torch.uint8)


def gather_locals(
    source: ShardedState,
    kind: str,
    assignments: Sequence[Assignment],
    at: ParallelState,
    axis: Axis,
    buffers: HostBuffers | None = None,
) -> Iterator[tuple[Assignment, list[Tensor]]]:
    """On each writer, every parameter assigned to it as the local tensors of all TP ranks, on the CPU.

    Args:
        source: what a rank holds whole is yielded as it is, not copied.
        assignments: those of this rank; all ranks of `axis` must iterate to the end.
        buffers: for the local tensors, which are then valid only until the next is asked for; None for new memory each time.
    """
    sending: deque[tuple[list[Pending], Messages]] = deque()  # holds what is sent until it has left
    arriving: deque[tuple[Assignment, list[Tensor], list[Tensor], list[Pending]]] = deque()

    def arrived() -> Iterator[tuple[Assignment, list[Tensor]]]:
        assignment, flats, taken, receiving = arriving.popleft()
        _wait(receiving)
        yield assignment, [flat.view(assignment.slot.info.shape) for flat in flats]
        if buffers is not None:
            buffers.free += taken

    for assignment in assignments:
        sends, receives, flats, taken = _transfers(source, kind, assignment, at, buffers or HostBuffers())
        pendings = exchange(sends, receives, axis)
        sending.append((pendings[: len(sends)], sends))
        while len(sending) > _SENDS_IN_FLIGHT:
            _wait(sending.popleft()[0])
        if assignment.writer == at.rank:
            arriving.append((assignment, flats, taken, pendings[len(sends) :]))
        while len(arriving) > _RECEIVED_AHEAD:
            yield from arrived()
    while arriving:
        yield from arrived()
    for pendings, _ in sending:
        _wait(pendings)


def _transfers(
    source: ShardedState, kind: str, assignment: Assignment, at: ParallelState, buffers: HostBuffers
) -> tuple[Messages, Messages, list[Tensor], list[Tensor]]:
    """The messages of one parameter; on its writer also the flat local tensors of all TP ranks, and the buffers they use."""
    bucket, slot, dtype = source.buckets[assignment.bucket], assignment.slot, source.dtype(kind)
    nbytes = numel(slot.info.shape) * dtype.itemsize
    sends: Messages = []
    receives: Messages = []
    flats = [torch.empty(0) for _ in range(1 if slot.info.spec.split is None else at.tp.size)]
    taken: list[Tensor] = []
    for rank, tp, run in assignment.parts:
        if at.rank not in (rank, assignment.writer):
            continue
        own = source.read(kind, bucket, run).detach() if rank == at.rank else None
        if own is not None and assignment.writer != at.rank:
            sends.append((own.to("cpu", copy=own.device.type != "cpu"), assignment.writer))
            continue
        if own is not None and run == slot.interval:
            flats[tp] = own.cpu()
            continue
        if not flats[tp].numel():
            taken.append(buffers.take(nbytes))
            flats[tp] = taken[-1][:nbytes].view(dtype)
        target = flats[tp][run.start - slot.start : run.stop - slot.start]
        if own is None:
            receives.append((target, rank))
        else:
            target.copy_(own)
    return sends, receives, flats, taken


def _wait(pendings: Sequence[Pending]) -> None:
    for pending in pendings:
        pending.wait()


def assemble(spec: ParamSpec, local: Sequence[Tensor]) -> dict[str, Tensor]:
    """Whole logical tensors, as a checkpoint stores them; views of `local` if they are contiguous there.

    `local` are the local tensors of all TP ranks; one if every rank holds the same.
    """
    shapes = spec.logical_shapes()
    whole: dict[str, Tensor] = {}
    for tp, tensor in enumerate(local):
        for region in spec.regions(tp, len(local)) if tensor.numel() else ():
            source = tensor.view(-1)[region.start : region.start + region.numel].view(region.shape)
            if not region.transposed and region.shape == region.whole:  # all of it, in the order of the file
                whole[region.name] = source
                continue
            target = whole.setdefault(region.name, local[0].new_empty(shapes[region.name]))
            (target.t() if region.transposed else target)[region.box] = source
    return {name: whole.get(name, local[0].new_empty(shape)) for name, shape in shapes.items()}


def gather_logical(source: ShardedState, kind: str, at: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """Every logical tensor of this rank's stage, on its writer only.  All ranks must iterate to the end."""
    for assignment, local in gather_locals(source, kind, assign_writers(source.buckets, at), at, at.model):
        yield from assemble(assignment.slot.info.spec, local).items()
