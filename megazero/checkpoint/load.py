"""Reading a checkpoint into any shape: each rank reads the slices it owns, and proves that it read each element once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from megazero.checkpoint.index import (
    CheckpointError,
    StoredTensors,
    TrainerState,
    index_name,
    read_manifest,
    read_trainer_state,
)
from megazero.checkpoint.verify import find_damage
from megazero.comm.collectives import gather_objects
from megazero.layers.spec import Block, ParamSpec, stored_shape
from megazero.parallel_state import ParallelState
from megazero.zero.bucket import intersect
from megazero.zero.optimizer import MOMENTS
from megazero.zero.state import MASTER, MODEL, ShardedState

T = TypeVar("T")
Shapes: TypeAlias = dict[str, tuple[int, ...]]


def load_checkpoint(directory: Path, state: ShardedState, at: ParallelState) -> TrainerState:
    """Fill this rank's masters and moments from a checkpoint of any shape.  Called on every rank.

    The caller publishes the masters to the weights afterwards.

    Args:
        directory: a complete step directory.
        state: this rank's shards; overwritten.
        at: this rank's place.

    Raises:
        CheckpointError: on every rank, before anything is overwritten: a file is missing, has another size or another
            hash, or the tensors are not those of this model.
    """
    trainer = _agree(lambda: _intact(directory, at), at)
    wanted = _logical_shapes(state)
    all_wanted = {name: shape for stage in gather_objects(wanted, at.pp) for name, shape in stage.items()}
    _agree(lambda: _compare(directory, wanted, all_wanted), at)
    stored_masters = MASTER if index_name(MASTER) in read_manifest(directory) else MODEL
    for kind, source in ((MASTER, stored_masters), *((name, name) for name in MOMENTS)):
        _fill(StoredTensors(directory, source), kind, state, at)
    state.optimizer.steps_taken = trainer.optimizer_steps
    return trainer


def _agree(check: Callable[[], T], at: ParallelState) -> T:
    """Run a check on every rank; if it fails on one, all raise."""
    answer: list[T] = []
    failure = None
    try:
        answer.append(check())
    except CheckpointError as error:
        failure = str(error)
    found = list(dict.fromkeys(text for text in gather_objects(failure, at.world) if text is not None))
    if found:
        raise CheckpointError("\n".join(found))
    return answer[0]


def _intact(directory: Path, at: ParallelState) -> TrainerState:
    """Prove this rank's share of the files; the ranks share the reading: each hashes every world_size-th file."""
    damage = find_damage(directory, sorted(read_manifest(directory))[at.rank :: at.world.size])
    if damage:
        raise CheckpointError(
            "\n".join(damage) + f"\n{directory} is damaged and was not loaded; resume from another step directory"
        )
    return read_trainer_state(directory)


def _compare(directory: Path, wanted: Shapes, all_wanted: Shapes) -> None:
    """Check that the stored tensors are those of this model."""
    for kind in (MODEL, *MOMENTS):
        problems = list(_differences(StoredTensors(directory, kind), wanted, all_wanted))
        if problems:
            raise CheckpointError(f"{directory / index_name(kind)} is of another model: " + "; ".join(problems[:5]))


def _logical_shapes(state: ShardedState) -> Shapes:
    shapes: Shapes = {}
    for bucket in state.buckets:
        for slot in bucket.layout.slots:
            shapes |= slot.info.spec.logical_shapes()
    return shapes


def _differences(stored: StoredTensors, wanted: Shapes, all_wanted: Shapes) -> Iterator[str]:
    for name in sorted(set(all_wanted) - set(stored.files)):
        yield f"{name} is missing"
    for name in sorted(set(stored.files) - set(all_wanted)):
        yield f"{name} belongs to no parameter of this model"
    for name in sorted(set(wanted) & set(stored.files)):
        found = tuple(stored.slice(name).get_shape())
        if found != wanted[name]:
            yield f"{name} has shape {list(found)}, this model needs {list(wanted[name])}"


def _fill(stored: StoredTensors, kind: str, state: ShardedState, at: ParallelState) -> None:
    for bucket in state.buckets:
        for slot in bucket.layout.slots:
            run = intersect(slot.run, bucket.owned)
            if run is not None:
                target = state.view(kind, bucket, run)
                target.zero_()
                read_range(stored, slot.info.spec, target, run.start - slot.start, at.tp.index, at.tp.size)


def read_range(stored: StoredTensors, spec: ParamSpec, out: Tensor, start: int, tp_rank: int, tp_size: int) -> None:
    """Read part of a local tensor from the logical tensors that hold it.

    Args:
        stored: tensors of one kind.
        spec: of the parameter.
        out: 1-D; elements [start, start + len(out)) of the flattened local tensor; padding is left as it is.
        start: first element.
        tp_rank, tp_size: place on the tensor-parallel axis.

    Raises:
        CheckpointError: the pieces read do not cover the elements exactly once.
    """
    width = 1 if spec.columns is None else spec.local_shape(tp_size)[1]
    stop = start + out.numel()
    covered = expected = 0
    for block in spec.blocks(tp_rank, tp_size):
        low, high = max(block.local_rows[0] * width, start), min(block.local_rows[1] * width, stop)
        if low >= high:
            continue
        expected += high - low
        first_row, last_row = low // width, -(-high // width)
        piece = _read_rows(stored, block, first_row, last_row).reshape(-1)
        piece = piece[low - first_row * width : high - first_row * width]
        out[low - start : high - start].copy_(piece)
        covered += piece.numel()
    if covered != expected:
        names = ", ".join(section.name for section in spec.sections)
        raise CheckpointError(
            f"{stored.directory}: {covered} elements of {names} were read where {expected} are needed"
        )


def _read_rows(stored: StoredTensors, block: Block, first: int, last: int) -> Tensor:
    """Local rows [first, last) of a block, from the file."""
    shift = block.rows[0] - block.local_rows[0]
    rows = slice(first + shift, last + shift)
    tensor = stored.slice(block.name)
    if block.columns is None:
        return torch.as_tensor(tensor[rows])
    columns = slice(*block.columns)
    if block.transposed:
        return torch.as_tensor(tensor[columns, rows]).t()
    if stored_shape(block)[1] == columns.stop - columns.start:
        return torch.as_tensor(tensor[rows])
    return torch.as_tensor(tensor[rows, columns])
