"""Reading a checkpoint into any shape: each rank reads the slices it owns; together they prove that none is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.checkpoint.index import (
    CheckpointError,
    StoredTensors,
    TrainerState,
    index_name,
    kinds_of,
    read_manifest,
    read_trainer_state,
)
from megazero.checkpoint.verify import find_damage
from megazero.comm.collectives import agree, gather_objects
from megazero.layers.spec import Block, ParamSpec, numel, stored_shape
from megazero.parallel_state import ParallelState
from megazero.zero.bucket import Bucket, intersect
from megazero.zero.state import MASTER, MODEL, ShardedState

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def load_checkpoint(
    directory: Path, state: ShardedState, at: ParallelState, *, with_optimizer: bool = True
) -> TrainerState:
    """Fill this rank's masters and moments from a checkpoint of any shape.  Called on every rank.

    The caller publishes the masters to the weights afterwards.

    Args:
        directory: a complete step directory.
        state: this rank's shards; overwritten.
        at: this rank's place.
        with_optimizer: read the optimizer's state too; otherwise it starts anew.

    Raises:
        CheckpointError: on every rank, before anything is overwritten: a file is missing, has another size or another
            hash, or the tensors are not those of this model.
    """
    trainer = agree(lambda: _intact(directory, at), at.world, CheckpointError)
    moments = state.optimizer.known_states if trainer.optimizer_steps and with_optimizer else ()
    stored = _Stored(directory)
    if with_optimizer and trainer.optimizer_steps:
        agree(lambda: stored.check_optimizer(moments), at.world, CheckpointError)
    wanted = {kind: _logical_shapes(state, kind) for kind in (MODEL, *moments)}
    everyone = gather_objects(wanted, at.pp)
    all_wanted = {kind: {name: shape for stage in everyone for name, shape in stage[kind].items()} for kind in wanted}
    agree(lambda: _compare(stored, wanted, all_wanted), at.world, CheckpointError)
    for kind in (MASTER, *moments):
        read = agree(partial(_fill, stored, kind, state, at), at.world, CheckpointError)
        everything = all_wanted[MODEL if kind == MASTER else kind]
        _prove_coverage(directory, kind, sum(gather_objects(read, at.world)), everything)
    if moments or (with_optimizer and trainer.optimizer_steps):
        state.optimizer.resume(trainer.optimizer_steps, trainer.optimizer_scalars)
    else:
        state.optimizer.reset()
    return trainer


class _Stored:
    """The tensors of a checkpoint by kind, each kind opened once."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.kinds = directory, kinds_of(read_manifest(directory))
        self._open: dict[str, StoredTensors] = {}

    def check_optimizer(self, states: Sequence[str]) -> None:
        """Make sure that the optimizer's state is what this one keeps.  Raises: CheckpointError."""
        found = [kind for kind in self.kinds if kind not in (MODEL, MASTER)]
        if set(found) != set(states):
            raise CheckpointError(
                f"{self.directory} was written with another optimizer: it holds {_listed(found)}, this one keeps "
                f"{_listed(states)}. Go on with the optimizer that wrote it"
            )

    def of(self, kind: str) -> StoredTensors:
        """The tensors of one kind.  Raises: CheckpointError, also where the checkpoint has no such kind."""
        if kind not in self.kinds:
            raise CheckpointError(f"{self.directory} has no {kind}; it holds {_listed(self.kinds)}")
        if kind not in self._open:
            self._open[kind] = StoredTensors(self.directory, kind)
        return self._open[kind]

    def source(self, kind: str, bucket: Bucket) -> StoredTensors:
        """What a bucket's kind is read from: master weights from the weights where no others were stored."""
        if kind == MASTER and (MASTER not in self.kinds or not bucket.layout.trains):
            return self.of(MODEL)
        return self.of(kind)


def _intact(directory: Path, at: ParallelState) -> TrainerState:
    """Prove this rank's share of the files; the ranks share the reading: each hashes every world_size-th file."""
    damage = find_damage(directory, sorted(read_manifest(directory))[at.rank :: at.world.size])
    if damage:
        raise CheckpointError(
            "\n".join(damage) + f"\n{directory} is damaged and was not loaded; resume from another step directory"
        )
    return read_trainer_state(directory)


