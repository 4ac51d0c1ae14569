"""How gradients are summed over ranks: each bucket while the backward runs, and the sums that end a step.

full [n * part] --reduce_dtype--> all-reduce (stage 0) or reduce-scatter over the shard axis --> result [owned]
                                  or reduce-scatter at stage 0, of buckets whose gradients are
                                  gathered behind the next forward                               --> result [shard]
full [n * part] --quantized-----> all-to-all over the shard axis, summed in fp32 -------------> result [owned]
result --set or add--> bucket.gradient, on the device, or on the host where the optimizer state is offloaded
the last result of a step -> summed over the ranks that hold the same shard (`replica_sums`)
reduced shards -> partial gradients over tp -> copies of tied parameters -> square_sum
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, all_reduce, all_to_all, arriving_elements, reduce_scatter, runs_by_itself
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, Interval, intersect
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.quantized import BlockFormat, InTwo, noise_of
from megazero.zero.replica_sums import ReplicaSums

_NORM_BLOCK = 256  # as fast as longer blocks here, and 30 times closer
_IN_FLIGHT = 2  # where results are copied to the host, or this rank must help: more would hide no more


class _Reduction(NamedTuple):
    pending: Pending | InTwo
    gradient: Tensor
    bucket: Bucket
    result: Tensor | None  # still to be copied to the bucket's gradient; None where the collective writes there
    adds: bool
    is_last: bool  # of this part in the step
    buffers: Sequence[Tensor]  # to be released afterwards


class ReductionQueue:
    """Starts the reductions of buckets, and finishes them in the order of their start.

    As many are under way as have buffers: on a slow network a backward that waited for the first would stand still.  Where
    sums over replicas follow, two are: each sum begins while the backward runs.

    The queue also lends the buffers that gradients come to: all of one size, so that each serves any part of any bucket.
    Before it makes one more than two buckets' worth, it finishes reductions, whose buffers are then free.  A bucket's worth
    is `bucket_bytes`, or the largest part of a bucket.

    Attributes:
        pool: all working buffers.
        most_bytes: their limit: what is more, while several parts fill at once, is freed at the end of the step.
        replicas: sums what is reduced over the ranks that hold the same shards.
        step: updates so far; it keys the random numbers that round quantized gradients.
    """

    def __init__(self, buckets: Sequence[Bucket], reduce_dtype: torch.dtype, bucket_bytes: int = 0) -> None:
        policy, self.step = buckets[0].policy, 0
        self._axis, self._all_reduces = policy.shard, policy.zero_stage == 0 or policy.shard.size == 1
        self._blocks = (
            BlockFormat.on(policy, policy.gradient_bits) if policy.gradient_bits and not self._all_reduces else None
        )
        self._dtype, self._kept_dtype = reduce_dtype, policy.accumulate_dtype
        self.pool = BufferPool(policy.device, policy.arena)
        lengths = [part.stop - part.start for bucket in buckets for part in bucket.gradient_parts]
        self._largest = max(lengths) * self._axis.size
        self._host, self._hosts = policy.levels or (Axis("host"), policy.shard)  # of quantized gradients
        self._sender = policy.replica.index * self._hosts.size + self._hosts.index  # groups round on their own
        self._newest: InTwo | None = None
        scatters = self._axis if self._blocks is None else self._host
        all_reduced = self._all_reduces and not any(bucket.gathers_gradients for bucket in buckets)
        self._scratch_numel = 0 if all_reduced else arriving_elements(self._largest, scatters)
        shared = [part.stop - part.start for one in buckets if len(one.layout.slots) > 1 for part in one.gradient_parts]
        self._usual = max(shared, default=max(lengths)) * self._axis.size
        is_cast = reduce_dtype != policy.accumulate_dtype and self._axis.size > 1
        sent = (is_cast * self._largest + self._scratch_numel) * reduce_dtype.itemsize  # beside what has filled
        if self._blocks is not None:  # within the host; what leaves, what arrives, and their sum
            within = (self._largest if policy.levels else 0) + self._scratch_numel + self._largest // self._axis.size
            sent = within * torch.float32.itemsize + 2 * self._blocks.nbytes(self._largest // self._host.size)
        kept, itemsize = policy.accumulate_dtype.itemsize, max(reduce_dtype.itemsize, policy.accumulate_dtype.itemsize)
        self._fills = not all(bucket.keeps_gradients for bucket in buckets)
        stays = all(bucket.master.location == "device" for bucket in buckets)
        waits = policy.replica.size > 1  # a sum over replicas starts when a reduction has ended
        self._most_in_flight = sys.maxsize if stays and not waits and runs_by_itself(self._axis) else _IN_FLIGHT
        self.most_bytes = _IN_FLIGHT * sent
        if sent and self._most_in_flight > _IN_FLIGHT:
            self.most_bytes = max(self.most_bytes, 2 * bucket_bytes)
        if self._fills:
            self.most_bytes = max(2 * max(bucket_bytes, self._largest * itemsize), self._largest * kept + sent)
        self._in_flight: deque[_Reduction] = deque()
        self._host_copies = HostGradientCopies()
        self.replicas = ReplicaSums(buckets, reduce_dtype)

    def buffer(self, numel: int | None = None) -> Tensor:
        """Memory for the gradients of a part; `numel`: of a size of its own, for gradients that stay until the step ends."""
        if numel is not None:
            return self.pool.acquire(numel, self._kept_dtype, reusable=False)
        return self._acquire(self._largest, self._kept_dtype)

    def _acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer for a part of a bucket."""
        return self._acquire_exactly(self._shared(numel), dtype)

    def _shared(self, numel: int) -> int:
        """Elements of a buffer for a part; where gradients stay in their buckets, it need not serve any other part."""
        return self._largest if self._fills else max(numel, self._usual)

    def _acquire_exactly(self, numel: int, dtype: torch.dtype) -> Tensor:
        while self._in_flight and self.pool.bytes_after(numel, dtype) > self.most_bytes:
            self._finish_all_but(len(self._in_flight) - 1)
        if self.pool.bytes_after(numel, dtype) > self.most_bytes:  # what is free has another size
            self.pool.free_above(self.most_bytes - numel * dtype.itemsize)
        return self.pool.acquire(numel, dtype)

    def start(self, bucket: Bucket, part: Interval, buffer: Tensor, *, reduced: int, is_last: bool) -> None:
        """Start the reduction of a part of a bucket: its `gradient` is replaced by the result, or the result is added to it.

        `buffer` begins with the part's whole gradients; it is released afterwards unless the bucket keeps it.  `reduced`:
        micro-batches of this step whose sum is in `gradient`.  `is_last`: no other reduction of the part follows in this
        step.
        """
        self._finish_all_but(self._most_in_flight - 1)
        full = buffer[: (part.stop - part.start) * bucket.layout.shards]
        is_all = full.numel() == bucket.layout.padded_numel
        gradient = bucket.gradient if is_all else bucket.gradient[part.start : part.stop]
        gradient = bucket.gradient_shard if bucket.gathers_gradients else gradient
        lent = [] if bucket.keeps_gradients else [buffer]
        send = self._send if self._blocks is None else self._send_blocks
        pending, result, buffers = send(bucket, part, full, gradient, lent, reduced)
        self._in_flight.append(_Reduction(pending, gradient, bucket, result, reduced > 0, is_last, buffers))

    def _send(
        self, bucket: Bucket, _: Interval, full: Tensor, gradient: Tensor, buffers: list[Tensor], reduced: int
    ) -> tuple[Pending | InTwo, Tensor | None, list[Tensor]]:
        """What is under way, its result if it must be copied, and the buffers that it needs."""
        sent, result = full, None
        if self._dtype != full.dtype and self._axis.size > 1:
            narrow = self._acquire(full.numel(), self._dtype)
            sent = narrow[: full.numel()].copy_(full)
            for one in buffers:  # what comes next on this device comes after the copy
                self.pool.release(one)
            buffers = [narrow]
        if self._all_reduces and not bucket.gathers_gradients:
            pending = all_reduce(sent, self._axis)
            return pending, sent if sent is not full or not bucket.reduces_in_place else None, buffers
        if reduced or gradient.dtype != sent.dtype or gradient.device != sent.device:
            result = sent.view(self._axis.size, -1)[self._axis.index]  # which no other rank needs any more
        scratch = None
        if self._scratch_numel:
            scratch = self._acquire(full.numel(), self._dtype)
            buffers.append(scratch)
        return reduce_scatter(gradient if result is None else result, sent, self._axis, scratch), result, buffers

    def _send_blocks(
        self, bucket: Bucket, part: Interval, full: Tensor, gradient: Tensor, buffers: list[Tensor], reduced: int
    ) -> tuple[Pending | InTwo, Tensor | None, list[Tensor]]:
        """As `_send`, quantized; see `quantized`, [Note: one sum]."""
        blocks, host, hosts, usual = self._blocks, self._host, self._hosts, self._shared(full.numel())
        assert blocks is not None
        if self._newest is not None:
            self._newest.advance()
        held = [self._acquire_exactly(blocks.nbytes(usual // host.size) // 4, torch.float32) for _ in range(2)]
        nbytes = blocks.nbytes(full.numel() // host.size)
        sent, arrived = (one.view(torch.uint8)[:nbytes].view(hosts.size, -1) for one in held)
        result, shard = None, bucket.layout.shard_numel
        if reduced or gradient.device != full.device:
            held.append(self._acquire_exactly(usual // self._axis.size, torch.float32))
            result = held[-1][: gradient.numel()]
        first = part.start + host.index * shard
        noise = noise_of(self.step, reduced, self._sender, bucket.layout.name, first, host.size * shard)
        add_up = partial(blocks.sum, arrived, gradient if result is None else result)

        def send(mine: Tensor) -> Pending:
            blocks.quantize(mine.view(hosts.size, -1), sent, noise)
            return Pending(all_to_all(arrived, sent, hosts).wait, add_up)

        if host.size == 1:
            pending: Pending | InTwo = send(full)
        else:
            of_hosts = full.view(hosts.size, host.size, -1).transpose(0, 1)
            held.append(self._acquire(full.numel(), torch.float32))
            whole = held[-1][: full.numel()].view(host.size, -1)
            whole.view(of_hosts.shape).copy_(of_hosts)
            mine, scratch = whole[host.index], None
            if self._scratch_numel:
                held.append(scratch := self._acquire(full.numel(), torch.float32))
            summed = reduce_scatter(mine, whole.view(-1), host, scratch)
            pending = self._newest = InTwo(summed, partial(send, mine))
        for one in buffers:  # what comes next on this device comes after this
            self.pool.release(one)
        return pending, result, held

    def finish(self) -> None:
        """Wait for all reductions, and for their results on the host."""
        self._finish_all_but(0)
        self._host_copies.finish()
        self.replicas.finish()
        self.pool.free_above(self.most_bytes)

    def begin_step(self, step: int) -> None:
        """Forget the last step, after its reductions: those of one that was given up must not be added to this one's."""
        self.finish()
        self.step = step
        self.replicas.begin_step()

    def reopen(self) -> None:
        """Let further reductions be added to those that were the last."""
        self.finish()
        self.replicas.reopen()

    def _finish_all_but(self, count: int) -> None:
        while len(self._in_flight) > count:
            reduction = self._in_flight[0]
            reduction.pending.wait()  # one that is interrupted is waited for again, before its buffer is filled anew
            self._in_flight.popleft()
            if reduction.result is not None:
                self._host_copies.start(reduction.result, reduction.gradient, adds=reduction.adds)
            for buffer in reduction.buffers:
                self.pool.release(buffer)
            if reduction.is_last:
                self.replicas.start(reduction.gradient)


class HostGradientCopies:
    """Copies results to where the optimizer steps them; from a GPU to the host they run asynchronously.

    A copy that adds goes through page-locked memory.  It is added only when later copies are under way, so that the host
    does not wait for the device.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[Tensor, Tensor, torch.cuda.Event]] = deque()  # staging, gradient, copied
        self._streams: set[torch.cuda.Stream] = set()  # a run that offloads nothing never waits for the device here
        self._pool = BufferPool(torch.device("cpu"), pinned=True)

    def start(self, result: Tensor, gradient: Tensor, *, adds: bool) -> None:
        """Set a gradient to a result, or add the result to it, wherever the gradient lies."""
        if result.device == gradient.device:
            if adds:
                gradient.add_(result)
            else:
                gradient.copy_(result)
            return
        stream = torch.cuda.current_stream(result.device)
        self._streams.add(stream)
        if not adds:
            gradient.copy_(result, non_blocking=True)
            return
        staging = self._pool.acquire(result.numel(), result.dtype, or_larger=True)
        staging[: result.numel()].copy_(result, non_blocking=True)
        self._under_way.append((staging, gradient, stream.record_event()))
        self._add_all_but(_IN_FLIGHT)

    def finish(self) -> None:
        """Wait until every gradient on the host is complete."""
        self._add_all_but(0)
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()

    def _add_all_but(self, count: int) -> None:
        while len(self._under_way) > count:
            staging, gradient, copied = self._under_way.popleft()
            copied.synchronize()
            gradient.add_(staging[: gradient.numel()])
            self._pool.release(staging)


def sum_partial_over_tp(buckets: Sequence[Bucket], tp: Axis) -> None:
    """Sum the gradients of which every tp rank has computed only a part."""
    parts = [
        bucket.owned_part(bucket.gradient, run)
        for bucket in buckets
        for partial, whole in bucket.layout.intervals(lambda info: info.spec.sum_over_tp)
        if partial and (run := intersect(whole, bucket.owned)) is not None
    ]
    if not parts or tp.size == 1:
        return
    flat = torch.cat([part.to(buckets[0].policy.device) for part in parts])  # offloaded ones lie on the host
    all_reduce(flat, tp).wait()
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed)


def sum_tied(buckets: Sequence[Bucket], ties: Mapping[str, Axis]) -> None:
    """Sum the gradients of all copies of each tied parameter, on this rank and on those of `ties`, by logical name."""
    copies: dict[str, list[Tensor]] = {}
    for bucket in buckets:
        if bucket.layout.tied:
            copies.setdefault(bucket.layout.tie, []).append(bucket.gradient)
    for name in sorted(copies):
        # On the device, wherever each rank's own copies lie: all ranks must use one backend.
        total = copies[name][0].to(buckets[0].policy.device)  # itself, where it lies there
        for other in copies[name][1:]:
            total.add_(other.to(total.device))
        if name in ties:
            all_reduce(total, ties[name]).wait()
        for copy in copies[name]:
            if copy is not total:
                copy.copy_(total)


def gradient_square_sum(buckets: Sequence[Bucket], tp: Axis) -> Tensor:
    """fp64 scalar: this rank's share of the squared gradient norm.

    Over all ranks every logical element is counted once: each rank counts its own part of the shards, the first tp rank
    the parameters that every one of them holds, and the first copy of a tied parameter stands for all.
    """
    parts = [
        bucket.owned_part(bucket.gradient, run)
        for bucket in buckets
        if not bucket.is_duplicate
        for replicated, whole in bucket.layout.intervals(lambda info: info.spec.split is None)
        if (run := intersect(whole, bucket.counted)) is not None and not (replicated and tp.index > 0)
    ]
    return square_sum(parts, buckets[0].policy.device)


def square_sum(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """fp64 sum of squares of flat fp32 tensors, in blocks: one long fp32 sum would lose digits.  A scalar on `device`.

    Two kernels a part and a few in all: a GPU would wait for the launches of more.
    """
    norms: dict[torch.device, list[Tensor]] = {device: []}
    for part in parts:
        blocks = part.numel() // _NORM_BLOCK
        whole, rest = part.split([blocks * _NORM_BLOCK, part.numel() - blocks * _NORM_BLOCK])
        here = norms.setdefault(part.device, [])
        here += [torch.linalg.vector_norm(whole.view(blocks, _NORM_BLOCK), dim=1)] if blocks else []
        here += [torch.linalg.vector_norm(rest, dim=0, keepdim=True)] if rest.numel() else []
    sums = [torch.cat(here).double().square().sum().to(device) for here in norms.values() if here]
    return sum(sums, torch.zeros((), dtype=torch.float64, device=device))
