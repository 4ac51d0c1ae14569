"""Loading a checkpoint into any shape.  Each rank reads the elements it holds; together they prove that none is missing.

manifest     every file has the size and hash that were written      each rank checks its share of the files
index        the stored tensors are those of this model              nothing has been overwritten until here
plan, read   masters and moments, from the files into the shards     `reader`
coverage     all ranks together have read each element of the model once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from megazero.checkpoint.folder import Folder, LocalFolder, Location, folder_at
from megazero.checkpoint.index import (
    CheckpointError,
    DamagedError,
    TrainerState,
    index_name,
    read_manifest,
    read_trainer_state,
)
from megazero.checkpoint.reader import Reader, StoredKinds, plan_reads
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.checkpoint.verify import find_damage
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
        state: this rank's shards; overwritten.
        at: this rank.
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

    shares, fills = shares_memory(folder, at), fills_weights(folder, at)
    reader = Reader(stored, state, at)
    for kind in (MASTER, *moments):
        reader.read(kind, plan_reads(kind, state, at, shares_memory=shares, fills_weights=fills))
    agree(reader.check, at.world, CheckpointError)
    elements = gather_objects(reader.elements, at.world)
    for kind in (MASTER, *moments):
        _check_coverage(folder, kind, sum(one[kind] for one in elements), all_shapes[MODEL if kind == MASTER else kind])
    if has_moments:
        state.optimizer.resume(trainer.optimizer_steps, trainer.optimizer_scalars)
    else:
        state.optimizer.reset()
    return trainer


def shares_memory(location: Location, at: ParallelState) -> bool:
    """Whether all ranks run on one machine and read a local file from its pages: faster than exchanging what they read."""
    return isinstance(folder_at(location), LocalFolder) and at.neighbours >= at.world.size


def fills_weights(location: Location, at: ParallelState) -> bool:
    """Whether loading also reads weights whose masters another rank holds.  Over NCCL a gather is faster."""
    return shares_memory(location, at) and at.device.type == "cpu"


def _check_files(folder: Folder, at: ParallelState, by_hash: bool) -> None:
    """Raises: DamagedError on every rank with what any rank found in its share of the files."""
    lines = agree(lambda: _damage(folder, at, by_hash), at.world, CheckpointError)
    damage = list(dict.fromkeys(line for found in gather_objects(lines, at.world) for line in found))
    if damage:
        raise DamagedError(
            "\n".join(damage) + f"\n{folder} is damaged and was not loaded; resume from another step directory"
        )


def _damage(folder: Folder, at: ParallelState, by_hash: bool) -> list[str]:
    """The damage in this rank's share of the files, which has about as many bytes as any other's.

    Raises: CheckpointError if the storage does not answer: that is no damage.
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


def _logical_shapes(state: ShardedState, kind: str) -> Shapes:
    shapes: Shapes = {}
    for bucket in state.buckets:
        for slot in bucket.layout.slots if state.holds(kind, bucket) else ():
            shapes |= slot.info.spec.logical_shapes()
    return shapes


def _compare(stored: StoredKinds, shapes: dict[str, Shapes], all_shapes: dict[str, Shapes]) -> None:
    """Check that the stored tensors are those of this model: all names, and the shapes of this rank's stage."""
    for kind, mine in shapes.items():
        problems = list(_differences(stored.of(kind), mine, all_shapes[kind]))
        if problems:
            raise CheckpointError(f"{stored.folder}/{index_name(kind)} is of another model: " + "; ".join(problems[:5]))


def _differences(stored: StoredTensors, shapes: Shapes, all_shapes: Shapes) -> Iterator[str]:
    for name in sorted(set(all_shapes) - set(stored.files)):
        yield f"{name} is missing"
    for name in sorted(set(stored.files) - set(all_shapes)):
        yield f"{name} belongs to no parameter of this model"
    for name in sorted(set(shapes) & set(stored.files)):
        found = stored.shape(name)
        if found != shapes[name]:
            yield f"{name} has shape {list(found)}, this model needs {list(shapes[name])}"


def _check_coverage(folder: Folder, kind: str, read: int, all_shapes: Shapes) -> None:
    needed = sum(numel(shape) for shape in all_shapes.values())
    if read != needed:
        raise CheckpointError(f"{folder}: {read} elements of {kind} were read, the model has {needed}")
