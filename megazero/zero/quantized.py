"""Weights and gradients that travel in blocks of 8 or 4 bits (ZeRO++: Wang et al. 2023, sections 3.1 and 3.3).

    numbers   | block of 256           | block of 256           |
    packed    [ scale 0 | scale 1 | 256 integers | 256 integers ]      bytes = numbers * bits / 8 + 4 * blocks

    scale = max |x| of the block / (2^(bits - 1) - 1)       in fp32: a loss scale makes gradients large
    x     = scale * integer, up to scale / 2                rounded to the nearest, as weights are
                          up to scale, and unbiased         rounded up or down at random, as gradients are

A block that holds an inf or a nan holds nothing finite afterwards: an overflow is seen as ever.

[Note: equal weights]  Every rank computes with the weights that have travelled, also where they are its own; the shard
itself, from which masters are stepped or which is the master, stays as it is.

[Note: blocks]  Blocks begin at multiples of 256 elements of a bucket, and so do shards, what is split over tp and that whose
gradients are summed over tp afterwards (`bucket`): no block holds parts of two shards, and what all ranks of tp hold has the
same blocks, integers and gradients on each.

[Note: one sum]  A gradient is sent once, by an all-to-all, and added up in fp32.  Where there are several hosts with several
ranks, a host's ranks sum theirs first, as they are, so that only one of them sends an element to each other host:

    full [hosts, ranks of one, part] --reduce-scatter within the host--> [hosts, part] --all-to-all--> [part]

The second step begins when the next bucket is reduced, while the backward goes on.  The random numbers are a function of
step, micro-batch, sender, bucket and element: the same run, interrupted or not, has the same bits.

[Note: passes over memory]  In torch's operations a number is read and written some twenty times, piece by piece so that the
caches of a CPU hold it.  A run that compiles its blocks compiles these functions too: one kernel reads numbers and writes
integers, one kernel reads them back, whatever the size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather
from megazero.layers.counter_rng import derive_key, random_bits
from megazero.parallel_state import Axis
from megazero.zero.bucket import BLOCK, ShardingPolicy
from megazero.zero.buffer_pool import BufferPool

WEIGHT_BITS = 8
_SCALE_BYTES = 4
_DRAWS = 4  # numbers of 16 bits in a random word


@dataclass(frozen=True)
class Noise:
    """Random numbers for rounding rows of a bucket: element i of row r draws number `first` + r `stride` + i under `key`."""

    key: int
    first: int
    stride: int

    def words(self, rows: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The key, and [rows, 1]: the random word of each row's element `start`; all are multiples of a block."""
        first = torch.arange(rows, device=device).mul_(self.stride // _DRAWS).add_((self.first + start) // _DRAWS)
        return torch.full((), self.key, device=device), first.unsqueeze(1)


def noise_of(step: int, round_: int, sender: int, bucket: str, first: int, stride: int) -> Noise:
    """Of what a rank, number `sender` of its axis, sends of a bucket in a micro-batch of a step."""
    return Noise(derive_key(step, f"rounding of {bucket} in {round_} by {sender}"), first, stride)


def _most(bits: int) -> int:
    return 127 if bits == 8 else 7


def rounded(blocks: Tensor, words: tuple[Tensor, Tensor] | None, integers: Tensor, bits: int) -> Tensor:
    """Round to `integers`; the scales.  [rows, blocks, 256], [rows, blocks, bytes] -> fp32 [rows, blocks, 1].

    `words`: see `Noise`; None rounds to the nearest.
    """
    most, blocks = _most(bits), blocks.float()
    largest = blocks.abs().amax(dim=2, keepdim=True)
    scale = (largest / most).clamp_(min=torch.finfo(torch.float32).tiny)  # a nan stays one
    ratio = blocks / scale
    if words is None:
        ratio.round_()
    else:
        key, first = words
        drawn = random_bits(key, first + torch.arange(ratio[0].numel() // _DRAWS, device=ratio.device))
        # above 0 and below 1
        ratio.add_(drawn.view(torch.int16).float().add_(2**15 + 0.5).mul_(2.0**-16).view_as(ratio)).floor_()
    ratio.clamp_(-most, most)
    if bits == 8:
        integers.copy_(ratio)
    else:
        low, high = ratio.to(torch.int8).chunk(2, dim=2)
        integers.copy_(high << 4 | low & 15)
    return scale


def restored(integers: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The numbers, fp32 [rows, blocks, 256]."""
    # of int8: the sign comes along
    return (integers if bits == 8 else torch.cat([integers << 4 >> 4, integers >> 4], dim=2)) * scale


def restored_to(out: Tensor, integers: Tensor, scale: Tensor, bits: int) -> None:
    """Fill `out`, [rows, blocks, 256]."""
    out.copy_(restored(integers, scale, bits))


def summed_to(out: Tensor, integers: Tensor, scale: Tensor, bits: int) -> None:
    """Fill `out`, fp32 [blocks, 256], with the sum of the rows."""
    torch.sum(restored(integers, scale, bits), dim=0, out=out)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One code for all sizes: the buckets of a model have many."""
    return torch.compile(function, dynamic=True)


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of numbers of 4 or 8 `bits`; about `at_once` numbers are computed with at a time, to need little memory.

    `compiled` gives what runs in place of a function; see [Note: passes over memory].

    Numbers come in rows [rows, numel], one for each rank, of any floating-point type; numel is a multiple of a block.
    """

    bits: int
    at_once: int = 2**18
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is

    @classmethod
    def on(cls, policy: ShardingPolicy, bits: int) -> BlockFormat:
        """As the device of a policy is used best: a GPU's kernels take microseconds to start."""
        if policy.compiles:
            return cls(bits, sys.maxsize, _compiled)
        return cls(bits, 2**18 if policy.on_cpu else 2**22)

    def nbytes(self, numel: int) -> int:
        """Bytes of so many numbers."""
        return numel * self.bits // 8 + numel // BLOCK * _SCALE_BYTES

    def quantize(self, x: Tensor, packed: Tensor, noise: Noise | None = None) -> None:
        """Pack x into `packed`, uint8 [rows, nbytes].  Without `noise` to the nearest."""
        function = self.compiled(rounded)
        for at, scale, integers in self._pieces(packed):
            words = None if noise is None else noise.words(x.shape[0], at.start * BLOCK, x.device)
            scale.copy_(function(x.unflatten(1, (-1, BLOCK))[:, at], words, integers, self.bits))

    def dequantize(self, packed: Tensor, out: Tensor) -> None:
        """Fill `out` from `packed`."""
        function = self.compiled(restored_to)
        for at, scale, integers in self._pieces(packed):
            function(out.unflatten(1, (-1, BLOCK))[:, at], integers, scale, self.bits)

    def sum(self, packed: Tensor, out: Tensor) -> None:
        """Fill `out`, fp32 [numel], with the sum of the rows that are in `packed`."""
        function = self.compiled(summed_to)
        for at, scale, integers in self._pieces(packed):
            function(out.view(-1, BLOCK)[at], integers, scale, self.bits)

    def _pieces(self, packed: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Piece by piece: which blocks, their scales fp32 [rows, blocks, 1], their integers int8 [rows, blocks, bytes]."""
        rows, count = packed.shape[0], packed.shape[1] // self.nbytes(BLOCK)
        scales = packed[:, : count * _SCALE_BYTES].view(torch.float32).unsqueeze(2)
        integers = packed[:, count * _SCALE_BYTES :].view(torch.int8).unflatten(1, (count, -1))
        each = max(1, self.at_once // BLOCK // rows)
        for start in range(0, count, each):
            at = slice(start, min(start + each, count))
            yield at, scales[:, at], integers[:, at]


class InTwo:
    """An operation that another follows, which `advance` starts when the first has ended; waited for as a `Pending`."""

    def __init__(self, first: Pending, then: Callable[[], Pending]) -> None:
        self._pending, self._then = first, [then]

    def advance(self) -> None:
        """Wait for the first operation and start the second, once."""
        if self._then:
            self._pending.wait()
            self._pending = self._then.pop()()

    def wait(self) -> None:
        """Wait for both."""
        self.advance()
        self._pending.wait()


class QuantizedGather:
    """All-gathers of weights of 8 bits, through buffers of one size from `pool`.  `largest`: numbers gathered at once."""

    def __init__(self, blocks: BlockFormat, pool: BufferPool, largest: int) -> None:
        self._blocks, self._pool, self._numel = blocks, pool, blocks.nbytes(largest) // _SCALE_BYTES

    def start(self, out: Tensor, shard: Tensor, axis: Axis, label: str) -> Pending:
        """As `all_gather`; see [Note: equal weights]."""
        buffer, ranks, at = self._pool.acquire(self._numel, torch.float32), axis.size, axis.index
        packed = buffer.view(torch.uint8)[: ranks * self._blocks.nbytes(shard.numel())].view(ranks, -1)
        mine = packed[at : at + 1]
        try:
            self._blocks.quantize(shard.view(1, -1), mine)
            arrive = all_gather(packed, mine, axis, label).wait
        except BaseException:
            self._pool.release(buffer)
            raise
        return Pending(arrive, partial(self._arrived, buffer, packed, out.view(ranks, -1)))

    def _arrived(self, buffer: Tensor, packed: Tensor, out: Tensor) -> None:
        try:
            self._blocks.dequantize(packed, out)
        finally:
            self._pool.release(buffer)
