"""Reading stored tensors into the shards of a rank, whatever the shape of the run that wrote them.

    plan_reads    for each bucket the elements that this rank reads, as values
    Reader        follows the plan: file -> masters, moments, weights
    read_range    elements of a local tensor from the rows and columns of logical tensors

Ranks that hold the same elements each read a part and exchange it.  If all of them run on one machine, each reads
everything for itself from the file's pages, which is faster.  Either way each element of the model is read for the count
by exactly one rank of the world, so the sum of the counts proves the coverage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.checkpoint.folder import Folder
from megazero.checkpoint.index import CheckpointError, kinds_of, read_manifest
from megazero.checkpoint.tensor_file import StoredTensors
from megazero.comm.collectives import all_gather
from megazero.layers.spec import ParamSpec, Region
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

    def source(self, kind: str, slot: Slot) -> StoredTensors:
        """The tensors that a parameter's kind is read from.

        Master weights are read from the weights if none were stored: the run was in fp32, or the parameter was frozen.
        """
        names = slot.info.spec.logical_shapes().keys()
        if kind == MASTER and (MASTER not in self.kinds or not names <= self.of(MASTER).files.keys()):
            return self.of(MODEL)
        return self.of(kind)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


@dataclass(frozen=True)
class BucketRead:
    """What this rank reads of one bucket.

    Args:
        bucket: whose elements.
        owned: elements whose masters and moments this rank holds, without padding at the end.
        counted: the part of them that this rank reads for the count.
        exchange: ranks that own the same elements and give each other what they have counted; None to read the rest of
            `owned` from the file, too.
        weights: elements whose weights are read, and whose masters another rank holds.
    """

    bucket: Bucket
    owned: Run
    counted: Run
    exchange: Axis | None
    weights: tuple[Run, ...]


def plan_reads(
    kind: str, state: ShardedState, at: ParallelState, *, shares_memory: bool, fills_weights: bool
) -> list[BucketRead]:
    """The elements of one kind that this rank reads, bucket by bucket.

    Frozen parameters have no masters, but are read with them: they have nothing else.

    Args:
        kind: what is read.
        state: this rank's shards.
        at: this rank.
        shares_memory, fills_weights: see the functions of `load` with these names.
    """
    reads = []
    for bucket in state.buckets:
        if kind != MASTER and not state.holds(kind, bucket):
            continue
        copies = at.dp if bucket.policy.zero_stage == 0 else bucket.policy.replica
        end = bucket.layout.slots[-1].stop
        owned = Run(bucket.owned.start, min(bucket.owned.stop, end))
        if copies.size > 1 and not shares_memory:
            each = -(-max(owned.stop - owned.start, 0) // copies.size)
            start = owned.start + each * copies.index
            reads.append(BucketRead(bucket, owned, Run(start, min(start + each, owned.stop)), copies, ()))
            continue
        counted = intersect(owned, bucket.counted) or Run(owned.start, owned.start)
        others = kind == MASTER and fills_weights and bucket.keeps_weights
        weights = tuple(_around(bucket.owned, Run(0, end))) if others else ()
        reads.append(BucketRead(bucket, owned, counted, None, weights))
    return reads


def _around(part: Run, whole: Run) -> Iterator[Run]:
    """The rest of `whole` before and after `part`."""
    for run in (Run(whole.start, min(part.start, whole.stop)), Run(max(part.stop, whole.start), whole.stop)):
        if run.start < run.stop:
            yield run


class Reader:
    """Follows a plan: reads from the files, exchanges, and writes into a rank's shards.

    Args:
        stored: the checkpoint.
        state: overwritten.
        at: this rank.

    Attributes:
        elements: by kind, those that this rank has read for the count.
    """

    def __init__(self, stored: StoredKinds, state: ShardedState, at: ParallelState) -> None:
        self._stored, self._state, self._at = stored, state, at
        self.elements: dict[str, int] = {}
        self._error: Exception | None = None
        self._scratch = torch.empty(0)

    def check(self) -> None:
        """Raises: the first error that stopped this rank from reading."""
        if self._error is not None:
            raise self._error

    def read(self, kind: str, plan: Sequence[BucketRead]) -> None:
        """Read one kind.  A rank that cannot read goes on with the exchange, so that no other rank waits for it."""
        self.elements[kind] = 0
        for one in plan:
            if one.exchange is not None:
                self._read_together(kind, one, one.exchange)
                continue
            self._read_own(kind, one.bucket, one.counted, counts=True)
            for run in _around(one.counted, one.owned):
                self._read_own(kind, one.bucket, run, counts=False)
            for run in one.weights:
                for slot, part in _parts(one.bucket, run):
                    self._read_part(kind, one.bucket, slot, part, one.bucket.weights[part.start : part.stop], False)

    def _read_own(self, kind: str, bucket: Bucket, run: Run, *, counts: bool) -> None:
        """Elements that this rank holds: straight into the state if that is in memory."""
        for slot, part in _parts(bucket, run):
            memory = self._state.memory(kind, bucket, part)
            values = self._buffer(part.stop - part.start) if memory is None else memory
            self._read_part(kind, bucket, slot, part, values, counts)
            if memory is None:
                self._state.write(kind, bucket, part, values)

    def _read_together(self, kind: str, one: BucketRead, copies: Axis) -> None:
        each = -(-max(one.owned.stop - one.owned.start, 0) // copies.size)
        values = self._buffer(each * copies.size)
        mine = values[each * copies.index : each * (copies.index + 1)]
        start = one.counted.start
        for slot, part in _parts(one.bucket, one.counted):
            self._read_part(kind, one.bucket, slot, part, mine[part.start - start : part.stop - start], True)
        if each:
            all_gather(values, mine, copies).wait()
        start = one.owned.start
        for _, part in _parts(one.bucket, one.owned):
            self._state.write(kind, one.bucket, part, values[part.start - start : part.stop - start])

    def _buffer(self, elements: int) -> Tensor:
        if self._scratch.numel() < elements:
            self._scratch = torch.empty(elements)
        return self._scratch[:elements]

    def _read_part(self, kind: str, bucket: Bucket, slot: Slot, run: Run, out: Tensor, counts: bool) -> None:
        spec, tp = slot.info.spec, self._at.tp
        try:
            source = self._stored.source(kind, slot)
            read = read_range(source, spec, out, run.start - slot.start, tp.index, tp.size)
        except Exception as error:  # an object store has errors of its own
            self._error = self._error or error
            return
        if counts and not bucket.is_second_copy and (spec.split is not None or tp.index == 0):
            self.elements[kind] += read


def _parts(bucket: Bucket, run: Run) -> Iterator[tuple[Slot, Run]]:
    """The parameters of a bucket within a run of its elements, each with its elements."""
    for slot in bucket.layout.slots:
        part = intersect(slot.run, run)
        if part is not None:
            yield slot, part


def read_range(stored: StoredTensors, spec: ParamSpec, out: Tensor, start: int, tp_rank: int, tp_size: int) -> int:
    """Read part of a local tensor from the logical tensors that hold it.

    Args:
        stored: tensors of one kind.
        spec: of the parameter.
        out: 1-D; elements [start, start + len(out)) of the flattened local tensor; padding becomes zero.
        start: first element.
        tp_rank, tp_size: index and size of the tensor-parallel axis.

    Returns: elements read; all but the padding.
    """
    width = spec.width(tp_size)
    stop = start + out.numel()
    read, done = 0, start  # elements before `done` are read or cleared
    for region in spec.regions(tp_rank, tp_size):
        low, high = max(region.local_rows[0] * width, start), min(region.local_rows[1] * width, stop)
        if low >= high:
            continue
        if low > done:
            out[done - start : low - start] = 0
        first, last = low // width, -(-high // width)
        rows = _rows(stored, region, first, last)
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


def _rows(stored: StoredTensors, region: Region, first: int, last: int) -> Tensor:
    """Local rows [first, last) of a region; a view of the file if that is mapped."""
    shift = region.rows[0] - region.local_rows[0]
    rows = (first + shift, last + shift)
    if region.whole == ():
        return stored.whole(region.name)
    if region.whole is not None or region.columns is None:
        return stored.rows(region.name, *rows)
    if region.transposed:
        return stored.rows(region.name, *region.columns)[:, slice(*rows)].t()
    return stored.rows(region.name, *rows)[:, slice(*region.columns)]
