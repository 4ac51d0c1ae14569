"""Weights and gradients that travel in blocks of 8 or 4 bits (ZeRO++: Wang et al. 2023, sections 3.1 and 3.3).

    numbers   | block of 256           | block of 256           |
    packed    [ scale 0 | scale 1 | 256 integers | 256 integers ]      bytes = numbers * bits / 8 + 4 * blocks

    scale = max |x| of the block / (2^(bits - 1) - 1)       in fp32: a loss scale makes gradients large
    x     = scale * integer, up to scale / 2                rounded to the nearest, as weights are
                          up to scale, and unbiased         rounded up or down at random, as gradients are

A block that holds an inf or a nan holds nothing finite afterwards: an overflow is seen as ever.

[Note: equal weights]  Every rank computes with the weights that have travelled, also where they are its own; the shard
itself, from which masters are stepped or which is the master, stays as it is.

[Note: blocks]  Blocks begin at multiples of 256 elements of a bucket, and so do shards and what is split over tp (`bucket`):
no block holds parts of two shards, and what all ranks of tp hold has the same blocks, integers and gradients on each.

[Note: one sum]  A gradient is sent once, by an all-to-all, and added up in fp32 in the order of ranks.  The random numbers
are a function of step, micro-batch, sender, bucket and element: the same run, interrupted or not, has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather
from megazero.layers.counter_rng import derive_key, random_bits
from megazero.parallel_state import Axis
from megazero.zero.bucket import BLOCK
from megazero.zero.buffer_pool import BufferPool

WEIGHT_BITS = 8
_SCALE_BYTES = 4
_AT_ONCE = 2**18 // BLOCK  # blocks: what is computed with on the way stays small
_DRAWS = 4  # numbers of 16 bits in a random word


@dataclass(frozen=True)
class Noise:
    """The random numbers of one tensor's rounding: those of elements `first`, `first` + 1, ... under `key`."""

    key: int
    first: int

    def draw(self, start: int, count: int, device: torch.device) -> Tensor:
        """[count]: fp32, above 0 and below 1, of the elements from `first` + `start` on; both are multiples of a block."""
        at = (self.first + start) // _DRAWS
        words = torch.arange(at, at + count // _DRAWS, device=device)
        return random_bits(self.key, words).view(torch.int16).float().add_(2**15 + 0.5).mul_(2.0**-16)


def noise_of(step: int, round_: int, sender: int, bucket: str, first: int) -> Noise:
    """Of what a rank, number `sender` of its axis, sends of a bucket in a micro-batch of a step."""
    return Noise(derive_key(step, f"rounding of {bucket} in {round_} by {sender}"), first)


@dataclass(frozen=True)
class BlockFormat:
    """How many `bits` each number of a block has: 4 or 8."""

    bits: int

    def nbytes(self, numel: int) -> int:
        """Bytes of so many numbers, a multiple of a block."""
        return numel * self.bits // 8 + numel // BLOCK * _SCALE_BYTES

    def quantize(self, x: Tensor, packed: Tensor, noise: Noise | None = None) -> None:
        """Pack x, [numel] of any floating-point type, into `packed`, uint8 [nbytes].  Without `noise` to the nearest."""
        most = 2 ** (self.bits - 1) - 1
        for at, scale, integers in self._pieces(packed, x.numel()):
            blocks = x[at].view(-1, BLOCK).float()
            largest = blocks.abs().amax(dim=1, keepdim=True)
            torch.div(largest, most, out=scale).clamp_(min=torch.finfo(torch.float32).tiny)  # a nan stays one
            ratio = blocks / scale
            if noise is None:
                ratio.round_()
            else:
                ratio.view(-1).add_(noise.draw(at.start, ratio.numel(), x.device)).floor_()
            ratio.clamp_(-most, most)
            if self.bits == 8:
                integers.copy_(ratio)
            else:
                low, high = ratio.to(torch.int8).chunk(2, dim=1)
                torch.bitwise_or(high << 4, low & 15, out=integers)

    def dequantize(self, packed: Tensor, out: Tensor) -> None:
        """Fill `out`, [numel] of any floating-point type, from `packed`, uint8 [nbytes]."""
        self.sum([packed], out)

    def sum(self, packed: list[Tensor], out: Tensor) -> None:
        """Fill `out`, [numel], with the sum of several packed tensors, each uint8 [nbytes], in fp32 and in their order."""
        for first, *others in zip(*(self._pieces(one, out.numel()) for one in packed), strict=True):
            total = self._unpack(*first[1:])
            for _, scale, integers in others:
                total += self._unpack(scale, integers)
            out[first[0]].view(-1, BLOCK).copy_(total)

    def _unpack(self, scale: Tensor, integers: Tensor) -> Tensor:
        if self.bits == 4:
            integers = torch.cat([integers << 4 >> 4, integers >> 4], dim=1)  # of int8: the sign comes along
        return integers * scale

    def _pieces(self, packed: Tensor, numel: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Piece by piece: which numbers, their scales fp32 [blocks, 1], their integers int8 [blocks, bytes of one]."""
        count = numel // BLOCK
        scales = packed[: count * _SCALE_BYTES].view(torch.float32).view(-1, 1)
        integers = packed[count * _SCALE_BYTES :].view(torch.int8).view(count, -1)
        for start in range(0, count, _AT_ONCE):
            at = slice(start, min(start + _AT_ONCE, count))
            yield slice(at.start * BLOCK, at.stop * BLOCK), scales[at], integers[at]


class QuantizedGather:
    """All-gathers of weights of 8 bits, through buffers of one size from `pool`.  `largest`: numbers of a rank's part."""

    def __init__(self, axis: Axis, pool: BufferPool, largest: int) -> None:
        self._axis, self._pool, self._format = axis, pool, BlockFormat(WEIGHT_BITS)
        self._numel = axis.size * self._format.nbytes(largest) // _SCALE_BYTES

    def start(self, out: Tensor, shard: Tensor, label: str) -> Pending:
        """As `all_gather` over the axis; see [Note: equal weights]."""
        buffer = self._pool.acquire(self._numel, torch.float32)
        nbytes = self._format.nbytes(shard.numel())
        packed = buffer.view(torch.uint8)[: self._axis.size * nbytes]
        mine = packed[self._axis.index * nbytes :][:nbytes]
        self._format.quantize(shard, mine)
        return Pending(all_gather(packed, mine, self._axis, label).wait, partial(self._arrived, buffer, packed, out))

    def _arrived(self, buffer: Tensor, packed: Tensor, out: Tensor) -> None:
        for one, part in zip(packed.chunk(self._axis.size), out.chunk(self._axis.size), strict=True):
            self._format.dequantize(one, part)
        self._pool.release(buffer)
