"""Gradients of a step: add up micro-batches bucket by bucket, and start each reduction while the backward is running.

    backward of one micro-batch      add(w1) add(w0)  -> every parameter of the bucket has its gradient: a round ends
    stages 0, 1                      rounds add up in the full buffer; the last round starts the reduction
    stages 2, 3                      each round starts a reduce-scatter; the shards add up; the buffer is released
                                     (or the whole step adds up in the buffer, and one reduce-scatter follows)
    finish                           missing gradients count as zero; wait for all reductions (then sums: `reductions`)

A large bucket is handled chunk by chunk (`sharding`, [Note: bucket chunks]): each chunk is filled and its reduction started
before the next chunk gets memory.

[Note: one order]  Ranks match collectives by their order, so every rank must start the reductions of a virtual stage in
the same order, whichever parameters its micro-batch used.  A complete bucket therefore waits for the buckets before it,
and at the end of a pass missing gradients count as zero.  A zero is reduced like any other value, so no other rank has
to know.  The order is the reverse of the order in which parameters were registered.

Volume per step, in parameters Ψ and rounds G: stage 0 2Ψ, stage 1 reduce-scatter Ψ, stages 2 and 3 ΨG or Ψ
(Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.layers.linear import WeightGradQueue, add_product, product_t
from megazero.zero.bucket import Bucket
from megazero.zero.reduction_plan import reduction_queue
from megazero.zero.reductions import ReductionQueue, ReductionTask
from megazero.zero.sharding import ChunkSlot, Interval, ShardingPolicy

if TYPE_CHECKING:
    from megazero.layers.experts import RowGroups

embedding_dense_backward = torch.ops.aten.embedding_dense_backward


class Accumulation(Enum):
    """How the micro-batches of a step add up in a bucket chunk.  `zero.reduce` chooses between SHARDS and BUFFER."""

    FULL = "full"  # in the bucket's full gradient, which is reduced once
    SHARDS = "micro_batch"  # each micro-batch is reduced at once, and the shards add up
    BUFFER = "step"  # in a lent buffer of the chunk's own size, until the step's only reduction


class ChunkGradients:
    """The gradients of one bucket chunk in the current step, before they are reduced.

    They are stored in the bucket's own `full_gradient` or in a buffer from `reductions`.

    Attributes:
        chunk: the interval of every shard that this chunk covers.
        lands: the elements of the bucket for which this rank gets reduced gradients from this chunk.
        accumulation: how micro-batches add up; changes only between micro-batches.
        chunk_slots: the elements of each parameter that lie in this chunk.
        memory: where the gradients are stored; None until the first gradient arrives.
        is_empty: for each chunk slot, whether its memory has no gradient yet, so that the next one overwrites it.
        counts: number of gradients of each chunk slot received in this step.
        complete: number of rounds (micro-batches) in which every gradient has been received.
        launched: number of rounds for which a reduction was started, or postponed to a later round.
        reduced: number of rounds that `bucket.gradient` contains, or will contain when running reductions end.
    """

    def __init__(self, bucket: Bucket, chunk: Interval, accumulation: Accumulation, reductions: ReductionQueue) -> None:
        self.bucket, self.chunk, self.accumulation, self._reductions = bucket, chunk, accumulation, reductions
        self.chunk_slots = list(bucket.layout.chunk_slots(chunk))
        self._numel = chunk.size * bucket.layout.shards
        borders = [0, *(at for held in self.chunk_slots for at in (held.start, held.stop)), self._numel]
        self._padding = [slice(*ends) for ends in zip(borders[::2], borders[1::2], strict=True) if ends[0] < ends[1]]
        # Of a bucket in several chunks, each lands in elements of this rank's shard.
        at = bucket.owned.start + chunk.start
        self.lands = bucket.owned if self._numel == bucket.layout.padded_numel else Interval(at, at + chunk.size)
        self._use(None)
        self.begin_step()

    def begin_step(self) -> None:
        """Discard all gradients."""
        if self.memory is not self.bucket.full_gradient:
            self._use(self.bucket.full_gradient)
        self.is_empty, self.counts = [True] * len(self.chunk_slots), [0] * len(self.chunk_slots)
        self.launched = self.reduced = 0
        self._advance_to(0)

    def _use(self, memory: Tensor | None) -> None:
        self.memory = memory
        self._views = [] if memory is None else [memory[held.start : held.stop] for held in self.chunk_slots]
        self.is_empty = [True] * len(self.chunk_slots)

    def _advance_to(self, rounds: int) -> None:
        self.complete = rounds
        self._missing = self.counts.count(rounds)  # gradients still missing in the next round

    def count(self, index: int, expected: int) -> None:
        """Count one gradient of a chunk slot.  Raises: RuntimeError: more than `expected` gradients have arrived."""
        if self.counts[index] == expected:
            raise RuntimeError(
                f"gradient of {self.chunk_slots[index].slot.info.name} came more than {expected} times in {expected} "
                "backward passes of a step: backward ran more often than that, or within itself, in a hook or a checkpoint "
                "with use_reentrant=True (megazero.checkpoint runs none)"
            )
        self.counts[index] += 1
        if self.counts[index] == self.complete + 1:
            self._missing -= 1
            if self._missing == 0:
                self._advance_to(self.complete + 1)

    def close(self, rounds: int) -> None:
        """Treat gradients that are still missing in the first `rounds` rounds as zero."""
        if self.complete < rounds:
            self.counts = [max(count, rounds) for count in self.counts]
            self._advance_to(rounds)

    def open(self) -> Tensor:
        """Return the memory for the gradients, and allocate it if necessary."""
        if self.memory is not None:
            return self.memory
        queue, dtype = self._reductions, self.bucket.policy.accumulate_dtype
        if self.accumulation is Accumulation.FULL:
            memory = self.bucket.allocate_gradient()
        elif self.accumulation is Accumulation.SHARDS:
            memory = queue.acquire(queue.plan.smallest_buffer, dtype)
        else:
            memory = queue.pool.acquire(self._numel, dtype, reusable=False)
        self._use(memory)
        return memory

    def view(self, index: int) -> tuple[Tensor, bool]:
        """Return the flat view of a chunk slot, and whether the caller must overwrite it instead of adding to it."""
        is_empty, self.is_empty[index] = self.is_empty[index], False
        return self._views[index], is_empty

    def take(self, rounds: int) -> ReductionTask:
        """Return the gradients to reduce, with zeros in the padding and for missing gradients.

        The next gradients will overwrite the memory.

        Args:
            rounds: number of micro-batches in this step.
        """
        memory = self.open()
        for view, is_empty in zip(self._views, self.is_empty, strict=True):
            if is_empty:
                view.zero_()
        for padding in self._padding:
            memory[padding].zero_()
        gradient, is_last = self.bucket.owned_slice(self.bucket.gradient, self.lands), self.complete == rounds
        task = ReductionTask(self.bucket, self.chunk, memory[: self._numel], gradient, self.reduced, is_last)
        self.reduced = self.complete
        if self.accumulation is Accumulation.FULL:
            self.is_empty = [True] * len(self.is_empty)
        else:
            task.buffers.append(memory)
            self._use(None)
        return task


class LaunchOrder:
    """The fixed order, close to that of the backward, in which the bucket chunks of a virtual stage are reduced in each
    round.

    Attributes:
        passes: number of backward passes of this step that have ended.
    """

    def __init__(self, chunks: Sequence[ChunkGradients]) -> None:
        self.chunks = list(chunks)
        self.begin_step()

    def begin_step(self) -> None:
        """Start again at the first round of the first chunk."""
        self._round = self._next = self.passes = 0

    def close(self, rounds: int) -> None:
        """Treat gradients that are still missing in the first `rounds` rounds as zero."""
        for gradients in self.chunks:
            gradients.close(rounds)

    def due(self, rounds: int) -> Iterator[ChunkGradients]:
        """Yield the chunks that are complete, in order, until the next one is incomplete or `rounds` rounds have been
        launched.
        """
        while self._round < rounds:
            gradients = self.chunks[self._next]
            if gradients.launched <= self._round:  # otherwise it was complete several rounds ahead of the others
                if gradients.complete <= self._round:
                    return
                gradients.launched = gradients.complete
                yield gradients
            self._next = (self._next + 1) % len(self.chunks)
            self._round += self._next == 0


class GradientReducer:
    """Adds up gradients in buckets, and starts the reduction of a bucket over dp as soon as the bucket is complete.

    Args:
        sharded: how micro-batches add up at stages 2 and 3.
        bucket_bytes: `zero.bucket_bytes`; see `reduction_queue`.

    Attributes:
        buckets: the buckets that train.
        rounds: number of micro-batches in this step.  Gradients that are reduced once per step are reduced in the last
            round.
    """

    def __init__(self, policy: ShardingPolicy, buckets: list[Bucket], sharded: Accumulation, bucket_bytes: int) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.layout.trains]
        self.reductions, self.rounds = reduction_queue(policy, self.buckets, bucket_bytes), 1
        # A backward runs the units in reverse, so a bucket is complete when its first unit has its gradients.
        order: dict[int, list[ChunkGradients]] = {}
        for bucket in sorted(self.buckets, key=lambda bucket: -bucket.layout.unit):
            accumulation = Accumulation.FULL if bucket.sums_full else sharded
            chunks = [ChunkGradients(bucket, chunk, accumulation, self.reductions) for chunk in bucket.gradient_chunks]
            # a chunk that holds more than the largest parameter is complete later, so it comes last
            chunks.sort(key=lambda gradients: len(gradients.chunk_slots))
            order.setdefault(bucket.layout.first.virtual_stage, []).extend(chunks)
        self.orders = {virtual_stage: LaunchOrder(chunks) for virtual_stage, chunks in order.items()}
        self.chunks_of: dict[int, list[tuple[LaunchOrder, ChunkGradients, int]]] = {}  # by id() of a parameter
        self.parameters: list[nn.Parameter] = []  # trainable ones
        self._deferring: dict[int, WeightGradQueue | None] = {}  # a vector's queue, by id() of it
        self._hooks: list[RemovableHandle] = []

    def attach(self, parameters: Mapping[str, nn.Parameter], wgrad_queues: Mapping[str, WeightGradQueue]) -> None:
        """Redirect every gradient of these parameters into the buckets, from autograd and from the virtual stages'
        queues.

        When the schedule splits backward passes, the gradients of vectors wait in the queue like those of matrices.
        Otherwise they alone would arrive early and keep every bucket of the virtual stage incomplete.

        Args:
            parameters: by qualified name.
            wgrad_queues: the queue of each parameter's virtual stage, by the same names.
        """
        for queue in set(wgrad_queues.values()):
            queue.accumulator = self
        for order in self.orders.values():
            for gradients in order.chunks:
                for index, chunk_slot in enumerate(gradients.chunk_slots):
                    parameter = parameters[chunk_slot.slot.info.name]
                    if id(parameter) not in self.chunks_of:
                        self.parameters.append(parameter)
                        if parameter.dim() == 1:
                            self._deferring[id(parameter)] = wgrad_queues.get(chunk_slot.slot.info.name)
                        hook = parameter.register_post_accumulate_grad_hook(partial(_hand_over, ref(self)))
                        self._hooks.append(hook)
                    self.chunks_of.setdefault(id(parameter), []).append((order, gradients, index))

    def detach(self) -> None:
        """Stop receiving gradients: autograd leaves them in `parameter.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take(self, parameter: Tensor) -> None:
        """Move the gradient that autograd left in `parameter.grad` into the buckets."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        wgrad_queue = self._deferring.get(id(parameter))
        if wgrad_queue is not None and wgrad_queue.defers:
            wgrad_queue.defer(parameter, gradient)
        else:
            self.add(parameter, gradient.to_dense())  # Embedding(sparse=True) gives a sparse one

    def begin_step(self, micro_batches: int, step: int = 0) -> None:
        """Discard the last step's gradients, and expect one gradient of every parameter per micro-batch.

        `step`: see `ReductionQueue`.
        """
        self.reductions.begin_step(step)
        for parameter in self.parameters:
            parameter.grad = None  # autograd leaves one if a signal ended a backward before the hook
        if micro_batches == 1:  # with more, forwards but the first find gradients there
            for bucket in self.buckets:
                bucket.free_gradient()
        for order in self.orders.values():
            order.begin_step()
            for gradients in order.chunks:
                gradients.begin_step()
        self.rounds = micro_batches

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter.  The caller may reuse the gradient's memory afterwards."""
        for chunk_slot, view, is_first in self._open(weight):
            _add_elements(chunk_slot, view, gradient, is_first=is_first)

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one micro-batch's gradient of a parameter [m, n] without a copy: the sum of a.T @ b over `factors`.

        If `factors` is a list, the chunks of a large weight are computed one after the other, so that only one of them is
        in memory at a time.

        Args:
            factors: pairs of a [k, m] and b [k, n].
        """
        if isinstance(factors, list):
            for opened in self._open(weight):
                for at, (a, b) in enumerate(factors):
                    _add_product(*opened, a, b, at)
            return
        every = list(self._open(weight, launches=False))
        for at, (a, b) in enumerate(factors):
            for opened in every:
                _add_product(*opened, a, b, at)
            del a, b  # free them before the next pair is computed
        self._launch(weight)

    def add_stacked(self, weight: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> None:
        """Add one micro-batch's gradient of stacked expert matrices [experts * m, n]: a.T @ b over the rows of each
        expert.
        """
        whole = None
        for chunk_slot, view, is_first in self._open(weight):
            if chunk_slot.is_whole:
                groups.add_products(view.view(-1, a.shape[1], b.shape[1]), a, b, is_first=is_first)
                continue
            whole = groups.sum_products(a, b) if whole is None else whole
            _add_elements(chunk_slot, view, whole, is_first=is_first)

    def add_rows(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of some rows of a parameter [m, n].

        Args:
            rows: int64 [k], indices of the rows.
            gradient: [k, n].
        """
        for chunk_slot, view, is_first in self._open(weight):
            if chunk_slot.is_whole or chunk_slot.rows is None:
                dense = embedding_dense_backward(gradient, rows, weight.shape[0], -1, False)
                _add_elements(chunk_slot, view, dense, is_first=is_first)
                continue
            at, count = chunk_slot.row_in_buffer(rows)
            dense = embedding_dense_backward(gradient, at, count + 1, count, False)[:count]
            (view.copy_ if is_first else view.add_)(dense.view(-1))

    def close_pass(self, virtual_stage: int) -> None:
        """End one micro-batch of a virtual stage, and treat its missing gradients as zero; see [Note: one order]."""
        if (order := self.orders.get(virtual_stage)) is not None:
            order.passes += 1
            order.close(order.passes)
            self.reduce_due(order)

    def finish(self) -> None:
        """Reduce every remaining bucket over all ranks that share it, and wait for the results.  Parameters without a
        gradient count as zero.
        """
        for order in self.orders.values():
            order.close(self.rounds)
            self.reduce_due(order)
            for gradients in order.chunks:
                if gradients.reduced < self.rounds:
                    self.reductions.start(gradients.take(self.rounds))
        self.reductions.finish()

    def _open(self, weight: Tensor, *, launches: bool = True) -> Iterator[tuple[ChunkSlot, Tensor, bool]]:
        """Yield each chunk slot of a parameter with its view of the buffer, and whether the caller must overwrite the view.

        With `launches`, the reduction of a chunk that is now complete starts before the next chunk is opened.
        """
        for order, gradients, index in self.chunks_of[id(weight)]:
            self.count(gradients, index)
            gradients.open()
            yield gradients.chunk_slots[index], *gradients.view(index)
            if launches and gradients.complete > gradients.launched:
                self.reduce_due(order)

    def _launch(self, weight: Tensor) -> None:
        for order, gradients, _ in self.chunks_of[id(weight)]:
            if gradients.complete > gradients.launched:
                self.reduce_due(order)

    def count(self, gradients: ChunkGradients, index: int) -> None:
        """Count a gradient.  In a pipeline with split backwards, it may belong to an earlier micro-batch."""
        gradients.count(index, self.rounds)

    def reduce_due(self, order: LaunchOrder) -> None:
        """Start every reduction that is complete and next in the order of its virtual stage."""
        for gradients in order.due(self.rounds):
            if gradients.accumulation is Accumulation.SHARDS or gradients.launched == self.rounds:
                self.reductions.start(gradients.take(self.rounds))


def _hand_over(reducer: ref[GradientReducer], parameter: Tensor) -> None:
    """Pass a gradient from autograd to the reducer.

    The hook holds only a weak reference to the reducer, because the garbage collector cannot see references inside
    autograd.
    """
    if (taker := reducer()) is not None:
        taker.take(parameter)


def _add_elements(chunk_slot: ChunkSlot, view: Tensor, gradient: Tensor, *, is_first: bool) -> None:
    """Add the elements of a parameter's gradient that lie in a chunk slot to the slot's view of a buffer."""
    if chunk_slot.is_whole:
        whole = view.view(gradient.shape)
        (whole.copy_ if is_first else whole.add_)(gradient)
        return
    flat = gradient.reshape(-1)
    views = view.split([blocks.numel for blocks in chunk_slot.blocks])
    for blocks, elements in zip(chunk_slot.blocks, views, strict=True):
        mine = elements.view(blocks.count, blocks.length)
        (mine.copy_ if is_first else mine.add_)(blocks.of(flat))


def _add_product(chunk_slot: ChunkSlot, view: Tensor, is_empty: bool, a: Tensor, b: Tensor, at: int) -> None:
    """Add the elements of term number `at`, a.T @ b, that lie in a chunk slot."""
    is_first = is_empty and at == 0
    if chunk_slot.is_whole:
        add_product(view.view(chunk_slot.slot.info.shape), a, b, is_first=is_first)
    elif chunk_slot.rows is None:
        _add_elements(chunk_slot, view, product_t(a.t(), b.t()), is_first=is_first)
    else:
        columns = torch.cat([blocks.of(a).flatten(1) for blocks in chunk_slot.rows], dim=1)
        add_product(view.view(-1, b.shape[1]), columns, b, is_first=is_first)
