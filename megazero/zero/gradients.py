"""From gradients of micro-batches to the reduced gradient of the step, bucket by bucket, while the backward runs.

    backward of one micro-batch      accumulate(w1) accumulate(w0)  -> every slot has come: the round is complete
    stages 0, 1                      rounds add up in the whole buffer; the last one starts the reduction
    stages 2, 3                      each round starts a reduce-scatter; the shards add up; the buffer returns to a pool
                                     (or the whole step adds up in the buffer, and one reduce-scatter follows)

    finish: wait -> sum over replicas of the shard -> sum partial gradients over tp -> sum copies of tied parameters

[Note: one order]  Collectives pair up by their order, so every rank must start the reductions of a chunk in one order,
whichever parameters its micro-batch happens to use.  A complete bucket therefore waits for those before it, and at the end
of a pass what has not come counts as zero.

Volume per step, in parameters Ψ and rounds G: stage 0 all-reduce 2Ψ, stage 1 reduce-scatter Ψ, stages 2 and 3 ΨG or Ψ
(Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending, all_reduce, arriving_elements, reduce_scatter
from megazero.layers.gemm import add_product
from megazero.layers.linear import WeightGradQueue
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, intersect

_REDUCTIONS_IN_FLIGHT = 2  # more would hide no more of the network and hold more buffers
_NORM_BLOCK = 256  # as fast as longer blocks here, and 30 times closer


class _BucketProgress:
    """What has come for one bucket in this step."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.fill(None)
        self.reset()

    def fill(self, full: Tensor | None) -> None:
        """From now on gradients add up here; None gives the buffer away."""
        self.full = full
        self._places: list[Tensor | None] = [None] * len(self.bucket.layout.slots)

    def place(self, slot: int) -> Tensor:
        """A slot's part of the buffer, in the parameter's shape."""
        place = self._places[slot]
        if place is None:
            assert self.full is not None
            at = self.bucket.layout.slots[slot]
            place = self._places[slot] = self.full[at.start : at.stop].view(at.info.shape)
        return place

    def reset(self) -> None:
        count = len(self.bucket.layout.slots)
        self.contributions = [0] * count
        self.untouched = [True] * count  # since the last reduction
        self.complete_rounds = 0
        self.missing = count  # slots that have not come in the current round
        self.launched_rounds = 0
        self.reductions = 0
        self.holds_some = False

    def count(self, slot: int, expected: int) -> None:
        """Note a contribution."""
        if self.contributions[slot] == expected:
            name = self.bucket.layout.slots[slot].info.name
            raise RuntimeError(
                f"gradient of {name} came more than {expected} times in a step of {expected} micro-batches: backward ran "
                "more often than that, or within itself (checkpointing needs use_reentrant=False)"
            )
        self.contributions[slot] += 1
        if self.contributions[slot] == self.complete_rounds + 1:
            self.missing -= 1
            if not self.missing:
                self.complete_rounds += 1
                self.missing = sum(n == self.complete_rounds for n in self.contributions)

    def close(self, round_: int) -> None:
        """What has not come by the end of a round will not come in it."""
        if self.complete_rounds < round_:
            self.contributions = [max(n, round_) for n in self.contributions]
            self.complete_rounds = round_
            self.missing = sum(n == round_ for n in self.contributions)


class _Reduction:
    """One reduction under way, where its result goes, and the buffers that it keeps busy.

    Args:
        pending: the collective.
        bucket: whose gradient it is.
        result: what is to be brought to the bucket's gradient; None where it arrives there by itself.
        adds: add the result instead of replacing the gradient.
        busy: buffers that are free again afterwards.
    """

    def __init__(
        self,
        pending: Pending,
        bucket: Bucket,
        result: Tensor | None = None,
        adds: bool = False,
        busy: Sequence[Tensor] = (),
    ) -> None:
        self.pending, self.bucket, self.result, self.adds, self.busy = pending, bucket, result, adds, busy


