"""Reading a checkpoint into any shape: each rank reads the slices it owns; together they prove that none is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder, LocalFolder, Place, folder_at
from megazero.checkpoint.index import (
    CheckpointError,
    DamagedError,
    TrainerState,
    index_name,
    kinds_of,
    read_manifest,
    read_trainer_state,
)
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.checkpoint.verify import find_damage
from megazero.comm.collectives import agree, all_gather, gather_objects
from megazero.layers.spec import ParamSpec, Region, numel
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.bucket import Bucket, Run, Slot, intersect
from megazero.zero.state import MASTER, MODEL, ShardedState

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def load_checkpoint(
    place: Place,
    state: ShardedState,
    at: ParallelState,
    *,
    check: Callable[[TrainerState], None] = lambda _: None,
    with_optimizer: bool = True,
    by_hash: bool = True,
) -> TrainerState:
    """Fill this rank's masters and moments from a checkpoint of any shape.  Called on every rank.

    Ranks that keep the same elements read a part each and give it to the others, so every byte is read once; on one machine
    each reads for itself (see `shares_memory`).  The caller publishes the masters to the weights afterwards, unless
    `fills_weights` says that they have been read, too.

    Args:
        place: a complete step directory.
        state: this rank's shards; overwritten.
        at: this rank's place.
        check: raises CheckpointError where the run that wrote it does not fit this one.
        with_optimizer: read the optimizer's state too; otherwise it starts anew.
        by_hash: check the hash of every file, not only its size.

    Raises:
        DamagedError: on every rank, before anything is overwritten: a file is missing, or has another size or hash.
        CheckpointError: on every rank: the tensors are not those of this model, before anything is overwritten; or the
            storage fails while they are read.
    """
    folder = folder_at(place)
    found = agree(lambda: _damage(folder, at, by_hash), at.world, CheckpointError)
    damage = list(dict.fromkeys(line for lines in gather_objects(found, at.world) for line in lines))
    if damage:
        raise DamagedError(
            "\n".join(damage) + f"\n{folder} is damaged and was not loaded; resume from another step directory"
        )
    trainer = agree(lambda: read_trainer_state(folder), at.world, CheckpointError)
    has_moments = with_optimizer and trainer.optimizer_steps > 0
    moments = state.optimizer.known_states if has_moments else ()

    def open_and_check() -> _Stored:
        check(trainer)
        stored = _Stored(folder, trainer.step)
        if has_moments:
            stored.check_optimizer(moments)
        return stored

    stored = agree(open_and_check, at.world, CheckpointError)
    wanted = {kind: _logical_shapes(state, kind) for kind in (MODEL, *moments)}
    everyone = gather_objects(wanted, at.pp)
    all_wanted = {kind: {name: shape for stage in everyone for name, shape in stage[kind].items()} for kind in wanted}
    agree(lambda: _compare(stored, wanted, all_wanted), at.world, CheckpointError)
    reader = _Reader(stored, state, at)
    for kind in (MASTER, *moments):
        reader.read(kind)
    agree(reader.check, at.world, CheckpointError)
    everywhere = gather_objects(reader.elements, at.world)
    for kind in (MASTER, *moments):
        everything = all_wanted[MODEL if kind == MASTER else kind]
        _prove_coverage(folder, kind, sum(elements[kind] for elements in everywhere), everything)
    if has_moments:
        state.optimizer.resume(trainer.optimizer_steps, trainer.optimizer_scalars)
    else:
        state.optimizer.reset()
    return trainer


class _Stored:
    """The tensors of a checkpoint by kind, each kind opened once."""

    def __init__(self, folder: Folder, step: int) -> None:
        self.folder, self.kinds, self._step = folder, kinds_of(read_manifest(folder)), step
        self._open: dict[str, StoredTensors] = {}

    def check_optimizer(self, states: Sequence[str]) -> None:
        """Make sure that the optimizer's state is what this one keeps.  Raises: CheckpointError."""
        found = [kind for kind in self.kinds if kind not in (MODEL, MASTER)]
        if set(found) != set(states):
            raise CheckpointError(
                f"{self.folder} was written with another optimizer: it holds {_listed(found)}, this one keeps "
                f"{_listed(states)}. Go on with the optimizer that wrote it"
            )

    def of(self, kind: str) -> StoredTensors:
        """The tensors of one kind.  Raises: CheckpointError, also where the checkpoint has no such kind."""
        if kind not in self.kinds:
            raise CheckpointError(f"{self.folder} has no {kind}; it holds {_listed(self.kinds)}")
        if kind not in self._open:
            self._open[kind] = StoredTensors(self.folder, kind, self._step)
        return self._open[kind]

    def source(self, kind: str, slot: Slot) -> StoredTensors:
        """What a parameter's kind is read from: master weights from the weights where no others were stored.

        None are where the run that wrote it was in fp32, or had the parameter frozen.
        """
        names = slot.info.spec.logical_shapes().keys()
        if kind == MASTER and (MASTER not in self.kinds or not names <= self.of(MASTER).files.keys()):
            return self.of(MODEL)
        return self.of(kind)


