"""Writing a checkpoint: every writer streams its tensors into files, then rank 0 writes indexes and the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from megazero.checkpoint.folder import Folder, Location, folder_at
from megazero.checkpoint.gather import Assignment, HostBuffers, Source, assemble, assign_writers, gather_locals
from megazero.checkpoint.index import (
    LATEST,
    MANIFEST,
    TRAINER_STATE,
    CheckpointError,
    FileRecord,
    TrainerState,
    index_name,
    is_complete,
    to_index,
    to_json,
    write_manifest,
)
from megazero.checkpoint.tensor_file import SafetensorsWriter
from megazero.comm.collectives import agree, gather_objects
from megazero.layers.spec import numel
from megazero.parallel_state import ParallelState, SavingAxes

T = TypeVar("T")
_OURS = (".safetensors", ".json", ".partial")


@dataclass(frozen=True, eq=False)
class _Task:
    """The arguments of `save_checkpoint`."""

    folder: Folder
    source: Source
    at: ParallelState
    axes: SavingAxes
    trainer: TrainerState
    files: Mapping[str, bytes]
    moves_latest: bool

    def on_first(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; if it fails, all ranks raise a CheckpointError."""
        agree(action if self.at.rank == 0 else lambda: None, self.axes.world, CheckpointError)


def save_checkpoint(
    location: Location,
    source: Source,
    at: ParallelState,
    trainer: TrainerState,
    files: Mapping[str, bytes],
    *,
    moves_latest: bool = True,
    axes: SavingAxes | None = None,
) -> int:
    """Write the whole state of a run into a new step directory, and wait until it is durable.  Called on every rank.

    Args:
        location: the step directory, which all ranks share.
        source: this rank's part of the state.
        at: this rank.
        trainer: the position of the run.
        files: further small files by name; rank 0's are written.
        moves_latest: let `latest` name it.
        axes: communicators to use; None for those of the training.

    Returns: bytes of the checkpoint, on rank 0.

    Raises:
        CheckpointError: on every rank; older checkpoints are untouched, and the files of this one are removed.
    """
    task = _Task(folder_at(location), source, at, axes or SavingAxes(at.model, at.world), trainer, files, moves_latest)
    assignments = assign_writers(source.buckets, at)
    mine = [assignment for assignment in assignments if assignment.writer == at.rank]
    task.on_first(lambda: _prepare(task.folder, files))
    writers = [rank for rank, writes in enumerate(gather_objects(bool(mine), task.axes.world)) if writes]
    suffix = f"{writers.index(at.rank) + 1:05d}-of-{len(writers):05d}" if mine else ""
    written, buffers = _WriterResult(), HostBuffers()
    open_files = [
        (kind, f"{kind}-{suffix}.safetensors", _write_kind(task, kind, suffix, assignments, buffers, written))
        for kind in source.kinds
    ]
    for kind, file, writer in open_files:  # only now, so that the disk works while the other kinds are gathered
        if writer is not None:
            written.finish(kind, file, writer)
    return _commit(task, written)


def _prepare(folder: Folder, files: Mapping[str, bytes]) -> None:
    """Make the directory, and remove files that a run may have left there when it was stopped while saving."""
    if is_complete(folder):
        raise CheckpointError(f"{folder} already holds a complete checkpoint")
    try:
        names = folder.files()
        foreign = [name for name in names if name not in files and not name.endswith(_OURS)] + folder.folders()
        if foreign:
            raise CheckpointError(
                f"{folder} holds {', '.join(sorted(foreign)[:3])}, which no checkpoint of ours has; nothing was deleted. "
                "Choose another name"
            )
        for name in names:
            folder.remove(name)
        folder.make()
    except OSError as error:
        raise _not_written(folder, str(error)) from error


def _not_written(folder: Folder, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder.name} could not be written ({reason}); older checkpoints are untouched")


