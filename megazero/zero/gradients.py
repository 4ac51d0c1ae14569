"""Gradients of a step: add up micro-batches bucket by bucket, and start each reduction while the backward is running.

    backward of one micro-batch      add(w1) add(w0)  -> every parameter of the bucket has its gradient: a round ends
    stages 0, 1                      rounds add up in the full buffer; the last round starts the reduction
    stages 2, 3                      each round starts a reduce-scatter; the shards add up; the buffer is released
                                     (or the whole step adds up in the buffer, and one reduce-scatter follows)
    finish                           missing gradients count as zero; wait for all reductions (then sums: `reductions`)

A large bucket is handled part by part (`bucket`, [Note: parts]): each part is filled and its reduction started before
the next part gets memory.

[Note: one order]  Ranks match collectives by their order, so every rank must start the reductions of a model chunk in
the same order, whichever parameters its micro-batch used.  A complete bucket therefore waits for the buckets before it,
and at the end of a pass missing gradients count as zero.  A zero is reduced like any other value, so no other rank has
to know.  The order is the reverse of the order in which parameters were registered.

Volume per step, in parameters Ψ and rounds G: stage 0 2Ψ, stage 1 reduce-scatter Ψ, stages 2 and 3 ΨG or Ψ
(Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.layers.linear import WeightGradQueue, add_product, product_t
from megazero.zero.bucket import Bucket
from megazero.zero.layout import Interval, Share
from megazero.zero.reductions import ReductionQueue
from megazero.zero.sharding import ShardingPolicy

if TYPE_CHECKING:
    from megazero.layers.experts import Groups

embedding_dense_backward = torch.ops.aten.embedding_dense_backward


class BucketGradients:
    """This step's gradients of one part of a bucket, until they are reduced.

    They lie in the bucket's own `full_gradient` if it has one, otherwise in a buffer that `reductions` lends; every
    such buffer is large enough for any part.

    Attributes:
        part: elements of every shard that this part covers.
        shares: the parameters' elements that lie in this part.
        counts: number of gradients of each share received in this step.
        complete: number of rounds (micro-batches) of which every gradient has been received.
        launched: number of rounds whose reduction was started, or postponed to a later round.
        reduced: number of rounds that `bucket.gradient` contains, or will contain when running reductions end.
    """

    def __init__(self, bucket: Bucket, part: Interval, reductions: ReductionQueue) -> None:
        self.bucket, self.part, self._reductions = bucket, part, reductions
        self.shares = list(bucket.layout.shares(part))
        self._numel = (part.stop - part.start) * bucket.layout.shards
        borders = [0, *(at for share in self.shares for at in (share.start, share.stop)), self._numel]
        self._padding = [slice(*ends) for ends in zip(borders[::2], borders[1::2], strict=True) if ends[0] < ends[1]]
        self._use(None)
        self.begin_step(frees=False)

    def begin_step(self, *, frees: bool) -> None:
        """Discard all gradients.  With `frees`, the bucket may free its memory until the first gradient arrives."""
        if not self.bucket.sums_whole and self._memory is not None:
            self._reductions.working.pool.release(self._memory)
        if frees:
            self.bucket.free_gradient()
        if self._memory is not self.bucket.full_gradient:
            self._use(self.bucket.full_gradient)
        count = len(self.shares)
        self._is_empty, self.counts = [True] * count, [0] * count
        self.launched = self.reduced = 0
        self._advance_to(0)

    def _use(self, memory: Tensor | None) -> None:
        self._memory = memory
        self._views = [] if memory is None else [memory[share.start : share.stop] for share in self.shares]
        self._is_empty = [True] * len(self.shares)

    def _advance_to(self, rounds: int) -> None:
        self.complete = rounds
        self._missing = self.counts.count(rounds)  # gradients still missing in the next round

    def count(self, index: int, expected: int) -> None:
        """Count a gradient.  Raises: RuntimeError: this is more than the `expected` number of them."""
        if self.counts[index] == expected:
            raise RuntimeError(
                f"gradient of {self.shares[index].slot.info.name} came more than {expected} times in {expected} backward "
                "passes of a step: backward ran more often than that, or within itself, in a hook or a checkpoint with "
                "use_reentrant=True (megazero.checkpoint runs none)"
            )
        self.counts[index] += 1
        if self.counts[index] == self.complete + 1:
            self._missing -= 1
            if self._missing == 0:
                self._advance_to(self.complete + 1)

    def close(self, rounds: int) -> None:
        """Count gradients that are missing in the first `rounds` rounds as zero."""
        if self.complete < rounds:
            self.counts = [max(count, rounds) for count in self.counts]
            self._advance_to(rounds)

    def open(self, *, is_reduced_soon: bool) -> None:
        """Make sure that there is memory.  A part that is reduced only at the end of the step gets a buffer of exactly
        its own size.
        """
        if self._memory is not None:
            return
        if self.bucket.sums_whole:
            self._use(self.bucket.allocate_gradient())
        else:
            self._use(self._reductions.buffer(None if is_reduced_soon else self._numel))

    def reopen(self) -> None:
        """Allow more gradients after a reduction.  Each rank keeps only its own shard of the reduced sum, so that the
        sum counts once.
        """
        if self.reduced and self.bucket.reduces_in_place and self._memory is not None:
            own = self.bucket.layout.shard(self.bucket.placement.shard.index)
            self._memory[: own.start].zero_()
            self._memory[own.stop :].zero_()
            self._is_empty, self.reduced = [False] * len(self._is_empty), 0

    def view(self, index: int) -> tuple[Tensor, bool]:
        """Return a share's elements, flat, and whether the caller must overwrite them instead of adding to them."""
        is_empty, self._is_empty[index] = self._is_empty[index], False
        return self._views[index], is_empty

    def take(self) -> Tensor:
        """Return the memory with zeros in padding and for missing gradients.  The next gradients will overwrite it."""
        memory = self._memory
        assert memory is not None
        for view, is_empty in zip(self._views, self._is_empty, strict=True):
            if is_empty:
                view.zero_()
        for padding in self._padding:
            memory[padding].zero_()
        self._is_empty = [True] * len(self._is_empty)
        if not self.bucket.sums_whole:  # the caller releases it
            self._use(None)
        return memory


