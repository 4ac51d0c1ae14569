"""Loading a checkpoint into any cluster shape: a plan of what each rank reads, and one loop that reads it.

verify     every file has the size and hash that were written      each rank checks some of the files
compare    the stored tensors are those of this model              nothing has been overwritten until here
plan       which elements of which tensors this rank reads         `plan_reads`, a pure function
read       masters, moments, weights, from the files into the state
exchange   ranks that hold the same elements each read some of them, and gather the rest
prove      all ranks together have read each element of the model once

If all ranks run on one machine, each rank reads everything itself from the file's cached pages, which is faster than an
exchange.  Either way, each element is counted by exactly one of the ranks that read it, so the sum of the counts proves
that nothing was missed.

[Note: readers] A reader writes a marker into `reading/` next to the step directories, then looks for the manifest.
Pruning removes the manifest, then looks for markers before it removes the rest.  So one of the two sees the other, on
any storage. The marker of a reader that was killed on this host is ignored.  Any other marker expires one day after
this process first saw it.  Clocks of different hosts are not compared.
"""

from __future__ import annotations

import os
import uuid
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint import index
from megazero.checkpoint.folder import Folder, LocalFolder, Location, folder_at
from megazero.checkpoint.lock import process_identity
from megazero.checkpoint.tensor_file import StoredTensor, StoredTensors
from megazero.comm.agreement import agree
from megazero.comm.collectives import all_gather, gather_objects
from megazero.layers.spec import ParamSpec, Region
from megazero.parallel_state import Axis, ParallelState
from megazero.settings import listed
from megazero.zero.bucket import Bucket
from megazero.zero.sharding import Interval, Slot, intersect
from megazero.zero.state import AVERAGE, MASTER, MODEL, ShardedState
from megazero.zero.storage import Extent

READING = "reading"  # the folder of the markers of readers

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def open_checkpoint(
    location: Location,
    state: ShardedState,
    at: ParallelState,
    *,
    check: Callable[[index.TrainerState], None] = lambda _: None,
    with_optimizer: bool = True,
    by_hash: bool = True,
) -> OpenCheckpoint:
    """Verify a checkpoint before it is loaded into this rank's state.  It may be from any cluster shape.  Collective.

    This function overwrites nothing; `OpenCheckpoint.read` does.

    Args:
        location: a complete step directory.
        check: raises CheckpointError if the run that wrote the checkpoint does not fit this run.
        with_optimizer: also read the optimizer's state; otherwise the optimizer starts anew.
        by_hash: check the hash of every file, not only its size.

    Raises:
        DamagedError: on every rank: a file is missing, or has a different size or hash.
        CheckpointError: on every rank: the tensors are not those of this model, or the storage fails.
    """
    folder = folder_at(location)
    if damage := find_damage_together(folder, at.world, by_hash=by_hash):
        advice = f"{folder} is damaged and was not loaded; resume from another step directory"
        raise index.DamagedError("\n".join([*damage, advice]))
    trainer = agree(lambda: index.read_trainer_state(folder), at.world, index.CheckpointError)
    has_moments = with_optimizer and trainer.optimizer_steps > 0
    moments = state.optimizer.known_states if has_moments else ()

    def open_and_check() -> dict[str, StoredTensors]:
        check(trainer)
        return _open_files(folder, trainer.step, moments if has_moments else None, state.average is not None)

    stored = agree(open_and_check, at.world, index.CheckpointError)
    elementwise = [*moments, *([AVERAGE] if AVERAGE in stored else [])]
    shapes = {state_kind: _logical_shapes(state, state_kind) for state_kind in (MODEL, *elementwise)}
    stages = gather_objects(shapes, at.pp)
    all_shapes = {state_kind: dict(ChainMap(*(stage[state_kind] for stage in stages))) for state_kind in shapes}
    agree(lambda: _compare(stored, shapes, all_shapes), at.world, index.CheckpointError)

    needed = {
        state_kind: sum(prod(shape) for shape in all_shapes[MODEL if state_kind == MASTER else state_kind].values())
        for state_kind in (MASTER, *elementwise)
    }
    return OpenCheckpoint(folder, trainer, stored, needed, has_moments, state, at)


