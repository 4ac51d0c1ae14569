"""From gradients of micro-batches to the reduced gradient of the step, bucket by bucket, while the backward runs.

    backward of one micro-batch      add(w1) add(w0)  -> every parameter of the bucket has come: its round is complete
    stages 0, 1                      rounds add up in the whole buffer; the last one starts the reduction
    stages 2, 3                      each round starts a reduce-scatter; the shards add up; the buffer goes back to the pool
                                     (or the whole step adds up in the buffer, and one reduce-scatter follows)
    finish                           what has not come counts as zero; wait (the sums that follow: `reductions`)

[Note: one order]  Collectives pair up by their order, so every rank must start the reductions of a chunk in one order,
whichever parameters its micro-batch happens to use.  A complete bucket therefore waits for those before it, and at the end
of a pass what has not come counts as zero.

Volume per step, in parameters Ψ and rounds G: stage 0 all-reduce 2Ψ, stage 1 reduce-scatter Ψ, stages 2 and 3 ΨG or Ψ
(Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.layers.gemm import add_product
from megazero.layers.linear import WeightGradQueue
from megazero.zero.bucket import Bucket
from megazero.zero.buffer_pool import BufferPool
from megazero.zero.reductions import ReductionQueue


class BucketGradients:
    """The gradients of one bucket in this step, until they are reduced.

    The bucket's own `full_gradient` is used where it keeps one; otherwise the memory comes from the pool, with
    `shared_numel` elements, which can serve any bucket.

    Attributes:
        complete: rounds of which all gradients have come; a round is one micro-batch.
        launched: rounds whose reduction was started, or left for a later one.
        reduced: rounds that are in `bucket.gradient`, or on their way there.
    """

    def __init__(self, bucket: Bucket, pool: BufferPool, shared_numel: int) -> None:
        self.bucket, self._pool, self._shared_numel = bucket, pool, shared_numel
        self._use(None)
        self.begin_step(frees=False)

    def begin_step(self, *, frees: bool) -> None:
        """Forget all gradients; `frees` lets the bucket free its memory until the first one comes."""
        if not self.bucket.keeps_gradients and self._memory is not None:
            self._pool.release(self._memory)
        if frees:
            self.bucket.free_gradient()
        if self._memory is not self.bucket.full_gradient:
            self._use(self.bucket.full_gradient)
        count = len(self.bucket.layout.slots)
        self._is_empty, self._counts = [True] * count, [0] * count
        self.launched = self.reduced = 0
        self._advance_to(0)

    def _use(self, memory: Tensor | None) -> None:
        slots, self._memory = self.bucket.layout.slots, memory
        self._parts = [] if memory is None else [memory[at.start : at.stop].view(at.info.shape) for at in slots]
        self._is_empty = [True] * len(slots)

    def _advance_to(self, rounds: int) -> None:
        self.complete = rounds
        self._missing = self._counts.count(rounds)  # gradients that have not come in the next round

    def count(self, slot: int, expected: int) -> None:
        """Count a gradient.  Raises: RuntimeError, it came more than `expected` times."""
        if self._counts[slot] == expected:
            raise RuntimeError(
                f"gradient of {self.bucket.layout.slots[slot].info.name} came more than {expected} times in a step of "
                f"{expected} micro-batches: backward ran more often than that, or within itself (checkpointing needs "
                "use_reentrant=False)"
            )
        self._counts[slot] += 1
        if self._counts[slot] == self.complete + 1:
            self._missing -= 1
            if self._missing == 0:
                self._advance_to(self.complete + 1)

    def close(self, rounds: int) -> None:
        """Count what has not come in the first `rounds` rounds as zero."""
        if self.complete < rounds:
            self._counts = [max(count, rounds) for count in self._counts]
            self._advance_to(rounds)

    def open(self, *, is_reduced_soon: bool) -> None:
        """Have memory; what is reduced only at the end of the step gets memory of the bucket's own size."""
        if self._memory is not None:
            return
        if self.bucket.keeps_gradients:
            self._use(self.bucket.allocate_gradient())
        else:
            numel = self._shared_numel if is_reduced_soon else self.bucket.layout.padded_numel
            self._use(self._pool.acquire(numel, self.bucket.policy.accumulate_dtype, reusable=is_reduced_soon))

    def reopen(self) -> None:
        """Let gradients be added to what is reduced already: each rank keeps its own shard of that and counts it once."""
        if self.reduced and self.bucket.reduces_in_place and self._memory is not None:
            own = self.bucket.layout.shard(self.bucket.policy.shard.index)
            self._memory[: own.start].zero_()
            self._memory[own.stop :].zero_()
            self._is_empty, self.reduced = [False] * len(self._is_empty), 0

    def part(self, slot: int) -> tuple[Tensor, bool]:
        """A parameter's part, in its shape, and whether it is empty: to be overwritten, not added to."""
        is_empty, self._is_empty[slot] = self._is_empty[slot], False
        return self._parts[slot], is_empty

    def take(self) -> Tensor:
        """The memory, with zeros in the padding and where no gradient has come; the next gradients overwrite it."""
        memory, layout = self._memory, self.bucket.layout
        assert memory is not None
        for part, is_empty in zip(self._parts, self._is_empty, strict=True):
            if is_empty:
                part.zero_()
        memory[layout.numel : layout.padded_numel].zero_()
        self._is_empty = [True] * len(self._is_empty)
        if not self.bucket.keeps_gradients:  # whoever has taken it releases it
            self._use(None)
        return memory


