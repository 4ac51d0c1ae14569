"""From the shards of a pipeline stage's ranks to whole logical tensors, each on one writer.

    dp 0 tp 0  [===]                    local flat, tp 0  [======]      sections -> q_proj
    dp 1 tp 0     [===]   -- send -->                                               k_proj
    dp 0 tp 1  [===]        writer      local flat, tp 1  [======]                  v_proj
    dp 1 tp 1     [===]

Each element of the state is sent once.  The plan is a pure function of the layouts, so every rank knows every message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, exchange
from megazero.layers.spec import ParamSpec, Region, numel
from megazero.parallel_state import Axis, Coordinate, ParallelState
from megazero.zero.bucket import Bucket, BucketLayout, Run, Slot, intersect

_SENDS_IN_FLIGHT = 16  # parameters whose parts may wait for their writer
_RECEIVED_AHEAD = 2  # parameters that may arrive while their writer works on the ones before
_SLACK = 1.1  # a writer may have so many times its fair share of elements, where that saves sending them


class Source(Protocol):
    """What can be written: the state of a rank, or a copy of it."""

    buckets: Sequence[Bucket]

    @property
    def kinds(self) -> tuple[str, ...]:
        """What must be saved."""

    def dtype(self, kind: str) -> torch.dtype:
        """Dtype in which a kind is kept."""

    def holds(self, kind: str, bucket: Bucket) -> bool:
        """Whether a bucket has this kind."""

    def read(self, kind: str, bucket: Bucket, run: Run) -> Tensor:
        """Elements of a bucket that this rank counts, 1-D."""


@dataclass(frozen=True)
class Assignment:
    """One parameter and the rank that writes it."""

    bucket: int
    slot: Slot
    writer: int


def assign_writers(buckets: Sequence[Bucket], at: ParallelState) -> tuple[Assignment, ...]:
    """Spread the parameters of this rank's stage over its ranks: largest first, to whoever holds most of it.

    A rank that has its fair share already leaves the parameter to the least loaded one.

    Args:
        buckets: of the stage, with equal layouts on all its ranks; second copies of tied parameters are not written.
        at: this rank's place.

    Returns: assignments in bucket order.
    """
    load = dict.fromkeys(at.model.ranks, 0)
    found = []
    first_copies = [(index, bucket) for index, bucket in enumerate(buckets) if not bucket.is_second_copy]
    slots = [(index, slot, bucket) for index, bucket in first_copies for slot in bucket.layout.slots]
    most = _SLACK * sum(numel(slot.info.shape) for _, slot, _ in slots) / len(load)
    for index, slot, bucket in sorted(slots, key=lambda entry: -numel(entry[1].info.shape)):
        size = numel(slot.info.shape)
        held = dict.fromkeys(load, 0)
        for rank, _, run in _parts(slot, bucket.layout, at):
            held[rank] += run.stop - run.start
        writer = max(load, key=lambda rank: (held[rank], -load[rank], -rank))
        if load[writer] + size > most:
            writer = min(load, key=lambda rank: (load[rank], rank))
        load[writer] += size
        found.append(Assignment(index, slot, writer))
    return tuple(sorted(found, key=lambda entry: (entry.bucket, entry.slot.start)))


def _parts(slot: Slot, layout: BucketLayout, at: ParallelState) -> Iterator[tuple[int, int, Run]]:
    """(rank, tp index, elements of the bucket) of each part of a parameter, once each."""
    tp_size = 1 if slot.info.spec.split is None else at.tp.size
    for tp in range(tp_size):
        for dp in range(layout.shards):  # the ranks of the first group that shares one copy of the state
            run = intersect(slot.run, layout.shard(dp))
            if run is not None:
                yield at.grid.rank(Coordinate(tp=tp, cp=at.at.cp, dp=dp, pp=at.at.pp)), tp, run


class Room:
    """Memory that is used again; new memory, which comes page by page, takes several times as long to fill."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """At least so many bytes, of any content."""
        self._free.sort(key=len)
        for index, memory in enumerate(self._free):
            if len(memory) >= size:
                return self._free.pop(index)
        if self._free:
            self._free.pop()  # too small, all of them: one makes way, so that there are no more than were in use at once
        return torch.empty(size, dtype=torch.uint8)

    def give(self, memories: Sequence[Tensor]) -> None:
        """Take back what `take` gave."""
        self._free += memories


def gather_locals(
    source: Source,
    kind: str,
    assignments: Sequence[Assignment],
    at: ParallelState,
    axis: Axis,
    room: Room | None = None,
) -> Iterator[tuple[Assignment, list[Tensor]]]:
    """On each writer, every parameter assigned to it as the local tensors of all TP ranks, on the CPU.

    Args:
        source: this rank's part; what a rank holds whole is given out as it is, not copied.
        kind: what to gather.
        assignments: of this stage; equal on all its ranks, all of which must iterate to the end.
        at: this rank's place.
        axis: the stage's ranks.
        room: where to assemble; what is yielded holds until the next is asked for.  None for memory of their own.
    """
    sending: deque[tuple[list[Pending], list[Tensor]]] = deque()
    arriving: deque[tuple[Assignment, list[Tensor], list[Pending], list[Tensor]]] = deque()

    def arrived() -> Iterator[tuple[Assignment, list[Tensor]]]:
        assignment, flats, receiving, taken = arriving.popleft()
        _finish(receiving)
        yield assignment, [flat.view(assignment.slot.info.shape) for flat in flats]
        if room is not None:
            room.give(taken)

    for assignment in assignments:
        taken: list[Tensor] = []
        flats, sends, receives = _parts_of(source, kind, assignment, at, room or Room(), taken)
        pendings = exchange(sends, receives, axis)
        sending.append((pendings[: len(sends)], [tensor for tensor, _ in sends]))
        while len(sending) > _SENDS_IN_FLIGHT:
            _finish(sending.popleft()[0])
        if assignment.writer == at.rank:
            arriving.append((assignment, flats, pendings[len(sends) :], taken))
        while len(arriving) > _RECEIVED_AHEAD:
            yield from arrived()
    while arriving:
        yield from arrived()
    for pendings, _ in sending:
        _finish(pendings)


def _parts_of(
    source: Source, kind: str, assignment: Assignment, at: ParallelState, room: Room, taken: list[Tensor]
) -> tuple[list[Tensor], list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """The local tensors where this rank writes them, with its own parts in place; what to send; where to receive.

    What it takes of the room is added to `taken`.
    """
    bucket, slot, dtype = source.buckets[assignment.bucket], assignment.slot, source.dtype(kind)
    parts = [one for one in _parts(slot, bucket.layout, at) if at.rank in (one[0], assignment.writer)]
    writes = assignment.writer == at.rank
    count = 1 if slot.info.spec.split is None else at.tp.size
    flats = [torch.empty(0) for _ in range(count)] if writes else []
    sends, receives = [], []
    for rank, tp, run in parts:
        own = source.read(kind, bucket, run).detach() if rank == at.rank else None
        if own is not None and not writes:
            sends.append((own.to("cpu", copy=own.device.type != "cpu"), assignment.writer))
            continue
        if own is not None and run == slot.run:
            flats[tp] = own.cpu()
            continue
        if not flats[tp].numel():
            taken.append(room.take(numel(slot.info.shape) * dtype.itemsize))
            flats[tp] = taken[-1][: numel(slot.info.shape) * dtype.itemsize].view(dtype)
        place = flats[tp][run.start - slot.start : run.stop - slot.start]
        if own is None:
            receives.append((place, rank))
        else:
            place.copy_(own)
    return flats, sends, receives


def _finish(pendings: Sequence[Pending]) -> None:
    for pending in pendings:
        pending.wait()


def assemble(spec: ParamSpec, local: Sequence[Tensor]) -> dict[str, Tensor]:
    """Whole logical tensors, as a checkpoint stores them; views of `local` where they lie there in one piece.

    Args:
        spec: of the parameter.
        local: the local tensors of all TP ranks; one where every rank holds the same.
    """
    width = spec.width(len(local))
    shapes = spec.logical_shapes()
    whole: dict[str, Tensor] = {}
    for tp, tensor in enumerate(local):
        for block in spec.regions(tp, len(local)) if tensor.numel() else ():
            rows, source = slice(*block.rows), tensor.view(-1, width)[slice(*block.local_rows)]
            if _is_all(block, source):
                whole[block.name] = source.reshape(shapes[block.name])
                continue
            target = whole.setdefault(block.name, local[0].new_empty(shapes[block.name]))
            if block.columns is None or block.whole is not None:
                target.view(-1, width)[rows] = source
            elif block.transposed:
                target[slice(*block.columns), rows] = source.t()
            else:
                target[rows, slice(*block.columns)] = source
    return {name: whole.get(name, local[0].new_empty(shape)) for name, shape in shapes.items()}


def _is_all(block: Region, source: Tensor) -> bool:
    """Whether a block is its logical tensor, element by element in the order in which it is stored."""
    return not block.transposed and source.numel() == numel(block.shape)


def gather_logical(source: Source, kind: str, at: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """Every logical tensor of this rank's stage, on its writer only.  All ranks must iterate to the end."""
    for assignment, local in gather_locals(source, kind, assign_writers(source.buckets, at), at, at.model):
        yield from assemble(assignment.slot.info.spec, local).items()