@contextmanager
def reading(location: Location) -> Iterator[Folder]:
    """Protect a step directory from pruning while it is read.  Directories with other names are never pruned.

    Raises: CheckpointError: the checkpoint is not complete, or no longer complete.
    """
    folder = folder_at(location)
    marker = f"{folder.name}.{uuid.uuid4().hex}"
    markers = folder.parent.child(READING)
    if index.is_step_name(folder.name):
        with suppress(OSError):  # if nothing can be written there, nothing can be pruned either
            markers.make()
            markers.write(marker, process_identity(os.getpid()).encode())
    try:
        index.check_complete(folder)
        yield folder
    finally:
        with suppress(OSError):
            markers.remove(marker)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that has been verified.

    `needed`: number of elements of the model, for each state kind to read.  `has_moments`: the optimizer's state is
    read too.
    """

    folder: Folder
    trainer: index.TrainerState
    stored: Mapping[str, StoredTensors]
    needed: Mapping[str, int]
    has_moments: bool
    state: ShardedState
    at: ParallelState

    def read(self) -> None:
        """Overwrite this rank's masters and moments.  Collective; called through `ShardedModel.load`.

        Raises:
            CheckpointError: on every rank: the storage failed.  Masters and moments read before the failure are already
                overwritten.
        """
        # Ranks of one machine that read a local file share its pages.
        reads_same_pages = isinstance(self.folder, LocalFolder) and self.at.local_world_size >= self.at.world.size
        copies = {bucket: None if reads_same_pages else copies_of(bucket, self.at) for bucket in self.state.buckets}
        reads = plan_reads(self.state, copies, tuple(self.needed), self.at.tp.index)
        counts = agree(lambda: _read_all(reads, self.stored, self.state, self.at), self.at.world, index.CheckpointError)
        for state_kind in self.needed:
            for bucket, axis in copies.items():
                if axis is not None and _holds(self.state, state_kind, bucket):
                    _exchange(self.state, state_kind, bucket, axis)
        of_ranks = gather_objects(counts, self.at.world)
        for state_kind, needed in self.needed.items():
            read = sum(counts[state_kind] for counts in of_ranks)
            if read != needed:
                hint = f"{read} elements of {state_kind} were read, the model has {needed}"
                raise index.CheckpointError(f"{self.folder}: {hint}")
        if self.has_moments:
            self.state.optimizer.resume(self.trainer.optimizer_steps, self.trainer.optimizer_scalars)
        else:
            self.state.optimizer.reset()
        if self.state.average is not None:
            self.state.average.has_begun = AVERAGE in self.needed


def find_damage_together(folder: Folder, world: Axis, *, by_hash: bool = True) -> list[str]:
    """Run `find_damage` over all files, with the work spread over the ranks.  Collective.

    Raises: CheckpointError: on every rank: there is no manifest, or the storage does not answer.
    """

    def look() -> list[str]:
        try:
            files = index.read_manifest(folder)
        except index.DamagedError as error:
            return [str(error)]
        by_size = sorted(files, key=lambda name: (-files[name].bytes, name))  # so all ranks get about as many bytes
        mine = {name: files[name] for name in by_size[world.index :: world.size]}
        return index.find_damage(folder, mine, by_hash=by_hash)

    found = gather_objects(agree(look, world, index.CheckpointError), world)
    return list(dict.fromkeys(line for lines in found for line in lines))


def check_state_kinds(folder: Folder, moments: Sequence[str] | None) -> list[str]:
    """Return the state kinds of a checkpoint, after checking that it has weights, and the optimizer's `moments` if
    given.

    Raises: CheckpointError: it has no weights, or another optimizer wrote it.
    """
    state_kinds = index.state_kinds_of(index.read_manifest(folder))
    stored = [state_kind for state_kind in state_kinds if state_kind not in (MODEL, MASTER, AVERAGE)]
    if moments is not None and set(stored) != set(moments):
        held, needed = (", ".join(names) or "nothing" for names in (stored, moments))
        hint = f"it holds {held}, and this one needs {needed}. Resume with the optimizer that wrote it"
        raise index.CheckpointError(f"{folder} was written with another optimizer: {hint}")
    if MODEL not in state_kinds:
        raise index.CheckpointError(f"{folder} has no {MODEL}; it holds {', '.join(state_kinds) or 'nothing'}")
    return state_kinds


def _open_files(folder: Folder, step: int, moments: Sequence[str] | None, averages: bool) -> dict[str, StoredTensors]:
    held = check_state_kinds(folder, moments)
    wanted = [MODEL, MASTER, *(moments or ()), *([AVERAGE] if averages else [])]
    return {state_kind: StoredTensors(folder, state_kind, step) for state_kind in wanted if state_kind in held}


def _logical_shapes(state: ShardedState, state_kind: str) -> Shapes:
    shapes: Shapes = {}
    for bucket in state.buckets:
        for slot in bucket.layout.slots if state.holds(state_kind, bucket) else ():
            shapes |= slot.info.spec.logical_shapes()
    return shapes


def _compare(stored: Mapping[str, StoredTensors], shapes: dict[str, Shapes], all_shapes: dict[str, Shapes]) -> None:
    """Check that the stored tensors are those of this model: the names of all stages, and the shapes of this rank's
    stage.
    """
    for state_kind, mine in shapes.items():
        tensors, wanted = stored[state_kind], all_shapes[state_kind]
        problems = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.files)]
        problems += [f"{name} belongs to no parameter of this model" for name in sorted(tensors.files.keys() - wanted)]
        for name in sorted(mine.keys() & tensors.files.keys()):
            found = tensors[name].shape
            if found != mine[name]:
                problems.append(f"{name} has shape {list(found)}, this model needs {list(mine[name])}")
        if problems:
            shown = listed(problems, 5, "; ")
            raise index.CheckpointError(f"{tensors.folder}/{index.index_name(state_kind)} is of another model: {shown}")


@dataclass(frozen=True)
class Read:
    """Elements of a parameter that a rank reads into its state."""

    state_kind: str
    bucket: Bucket
    slot: Slot
    elements: Interval  # of the bucket
    is_counted: bool  # only by this rank, although other ranks may read them too


def copies_of(bucket: Bucket, at: ParallelState) -> Axis | None:
    """Return the ranks that hold the same elements of a bucket; None if only this rank holds them."""
    same = bucket.placement.shard if bucket.layout.first.spec.of_experts else at.dp_cp
    axis = same if bucket.residency.state is Extent.FULL else bucket.placement.replica
    return axis if axis.size > 1 else None


def plan_reads(
    state: ShardedState, copies: Mapping[Bucket, Axis | None], state_kinds: Sequence[str], tp_index: int
) -> Iterator[Read]:
    """Plan what a rank reads of each state kind.

    Args:
        copies: for a bucket, the ranks that each read some of its elements and exchange them; None if this rank reads
            all that it holds.
    """
    for state_kind in state_kinds:
        for bucket in state.buckets:
            if not _holds(state, state_kind, bucket):
                continue
            axis = copies[bucket]
            whole, counted = (bucket.owned, bucket.counted) if axis is None else (_elements_to_read(bucket, axis),) * 2
            for slot in bucket.layout.slots:
                is_first = not bucket.is_duplicate and (slot.info.spec.split is not None or tp_index == 0)
                for elements, is_counted in _cut(intersect(slot.interval, whole), counted):
                    yield Read(state_kind, bucket, slot, elements, is_first and is_counted)


def _holds(state: ShardedState, state_kind: str, bucket: Bucket) -> bool:
    """Whether a state kind is read for a bucket.

    Frozen parameters have no masters, but their weights are read along with the masters.
    """
    return state_kind == MASTER or state.holds(state_kind, bucket)


def _elements_to_read(bucket: Bucket, copies: Axis) -> Interval:
    """Return the elements that this rank reads if all ranks of `copies` hold the same ones."""
    each = -(-bucket.owned.size // copies.size)
    start = bucket.owned.start + each * copies.index
    return Interval(start, max(start, min(start + each, bucket.owned.stop)))


def _exchange(state: ShardedState, state_kind: str, bucket: Bucket, copies: Axis) -> None:
    """Gather a bucket after each rank of `copies` has read its elements."""
    owned, read = bucket.owned, _elements_to_read(bucket, copies)
    each = -(-owned.size // copies.size)
    values = torch.zeros(each * copies.size)
    mine = values[each * copies.index : each * (copies.index + 1)]
    for slot in bucket.layout.slots:
        if common := intersect(slot.interval, read):
            mine[common.start - read.start : common.stop - read.start] = state.read(state_kind, bucket, common)
    if each:
        all_gather(values, mine, copies).wait()
    for slot in bucket.layout.slots:
        if common := intersect(slot.interval, owned):
            state.write(state_kind, bucket, common, values[common.start - owned.start : common.stop - owned.start])


def _cut(whole: Interval | None, counted: Interval) -> Iterator[tuple[Interval, bool]]:
    """Cut an interval where `counted` begins and ends.  Yield (interval, whether it lies within `counted`)."""
    if whole is not None:
        inside = (edge for edge in (counted.start, counted.stop) if whole.start < edge < whole.stop)
        for start, stop in pairwise((whole.start, *inside, whole.stop)):
            yield Interval(start, stop), counted.start <= start < counted.stop


def _read_all(
    reads: Iterable[Read], stored: Mapping[str, StoredTensors], state: ShardedState, at: ParallelState
) -> Counter[str]:
    """Execute a plan.  State that is in memory is read in place.  Return the number of counted elements by state kind."""
    counts, scratch = Counter[str](), torch.empty(0)
    for read in reads:
        spec, numel = read.slot.info.spec, read.elements.size
        memory = state.memory(read.state_kind, read.bucket, read.elements)
        if memory is None and scratch.numel() < numel:
            scratch = torch.empty(numel)
        values = scratch[:numel] if memory is None else memory
        source = _source(stored, read.state_kind, spec)
        count = _read_range(source, spec, values, read.elements.start - read.slot.start, spec.axis(at))
        if memory is None:
            state.write(read.state_kind, read.bucket, read.elements, values)
        counts[read.state_kind] += count if read.is_counted else 0
    return counts


def _source(stored: Mapping[str, StoredTensors], state_kind: str, spec: ParamSpec) -> StoredTensors:
    """Return the tensors to read a state kind from.

    If the checkpoint has no masters, as of an fp32 run or a frozen parameter, these are the weights.
    """
    if state_kind == MASTER and not (MASTER in stored and spec.logical_shapes().keys() <= stored[MASTER].files.keys()):
        return stored[MODEL]
    return stored[state_kind]


def _read_range(stored: StoredTensors, spec: ParamSpec, out: Tensor, start: int, axis: Axis) -> int:
    """Read elements [start, start + len(out)) of a flattened local tensor; padding becomes zero.

    Returns: number of elements read, without padding.
    """
    stop = start + out.numel()
    read, done = 0, start  # all elements before `done` have been read or set to zero
    for region in spec.regions(axis.index, axis.size):
        low, high = max(region.start, start), min(region.start + region.numel, stop)
        if low >= high:
            continue
        if low > done:
            out[done - start : low - start] = 0
        width = region.numel // (region.shape or (1,))[0]
        at, end = low - region.start, high - region.start
        first, last = at // width, -(-end // width)
        rows = _rows(stored[region.name], region, first, last)
        target = out[low - start : high - start]
        if target.numel() == rows.numel():  # whole rows: a single copy from the file's pages to the target
            target.view(rows.shape).copy_(rows)
        else:
            target.copy_(rows.reshape(-1)[at - first * width : end - first * width])
        read += high - low
        done = max(done, high)
    if done < stop:
        out[done - start :] = 0
    return read


def _rows(tensor: StoredTensor, region: Region, first: int, last: int) -> Tensor:
    """Return rows [first, last) of a region; a view of the file if it is memory-mapped."""
    if not region.whole:
        return tensor.whole()
    (rows, *rest), top = region.box, region.corner[0]
    rows = slice(top + first, top + last)
    if region.transposed:
        return tensor.rows(rest[0].start, rest[0].stop)[:, rows].t()
    return tensor.rows(rows.start, rows.stop)[(slice(None), *rest)]