class _HostGradientCopies:
    """Gradients on their way from the device to host memory, where offloaded optimizer state is stepped.

    On a CPU the two are one and nothing waits.  On a GPU a copy is added only when later ones are under way, so that the
    host does not wait for the device.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[Tensor, Tensor, Tensor, torch.cuda.Event]] = deque()
        self._free: list[Tensor] = []
        self._copying: set[torch.cuda.Stream] = set()  # a run that offloads nothing never waits for the device here

    def land(self, result: Tensor, gradient: Tensor, adds: bool) -> None:
        """Bring a result to a gradient, wherever it lies."""
        if result.device == gradient.device:
            if adds:
                gradient.add_(result)
            else:
                gradient.copy_(result)
            return
        self._copying.add(torch.cuda.current_stream(result.device))
        if not adds:
            gradient.copy_(result, non_blocking=True)
            return
        fitting = [buffer for buffer in self._free if buffer.numel() >= result.numel() and buffer.dtype == result.dtype]
        whole = fitting[0] if fitting else torch.empty(result.numel(), dtype=result.dtype, pin_memory=True)
        self._free = [buffer for buffer in self._free if buffer is not whole]
        staging = whole[: result.numel()].copy_(result, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((staging, whole, gradient, event))
        self._drain(_REDUCTIONS_IN_FLIGHT)

    def finish(self) -> None:
        """Have everything in place on the host."""
        self._drain(0)
        for stream in self._copying:
            stream.synchronize()
        self._copying.clear()

    def _drain(self, leave: int) -> None:
        while len(self._under_way) > leave:
            staging, whole, gradient, event = self._under_way.popleft()
            event.synchronize()
            gradient.add_(staging)
            self._free.append(whole)


class GradientReducer:
    """Accumulates gradients into buckets and reduces them over dp as soon as they are complete.

    Args:
        buckets: this rank's buckets.
        tp: the axis of partial gradients.
        ties: by logical name of a tied parameter, the ranks that hold a copy.
        every_micro_batch: stages 2 and 3 reduce after each micro-batch; otherwise once per step.
        reduce_dtype: in which gradients travel.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        tp: Axis,
        ties: Mapping[str, Axis],
        *,
        every_micro_batch: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.layout.trains]
        if not self.buckets:
            raise ValueError("no parameter requires a gradient: there is nothing to train on this rank")
        policy = self.buckets[0].policy
        self._shard, self._replica, self._tp, self._ties = policy.shard, policy.replica, tp, ties
        self._device, self._accumulate_dtype, self._reduce_dtype = (
            policy.device,
            policy.accumulate_dtype,
            reduce_dtype,
        )
        self._all_reduces = policy.zero_stage == 0
        self._every_round = every_micro_batch
        rounds = [_BucketProgress(bucket) for bucket in self.buckets]
        self._at = {
            slot.info.name: (of_bucket, index)
            for of_bucket in rounds
            for index, slot in enumerate(of_bucket.bucket.layout.slots)
        }
        # The order in which a backward completes them: a bucket is complete with its first unit's gradients.
        self._order: dict[int, list[_BucketProgress]] = {}
        for one in sorted(rounds, key=lambda one: -one.bucket.layout.unit):
            self._order.setdefault(one.bucket.layout.chunk, []).append(one)
        self._name_of: dict[int, str] = {}
        self._wave = dict.fromkeys(self._order, 0)  # rounds that all buckets of a chunk have launched
        self._cursor = dict.fromkeys(self._order, 0)  # the bucket whose turn it is in the next one
        self._closed = dict.fromkeys(self._order, 0)
        self.last_round = 1
        self.holds = False  # while set, rounds add up where they are
        self._in_flight: deque[_Reduction] = deque()
        self._landings = _HostGradientCopies()
        self._lendable = max(bucket.layout.padded_numel for bucket in self.buckets)
        arriving = arriving_elements(self._lendable, self._shard, self._device)
        self._needs_scratch, self._arriving = arriving > 0, max(arriving, self._lendable // self._shard.size)
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._lent: set[int] = set()  # addresses of what comes back to the pool

    def attach(self, parameters: Mapping[str, nn.Parameter], wgrad_queues: Mapping[str, WeightGradQueue]) -> None:
        """Take every gradient that autograd and `WeightGradQueue` compute for these parameters.

        Args:
            parameters: by qualified name.
            wgrad_queues: by the same names, the queue that takes weight gradients of the parameter's chunk past autograd.
                When the schedule splits backwards, vectors wait with them: alone they would keep every bucket of
                the chunk open.
        """
        for queue in set(wgrad_queues.values()):
            queue.accumulator = self
        for name, parameter in parameters.items():
            if name in self._at:
                self._name_of[id(parameter)] = name
                wgrad_queue = wgrad_queues.get(name) if parameter.dim() == 1 else None
                parameter.register_post_accumulate_grad_hook(partial(self._take, name, wgrad_queue))

    def _take(self, name: str, wgrad_queue: WeightGradQueue | None, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if wgrad_queue is not None and wgrad_queue.defers:
            wgrad_queue.defer(parameter, gradient)
        else:
            self.accumulate(name, gradient)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the last step.  Each parameter is expected once per micro-batch."""
        self._drain(0)
        self._landings.finish()  # of a step that was given up, too: what comes later would be added to this one
        for order in self._order.values():
            for rounds in order:
                if not rounds.bucket.keeps_gradients and rounds.full is not None:
                    self._give_back(rounds.full)
                if micro_batches == 1:  # with more, gradients are there in all forwards but the first
                    rounds.bucket.drop_gradient()
                if rounds.full is not rounds.bucket.full_gradient:
                    rounds.fill(rounds.bucket.full_gradient)
                rounds.reset()
        self._wave = dict.fromkeys(self._order, 0)
        self._cursor = dict.fromkeys(self._order, 0)
        self._closed = dict.fromkeys(self._order, 0)
        self.last_round = micro_batches

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter.

        Args:
            name: qualified name of the parameter.
            gradient: in the parameter's shape and dtype; may be reused by the caller afterwards.
        """
        place, is_first = self._open(name)
        if is_first:
            place.copy_(gradient)
        else:
            place.add_(gradient)
        self._close(name)

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """As `accumulate`, by the parameter itself."""
        self.accumulate(self._name_of[id(weight)], gradient)

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one micro-batch's gradient of a parameter, a sum of a.T @ b, with no copy of it in between.

        Args:
            weight: the parameter, [m, n].
            factors: a and b of each term, [k, m] and [k, n].
        """
        name = self._name_of[id(weight)]
        place, is_first = self._open(name)
        for a, b in factors:
            add_product(place, a, b, is_first=is_first)
            is_first = False
            del a, b  # before the next are computed
        self._close(name)

    def _open(self, name: str) -> tuple[Tensor, bool]:
        """Where a gradient belongs, and whether it is the first to come there since the last reduction."""
        rounds, index = self._at[name]
        rounds.count(index, self.last_round)
        if rounds.full is None:
            rounds.fill(self._lend_for(rounds))
        is_first, rounds.untouched[index] = rounds.untouched[index], False
        return rounds.place(index), is_first

    def _close(self, name: str) -> None:
        """Hear that it has been written."""
        rounds, _ = self._at[name]
        if rounds.complete_rounds > rounds.launched_rounds:
            self._launch(rounds.bucket.layout.chunk)

    def close_pass(self, chunk: int) -> None:
        """Hear that the weight gradients of one micro-batch of a chunk have all come; see [Note: one order]."""
        if chunk not in self._order:
            return
        self._closed[chunk] += 1
        for rounds in self._order[chunk]:
            rounds.close(self._closed[chunk])
        self._launch(chunk)

    def _launch(self, chunk: int) -> None:
        """Reduce what is complete, in the one order; a bucket may have been several rounds ahead of the others."""
        order = self._order[chunk]
        while self._wave[chunk] < self.last_round:
            rounds = order[self._cursor[chunk]]
            if rounds.launched_rounds <= self._wave[chunk]:
                if rounds.complete_rounds <= self._wave[chunk]:
                    return
                rounds.launched_rounds = rounds.complete_rounds
                is_last = rounds.complete_rounds == self.last_round
                reduces_now = self._every_round and not rounds.bucket.keeps_gradients
                if not self.holds and (reduces_now or is_last):
                    self._reduce(rounds)
                else:
                    rounds.holds_some = True  # on every rank, whichever parameters it has used
            self._cursor[chunk] = (self._cursor[chunk] + 1) % len(order)
            self._wave[chunk] += self._cursor[chunk] == 0

    def finish(self) -> None:
        """Make `bucket.gradient` of every bucket the whole step's, including parameters that never came."""
        for chunk, order in self._order.items():
            for rounds in order:
                rounds.close(self.last_round)
            self._launch(chunk)
            for rounds in order:
                if rounds.reductions == 0 or rounds.holds_some:
                    self._reduce(rounds)
        self._drain(0)
        self._landings.finish()
        for pending in [all_reduce(bucket.gradient, self._replica) for bucket in self.buckets]:
            pending.wait()
        self._sum_partial_over_tp()
        self._sum_tied()

    def _reduce(self, rounds: _BucketProgress) -> None:
        bucket = rounds.bucket
        if rounds.full is None:
            rounds.fill(self._lend_for(rounds))
        assert rounds.full is not None
        full = rounds.full[: bucket.layout.padded_numel]
        for slot, untouched in zip(bucket.layout.slots, rounds.untouched, strict=True):
            if untouched:
                full[slot.start : slot.stop].zero_()
        full[bucket.layout.numel :].zero_()
        rounds.untouched = [True] * len(rounds.untouched)
        first = rounds.reductions == 0
        rounds.reductions += 1
        rounds.holds_some = False
        self._drain(_REDUCTIONS_IN_FLIGHT - 1)
        self._in_flight.append(self._start(rounds, full, first))

    def _start(self, rounds: _BucketProgress, full: Tensor, first: bool) -> _Reduction:
        bucket = rounds.bucket
        busy = []
        if not bucket.keeps_gradients and (lent := rounds.full) is not None:
            busy.append(lent)
            rounds.fill(None)
        wire = full
        if self._reduce_dtype != full.dtype and self._shard.size > 1:
            sent = self._lend(self._reduce_dtype, self._lendable)
            busy.append(sent)
            wire = sent[: full.numel()].copy_(full)
        if self._all_reduces or self._shard.size == 1:
            pending = all_reduce(wire, self._shard)
            arrives = wire is full and bucket.reduces_in_place
            result = None if arrives else wire[bucket.owned.start : bucket.owned.stop]
            return _Reduction(pending, bucket, result, not first, busy)
        gradient = bucket.gradient
        arrives = first and gradient.dtype == wire.dtype and gradient.device == wire.device
        scratch = None
        if not arrives or self._needs_scratch:
            scratch = self._lend(self._reduce_dtype, self._arriving)
            busy.append(scratch)
        result = gradient if scratch is None or arrives else scratch[: gradient.numel()]
        pending = reduce_scatter(result, wire, self._shard, scratch)
        return _Reduction(pending, bucket, None if arrives else result, not first, busy)

    def _lend_for(self, rounds: _BucketProgress) -> Tensor:
        """A buffer for a bucket's gradients: from the pool where it is reduced soon, else of its size, for this step."""
        if rounds.bucket.keeps_gradients:
            return rounds.bucket.take_gradient()
        if self._every_round and not self.holds:
            return self._lend(self._accumulate_dtype, self._lendable)
        return torch.empty(rounds.bucket.layout.padded_numel, dtype=self._accumulate_dtype, device=self._device)

    def _give_back(self, buffer: Tensor) -> None:
        if buffer.data_ptr() in self._lent:
            self._lent.discard(buffer.data_ptr())
            self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)

    def _lend(self, dtype: torch.dtype, numel: int) -> Tensor:
        """A buffer for the gradients of one round in the largest bucket, or for what arrives of it from other ranks."""
        free = self._free.get((dtype, numel))
        buffer = free.pop() if free else torch.empty(numel, dtype=dtype, device=self._device)
        self._lent.add(buffer.data_ptr())
        return buffer

    def _drain(self, leave: int) -> None:
        """Finish reductions, oldest first, until `leave` are under way."""
        while len(self._in_flight) > leave:
            reduction = self._in_flight.popleft()
            reduction.pending.wait()
            if reduction.result is not None:
                self._landings.land(reduction.result, reduction.bucket.gradient, reduction.adds)
            for buffer in reduction.busy:
                self._give_back(buffer)

    def _sum_tied(self) -> None:
        """Sum the gradients of all copies of each tied parameter, on this rank and on others."""
        copies: dict[str, list[Tensor]] = {}
        for bucket in self.buckets:
            if bucket.layout.tied:
                copies.setdefault(tie_of(bucket), []).append(bucket.gradient)
        for name in sorted(copies):
            # On the device, wherever each rank keeps its own copies: all must meet over one backend.
            total = copies[name][0].to(self._device)  # itself, where it lies there
            for other in copies[name][1:]:
                total.add_(other.to(self._device))
            if name in self._ties:
                all_reduce(total, self._ties[name]).wait()
            for copy in copies[name]:
                if copy is not total:
                    copy.copy_(total)

    def _sum_partial_over_tp(self) -> None:
        parts = [
            bucket.owned_part(bucket.gradient, run)
            for bucket in self.buckets
            for partial, whole in bucket.layout.runs(lambda info: info.spec.sum_over_tp)
            if partial and (run := intersect(whole, bucket.owned)) is not None
        ]
        if not parts or self._tp.size == 1:
            return
        flat = torch.cat([part.to(self._device) for part in parts])  # offloaded ones lie on the host
        all_reduce(flat, self._tp).wait()
        for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed)

    def square_sum(self) -> Tensor:
        """fp64 scalar: this rank's share of the squared gradient norm.

        Over all ranks every logical element is counted once: each rank its own part of the shards, parameters that every TP
        rank holds on the first of them, the first copy of a tied parameter.
        """
        parts = [
            bucket.owned_part(bucket.gradient, run)
            for bucket in self.buckets
            if not bucket.is_second_copy
            for replicated, whole in bucket.layout.runs(lambda info: info.spec.split is None)
            if (run := intersect(whole, bucket.counted)) is not None and not (replicated and self._tp.index > 0)
        ]
        return square_sum(parts, self._device)

    def working_bytes(self) -> int:
        """Bytes of the bucket-size buffers through which gradients pass on their way to the shards."""
        every = [rounds for order in self._order.values() for rounds in order]
        filling = [one.full for one in every if one.full is not None and not one.bucket.keeps_gradients]
        busy = [buffer for reduction in self._in_flight for buffer in reduction.busy]
        free = [buffer for buffers in self._free.values() for buffer in buffers]
        return sum(buffer.nbytes for buffer in [*free, *filling, *busy])


def tie_of(bucket: Bucket) -> str:
    """The logical name that all copies of a tied bucket's parameter share."""
    return bucket.layout.slots[0].info.spec.sections[0].name


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
