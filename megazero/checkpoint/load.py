"""Loading a checkpoint into any shape.  Each rank reads the elements it holds; together they prove that none is missing.

manifest     every file has the size and hash that were written      each rank checks its share of the files
index        the stored tensors are those of this model              nothing has been overwritten until here
read         masters, moments, weights, from the files into the shards
coverage     all ranks together have read each element of the model once

Ranks that hold the same elements each read a part and exchange it.  If all of them run on one machine, each reads
everything for itself from the file's pages, which is faster.  Either way each element of the model is read for the count
by exactly one rank of the world, so the sum of the counts proves the coverage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.folder import FileRecord, Folder, LocalFolder, Location, folder_at
from megazero.checkpoint.index import (
    CheckpointError,
    DamagedError,
    TrainerState,
    find_damage,
    index_name,
    kinds_of,
    read_manifest,
    read_trainer_state,
)
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.comm.collectives import agree, all_gather, gather_objects
from megazero.layers.spec import ParamSpec, Region, numel
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.bucket import Bucket, Interval, Slot, intersect
from megazero.zero.state import MASTER, MODEL, ShardedState

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def open_checkpoint(
    location: Location,
    state: ShardedState,
    at: ParallelState,
    *,
    check: Callable[[TrainerState], None] = lambda _: None,
    with_optimizer: bool = True,
    by_hash: bool = True,
) -> OpenCheckpoint:
    """Verify a checkpoint of any shape that is to fill this rank's masters and moments.  Called on every rank.

    Overwrites nothing; `OpenCheckpoint.read` does.

    Args:
        location: a complete step directory.
        check: raises CheckpointError if the run that wrote it does not fit this one.
        with_optimizer: read the optimizer's state too; otherwise it starts anew.
        by_hash: check the hash of every file, not only its size.

    Raises:
        DamagedError: on every rank: a file is missing, or has another size or hash.
        CheckpointError: on every rank: the tensors are not those of this model, or the storage fails.
    """
    folder = folder_at(location)
    if damage := find_damage_together(folder, at.world, by_hash=by_hash):
        advice = f"{folder} is damaged and was not loaded; resume from another step directory"
        raise DamagedError("\n".join([*damage, advice]))
    trainer = agree(lambda: read_trainer_state(folder), at.world, CheckpointError)
    has_moments = with_optimizer and trainer.optimizer_steps > 0
    moments = state.optimizer.known_states if has_moments else ()

    def open_and_check() -> dict[str, StoredTensors]:
        check(trainer)
        return _open_kinds(folder, trainer.step, moments if has_moments else None)

    stored = agree(open_and_check, at.world, CheckpointError)
    shapes = {kind: _logical_shapes(state, kind) for kind in (MODEL, *moments)}
    stages = gather_objects(shapes, at.pp)
    all_shapes = {kind: {name: shape for one in stages for name, shape in one[kind].items()} for kind in shapes}
    agree(lambda: _compare(stored, shapes, all_shapes), at.world, CheckpointError)

    needed = {
        kind: sum(numel(shape) for shape in all_shapes[MODEL if kind == MASTER else kind].values())
        for kind in (MASTER, *moments)
    }
    return OpenCheckpoint(folder, trainer, stored, needed, has_moments, state, at)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that was verified.

    `needed`: elements of the model, by kind of state to read.  `has_moments`: the optimizer goes on from its state.
    """

    folder: Folder
    trainer: TrainerState
    stored: Mapping[str, StoredTensors]
    needed: Mapping[str, int]
    has_moments: bool
    state: ShardedState
    at: ParallelState

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one machine and read a local file from its pages: faster than exchanging their parts."""
        return isinstance(self.folder, LocalFolder) and self.at.neighbours >= self.at.world.size

    @property
    def fills_weights(self) -> bool:
        """Whether `read` also reads weights whose masters another rank holds.  Over NCCL a gather is faster."""
        return self.shares_memory and self.at.device.type == "cpu"

    def read(self) -> None:
        """Overwrite this rank's masters and moments.  Called on every rank, through `ShardedModel.load`.

        Raises: CheckpointError: on every rank, the storage fails, and what is read so far has been overwritten.
        """
        reader = _Reader(self.stored, self.state, self.at, self.shares_memory, self.fills_weights)
        for kind in self.needed:
            reader.read(kind)
        agree(reader.check, self.at.world, CheckpointError)
        elements = gather_objects(reader.elements, self.at.world)
        for kind, needed in self.needed.items():
            read = sum(one[kind] for one in elements)
            if read != needed:
                raise CheckpointError(f"{self.folder}: {read} elements of {kind} were read, the model has {needed}")
        if self.has_moments:
            self.state.optimizer.resume(self.trainer.optimizer_steps, self.trainer.optimizer_scalars)
        else:
            self.state.optimizer.reset()


def find_damage_together(folder: Folder, world: Axis, *, by_hash: bool = True) -> list[str]:
    """What `find_damage` finds in all files; every rank checks its share of them.  Called on every rank.

    Raises: CheckpointError on every rank: there is no manifest, or the storage does not answer.
    """

    def look() -> list[str]:
        try:
            files = read_manifest(folder)
        except DamagedError as error:
            return [str(error)]
        return find_damage(folder, _share_of(files, world), by_hash=by_hash)

    found = gather_objects(agree(look, world, CheckpointError), world)
    return list(dict.fromkeys(line for lines in found for line in lines))


def _share_of(files: Mapping[str, FileRecord], world: Axis) -> dict[str, FileRecord]:
    """The files that this rank checks: all ranks have about as many bytes."""
    mine = {}
    loads = [(0, rank) for rank in range(world.size)]  # a heap
    for name, record in sorted(files.items(), key=lambda file: -file[1].bytes):
        load, rank = loads[0]
        heapreplace(loads, (load + record.bytes, rank))
        if rank == world.index:
            mine[name] = record
    return mine


def check_kinds(folder: Folder, moments: Sequence[str] | None) -> list[str]:
    """The kinds that a checkpoint holds: weights, and all of the optimizer's `moments`; None where these are left out.

    Raises: CheckpointError: another optimizer has written it, or it has no weights.
    """
    kinds = kinds_of(read_manifest(folder))
    stored = [kind for kind in kinds if kind not in (MODEL, MASTER)]
    if moments is not None and set(stored) != set(moments):
        held, needed = (", ".join(names) or "nothing" for names in (stored, moments))
        raise CheckpointError(
            f"{folder} was written with another optimizer: it holds {held}, this one keeps {needed}. "
            "Go on with the optimizer that wrote it"
        )
    if MODEL not in kinds:
        raise CheckpointError(f"{folder} has no {MODEL}; it holds {', '.join(kinds) or 'nothing'}")
    return kinds


def _open_kinds(folder: Folder, step: int, moments: Sequence[str] | None) -> dict[str, StoredTensors]:
    kinds = check_kinds(folder, moments)
    return {kind: StoredTensors(folder, kind, step) for kind in (MODEL, MASTER, *(moments or ())) if kind in kinds}


def _logical_shapes(state: ShardedState, kind: str) -> Shapes:
    shapes: Shapes = {}
    for bucket in state.buckets:
        for slot in bucket.layout.slots if state.holds(kind, bucket) else ():
            shapes |= slot.info.spec.logical_shapes()
    return shapes


def _compare(stored: Mapping[str, StoredTensors], shapes: dict[str, Shapes], all_shapes: dict[str, Shapes]) -> None:
    """Check that the stored tensors are those of this model: all names, and the shapes of this rank's stage."""
    for kind, mine in shapes.items():
        tensors, wanted = stored[kind], all_shapes[kind]
        problems = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.files)]
        problems += [f"{name} belongs to no parameter of this model" for name in sorted(tensors.files.keys() - wanted)]
        for name in sorted(mine.keys() & tensors.files.keys()):
            found = tensors[name].shape
            if found != mine[name]:
                problems.append(f"{name} has shape {list(found)}, this model needs {list(mine[name])}")
        if problems:
            shown = "; ".join(problems[:5])
            raise CheckpointError(f"{tensors.folder}/{index_name(kind)} is of another model: {shown}")


