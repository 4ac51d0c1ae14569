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

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, exchange
from megazero.layers.spec import ParamSpec, numel
from megazero.parallel_state import Coordinate, ParallelState
from megazero.zero.bucket import Bucket, BucketLayout, Run, Slot, intersect
from megazero.zero.state import ShardedState

_SENDS_IN_FLIGHT = 16  # parameters whose parts may wait for their writer


@dataclass(frozen=True)
class Assignment:
    """One parameter and the rank that writes it."""

    bucket: int
    slot: Slot
    writer: int


def assign_writers(buckets: Sequence[Bucket], ranks: Sequence[int]) -> tuple[Assignment, ...]:
    """Spread a stage's parameters over its ranks, largest first onto the least loaded.

    Args:
        buckets: of the stage, with equal layouts on all its ranks; second copies of tied parameters are not written.
        ranks: global ranks of the stage.

    Returns: assignments in bucket order.
    """
    load = dict.fromkeys(ranks, 0)
    found = []
    first_copies = [(index, bucket) for index, bucket in enumerate(buckets) if not bucket.is_second_copy]
    slots = [(index, slot) for index, bucket in first_copies for slot in bucket.layout.slots]
    for index, slot in sorted(slots, key=lambda entry: -numel(entry[1].info.shape)):
        writer = min(load, key=lambda rank: (load[rank], rank))
        load[writer] += numel(slot.info.shape)
        found.append(Assignment(index, slot, writer))
    return tuple(sorted(found, key=lambda entry: (entry.bucket, entry.slot.start)))


def stage_assignments(state: ShardedState, at: ParallelState) -> tuple[Assignment, ...]:
    """The assignments of this rank's stage."""
    return assign_writers(state.buckets, at.model.ranks)


def _parts(slot: Slot, layout: BucketLayout, at: ParallelState) -> Iterator[tuple[int, int, Run]]:
    """(rank, tp index, elements of the bucket) of each part of a parameter, once each."""
    tp_size = 1 if slot.info.spec.split is None else at.tp.size
    for tp in range(tp_size):
        for dp in range(layout.shards):  # the ranks of the first group that shares one copy of the state
            run = intersect(slot.run, layout.shard(dp))
            if run is not None:
                yield at.grid.rank(Coordinate(tp=tp, cp=at.at.cp, dp=dp, pp=at.at.pp)), tp, run


def gather_locals(
    state: ShardedState, kind: str, assignments: Sequence[Assignment], at: ParallelState
) -> Iterator[tuple[Assignment, list[Tensor]]]:
    """On each writer, every parameter assigned to it as the local tensors of all TP ranks, on the CPU.

    Args:
        state: this rank's shards.
        kind: what to gather.
        assignments: of this stage; equal on all its ranks, all of which must iterate to the end.
        at: this rank's place.
    """
    sending: deque[tuple[list[Pending], list[Tensor]]] = deque()
    for assignment in assignments:
        bucket, slot = state.buckets[assignment.bucket], assignment.slot
        flats = []
        if assignment.writer == at.rank:
            count = 1 if slot.info.spec.split is None else at.tp.size
            flats = [torch.empty(numel(slot.info.shape), dtype=state.dtype(kind)) for _ in range(count)]
        sends, receives = [], []
        for rank, tp, run in _parts(slot, bucket.layout, at):
            if at.rank not in (rank, assignment.writer):
                continue
            place = flats[tp][run.start - slot.start : run.stop - slot.start] if flats else None
            if rank != at.rank and place is not None:
                receives.append((place, rank))
                continue
            own = state.read(kind, bucket, run)
            if place is not None:
                place.copy_(own)
            else:
                sends.append((own.detach().to("cpu", copy=True), assignment.writer))
        pendings = exchange(sends, receives, at.model)
        sending.append((pendings[: len(sends)], [tensor for tensor, _ in sends]))
        for pending in pendings[len(sends) :]:
            pending.wait()
        while len(sending) > _SENDS_IN_FLIGHT:
            _finish(sending.popleft()[0])
        if flats:
            yield assignment, [flat.view(slot.info.shape) for flat in flats]
    for pendings, _ in sending:
        _finish(pendings)


def _finish(pendings: Sequence[Pending]) -> None:
    for pending in pendings:
        pending.wait()


def assemble(spec: ParamSpec, local: Sequence[Tensor]) -> dict[str, Tensor]:
    """Whole logical tensors, as a checkpoint stores them.

    Args:
        spec: of the parameter.
        local: the local tensors of all TP ranks; one where every rank holds the same.
    """
    whole = {name: local[0].new_empty(shape) for name, shape in spec.logical_shapes().items()}
    width = spec.width(len(local))
    for tp, tensor in enumerate(local):
        for block in spec.blocks(tp, len(local)) if tensor.numel() else ():
            rows, source = slice(*block.rows), tensor.view(-1, width)[slice(*block.local_rows)]
            target = whole[block.name]
            if block.columns is None or block.whole is not None:
                target.view(-1, width)[rows] = source
            elif block.transposed:
                target[slice(*block.columns), rows] = source.t()
            else:
                target[rows, slice(*block.columns)] = source
    return whole


def gather_logical(state: ShardedState, kind: str, at: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """Every logical tensor of this rank's stage, on its writer only.  All ranks must iterate to the end."""
    for assignment, local in gather_locals(state, kind, stage_assignments(state, at), at):
        yield from assemble(assignment.slot.info.spec, local).items()