def _compare(stored: _Stored, wanted: dict[str, Shapes], all_wanted: dict[str, Shapes]) -> None:
    """Check that the stored tensors are those of this model."""
    for kind, shapes in wanted.items():
        problems = list(_differences(stored.of(kind), shapes, all_wanted[kind]))
        if problems:
            path = stored.directory / index_name(kind)
            raise CheckpointError(f"{path} is of another model: " + "; ".join(problems[:5]))


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
        found = tuple(stored.slice(name).get_shape())
        if found != wanted[name]:
            yield f"{name} has shape {list(found)}, this model needs {list(wanted[name])}"


def _fill(stored: _Stored, kind: str, state: ShardedState, at: ParallelState) -> int:
    """Read one kind; the number of elements of which this rank holds the first copy.

    Frozen parameters have no master weights, but are read with them: the weights are all they have.
    """
    first_copies = 0
    for bucket in state.buckets:
        if kind != MASTER and not state.holds(kind, bucket):
            continue
        source = stored.source(kind, bucket)
        for slot in bucket.layout.slots:
            spec = slot.info.spec
            second_copy = bucket.is_second_copy or (spec.split is None and at.tp.index > 0)
            for shard in range(bucket.layout.shards):
                run = intersect(slot.run, bucket.layout.shard(shard))
                if run is None or intersect(run, bucket.owned) is None:
                    continue
                values = torch.zeros(run.stop - run.start)
                elements = read_range(source, spec, values, run.start - slot.start, at.tp.index, at.tp.size)
                state.write(kind, bucket, run, values)
                if intersect(run, bucket.counted) is not None and not second_copy:
                    first_copies += elements
    return first_copies


def _prove_coverage(directory: Path, kind: str, read: int, all_wanted: Shapes) -> None:
    """All ranks together have read each element of the model once: their number is that of the logical shapes."""
    wanted = sum(numel(shape) for shape in all_wanted.values())
    if read != wanted:
        raise CheckpointError(f"{directory}: {read} elements of {kind} were read, the model has {wanted}")


def read_range(stored: StoredTensors, spec: ParamSpec, out: Tensor, start: int, tp_rank: int, tp_size: int) -> int:
    """Read part of a local tensor from the logical tensors that hold it.

    Args:
        stored: tensors of one kind.
        spec: of the parameter.
        out: 1-D; elements [start, start + len(out)) of the flattened local tensor; padding is left as it is.
        start: first element.
        tp_rank, tp_size: place on the tensor-parallel axis.

    Returns: elements read; all but the padding.
    """
    width = spec.width(tp_size)
    stop = start + out.numel()
    read = 0
    for block in spec.blocks(tp_rank, tp_size):
        low, high = max(block.local_rows[0] * width, start), min(block.local_rows[1] * width, stop)
        if low >= high:
            continue
        first_row, last_row = low // width, -(-high // width)
        piece = _read_rows(stored, block, first_row, last_row).reshape(-1)
        piece = piece[low - first_row * width : high - first_row * width]
        out[low - start : high - start].copy_(piece)
        read += piece.numel()
    return read


def _read_rows(stored: StoredTensors, block: Block, first: int, last: int) -> Tensor:
    """Local rows [first, last) of a block, from the file."""
    shift = block.rows[0] - block.local_rows[0]
    rows = slice(first + shift, last + shift)
    tensor = stored.slice(block.name)
    if block.whole is not None:
        return torch.as_tensor(tensor[rows] if block.whole else tensor[...])
    if block.columns is None:
        return torch.as_tensor(tensor[rows])
    columns = slice(*block.columns)
    if block.transposed:
        return torch.as_tensor(tensor[columns, rows]).t()
    if stored_shape(block)[1] == columns.stop - columns.start:
        return torch.as_tensor(tensor[rows])
    return torch.as_tensor(tensor[rows, columns])