def _damage(folder: Folder, at: ParallelState, by_hash: bool) -> list[str]:
    """What is damaged of this rank's share of the files, of about as many bytes as any other's.

    Raises: CheckpointError, they cannot be looked at: an intact checkpoint must not be set aside for a storage that does
        not answer.
    """
    try:
        files = read_manifest(folder)
    except DamagedError as error:
        return [str(error)]
    load, mine = [0] * at.world.size, []
    for name, record in sorted(files.items(), key=lambda file: -file[1].bytes):
        rank = load.index(min(load))
        load[rank] += record.bytes
        if rank == at.world.index:
            mine.append(name)
    return find_damage(folder, mine, by_hash=by_hash)


def _compare(stored: _Stored, wanted: dict[str, Shapes], all_wanted: dict[str, Shapes]) -> None:
    """Check that the stored tensors are those of this model."""
    for kind, shapes in wanted.items():
        problems = list(_differences(stored.of(kind), shapes, all_wanted[kind]))
        if problems:
            raise CheckpointError(f"{stored.folder}/{index_name(kind)} is of another model: " + "; ".join(problems[:5]))


def _logical_shapes(state: ShardedState, kind: str) -> Shapes:
    shapes: Shapes = {}
    for bucket in state.buckets:
        for slot in bucket.layout.slots if state.holds(kind, bucket) else ():
            shapes |= slot.info.spec.logical_shapes()
    return shapes


def _differences(stored: StoredTensors, wanted: Shapes, all_wanted: Shapes) -> Iterator[str]:
    for name in sorted(set(all_wanted) - set(stored.files)):
        yield f"{name} is missing"
    for name in sorted(set(stored.files) - set(all_wanted)):
        yield f"{name} belongs to no parameter of this model"
    for name in sorted(set(wanted) & set(stored.files)):
        found = stored.shape(name)
        if found != wanted[name]:
            yield f"{name} has shape {list(found)}, this model needs {list(wanted[name])}"


