"""Reading stored tensors into the shards of a rank, whatever the shape of the run that wrote them.

    Reader        for each bucket: file -> masters, moments, weights
    read_range    elements of a local tensor from the rows and columns of logical tensors

Ranks that hold the same elements each read a part and exchange it.  If all of them run on one machine, each reads
everything for itself from the file's pages, which is faster.  Either way each element of the model is read for the count
by exactly one rank of the world, so the sum of the counts proves the coverage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.index import CheckpointError, kinds_of, read_manifest
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.comm.collectives import all_gather
from megazero.layers.spec import Block, ParamSpec
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.bucket import Bucket, Run, Slot, intersect
from megazero.zero.state import MASTER, MODEL, ShardedState


class StoredKinds:
    """The tensors of a checkpoint by kind; each kind is opened once."""

    def __init__(self, folder: Folder, step: int) -> None:
        self.folder, self.kinds, self._step = folder, kinds_of(read_manifest(folder)), step
        self._open: dict[str, StoredTensors] = {}

    def check_optimizer(self, states: Sequence[str]) -> None:
        """Make sure that the stored optimizer state is of these kinds.  Raises: CheckpointError."""
        stored = [kind for kind in self.kinds if kind not in (MODEL, MASTER)]
        if set(stored) != set(states):
            raise CheckpointError(
                f"{self.folder} was written with another optimizer: it holds {_listed(stored)}, this one keeps "
                f"{_listed(states)}. Go on with the optimizer that wrote it"
            )

    def of(self, kind: str) -> StoredTensors:
        """The tensors of one kind.  Raises: CheckpointError, also if the checkpoint has no such kind."""
        if kind not in self.kinds:
            raise CheckpointError(f"{self.folder} has no {kind}; it holds {_listed(self.kinds)}")
        if kind not in self._open:
            self._open[kind] = StoredTensors(self.folder, kind, self._step)
        return self._open[kind]

    def source(self, kind: str, spec: ParamSpec) -> StoredTensors:
        """The tensors that a parameter's kind is read from.

        Masters are read from the weights if none were stored: the run was in fp32, or the parameter was frozen.
        """
        if kind == MASTER and (
            MASTER not in self.kinds or not spec.logical_shapes().keys() <= self.of(MASTER).files.keys()
        ):
            return self.of(MODEL)
        return self.of(kind)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


class Reader:
    """Reads from the files, exchanges, and writes into a rank's shards.

    Args:
        shares_memory: every rank reads all it needs, from pages that they share; otherwise ranks exchange what they read.
        fills_weights: also read weights whose masters another rank holds.

    Attributes:
        elements: by kind, those that this rank has read for the count.
        error: the first that stopped this rank from reading, or None.
    """

    def __init__(
        self, stored: StoredKinds, state: ShardedState, at: ParallelState, *, shares_memory: bool, fills_weights: bool
    ) -> None:
        self._stored, self._state, self._at = stored, state, at
        self._shares_memory, self._fills_weights = shares_memory, fills_weights
        self.elements: dict[str, int] = {}
        self.error: Exception | None = None
        self._scratch = torch.empty(0)

    def read(self, kind: str) -> None:
        """Read one kind.  A rank that cannot read goes on with the exchange, so that no other rank waits for it.

        Frozen parameters have no masters, but are read with them: they have nothing else.
        """
        self.elements[kind] = 0
        for bucket in self._state.buckets:
            if kind != MASTER and not self._state.holds(kind, bucket):
                continue
            copies = self._at.dp if bucket.policy.zero_stage == 0 else bucket.policy.replica
            end = bucket.layout.numel
            owned = Run(bucket.owned.start, min(bucket.owned.stop, end))
            if copies.size > 1 and not self._shares_memory:
                self._read_together(kind, bucket, owned, copies)
                continue
            counted = intersect(owned, bucket.counted) or Run(owned.start, owned.start)
            self._read_own(kind, bucket, counted, counts=True)
            for run in _around(counted, owned):
                self._read_own(kind, bucket, run, counts=False)
            if kind == MASTER and self._fills_weights and bucket.keeps_weights:
                for run in _around(bucket.owned, Run(0, end)):
                    for slot, part in _parts(bucket, run):
                        self._read_part(kind, bucket, slot, part, bucket.weights[part.start : part.stop], False)

    def _read_own(self, kind: str, bucket: Bucket, run: Run, *, counts: bool) -> None:
        """Elements that this rank holds: straight into the state if that is in memory."""
        for slot, part in _parts(bucket, run):
            memory = self._state.memory(kind, bucket, part)
            values = self._buffer(part.stop - part.start) if memory is None else memory
            self._read_part(kind, bucket, slot, part, values, counts)
            if memory is None:
                self._state.write(kind, bucket, part, values)

    def _read_together(self, kind: str, bucket: Bucket, owned: Run, copies: Axis) -> None:
        """Elements that all of `copies` hold: each rank reads an equal part for the count."""
        each = -(-max(owned.stop - owned.start, 0) // copies.size)
        values = self._buffer(each * copies.size)
        mine = values[each * copies.index : each * (copies.index + 1)]
        start = owned.start + each * copies.index
        for slot, part in _parts(bucket, Run(start, min(start + each, owned.stop))):
            self._read_part(kind, bucket, slot, part, mine[part.start - start : part.stop - start], True)
        if each:
            all_gather(values, mine, copies).wait()
        for _, part in _parts(bucket, owned):
            self._state.write(kind, bucket, part, values[part.start - owned.start : part.stop - owned.start])

    def _buffer(self, elements: int) -> Tensor:
        if self._scratch.numel() < elements:
            self._scratch = torch.empty(elements)
        return self._scratch[:elements]

    def _read_part(self, kind: str, bucket: Bucket, slot: Slot, run: Run, out: Tensor, counts: bool) -> None:
        spec, tp = slot.info.spec, self._at.tp
        try:
            read = read_range(self._stored.source(kind, spec), spec, out, run.start - slot.start, tp)
        except Exception as error:  # an object store has errors of its own
            self.error = self.error or error
            return
        if counts and not bucket.is_second_copy and (spec.split is not None or tp.index == 0):
            self.elements[kind] += read


def _around(part: Run, whole: Run) -> Iterator[Run]:
    """The rest of `whole` before and after `part`."""
    for run in (Run(whole.start, min(part.start, whole.stop)), Run(max(part.stop, whole.start), whole.stop)):
        if run.start < run.stop:
            yield run


def _parts(bucket: Bucket, run: Run) -> Iterator[tuple[Slot, Run]]:
    """The parameters of a bucket within a run of its elements, each with its elements."""
    for slot in bucket.layout.slots:
        part = intersect(slot.run, run)
        if part is not None:
            yield slot, part


def read_range(stored: StoredTensors, spec: ParamSpec, out: Tensor, start: int, tp: Axis) -> int:
    """Read elements [start, start + len(out)) of a flattened local tensor from the logical tensors that hold them.

    Args:
        stored: tensors of one kind.
        out: 1-D; padding becomes zero.

    Returns: elements read; all but the padding.
    """
    width = spec.width(tp.size)
    stop = start + out.numel()
    read, done = 0, start  # elements before `done` are read or cleared
    for block in spec.blocks(tp.index, tp.size):
        low, high = max(block.local_rows[0] * width, start), min(block.local_rows[1] * width, stop)
        if low >= high:
            continue
        if low > done:
            out[done - start : low - start] = 0
        first, last = low // width, -(-high // width)
        rows = _rows(stored, block, first, last)
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


def _rows(stored: StoredTensors, block: Block, first: int, last: int) -> Tensor:
    """Local rows [first, last) of a block; a view of the file if that is mapped."""
    tensor, shift = stored[block.name], block.rows[0] - block.local_rows[0]
    rows = (first + shift, last + shift)
    if block.whole == ():
        return tensor.whole()
    if block.whole is not None or block.columns is None:
        return tensor.rows(*rows)
    if block.transposed:
        return tensor.rows(*block.columns)[:, slice(*rows)].t()
    return tensor.rows(*rows)[:, slice(*block.columns)]