class _WriterResult:
    """The files that this rank has written, or the first error that stopped it."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.needed_bytes = 0
        self.records: dict[str, FileRecord] = {}
        self.tensors: dict[str, dict[str, tuple[str, int]]] = {}  # kind -> name -> (file, bytes)

    def attempt(self, path: str, action: Callable[[], T]) -> T | None:
        """Run an action unless something has failed; an error is held until the commit, where all ranks see it."""
        if self.error is None:
            try:
                return action()
            except Exception as error:  # an object store has errors of its own
                self.error = f"{path}: {getattr(error, 'strerror', None) or error}"
        return None

    def finish(self, kind: str, file: str, writer: SafetensorsWriter) -> None:
        """Finish a file, or abandon it if something has failed."""
        record = self.attempt(file, writer.finish)
        if record is None:
            writer.abandon()
            del self.tensors[kind]
        else:
            self.records[file] = record


def _write_kind(
    task: _Task, kind: str, suffix: str, everything: Sequence[Assignment], buffers: HostBuffers, written: _WriterResult
) -> SafetensorsWriter | None:
    """Take part in gathering one kind and write this rank's tensors; returns the file, which is not finished yet.

    A writer whose disk fails goes on receiving and drops what it receives, so that no other rank waits for it.
    """
    source, dtype, file = task.source, task.source.dtype(kind), f"{kind}-{suffix}.safetensors"
    assignments = [one for one in everything if source.holds(kind, source.buckets[one.bucket])]
    mine = [one for one in assignments if one.writer == task.at.rank]
    shapes = {name: shape for one in mine for name, shape in one.slot.info.spec.logical_shapes().items()}
    sizes = {name: dtype.itemsize * numel(shape) for name, shape in shapes.items()}
    written.needed_bytes += sum(sizes.values())
    path, described = f"{task.folder}/{file}", {name: (dtype, shape) for name, shape in shapes.items()}
    metadata = {"kind": kind, "step": str(task.trainer.step)}
    writer = written.attempt(path, lambda: SafetensorsWriter(task.folder, file, described, metadata)) if mine else None
    for assignment, local in gather_locals(source, kind, assignments, task.at, task.axes.model, buffers):
        for name, tensor in assemble(assignment.slot.info.spec, local).items():
            if writer is not None:
                written.attempt(path, partial(writer.write, name, tensor))
    if writer is not None:
        written.tensors[kind] = {name: (file, size) for name, size in sizes.items()}
    return writer


def _commit(task: _Task, written: _WriterResult) -> int:
    """Complete the checkpoint if every rank has written its files; returns the bytes of all tensors."""
    everyone = gather_objects(written, task.axes.world)
    needed = sum(one.needed_bytes for one in everyone)
    folder = task.folder

    def commit() -> None:
        error = next((f"rank {rank}: {one.error}" for rank, one in enumerate(everyone) if one.error), None)
        try:
            if error is None:
                _write_index(task, everyone)
        except Exception as failure:
            error = str(failure)
        if error is not None:
            reason = f"{error}; it takes {needed:,} bytes{_free(folder)}"
            with suppress(Exception):
                if not folder.has(MANIFEST):
                    folder.remove_all()  # frees the space for the next one
            raise _not_written(folder, reason)
        if task.moves_latest:  # after the manifest, which decides
            _move_latest(folder)

    task.on_first(commit)
    return needed


def _move_latest(folder: Folder) -> None:
    try:
        folder.parent.write(LATEST, (folder.name + "\n").encode())
    except Exception as failure:
        raise CheckpointError(
            f"checkpoint {folder.name} is complete, but {folder.parent}/{LATEST} could not be written ({failure})"
        ) from failure


def _free(folder: Folder) -> str:
    free = folder.parent.free_bytes()
    return "" if free is None else f", {free:,} are free in {folder.parent} beside what was written of it"


def _write_index(task: _Task, everyone: Sequence[_WriterResult]) -> None:
    files = {name: record for one in everyone for name, record in one.records.items()}
    small = dict(task.files)
    for kind in task.source.kinds:
        tensors = {name: stored for one in everyone for name, stored in one.tensors.get(kind, {}).items()}
        files_of_tensors = {name: file for name, (file, _) in sorted(tensors.items())}
        small[index_name(kind)] = to_index(files_of_tensors, sum(size for _, size in tensors.values()))
    small[TRAINER_STATE] = to_json(asdict(task.trainer))
    for name, data in small.items():
        output = task.folder.write(name, data)
        files[name] = FileRecord(output.bytes, output.xxh3)
    write_manifest(task.folder, files)
