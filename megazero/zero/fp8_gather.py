"""All-gathers of weights in fp8 (e4m3), for weights that the products round to fp8 anyway, so that no bit changes.

    shards       |   rank 0    |   rank 1    |
    squares      |   128 x 128   | 128 x 128 |     one may lie on several ranks

    after an update    every rank takes the maxima of its elements; a small all-reduce gives those of whole squares.  It
                       starts when the shard is updated, beside gathers, and only the rounding waits for it
    each gather        shard -> e4m3, 1 byte per element -> all ranks -> the run's format, in which these are exact

Both passes of a layer round its weight in these squares (`layers/fp8.py`).  To round what is rounded changes nothing: the
largest element of a square stays the largest, and in a scale of half the size, where it needs one, all are exact.  So the
run has the same bits as if weights travelled in their own format.  Masters keep their precision.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather, all_reduce
from megazero.layers.fp8 import Quantised, dequantise, maxima, quantise, scales_of
from megazero.layers.fp8_sizes import BLOCK
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.sharding import intersect


class _OwnedRows(NamedTuple):
    """The rows of one matrix that this rank's shard covers, some of them in part.

    Args:
        squares: the largest magnitude of each square of the matrix.
        rows: the rows of the matrix that contain the elements.
        matrix: those rows, with zeros in place of elements of other shards.
        skipped: number of elements of the first row that belong to another shard.
        at: where the elements lie in the shard.
    """

    squares: Tensor
    rows: slice
    matrix: Tensor
    skipped: int
    at: slice


class Fp8Gather:
    """All-gathers of one bucket, with its matrices in fp8.

    Args:
        pool: provides the buffers.

    Attributes:
        is_fresh: the maxima belong to the current weights, or will when the running all-reduce ends.
    """

    def __init__(self, bucket: Bucket, pool: BufferPool) -> None:
        self._owned, self._slots, self._pool = bucket.owned, bucket.layout.slots, pool
        self._shard_axis, self._reducing, self.is_fresh = bucket.placement.shard, Pending(), False
        grids = [tuple(-(-size // BLOCK) for size in slot.info.shape) for slot in self._slots]
        self._maxima = pool.acquire(sum(map(prod, grids)), torch.float32)
        flats = self._maxima.split([prod(grid) for grid in grids])
        self._squares = [flat.view(grid) for flat, grid in zip(flats, grids, strict=True)]

    def start(self, out: Tensor, shard: Tensor, axis: Axis, label: str) -> Pending:
        """Start the all-gather of a bucket.  Arguments as in `all_gather`."""
        self.reduce_maxima(shard)
        self._reducing.wait()
        packed = self._pool.acquire(len(out), torch.uint8)
        mine = packed.view(axis.size, -1)[axis.index]
        try:
            for squares, rows, matrix, skipped, at in self._owned_rows(shard):
                rounded = quantise(matrix, squares.repeat_interleave(BLOCK, 0)[rows], BLOCK).values
                mine[at] = rounded.view(torch.uint8).flatten()[skipped:][: at.stop - at.start]
            arrive = all_gather(packed, mine, axis, label).wait
        except BaseException:
            self._pool.release(packed)
            raise
        return Pending(arrive, partial(self._arrived, packed, out))

    def _arrived(self, packed: Tensor, out: Tensor) -> None:
        try:
            for slot, squares in zip(self._slots, self._squares, strict=True):
                shape, at = slot.info.shape, slice(slot.start, slot.stop)
                scales = scales_of(squares).repeat_interleave(BLOCK, 0)[: shape[0]]
                rounded = Quantised(packed[at].view(torch.float8_e4m3fn).view(shape), scales)
                out[at] = dequantise(rounded, BLOCK, out.dtype).flatten()
        finally:
            self._pool.release(packed)

    def reduce_maxima(self, shard: Tensor) -> None:
        """Start the all-reduce of the squares' maxima, unless they are known.  A collective call."""
        if self.is_fresh:
            return
        self._reducing.wait()
        self._maxima.zero_()
        for squares, rows, matrix, *_ in self._owned_rows(shard):
            largest = maxima(matrix, BLOCK)
            row_of_squares = torch.arange(rows.start, rows.stop, device=shard.device).unsqueeze(1) // BLOCK
            squares.scatter_reduce_(0, row_of_squares.expand_as(largest), largest, "amax")
        # not over the axis of gathers: it would queue behind the gather of the bucket before
        self._reducing, self.is_fresh = all_reduce(self._maxima, self._shard_axis, "max"), True

    def _owned_rows(self, shard: Tensor) -> Iterator[_OwnedRows]:
        for slot, squares in zip(self._slots, self._squares, strict=True):
            held = intersect(slot.interval, self._owned)
            if held is None:
                continue
            width, first = slot.info.shape[1], held.start - slot.start
            rows = slice(first // width, -(-(first + held.size) // width))
            at = slice(held.start - self._owned.start, held.stop - self._owned.start)
            matrix = shard.new_zeros((rows.stop - rows.start) * width)
            matrix[first % width :][: held.size] = shard[at]
            yield _OwnedRows(squares, rows, matrix.view(-1, width), first % width, at)


def fp8_gathers(buckets: Sequence[Bucket], pool: BufferPool) -> dict[Bucket, Fp8Gather]:
    """Return an `Fp8Gather` for each bucket with matrices that products round in squares."""
    rounded = [bucket for bucket in buckets if bucket.layout.first.spec.in_fp8_squares and bucket.layout.shards > 1]
    return {bucket: Fp8Gather(bucket, pool) for bucket in rounded}
