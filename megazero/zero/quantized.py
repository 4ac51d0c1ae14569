"""Weights and gradients that are sent in blocks of 8 or 4 bits (ZeRO++: Wang et al. 2023, sections 3.1 and 3.3).

    numbers   | block of 256           | block of 256           |
    packed    [ scale 0 | scale 1 | 256 integers | 256 integers ]      bytes = numbers * bits / 8 + 4 * blocks

    scale = max |x| of the block / (2^(bits - 1) - 1)       in fp32: a loss scale makes gradients large
    x     = scale * integer, +- scale / 2                   weights: rounded to nearest
                             +- scale, unbiased             gradients: rounded up or down at random

A block with an inf or a nan contains no finite number afterwards, so overflows are detected as without quantization.

[Note: equal weights]  Every rank computes with the dequantized weights, also for its own shard.  The shard itself, from
which the master weights are updated or which is the master, keeps its precision.

[Note: blocks]  Blocks begin at multiples of 256 elements of a bucket.  So do shards, parameters that are split over tp,
and parameters whose gradients are summed over tp afterwards (`bucket`).  So no block spans two shards, and parameters
that all tp ranks hold have the same blocks, integers and gradients on each of them.

[Note: one sum]  A gradient is sent once, by an all-to-all, and summed in fp32.  If there are several hosts with several
ranks each, the ranks of a host first sum their gradients without quantization, so that only one of them sends an
element to each other host:

    full [hosts, ranks per host, shard] --reduce-scatter within the host--> [hosts, shard] --all-to-all--> [shard]

The second operation starts when the next bucket is reduced, while the backward continues.  The random numbers are a
function of step, micro-batch, sender, bucket and element, so a resumed run gives the same bits as an uninterrupted one.

[Note: passes over memory]  torch's operations read and write a number about twenty times, in slices that fit a CPU's
caches.  A run that compiles its blocks also compiles these functions: one kernel reads numbers and writes integers, one
kernel reads them back, in a single slice of any size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather, all_to_all, arriving_elements
from megazero.layers.counter_rng import derive_key, random_bits
from megazero.parallel_state import Axis
from megazero.zero.bucket import Landing
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.reductions import Reduction, ReductionQueue, ReductionTask
from megazero.zero.sharding import BLOCK, Placement, ShardingPolicy

WEIGHT_BITS = 8
_SCALE_BYTES = 4
_DRAWS = 4  # 16-bit numbers in a random word


@dataclass(frozen=True)
class Noise:
    """Random numbers for the stochastic rounding of the rows of a bucket.

    Element i of row r uses number `first` + r * `stride` + i of the random sequence of `key`.
    """

    key: int
    first: int
    stride: int

    def words(self, rows: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the key, and for each row the random word of its element `start`, [rows, 1].

        `start`, `first` and `stride` must be multiples of a block.
        """
        first = torch.arange(rows, device=device).mul_(self.stride // _DRAWS).add_((self.first + start) // _DRAWS)
        return torch.full((), self.key, device=device), first.unsqueeze(1)


def noise_of(step: int, round_: int, sender: int, bucket: str, first: int, stride: int) -> Noise:
    """Return the rounding noise of a bucket that rank `sender` of an axis sends in micro-batch `round_` of a step."""
    return Noise(derive_key(step, f"rounding of {bucket} in {round_} by {sender}"), first, stride)


def rounded(blocks: Tensor, words: tuple[Tensor, Tensor] | None, integers: Tensor, bits: int) -> Tensor:
    """Quantize `blocks` into `integers` and return the scales.

    Args:
        blocks: [rows, blocks, 256].
        words: see `Noise`; None: round to nearest.
        integers: [rows, blocks, bytes].

    Returns: fp32 [rows, blocks, 1].
    """
    most, blocks = 127 if bits == 8 else 7, blocks.float()
    largest = blocks.abs().amax(dim=2, keepdim=True)
    scale = (largest / most).clamp_(min=torch.finfo(torch.float32).tiny)  # a nan stays a nan
    ratio = blocks / scale
    if words is None:
        ratio.round_()
    else:
        key, first = words
        drawn = random_bits(key, first + torch.arange(ratio[0].numel() // _DRAWS, device=ratio.device))
        # the random numbers are above 0 and below 1
        ratio.add_(drawn.view(torch.int16).float().add_(2**15 + 0.5).mul_(2.0**-16).view_as(ratio)).floor_()
    ratio.clamp_(-most, most)
    if bits == 8:
        integers.copy_(ratio)
    else:
        low, high = ratio.to(torch.int8).chunk(2, dim=2)
        integers.copy_(high << 4 | low & 15)
    return scale


def restored(integers: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the dequantized numbers, fp32 [rows, blocks, 256]."""
    # shifts of int8 extend the sign
    return (integers if bits == 8 else torch.cat([integers << 4 >> 4, integers >> 4], dim=2)) * scale


def restored_to(out: Tensor, integers: Tensor, scale: Tensor, bits: int) -> None:
    """Write the dequantized numbers to `out`, [rows, blocks, 256]."""
    out.copy_(restored(integers, scale, bits))


def summed_to(out: Tensor, integers: Tensor, scale: Tensor, bits: int) -> None:
    """Write the sum of the dequantized rows to `out`, fp32 [blocks, 256]."""
    torch.sum(restored(integers, scale, bits), dim=0, out=out)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once for all sizes, since buckets have many different sizes."""
    return torch.compile(function, dynamic=True)


@dataclass(frozen=True)
class BlockFormat:
    """Packs and unpacks rows of numbers, [rows, numel], one row for each rank.  They may have any floating-point type;
    numel is a multiple of a block.

    Args:
        bits: size of a packed number, 4 or 8.
        at_once: number of elements to process at a time, about; it bounds temporary memory.
        compiled: compiles a function, or returns it unchanged; see [Note: passes over memory].
    """

    bits: int
    at_once: int = 2**18
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function

    @classmethod
    def on(cls, policy: ShardingPolicy, bits: int) -> BlockFormat:
        """Return the format for the policy's device.  A GPU processes larger slices at a time, since every kernel launch
        takes microseconds.
        """
        if policy.compiles:
            return cls(bits, sys.maxsize, _compiled)
        return cls(bits, 2**18 if policy.on_cpu else 2**22)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` packed numbers."""
        return numel * self.bits // 8 + numel // BLOCK * _SCALE_BYTES

    def quantize(self, x: Tensor, packed: Tensor, noise: Noise | None = None) -> None:
        """Pack x into `packed`, uint8 [rows, nbytes].  Without `noise`, round to nearest."""
        function = self.compiled(rounded)
        for at, scale, integers in self._slices(packed):
            words = None if noise is None else noise.words(x.shape[0], at.start * BLOCK, x.device)
            scale.copy_(function(x.unflatten(1, (-1, BLOCK))[:, at], words, integers, self.bits))

    def dequantize(self, packed: Tensor, out: Tensor) -> None:
        """Unpack `packed` into `out`."""
        function = self.compiled(restored_to)
        for at, scale, integers in self._slices(packed):
            function(out.unflatten(1, (-1, BLOCK))[:, at], integers, scale, self.bits)

    def sum(self, packed: Tensor, out: Tensor) -> None:
        """Write the sum of the rows of `packed` to `out`, fp32 [numel]."""
        function = self.compiled(summed_to)
        for at, scale, integers in self._slices(packed):
            function(out.view(-1, BLOCK)[at], integers, scale, self.bits)

    def _slices(self, packed: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the blocks slice by slice: the slice of blocks, their scales, fp32 [rows, blocks, 1], and their
        integers, int8 [rows, blocks, bytes].
        """
        rows, count = packed.shape[0], packed.shape[1] // self.nbytes(BLOCK)
        scales = packed[:, : count * _SCALE_BYTES].view(torch.float32).unsqueeze(2)
        integers = packed[:, count * _SCALE_BYTES :].view(torch.int8).unflatten(1, (count, -1))
        each = max(1, self.at_once // BLOCK // rows)
        for start in range(0, count, each):
            at = slice(start, min(start + each, count))
            yield at, scales[:, at], integers[:, at]


class InTwo:
    """A `Pending` of two operations.  `advance` or `wait` starts the second one after the first has ended."""

    def __init__(self, first: Pending, then: Callable[[], Pending]) -> None:
        self._pending, self._then = first, [then]

    def advance(self) -> None:
        """Wait for the first operation and start the second.  Further calls do nothing."""
        if self._then:
            self._pending.wait()
            self._pending = self._then.pop()()

    def wait(self) -> None:
        """Wait for both operations."""
        self.advance()
        self._pending.wait()


class QuantizedScatter(Reduction):
    """A `ReduceScatter` that sends gradients as quantized blocks; see [Note: one sum].

    Attributes:
        sender: index of this rank among the ranks that send gradients of its shards.
    """

    def __init__(self, placement: Placement, policy: ShardingPolicy) -> None:
        super().__init__(placement.shard, policy.accumulate_dtype)
        self._blocks = BlockFormat.on(policy, policy.gradient_bits)
        self._host, self._hosts = placement.levels or (Axis("host"), placement.shard)
        self.sender = placement.replica.index * self._hosts.size + self._hosts.index  # each group rounds independently
        self._newest: InTwo | None = None

    def working_bytes(self, numel: int) -> int:
        whole = numel if self._host.size > 1 else 0
        within = whole + arriving_elements(numel, self._host) + numel // self.axis.size
        return within * self.dtype.itemsize + 2 * self._blocks.nbytes(numel // self._host.size)

    def start(self, task: ReductionTask, queue: ReductionQueue) -> None:
        if self._newest is not None:
            self._newest.advance()
        blocks, host, hosts, full = self._blocks, self._host, self._hosts, task.local
        usual, filled = max(full.numel(), queue.plan.smallest_buffer), task.buffers
        task.buffers = [queue.acquire(blocks.nbytes(usual // host.size) // 4, self.dtype) for _ in range(2)]
        nbytes = blocks.nbytes(full.numel() // host.size)
        sent, arrived = (buffer.view(torch.uint8)[:nbytes].view(hosts.size, -1) for buffer in task.buffers)
        if task.reduced or task.bucket.landing is Landing.HOST:
            task.buffers.append(queue.acquire(usual // self.axis.size, self.dtype))
            task.result = task.buffers[-1][: task.gradient.numel()]
        out, shard = task.gradient if task.result is None else task.result, task.bucket.layout.shard_numel
        first = task.elements.start + host.index * shard
        noise = noise_of(queue.step, task.reduced, self.sender, task.bucket.layout.name, first, host.size * shard)

        def send(mine: Tensor) -> Pending:
            blocks.quantize(mine.view(hosts.size, -1), sent, noise)
            return Pending(all_to_all(arrived, sent, hosts).wait, partial(blocks.sum, arrived, out))

        if host.size == 1:
            task.pending = send(full)
        else:
            of_hosts = full.view(hosts.size, host.size, -1).transpose(0, 1)
            whole = self.lend_buffer(task, queue).view(host.size, -1)
            whole.view(of_hosts.shape).copy_(of_hosts)
            mine = whole[host.index]
            summed = self.scatter(task, mine, whole.view(-1), host, queue)
            task.pending = self._newest = InTwo(summed, partial(send, mine))
        queue.pool.release(*filled)  # later work on this device is ordered after this


class QuantizedGather:
    """All-gathers of weights quantized to 8 bits.

    Args:
        pool: provides the buffers, all of the same size.
        largest: most elements that are gathered at once.
    """

    def __init__(self, blocks: BlockFormat, pool: BufferPool, largest: int) -> None:
        self._blocks, self._pool, self._numel = blocks, pool, blocks.nbytes(largest) // _SCALE_BYTES

    def start(self, out: Tensor, shard: Tensor, axis: Axis, label: str) -> Pending:
        """Start an all-gather of quantized weights; arguments as in `all_gather`.  See [Note: equal weights]."""
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