class _LaunchOrder:
    """The one order in which a chunk's buckets are reduced, round by round: that in which a backward completes them."""

    def __init__(self, buckets: Sequence[BucketGradients]) -> None:
        self.buckets = buckets
        self.begin_step()

    def begin_step(self) -> None:
        """Begin with the first bucket's first round."""
        self._round = self._next = self._passes = 0

    def close_pass(self) -> None:
        """Close the next round of every bucket."""
        self._passes += 1
        self.close(self._passes)

    def close(self, rounds: int) -> None:
        """Count what has not come in the first `rounds` rounds as zero."""
        for one in self.buckets:
            one.close(rounds)

    def due(self, rounds: int) -> Iterator[BucketGradients]:
        """Buckets that are complete and come next, until one is incomplete or `rounds` rounds are launched."""
        while self._round < rounds:
            one = self.buckets[self._next]
            if one.launched <= self._round:  # else it was complete several rounds ahead of the others
                if one.complete <= self._round:
                    return
                one.launched = one.complete
                yield one
            self._next = (self._next + 1) % len(self.buckets)
            self._round += self._next == 0


class GradientReducer:
    """Adds gradients up in buckets, and starts the reduction of a bucket over dp as soon as it is complete.

    Args:
        every_micro_batch: stages 2 and 3 reduce after each micro-batch; otherwise once per step.
        reduce_dtype: in which gradients travel.

    Attributes:
        buckets: those that train.
        pool: the working buffers through which gradients pass on their way to the shards.
        accumulate_only: while set, rounds add up in the buffers and nothing is sent.
        admits: says of a gradient whether it is this step's; those of another model's backward are dropped.  None: all are.
        on_close: called at the end of every micro-batch's backward.
        rounds: how many the step has; the last one starts what is reduced once per step.
    """

    def __init__(
        self, buckets: Sequence[Bucket], every_micro_batch: bool = True, reduce_dtype: torch.dtype = torch.float32
    ) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.layout.trains]
        self.pool = BufferPool(self.buckets[0].policy.device)
        self._reductions = ReductionQueue(self.buckets, reduce_dtype, self.pool)
        self._every_round, self.rounds, self.accumulate_only = every_micro_batch, 1, False
        self.admits: Callable[[Tensor], bool] | None = None
        self.on_close: Callable[[], None] = lambda: None
        largest = max(bucket.layout.padded_numel for bucket in self.buckets)
        # A backward runs the units in reverse; a bucket is complete with the gradients of its first unit.
        order: dict[int, list[BucketGradients]] = {}
        for bucket in sorted(self.buckets, key=lambda bucket: -bucket.layout.unit):
            order.setdefault(bucket.layout.chunk, []).append(BucketGradients(bucket, self.pool, largest))
        self._orders = {chunk: _LaunchOrder(buckets) for chunk, buckets in order.items()}
        self._owner: dict[int, tuple[_LaunchOrder, BucketGradients, int]] = {}  # by identity of a parameter
        self._hooks: list[RemovableHandle] = []

    def attach(self, parameters: Mapping[str, nn.Parameter], wgrad_queues: Mapping[str, WeightGradQueue]) -> None:
        """Take every gradient that autograd and the chunks' queues compute for these parameters, both by qualified name.

        When the schedule splits backwards, vectors wait in the queue, too: alone they would keep every bucket of the chunk
        incomplete.
        """
        for queue in set(wgrad_queues.values()):
            queue.accumulator = self
        for order in self._orders.values():
            for one in order.buckets:
                for index, slot in enumerate(one.bucket.layout.slots):
                    parameter = parameters[slot.info.name]
                    self._owner[id(parameter)] = order, one, index
                    wgrad_queue = wgrad_queues.get(slot.info.name) if parameter.dim() == 1 else None
                    take = partial(self._take, wgrad_queue)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(take))

    def detach(self) -> None:
        """Take no more gradients: autograd leaves them in the parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _take(self, wgrad_queue: WeightGradQueue | None, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or (self.admits is not None and not self.admits(gradient)):
            return
        if wgrad_queue is not None and wgrad_queue.defers:
            wgrad_queue.defer(parameter, gradient)
        else:
            self.add(parameter, gradient)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the last step.  Each parameter is expected once per micro-batch."""
        self._reductions.finish()  # of a step that was given up, too: its results must not be added to this one's
        for order in self._orders.values():
            order.begin_step()
            for one in order.buckets:  # with more, gradients lie there in all forwards but one
                one.begin_step(frees=micro_batches == 1)
        self.rounds = micro_batches

    def reopen(self) -> None:
        """Let one more round follow the last one, whose reductions may have been started."""
        self._reductions.finish()
        for order in self._orders.values():
            for one in order.buckets:
                one.reopen()

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter; its memory may be used again afterwards."""
        part, is_first = self._open(weight)
        if is_first:
            part.copy_(gradient)
        else:
            part.add_(gradient)
        self._launch(weight)

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one micro-batch's gradient of a parameter [m, n], a sum of a.T @ b of [k, m] and [k, n], without a copy."""
        part, is_first = self._open(weight)
        for a, b in factors:
            add_product(part, a, b, is_first=is_first)
            is_first = False
            del a, b  # before the next are computed
        self._launch(weight)

    def close_pass(self, chunk: int) -> None:
        """Count the gradients of one micro-batch of a chunk that have not come as zero; see [Note: one order]."""
        self.on_close()
        if (order := self._orders.get(chunk)) is not None:
            order.close_pass()
            self._reduce_due(order)

    def finish(self) -> None:
        """Have every bucket's gradient summed over the shard axis, including parameters that never came."""
        for order in self._orders.values():
            order.close(self.rounds)
            self._reduce_due(order)
            for one in order.buckets:
                if one.reduced < self.rounds:
                    self._reduce(one)
        self._reductions.finish()

    def _open(self, weight: Tensor) -> tuple[Tensor, bool]:
        """A parameter's part of its bucket's buffer, and whether it is empty."""
        _, one, slot = self._owner[id(weight)]
        one.count(slot, self.rounds)
        one.open(is_reduced_soon=self._every_round and not self.accumulate_only)
        return one.part(slot)

    def _launch(self, weight: Tensor) -> None:
        order, one, _ = self._owner[id(weight)]
        if one.complete > one.launched:
            self._reduce_due(order)

    def _reduce_due(self, order: _LaunchOrder) -> None:
        for one in order.due(self.rounds):
            each_round = self._every_round and not one.bucket.keeps_gradients
            if not self.accumulate_only and (each_round or one.launched == self.rounds):
                self._reduce(one)

    def _reduce(self, one: BucketGradients) -> None:
        one.open(is_reduced_soon=self._every_round and not self.accumulate_only)
        self._reductions.start(one.bucket, one.take(), adds=one.reduced > 0)
        one.reduced = one.complete
