"""Writing a checkpoint: every writer streams its tensors into files, then rank 0 writes indexes and the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

from megazero.checkpoint.folder import FileRecord, Folder, Location, folder_at
from megazero.checkpoint.gather import Assignment, HostBuffers, assemble, assign_writers, gather_locals
from megazero.checkpoint.index import (
    LATEST,
    MANIFEST,
    TRAINER_STATE,
    UNFINISHED,
    CheckpointError,
    TrainerState,
    index_name,
    is_complete,
    own_files,
    remove_own_files,
    to_index,
    to_json,
    write_manifest,
    write_unfinished,
)
from megazero.checkpoint.tensor_file import SafetensorsWriter
from megazero.comm.collectives import agree, gather_objects
from megazero.layers.spec import numel
from megazero.parallel_state import Axis, ParallelState
from megazero.parallel_state.groups import SavingAxes
from megazero.zero.state import ShardedState

T = TypeVar("T")
_FAILED = "checkpoint {} could not be written ({}); older checkpoints are untouched"


@dataclass(frozen=True)
class SavePlan:
    """Who writes what, the same for every checkpoint of a run."""

    assignments: tuple[Assignment, ...]  # in which this rank takes part
    writers: tuple[int, ...]  # every rank that writes a file of each kind

    def file(self, kind: str, rank: int) -> str:
        """The file of a writer."""
        return f"{kind}-{self.writers.index(rank) + 1:05d}-of-{len(self.writers):05d}.safetensors"


def plan_saving(source: ShardedState, at: ParallelState, world: Axis) -> SavePlan:
    """Called on every rank, once per run."""
    assignments = assign_writers(source.buckets, at)
    writes = gather_objects(any(assignment.writer == at.rank for assignment in assignments), world)
    return SavePlan(assignments, tuple(rank for rank, does in enumerate(writes) if does))


def save_checkpoint(
    location: Location,
    source: ShardedState,
    at: ParallelState,
    trainer: TrainerState,
    files: Mapping[str, bytes],
    *,
    moves_latest: bool = True,
    axes: SavingAxes | None = None,
    plan: SavePlan | None = None,
) -> int:
    """Write the whole state of a run into a new step directory, and wait until it is durable.  Called on every rank.

    Args:
        location: the step directory, which all ranks share.
        source: this rank's part of the state.
        files: further small files by name; rank 0's are written.
        moves_latest: let `latest` name it.
        axes: communicators to use; None for those of the training.
        plan: see `plan_saving`; None makes it.

    Returns: bytes of all tensors.

    Raises:
        CheckpointError: on every rank; older checkpoints are untouched, and the files of this one are removed.  Files in the
            directory that no checkpoint of ours has written are an error, and stay.
        OwnerError: on every rank; this run does not own the directory, or not any more.
    """
    folder, axes = folder_at(location), axes or SavingAxes(at.model, at.world)

    def on_first(action: Callable[[], None]) -> None:
        agree(action if at.rank == 0 else lambda: None, axes.world, CheckpointError)

    plan = plan or plan_saving(source, at, axes.world)
    tensor_files = [plan.file(kind, rank) for kind in source.kinds for rank in plan.writers]
    on_first(lambda: _prepare(folder, [*tensor_files, *map(index_name, source.kinds), TRAINER_STATE, *files]))
    own = _write_own(folder, source, plan, trainer.step, at, axes.model)
    of_ranks = gather_objects(own, axes.world)
    on_first(lambda: _commit(folder, of_ranks, source.kinds, trainer, files, moves_latest))
    return sum(written.bytes for written in of_ranks)


def _write_own(
    folder: Folder, source: ShardedState, plan: SavePlan, step: int, at: ParallelState, stage: Axis
) -> _Written:
    """Gather the tensors of this rank's pipeline stage, and write those that this rank is to write.

    A writer whose disk fails goes on receiving and drops what it receives, so that no other rank waits for it.
    """
    written, buffers, open_files = _Written(), HostBuffers(), dict[str, SafetensorsWriter]()
    for kind in source.kinds:
        held = [entry for entry in plan.assignments if source.holds(kind, source.buckets[entry.bucket])]
        specs, dtype = [entry.slot.info.spec for entry in held if entry.writer == at.rank], source.dtype(kind)
        shapes = {name: shape for spec in specs for name, shape in spec.logical_shapes().items()}
        file, metadata = plan.file(kind, at.rank) if specs else "", {"kind": kind, "step": str(step)}
        written.tensors[kind] = {name: (file, dtype.itemsize * numel(shape)) for name, shape in shapes.items()}
        layout = {name: (dtype, shape) for name, shape in shapes.items()}
        begin = partial(SafetensorsWriter, folder, file, layout, metadata)
        writer = written.attempt(f"{folder}/{file}", begin) if specs else None
        if writer is not None:
            open_files[file] = writer
        for assignment, local in gather_locals(source, kind, held, at, stage, buffers):
            for name, tensor in assemble(assignment.slot.info.spec, local).items():
                if writer is not None:
                    written.attempt(f"{folder}/{file}", partial(writer.write, name, tensor))
    for file, writer in open_files.items():  # only now, so that the disk works while the other kinds are gathered
        record = written.attempt(file, writer.finish)
        if record is None:
            writer.abandon()
        else:
            written.records[file] = record
    return written


def _prepare(folder: Folder, names: Iterable[str]) -> None:
    """Make the directory for files of these names, and remove those that a run left there when it was stopped."""
    folder.check_lock()
    try:
        if folder.is_link:
            raise CheckpointError(
                f"{folder} is a link: what it holds belongs elsewhere. Remove it, or choose another name"
            )
        if is_complete(folder):
            raise CheckpointError(f"{folder} already holds a complete checkpoint; remove it, or write elsewhere")
        ours = set(own_files(folder))
        foreign = [name for name in folder.files() if name not in ours] + folder.folders()
        if foreign:
            raise CheckpointError(
                f"{folder} holds {', '.join(sorted(foreign)[:3])}, which no checkpoint of ours has left there; nothing was "
                "deleted. Choose another name, or remove it"
            )
        remove_own_files(folder)
        folder.make()
        write_unfinished(folder, names)
    except OSError as error:
        raise CheckpointError(_FAILED.format(folder.name, error)) from error


@dataclass
class _Written:
    """The files that a rank has written, or the first error that stopped it."""

    error: str | None = None
    records: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)  # kind -> name -> (file, bytes)

    @property
    def bytes(self) -> int:
        """Of all tensors, also of those that could not be written."""
        return sum(size for tensors in self.tensors.values() for _, size in tensors.values())

    def attempt(self, path: str, action: Callable[[], T]) -> T | None:
        """Run an action unless something has failed; an error is held until the commit, where all ranks see it."""
        if self.error is None:
            try:
                return action()
            except Exception as error:  # whatever it is, all ranks must hear of it
                self.error = f"{path}: {getattr(error, 'strerror', None) or error}"
        return None


def _commit(
    folder: Folder,
    of_ranks: Sequence[_Written],
    kinds: Sequence[str],
    trainer: TrainerState,
    files: Mapping[str, bytes],
    moves_latest: bool,
) -> None:
    """Complete the checkpoint if every rank has written its files."""
    folder.check_lock()
    try:
        for rank, written in enumerate(of_ranks):
            if written.error is not None:
                raise CheckpointError(f"rank {rank}: {written.error}")
        small = dict(files)
        for kind in kinds:
            tensors = {name: stored for own in of_ranks for name, stored in own.tensors.get(kind, {}).items()}
            files_of_tensors = {name: file for name, (file, _) in sorted(tensors.items())}
            small[index_name(kind)] = to_index(files_of_tensors, sum(size for _, size in tensors.values()))
        small[TRAINER_STATE] = to_json(asdict(trainer))
        records = {name: record for own in of_ranks for name, record in own.records.items()}
        for name, data in small.items():
            records[name] = folder.write(name, data)
        write_manifest(folder, records)
    except Exception as failure:
        needed, free = sum(own.bytes for own in of_ranks), folder.parent.free_bytes()
        beside = "" if free is None else f", {free:,} are free in {folder.parent} beside what was written of it"
        with suppress(Exception):
            if not folder.has(MANIFEST):
                remove_own_files(folder)  # frees the space for the next one
        reason = f"{failure}; it takes {needed:,} bytes{beside}"
        raise CheckpointError(_FAILED.format(folder.name, reason)) from failure
    with suppress(Exception):  # the manifest decides
        folder.remove(UNFINISHED)
    if moves_latest:  # after the manifest, which decides
        try:
            folder.parent.write(LATEST, (folder.name + "\n").encode())
        except Exception as failure:
            raise CheckpointError(
                f"checkpoint {folder.name} is complete, but {folder.parent}/{LATEST} could not be written ({failure})"
            ) from failure
