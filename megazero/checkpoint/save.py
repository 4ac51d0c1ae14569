"""Writing a checkpoint: every writer streams its tensors, then rank 0 commits with the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megazero.checkpoint.gather import Assignment, assemble, gather_locals, stage_assignments
from megazero.checkpoint.index import (
    HF_CONFIG,
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
from megazero.comm.collectives import gather_objects
from megazero.parallel_state import ParallelState
from megazero.zero.state import ShardedState

T = TypeVar("T")


def save_checkpoint(
    directory: Path, state: ShardedState, at: ParallelState, trainer: TrainerState, hugging_face: Mapping[str, Any]
) -> None:
    """Write the whole state of a run into a new step directory.  Called on every rank.

    Args:
        directory: the step directory, on a file system that all ranks share.
        state: this rank's shards.
        at: this rank's place.
        trainer: where the run stands.
        hugging_face: content of config.json.

    Raises:
        CheckpointError: on every rank; older checkpoints are untouched and the directory stays incomplete.
    """
    assignments = stage_assignments(state, at)
    mine = [assignment for assignment in assignments if assignment.writer == at.rank]
    writers = [rank for rank, writes in enumerate(gather_objects(bool(mine), at.world)) if writes]
    suffix = f"{writers.index(at.rank) + 1:05d}-of-{len(writers):05d}" if mine else ""
    written = _Written()
    if is_complete(directory):
        written.error = f"{directory} already holds a complete checkpoint"
    else:
        written.attempt(lambda: directory.mkdir(parents=True, exist_ok=True))
    for kind in state.kinds:
        _write_kind(directory / f"{kind}-{suffix}.safetensors", kind, state, assignments, mine, at, written)
    _commit(directory, state.kinds, written, at, trainer, hugging_face)


class _Written:
    """What this rank has written, or the first error that stopped it from writing."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.records: dict[str, FileRecord] = {}
        self.tensors: dict[str, dict[str, tuple[str, int]]] = {}  # kind -> name -> (file, bytes)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Run an action unless something has failed; keep the error for the commit, where all ranks learn of it."""
        if self.error is None:
            try:
                return action()
            except OSError as error:
                self.error = f"{error.filename or 'a checkpoint file'}: {error.strerror or error}"
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
    with ExitStack() as stack:
        writer: SafetensorsWriter | None = None
        if mine:
            writer = written.attempt(lambda: stack.enter_context(SafetensorsWriter(path, shapes)))
        for assignment, local in gather_locals(state, kind, assignments, at):
            for name, tensor in assemble(assignment.slot.info.spec, local).items():
                if writer is not None:
                    written.attempt(partial(writer.write, name, tensor))
        written.attempt(stack.close)
    if writer is not None and written.error is None:
        written.records[path.name] = writer.record
        written.tensors[kind] = {
            name: (path.name, dtype.itemsize * torch.Size(shape).numel()) for name, (dtype, shape) in shapes.items()
        }


def _commit(
    directory: Path,
    kinds: Sequence[str],
    written: _Written,
    at: ParallelState,
    trainer: TrainerState,
    hugging_face: Mapping[str, Any],
) -> None:
    everyone = gather_objects(written, at.world)
    failure = next((f"rank {rank}: {one.error}" for rank, one in enumerate(everyone) if one.error), None)
    if failure is None and at.rank == 0:
        mine = _Written()
        mine.attempt(lambda: _write_index(directory, kinds, everyone, trainer, hugging_face))
        failure = mine.error and f"rank 0: {mine.error}"
    failure = gather_objects(failure, at.world)[0] or failure
    if failure is not None:
        raise CheckpointError(
            f"checkpoint {directory.name} could not be written ({failure}); older checkpoints are untouched"
        )


def _write_index(
    directory: Path,
    kinds: Sequence[str],
    everyone: Sequence[_Written],
    trainer: TrainerState,
    hugging_face: Mapping[str, Any],
) -> None:
    files = {name: record for one in everyone for name, record in one.records.items()}
    for kind in kinds:
        tensors = {name: place for one in everyone for name, place in one.tensors.get(kind, {}).items()}
        index = {
            "metadata": {"total_size": sum(size for _, size in tensors.values())},
            "weight_map": {name: file for name, (file, _) in sorted(tensors.items())},
        }
        files[index_name(kind)] = write_atomically(directory / index_name(kind), to_json(index))
    files[HF_CONFIG] = write_atomically(directory / HF_CONFIG, to_json(hugging_face))
    files[TRAINER_STATE] = write_atomically(directory / TRAINER_STATE, to_json(asdict(trainer)))
    write_manifest(directory, files)
    write_atomically(directory.parent / LATEST, (directory.name + "\n").encode())
