"""Loading a checkpoint into any shape.  Each rank reads the elements it holds; together they prove that none is missing.

manifest     every file has the size and hash that were written      each rank checks its share of the files
index        the stored tensors are those of this model              nothing has been overwritten until here
read         masters and moments, from the files into the shards     `reader`
coverage     all ranks together have read each element of the model once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from megazero.checkpoint.folder import Folder, LocalFolder, Location, folder_at
from megazero.checkpoint.index import (
    CheckpointError,
    DamagedError,
    TrainerState,
    find_damage,
    index_name,
    read_manifest,
    read_trainer_state,
)
from megazero.checkpoint.reader import Reader, StoredKinds
from megazero.comm.collectives import agree, gather_objects
from megazero.layers.spec import numel
from megazero.parallel_state import ParallelState
from megazero.zero.state import MASTER, MODEL, ShardedState

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def load_checkpoint(
    location: Location,
    state: ShardedState,
    at: ParallelState,
    *,
    check: Callable[[TrainerState], None] = lambda _: None,
    with_optimizer: bool = True,
    by_hash: bool = True,
) -> TrainerState:
    """Fill this rank's masters and moments from a checkpoint of any shape.  Called on every rank.

    The caller gathers the weights from the masters afterwards, unless `fills_weights` says that they were read, too.

    Args:
        location: a complete step directory.
        state: overwritten.
        check: raises CheckpointError if the run that wrote it does not fit this one.
        with_optimizer: read the optimizer's state too; otherwise it starts anew.
        by_hash: check the hash of every file, not only its size.

    Raises:
        DamagedError: on every rank, before anything is overwritten: a file is missing, or has another size or hash.
        CheckpointError: on every rank: the tensors are not those of this model, before anything is overwritten; or the
            storage fails while they are read.
    """
    folder = folder_at(location)
    _check_files(folder, at, by_hash)
    trainer = agree(lambda: read_trainer_state(folder), at.world, CheckpointError)
    has_moments = with_optimizer and trainer.optimizer_steps > 0
    moments = state.optimizer.known_states if has_moments else ()

    def open_and_check() -> StoredKinds:
        check(trainer)
        stored = StoredKinds(folder, trainer.step)
        if has_moments:
            stored.check_optimizer(moments)
        return stored

    stored = agree(open_and_check, at.world, CheckpointError)
    shapes = {kind: _logical_shapes(state, kind) for kind in (MODEL, *moments)}
    stages = gather_objects(shapes, at.pp)
    all_shapes = {kind: {name: shape for one in stages for name, shape in one[kind].items()} for kind in shapes}
    agree(lambda: _compare(stored, shapes, all_shapes), at.world, CheckpointError)

    shares_memory, fills = _shares_memory(folder, at), fills_weights(folder, at)
    reader = Reader(stored, state, at, shares_memory=shares_memory, fills_weights=fills)
    for kind in (MASTER, *moments):
        reader.read(kind)

    def raise_error() -> None:
        if reader.error is not None:
            raise reader.error

    agree(raise_error, at.world, CheckpointError)
    elements = gather_objects(reader.elements, at.world)
    for kind in (MASTER, *moments):
        read = sum(one[kind] for one in elements)
        needed = sum(numel(shape) for shape in all_shapes[MODEL if kind == MASTER else kind].values())
        if read != needed:
            raise CheckpointError(f"{folder}: {read} elements of {kind} were read, the model has {needed}")
    if has_moments:
        state.optimizer.resume(trainer.optimizer_steps, trainer.optimizer_scalars)
    else:
        state.optimizer.reset()
    return trainer


def _shares_memory(folder: Folder, at: ParallelState) -> bool:
    """Whether all ranks run on one machine and read a local file from its pages: faster than exchanging what they read."""
    return isinstance(folder, LocalFolder) and at.neighbours >= at.world.size


def fills_weights(location: Location, at: ParallelState) -> bool:
    """Whether loading also reads weights whose masters another rank holds.  Over NCCL a gather is faster."""
    return _shares_memory(folder_at(location), at) and at.device.type == "cpu"


def _check_files(folder: Folder, at: ParallelState, by_hash: bool) -> None:
    """Raises: DamagedError on every rank with what any rank found in its share of the files."""

    def look() -> list[str]:
        try:
            files = read_manifest(folder)
        except DamagedError as error:
            return [str(error)]
        load, mine = [0] * at.world.size, []  # all ranks have about as many bytes to check
        for name, record in sorted(files.items(), key=lambda file: -file[1].bytes):
            rank = load.index(min(load))
            load[rank] += record.bytes
            if rank == at.world.index:
                mine.append(name)
        return find_damage(folder, mine, by_hash=by_hash)

    found = gather_objects(agree(look, at.world, CheckpointError), at.world)
    damage = list(dict.fromkeys(line for lines in found for line in lines))
    if damage:
        advice = f"{folder} is damaged and was not loaded; resume from another step directory"
        raise DamagedError("\n".join([*damage, advice]))


def _logical_shapes(state: ShardedState, kind: str) -> Shapes:
    shapes: Shapes = {}
    for bucket in state.buckets:
        for slot in bucket.layout.slots if state.holds(kind, bucket) else ():
            shapes |= slot.info.spec.logical_shapes()
    return shapes


def _compare(stored: StoredKinds, shapes: dict[str, Shapes], all_shapes: dict[str, Shapes]) -> None:
    """Check that the stored tensors are those of this model: all names, and the shapes of this rank's stage."""
    for kind, mine in shapes.items():
        tensors, wanted = stored.of(kind), all_shapes[kind]
        problems = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.files)]
        problems += [f"{name} belongs to no parameter of this model" for name in sorted(tensors.files.keys() - wanted)]
        for name in sorted(mine.keys() & tensors.files.keys()):
            found = tensors[name].shape
            if found != mine[name]:
                problems.append(f"{name} has shape {list(found)}, this model needs {list(mine[name])}")
        if problems:
            raise CheckpointError(f"{stored.folder}/{index_name(kind)} is of another model: " + "; ".join(problems[:5]))