class _Reader:
    """Reads one kind after the other into a rank's shards.

    Frozen parameters have no master weights, but are read with them: the weights are all they have.

    Args:
        stored: the checkpoint.
        state: overwritten.
        at: this rank's place.

    Attributes:
        elements: by kind, read by this rank of the tensors of which the whole world reads one copy.
    """

    def __init__(self, stored: _Stored, state: ShardedState, at: ParallelState) -> None:
        self._stored, self._state, self._at = stored, state, at
        self._alone, self._fills_weights = shares_memory(stored.folder, at), fills_weights(stored.folder, at)
        self.elements: dict[str, int] = {}
        self._error: Exception | None = None
        self._scratch = torch.empty(0)

    def check(self) -> None:
        """Raises: whatever stopped this rank from reading."""
        if self._error is not None:
            raise self._error

    def read(self, kind: str) -> None:
        """Read, share and write every bucket.  A rank that cannot read goes on, so that no other waits for it."""
        self.elements[kind] = 0
        for bucket in self._state.buckets:
            if kind != MASTER and not self._state.holds(kind, bucket):
                continue
            copies = self._at.dp if bucket.policy.zero_stage == 0 else bucket.policy.replica
            end = bucket.layout.slots[-1].stop
            owned = Run(bucket.owned.start, min(bucket.owned.stop, end))
            if copies.size > 1 and not self._alone:
                self._read_together(kind, bucket, owned, copies)
                continue
            counted = intersect(owned, bucket.counted) or Run(owned.start, owned.start)
            self._read_alone(kind, bucket, counted, counts=True)
            for run in _around(counted, owned):
                self._read_alone(kind, bucket, run, counts=False)
            if kind == MASTER and self._fills_weights and bucket.keeps_weights:
                for run in _around(bucket.owned, Run(0, end)):
                    self._read_weights(bucket, run)

    def _read_alone(self, kind: str, bucket: Bucket, part: Run, *, counts: bool) -> None:
        """Elements that this rank keeps: into their place, if that is in memory."""
        for slot in bucket.layout.slots:
            run = intersect(slot.run, part)
            if run is None:
                continue
            place = self._state.memory(kind, bucket, run)
            if place is not None:
                self._read_part(kind, bucket, slot, run, place, counts=counts)
                continue
            values = self._room(run.stop - run.start)
            self._read_part(kind, bucket, slot, run, values, counts=counts)
            self._state.write(kind, bucket, run, values)

    def _read_weights(self, bucket: Bucket, part: Run) -> None:
        """Weights whose masters another rank keeps."""
        for slot in bucket.layout.slots:
            run = intersect(slot.run, part)
            if run is not None:
                self._read_part(MASTER, bucket, slot, run, bucket.weights[run.start : run.stop], counts=False)

    def _read_together(self, kind: str, bucket: Bucket, owned: Run, copies: Axis) -> None:
        each = -(-max(owned.stop - owned.start, 0) // copies.size)
        start = owned.start + each * copies.index
        values = self._room(each * copies.size)
        part = values[each * copies.index : each * (copies.index + 1)]
        for slot in bucket.layout.slots:
            run = intersect(slot.run, Run(start, min(start + each, owned.stop)))
            if run is not None:
                self._read_part(kind, bucket, slot, run, part[run.start - start : run.stop - start], counts=True)
        if each:
            all_gather(values, part, copies).wait()
        for slot in bucket.layout.slots:
            run = intersect(slot.run, owned)
            if run is not None:
                self._state.write(kind, bucket, run, values[run.start - owned.start : run.stop - owned.start])

    def _room(self, elements: int) -> Tensor:
        if self._scratch.numel() < elements:
            self._scratch = torch.empty(elements)
        return self._scratch[:elements]

    def _read_part(self, kind: str, bucket: Bucket, slot: Slot, run: Run, out: Tensor, *, counts: bool) -> None:
        spec, tp = slot.info.spec, self._at.tp
        try:
            source = self._stored.source(kind, slot)
            read = read_range(source, spec, out, run.start - slot.start, tp.index, tp.size)
        except Exception as error:  # an object store has errors of its own
            self._error = self._error or error
            return
        if counts and not bucket.is_second_copy and (spec.split is not None or tp.index == 0):
            self.elements[kind] += read


def _around(part: Run, whole: Run) -> Iterator[Run]:
    """What is left of `whole` before and behind `part`."""
    for run in (Run(whole.start, min(part.start, whole.stop)), Run(max(part.stop, whole.start), whole.stop)):
        if run.start < run.stop:
            yield run


def shares_memory(place: Place, at: ParallelState) -> bool:
    """Whether all ranks read a file from the memory of one machine: quicker than giving one another what they have read."""
    return isinstance(folder_at(place), LocalFolder) and at.neighbours >= at.world.size


def fills_weights(place: Place, at: ParallelState) -> bool:
    """Whether loading reads the whole weights, too, where a rank keeps the masters of a part alone; not over NCCL's head."""
    return shares_memory(place, at) and at.device.type == "cpu"


def _prove_coverage(folder: Folder, kind: str, read: int, all_wanted: Shapes) -> None:
    """All ranks together have read each element of the model once: their number is that of the logical shapes."""
    wanted = sum(numel(shape) for shape in all_wanted.values())
    if read != wanted:
        raise CheckpointError(f"{folder}: {read} elements of {kind} were read, the model has {wanted}")


def read_range(stored: StoredTensors, spec: ParamSpec, out: Tensor, start: int, tp_rank: int, tp_size: int) -> int:
    """Read part of a local tensor from the logical tensors that hold it.

    Args:
        stored: tensors of one kind.
        spec: of the parameter.
        out: 1-D; elements [start, start + len(out)) of the flattened local tensor; padding becomes zero.
        start: first element.
        tp_rank, tp_size: place on the tensor-parallel axis.

    Returns: elements read; all but the padding.
    """
    width = spec.width(tp_size)
    stop = start + out.numel()
    read = 0
    for block in spec.regions(tp_rank, tp_size):
        low, high = max(block.local_rows[0] * width, start), min(block.local_rows[1] * width, stop)
        if low >= high:
            continue
        first, last = low // width, -(-high // width)
        piece = _rows(stored, block, first, last)
        whole = low == first * width and high == last * width
        target = out[low - start : high - start]
        if whole:  # the one copy there is, from the file's pages to where the values belong
            target.view(last - first, width).copy_(piece.reshape(last - first, width) if piece.dim() != 2 else piece)
        else:
            target.copy_(piece.reshape(-1)[low - first * width : high - first * width])
        read += high - low
    if read != out.numel():
        _clear_padding(spec, out, start, tp_rank, tp_size)
    return read


def _clear_padding(spec: ParamSpec, out: Tensor, start: int, tp_rank: int, tp_size: int) -> None:
    width, at = spec.width(tp_size), start
    for block in spec.regions(tp_rank, tp_size):
        low, high = block.local_rows[0] * width, block.local_rows[1] * width
        out[at - start : max(low, at) - start] = 0
        at = max(at, high)
    out[at - start :] = 0


def _rows(stored: StoredTensors, block: Region, first: int, last: int) -> Tensor:
    """Local rows [first, last) of a block, as a view of the file where that is mapped."""
    shift = block.rows[0] - block.local_rows[0]
    rows = (first + shift, last + shift)
    if block.whole is not None:
        return stored.rows(block.name, *rows) if block.whole else stored.whole(block.name)
    if block.columns is None:
        return stored.rows(block.name, *rows)
    if block.transposed:
        return stored.rows(block.name, *block.columns)[:, slice(*rows)].t()
    return stored.rows(block.name, *rows)[:, slice(*block.columns)]