@dataclass
class _Reader:
    """Reads from the files, exchanges, and writes into a rank's shards."""

    stored: Mapping[str, StoredTensors]
    state: ShardedState
    at: ParallelState
    shares_memory: bool  # every rank reads all it needs from shared pages; otherwise they exchange what they read
    fills_weights: bool  # also read weights whose masters another rank holds
    elements: dict[str, int] = field(default_factory=dict)  # by kind, those that this rank has read for the count
    error: Exception | None = None  # the first that stopped this rank from reading
    scratch: Tensor = field(default_factory=lambda: torch.empty(0))

    def check(self) -> None:
        """Raises: what stopped this rank from reading."""
        if self.error is not None:
            raise self.error

    def read(self, kind: str) -> None:
        """Read one kind.  A rank that cannot read goes on with the exchange, so that no other rank waits for it.

        Frozen parameters have no masters, but are read with them: they have nothing else.
        """
        self.elements[kind] = 0
        for bucket in self.state.buckets:
            if kind != MASTER and not self.state.holds(kind, bucket):
                continue
            copies = self.at.dp_cp if bucket.policy.zero_stage == 0 else bucket.policy.replica
            end = bucket.layout.numel
            owned = Interval(bucket.owned.start, min(bucket.owned.stop, end))
            if copies.size > 1 and not self.shares_memory:
                self._read_together(kind, bucket, owned, copies)
                continue
            counted = intersect(owned, bucket.counted) or Interval(owned.start, owned.start)
            self._read_own(kind, bucket, counted, counts=True)
            for run in _around(counted, owned):
                self._read_own(kind, bucket, run, counts=False)
            if kind == MASTER and self.fills_weights and bucket.keeps_weights:
                for run in _around(bucket.owned, Interval(0, end)):
                    for slot, part in _parts(bucket, run):
                        self._read_part(kind, bucket, slot, part, bucket.weights[part.start : part.stop], False)

    def _read_own(self, kind: str, bucket: Bucket, run: Interval, *, counts: bool) -> None:
        """Elements that this rank holds: straight into the state if that is in memory."""
        for slot, part in _parts(bucket, run):
            memory = self.state.memory(kind, bucket, part)
            values = self._buffer(part.stop - part.start) if memory is None else memory
            self._read_part(kind, bucket, slot, part, values, counts)
            if memory is None:
                self.state.write(kind, bucket, part, values)

    def _read_together(self, kind: str, bucket: Bucket, owned: Interval, copies: Axis) -> None:
        """Elements that all of `copies` hold: each rank reads an equal part for the count."""
        each = -(-max(owned.stop - owned.start, 0) // copies.size)
        values = self._buffer(each * copies.size)
        mine = values[each * copies.index : each * (copies.index + 1)]
        start = owned.start + each * copies.index
        for slot, part in _parts(bucket, Interval(start, min(start + each, owned.stop))):
            self._read_part(kind, bucket, slot, part, mine[part.start - start : part.stop - start], True)
        if each:
            all_gather(values, mine, copies).wait()
        for _, part in _parts(bucket, owned):
            self.state.write(kind, bucket, part, values[part.start - owned.start : part.stop - owned.start])

    def _buffer(self, elements: int) -> Tensor:
        if self.scratch.numel() < elements:
            self.scratch = torch.empty(elements)
        return self.scratch[:elements]

    def _read_part(self, kind: str, bucket: Bucket, slot: Slot, run: Interval, out: Tensor, counts: bool) -> None:
        spec, tp = slot.info.spec, self.at.tp
        try:
            stored = self.stored.get(kind)
            # Without masters it was a run in fp32, or the parameter was frozen.
            if stored is None or (kind == MASTER and not spec.logical_shapes().keys() <= stored.files.keys()):
                stored = self.stored[MODEL]
            read = _read_range(stored, spec, out, run.start - slot.start, tp)
        except Exception as error:  # whatever it is, all ranks must hear of it
            self.error = self.error or error
            return
        if counts and not bucket.is_duplicate and (spec.split is not None or tp.index == 0):
            self.elements[kind] += read


def _around(part: Interval, whole: Interval) -> Iterator[Interval]:
    """The rest of `whole` before and after `part`."""
    for run in (Interval(whole.start, min(part.start, whole.stop)), Interval(max(part.stop, whole.start), whole.stop)):
        if run.start < run.stop:
            yield run


def _parts(bucket: Bucket, run: Interval) -> Iterator[tuple[Slot, Interval]]:
    """The parameters of a bucket within a run of its elements, each with its elements."""
    for slot in bucket.layout.slots:
        part = intersect(slot.interval, run)
        if part is not None:
            yield slot, part


def _read_range(stored: StoredTensors, spec: ParamSpec, out: Tensor, start: int, tp: Axis) -> int:
    """Read elements [start, start + len(out)) of a flattened local tensor; padding becomes zero.

    Returns: elements read; all but the padding.
    """
    width = spec.width(tp.size)
    stop = start + out.numel()
    read, done = 0, start  # elements before `done` are read or cleared
    for region in spec.regions(tp.index, tp.size):
        low, high = max(region.local_rows[0] * width, start), min(region.local_rows[1] * width, stop)
        if low >= high:
            continue
        if low > done:
            out[done - start : low - start] = 0
        first, last = low // width, -(-high // width)
        rows = _rows(stored, region, first, last)
        target = out[low - start : high - start]
        if low == first * width and high == last * width:  # whole rows: one copy, from the file's pages to the target
            target.view(last - first, width).copy_(rows.reshape(last - first, width) if rows.dim() != 2 else rows)
        else:
            target.copy_(rows.reshape(-1)[low - first * width : high - first * width])
        read += high - low
        done = max(done, high)
    if done < stop:
        out[done - start :] = 0
    return read


def _rows(stored: StoredTensors, region: Region, first: int, last: int) -> Tensor:
    """Local rows [first, last) of a region; a view of the file if that is mapped."""
    tensor, shift = stored[region.name], region.rows[0] - region.local_rows[0]
    rows = (first + shift, last + shift)
    if region.whole == ():
        return tensor.whole()
    if region.whole is not None or region.columns is None:
        return tensor.rows(*rows)
    if region.transposed:
        return tensor.rows(*region.columns)[:, slice(*rows)].t()
    return tensor.rows(*rows)[:, slice(*region.columns)]
