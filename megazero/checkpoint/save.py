"""Writing a checkpoint: every writer streams its tensors, then rank 0 commits with the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from megazero.checkpoint.gather import Assignment, assemble, gather_locals, stage_assignments
from megazero.checkpoint.index import (
    LATEST,
    TRAINER_STATE,
    CheckpointError,
    FileRecord,
    SafetensorsWriter,
    TrainerState,
    index_name,
    is_complete,
    to_json,
    write_atomically,
    write_manifest,
)
from megazero.comm.collectives import agree, gather_objects
from megazero.parallel_state import ParallelState
from megazero.zero.state import ShardedState

T = TypeVar("T")
_OURS = (".safetensors", ".json", ".partial")


def save_checkpoint(
    directory: Path,
    state: ShardedState,
    at: ParallelState,
    trainer: TrainerState,
    files: Mapping[str, bytes],
    *,
    moves_latest: bool = True,
) -> None:
    """Write the whole state of a run into a new step directory.  Called on every rank.

    Args:
        directory: the step directory, on a file system that all ranks share.
        state: this rank's shards.
        at: this rank's place.
        trainer: where the run stands.
        files: whatever else belongs to it, by name; rank 0's are written.
        moves_latest: let `latest` name it.

    Raises:
        CheckpointError: on every rank; older checkpoints are untouched and the directory stays incomplete.
    """
    assignments = stage_assignments(state, at)
    mine = [assignment for assignment in assignments if assignment.writer == at.rank]
    agree(lambda: _prepare(directory, files) if at.rank == 0 else None, at.world, CheckpointError)
    writers = [rank for rank, writes in enumerate(gather_objects(bool(mine), at.world)) if writes]
    suffix = f"{writers.index(at.rank) + 1:05d}-of-{len(writers):05d}" if mine else ""
    written = _Written()
    for kind in state.kinds:
        kept = [one for one in assignments if state.holds(kind, state.buckets[one.bucket])]
        own = [one for one in kept if one.writer == at.rank]
        _write_kind(directory / f"{kind}-{suffix}.safetensors", kind, state, kept, own, at, written)
    _commit(directory, state.kinds, written, at, trainer, files, moves_latest)


def _prepare(directory: Path, files: Mapping[str, bytes]) -> None:
    """Make the directory, empty of what a run that was stopped while saving may have left."""
    if is_complete(directory):
        raise CheckpointError(f"{directory} already holds a complete checkpoint")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        left = list(directory.iterdir())
        foreign = [p.name for p in left if p.name not in files and (p.suffix not in _OURS or not p.is_file())]
        if foreign:
            raise CheckpointError(
                f"{directory} holds {', '.join(sorted(foreign)[:3])}, which no checkpoint of ours has; nothing was deleted. "
                "Choose another name"
            )
        for path in left:
            path.unlink()
    except OSError as error:
        raise _not_written(directory, str(error)) from error


def _not_written(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory.name} could not be written ({reason}); older checkpoints are untouched"
    )


class _Written:
    """What this rank has written, or the first error that stopped it from writing."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.records: dict[str, FileRecord] = {}
        self.tensors: dict[str, dict[str, tuple[str, int]]] = {}  # kind -> name -> (file, bytes)

    def attempt(self, path: Path, action: Callable[[], T]) -> T | None:
        """Run an action unless something has failed; keep the error for the commit, where all ranks learn of it."""
        if self.error is None:
            try:
                return action()
            except OSError as error:
                self.error = f"{path}: {error.strerror or error}"
        return None


def _write_kind(
    path: Path,
    kind: str,
    state: ShardedState,
    assignments: Sequence[Assignment],
    mine: Sequence[Assignment],
    at: ParallelState,
    written: _Written,
) -> None:
    """Take part in gathering one kind and write this rank's tensors.

    A writer whose disk fails goes on receiving and drops what it gets, so that no other rank waits for it.
    """
    shapes = {
        name: (state.dtype(kind), shape)
        for assignment in mine
        for name, shape in assignment.slot.info.spec.logical_shapes().items()
    }
    writer = written.attempt(path, lambda: SafetensorsWriter(path, shapes)) if mine else None
    for assignment, local in gather_locals(state, kind, assignments, at):
        for name, tensor in assemble(assignment.slot.info.spec, local).items():
            if writer is not None:
                written.attempt(path, partial(writer.write, name, tensor))
    if writer is None:
        return
    record = written.attempt(path, writer.finish)
    if record is None:
        writer.abandon()
        return
    written.records[path.name] = record
    written.tensors[kind] = {
        name: (path.name, dtype.itemsize * torch.Size(shape).numel()) for name, (dtype, shape) in shapes.items()
    }


def _commit(
    directory: Path,
    kinds: Sequence[str],
    written: _Written,
    at: ParallelState,
    trainer: TrainerState,
    files: Mapping[str, bytes],
    moves_latest: bool,
) -> None:
    everyone = gather_objects(written, at.world)
    failure = next((f"rank {rank}: {one.error}" for rank, one in enumerate(everyone) if one.error), None)
    if failure is not None:
        raise _not_written(directory, failure)

    def commit() -> None:
        try:
            _write_index(directory, kinds, everyone, trainer, files)
        except OSError as error:
            raise _not_written(directory, str(error)) from error
        if moves_latest:  # after the manifest, which is what counts
            write_atomically(directory.parent / LATEST, (directory.name + "\n").encode())

    agree(commit if at.rank == 0 else lambda: None, at.world, CheckpointError)


def _write_index(
    directory: Path,
    kinds: Sequence[str],
    everyone: Sequence[_Written],
    trainer: TrainerState,
    extra: Mapping[str, bytes],
) -> None:
    files = {name: record for one in everyone for name, record in one.records.items()}
    for kind in kinds:
        tensors = {name: place for one in everyone for name, place in one.tensors.get(kind, {}).items()}
        index = {
            "metadata": {"total_size": sum(size for _, size in tensors.values())},
            "weight_map": {name: file for name, (file, _) in sorted(tensors.items())},
        }
        files[index_name(kind)] = write_atomically(directory / index_name(kind), to_json(index))
    for name, data in extra.items():
        files[name] = write_atomically(directory / name, data)
    files[TRAINER_STATE] = write_atomically(directory / TRAINER_STATE, to_json(asdict(trainer)))
    write_manifest(directory, files)