class LaunchOrder:
    """The fixed order in which a chunk's bucket parts are reduced, round by round.  It is close to the order of the
    backward.

    Attributes:
        passes: backward passes of this step that have ended.
    """

    def __init__(self, buckets: Sequence[BucketGradients]) -> None:
        self.buckets = list(buckets)
        self.begin_step()

    def begin_step(self) -> None:
        """Start again at the first round of the first bucket."""
        self._round = self._next = self.passes = 0

    def close_pass(self) -> None:
        """Close the next round of every bucket part."""
        self.passes += 1
        self.close(self.passes)

    def close(self, rounds: int) -> None:
        """Count gradients that are missing in the first `rounds` rounds as zero."""
        for one in self.buckets:
            one.close(rounds)

    def due(self, rounds: int) -> Iterator[BucketGradients]:
        """Yield the complete parts whose turn it is, until one is incomplete or `rounds` rounds have been launched."""
        while self._round < rounds:
            one = self.buckets[self._next]
            if one.launched <= self._round:  # otherwise it was complete several rounds ahead of the others
                if one.complete <= self._round:
                    return
                one.launched = one.complete
                yield one
            self._next = (self._next + 1) % len(self.buckets)
            self._round += self._next == 0


class GradientReducer:
    """Adds up gradients in buckets, and starts the reduction of a bucket over dp as soon as the bucket is complete.

    Args:
        every_micro_batch: stages 2 and 3 reduce after each micro-batch; otherwise once per step.
        bucket_bytes: `zero.bucket_bytes`; see `ReductionQueue`.

    Attributes:
        buckets: the buckets that train.
        most_buffer_bytes: upper limit of `buffer_bytes`; see `ReductionQueue`.
        rounds: number of micro-batches in this step.  What is reduced once per step is reduced in the last round.
    """

    def __init__(
        self, policy: ShardingPolicy, buckets: Sequence[Bucket], every_micro_batch: bool = True, bucket_bytes: int = 0
    ) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.layout.trains]
        self.reductions = ReductionQueue(policy, self.buckets, bucket_bytes)
        self.most_buffer_bytes = self.reductions.working.most_bytes + self.reductions.replicas.most_bytes
        self.every_round, self.rounds = every_micro_batch, 1
        # A backward runs the units in reverse, so a bucket is complete when its first unit has its gradients.
        order: dict[int, list[BucketGradients]] = {}
        for bucket in sorted(self.buckets, key=lambda bucket: -bucket.layout.unit):
            parts = [BucketGradients(bucket, part, self.reductions) for part in bucket.gradient_parts]
            # a part that holds more than the largest parameter is complete later, so it comes last
            order.setdefault(bucket.layout.first.chunk, []).extend(sorted(parts, key=lambda one: len(one.shares)))
        self.orders = {chunk: LaunchOrder(buckets) for chunk, buckets in order.items()}
        self.parts_of: dict[int, list[tuple[LaunchOrder, BucketGradients, int]]] = {}  # by id() of a parameter
        self.parameters: dict[int, list[nn.Parameter]] = {}  # trainable parameters by chunk
        self._deferring: dict[int, WeightGradQueue | None] = {}  # a vector's queue, by id() of it
        self._hooks: list[RemovableHandle] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the working buffers that gradients pass through before they reach the shards."""
        return self.reductions.working.pool.nbytes + self.reductions.replicas.nbytes

    def attach(self, parameters: Mapping[str, nn.Parameter], wgrad_queues: Mapping[str, WeightGradQueue]) -> None:
        """Receive every gradient that autograd and the chunks' queues compute for these parameters.

        When the schedule splits backward passes, the gradients of vectors wait in the queue like those of matrices.
        Otherwise they alone would arrive early and keep every bucket of the chunk incomplete.

        Args:
            parameters: by qualified name.
            wgrad_queues: the queue of each parameter, by the same names.
        """
        for queue in set(wgrad_queues.values()):
            queue.accumulator = self
        for order in self.orders.values():
            for one in order.buckets:
                for index, share in enumerate(one.shares):
                    parameter = parameters[share.slot.info.name]
                    if id(parameter) not in self.parts_of:
                        self.parameters.setdefault(one.bucket.layout.first.chunk, []).append(parameter)
                        if parameter.dim() == 1:
                            self._deferring[id(parameter)] = wgrad_queues.get(share.slot.info.name)
                        hook = parameter.register_post_accumulate_grad_hook(partial(_hand_over, ref(self)))
                        self._hooks.append(hook)
                    self.parts_of.setdefault(id(parameter), []).append((order, one, index))

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
        """Discard the last step's gradients.  Every parameter is expected once per micro-batch.  `step`: see
        `ReductionQueue`.
        """
        self.reductions.begin_step(step)
        for parameters in self.parameters.values():
            for parameter in parameters:
                parameter.grad = None  # autograd leaves one if a signal ended a backward before the hook
        for order in self.orders.values():
            order.begin_step()
            for one in order.buckets:  # with more, forwards but the first find gradients there
                one.begin_step(frees=micro_batches == 1)
        self.reductions.working.pool.begin_step()
        self.rounds = micro_batches

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter.  The caller may reuse the gradient's memory afterwards."""
        for share, view, is_first in self._open(weight):
            _add_elements(share, view, gradient, is_first=is_first)

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one micro-batch's gradient of a parameter [m, n] without a copy: the sum of a.T @ b over `factors`.

        If `factors` is a list, the parts of a large weight are computed one after the other, so that only one needs
        memory.

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

    def add_stacked(self, weight: Tensor, a: Tensor, b: Tensor, groups: Groups) -> None:
        """Add one micro-batch's gradient of stacked expert matrices [experts * m, n]: a.T @ b over the rows of each
        expert.
        """
        whole = None
        for share, view, is_first in self._open(weight):
            if share.is_whole:
                groups.add_products(view.view(-1, a.shape[1], b.shape[1]), a, b, is_first=is_first)
                continue
            whole = groups.sum_products(a, b) if whole is None else whole
            _add_elements(share, view, whole, is_first=is_first)

    def add_rows(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of some rows of a parameter [m, n].

        Args:
            rows: int64 [k], indices of the rows.
            gradient: [k, n].
        """
        for share, view, is_first in self._open(weight):
            if share.is_whole or share.rows is None:
                dense = embedding_dense_backward(gradient, rows, weight.shape[0], -1, False)
                _add_elements(share, view, dense, is_first=is_first)
                continue
            at, count = share.row_in_buffer(rows)
            dense = embedding_dense_backward(gradient, at, count + 1, count, False)[:count]
            (view.copy_ if is_first else view.add_)(dense.view(-1))

    def close_pass(self, chunk: int) -> None:
        """End one micro-batch of a chunk: its missing gradients count as zero; see [Note: one order]."""
        if (order := self.orders.get(chunk)) is not None:
            order.close_pass()
            self.reduce_due(order)

    def finish(self) -> None:
        """Reduce every bucket over all ranks that share it, including parameters without a gradient, and wait for the
        results.
        """
        for order in self.orders.values():
            order.close(self.rounds)
            self.reduce_due(order)
            for one in order.buckets:
                if one.reduced < self.rounds:
                    self._reduce(one)
        self.reductions.finish()

    def _open(self, weight: Tensor, *, launches: bool = True) -> Iterator[tuple[Share, Tensor, bool]]:
        """Yield each share of a parameter with its view of the buffer, and whether the caller must overwrite the view.

        With `launches`, a part that is complete after its use is reduced before the next part is opened.
        """
        for order, one, index in self.parts_of[id(weight)]:
            self.count(order, one, index)
            one.open(is_reduced_soon=self.reduces_soon)
            yield one.shares[index], *one.view(index)
            if launches and one.complete > one.launched:
                self.reduce_due(order)

    def _launch(self, weight: Tensor) -> None:
        for order, one, _ in self.parts_of[id(weight)]:
            if one.complete > one.launched:
                self.reduce_due(order)

    def count(self, _: LaunchOrder, one: BucketGradients, index: int) -> None:
        """Count a gradient.  In a pipeline with split backwards, it may belong to an earlier micro-batch."""
        one.count(index, self.rounds)

    @property
    def reduces_soon(self) -> bool:
        """Whether complete buckets are reduced after every micro-batch, not only after the last."""
        return self.every_round

    def is_due(self, one: BucketGradients) -> bool:
        """Whether a complete part is reduced now: after each round, or only after the last."""
        return (self.every_round and not one.bucket.sums_whole) or one.launched == self.rounds

    def reduce_due(self, order: LaunchOrder) -> None:
        """Start every reduction that is complete and next in the chunk's order."""
        for one in order.due(self.rounds):
            if self.is_due(one):
                self._reduce(one)

    def _reduce(self, one: BucketGradients) -> None:
        one.open(is_reduced_soon=self.reduces_soon)
        is_last = one.complete == self.rounds
        self.reductions.start(one.bucket, one.part, one.take(), reduced=one.reduced, is_last=is_last)
        one.reduced = one.complete


def _hand_over(reducer: ref[GradientReducer], parameter: Tensor) -> None:
    """Autograd's hook.  It holds a weak reference: Python's garbage collector cannot see a strong one inside autograd."""
    if (taker := reducer()) is not None:
        taker.take(parameter)


def _add_elements(share: Share, view: Tensor, gradient: Tensor, *, is_first: bool) -> None:
    """Add the share's elements of a parameter's gradient to its view of a buffer."""
    if share.is_whole:
        whole = view.view(gradient.shape)
        (whole.copy_ if is_first else whole.add_)(gradient)
        return
    flat = gradient.reshape(-1)
    views = view.split([piece.numel for piece in share.pieces])
    for piece, part in zip(share.pieces, views, strict=True):
        mine = part.view(piece.count, piece.length)
        (mine.copy_ if is_first else mine.add_)(piece.of(flat))


def _add_product(share: Share, view: Tensor, is_empty: bool, a: Tensor, b: Tensor, at: int) -> None:
    """Add this share's elements of term number `at`, a.T @ b."""
    is_first = is_empty and at == 0
    if share.is_whole:
        add_product(view.view(share.slot.info.shape), a, b, is_first=is_first)
    elif share.rows is None:
        _add_elements(share, view, product_t(a.t(), b.t()), is_first=is_first)
    else:
        columns = torch.cat([piece.of(a).flatten(1) for piece in share.rows], dim=1)
        add_product(view.view(-1, b.shape[1]), columns, b, is_first=is_first)
