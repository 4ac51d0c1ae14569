"""From gradients of micro-batches to the reduced gradient of the step, bucket by bucket, while the backward runs.

    backward of one micro-batch      add(w1) add(w0)  -> every parameter of the bucket has come: its round is complete
    stages 0, 1                      rounds add up in the whole buffer; the last one starts the reduction
    stages 2, 3                      each round starts a reduce-scatter; the shards add up; the buffer goes back to the pool
                                     (or the whole step adds up in the buffer, and one reduce-scatter follows)
    finish                           what has not come counts as zero; wait (the sums that follow: `reductions`)

A large bucket goes through all of this part by part (`bucket`, [Note: parts]): a part is filled and its reduction started
before the next has memory.

[Note: one order]  Collectives pair up by their order, so every rank must start the reductions of a chunk in one order,
whichever parameters its micro-batch happens to use.  A complete bucket therefore waits for those before it, and at the end
of a pass what has not come counts as zero.  A zero is reduced like any other value, so no other rank has to know.  The order
is the reverse of that in which parameters were registered.

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
from megazero.zero.bucket import Bucket, Interval, ShardingPolicy, Share
from megazero.zero.reductions import ReductionQueue

if TYPE_CHECKING:
    from megazero.layers.experts import Groups

embedding_dense_backward = torch.ops.aten.embedding_dense_backward


class BucketGradients:
    """The gradients of one part of a bucket in this step, until they are reduced.

    The bucket's own `full_gradient` is used where it keeps one; otherwise the memory comes from `reductions`, with as many
    elements as serve any part.

    Attributes:
        part: elements of every shard.
        shares: what the part holds of the bucket's parameters.
        counts: how many gradients of each share have come in this step.
        complete: rounds of which all gradients have come; a round is one micro-batch.
        launched: rounds whose reduction was started, or left for a later one.
        reduced: rounds that are in `bucket.gradient`, or on their way there.
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
        """Forget all gradients; `frees` lets the bucket free its memory until the first one comes."""
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
        self._missing = self.counts.count(rounds)  # gradients that have not come in the next round

    def count(self, index: int, expected: int) -> None:
        """Count a gradient.  Raises: RuntimeError, it came more than `expected` times."""
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
        """Count what has not come in the first `rounds` rounds as zero."""
        if self.complete < rounds:
            self.counts = [max(count, rounds) for count in self.counts]
            self._advance_to(rounds)

    def open(self, *, is_reduced_soon: bool) -> None:
        """Have memory; what is reduced only at the end of the step gets memory of the part's own size."""
        if self._memory is not None:
            return
        if self.bucket.sums_whole:
            self._use(self.bucket.allocate_gradient())
        else:
            self._use(self._reductions.buffer(None if is_reduced_soon else self._numel))

    def reopen(self) -> None:
        """Let gradients be added to what is reduced already: each rank keeps its own shard of that and counts it once."""
        if self.reduced and self.bucket.reduces_in_place and self._memory is not None:
            own = self.bucket.layout.shard(self.bucket.placement.shard.index)
            self._memory[: own.start].zero_()
            self._memory[own.stop :].zero_()
            self._is_empty, self.reduced = [False] * len(self._is_empty), 0

    def view(self, index: int) -> tuple[Tensor, bool]:
        """A share's elements, flat, and whether they are empty: to be overwritten, not added to."""
        is_empty, self._is_empty[index] = self._is_empty[index], False
        return self._views[index], is_empty

    def take(self) -> Tensor:
        """The memory, with zeros in the padding and where no gradient has come; the next gradients overwrite it."""
        memory = self._memory
        assert memory is not None
        for view, is_empty in zip(self._views, self._is_empty, strict=True):
            if is_empty:
                view.zero_()
        for padding in self._padding:
            memory[padding].zero_()
        self._is_empty = [True] * len(self._is_empty)
        if not self.bucket.sums_whole:  # whoever has taken it releases it
            self._use(None)
        return memory


class LaunchOrder:
    """The one order in which a chunk's buckets are reduced, round by round: about that in which a backward completes them.

    Attributes:
        passes: backward passes of this step that have ended.
    """

    def __init__(self, buckets: Sequence[BucketGradients]) -> None:
        self.buckets = list(buckets)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin with the first bucket's first round."""
        self._round = self._next = self.passes = 0

    def close_pass(self) -> None:
        """Close the next round of every bucket."""
        self.passes += 1
        self.close(self.passes)

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
        bucket_bytes: `zero.bucket_bytes`; see `ReductionQueue`.

    Attributes:
        buckets: those that train.
        most_buffer_bytes: the limit of `buffer_bytes`; see `ReductionQueue`.
        rounds: how many the step has; the last one starts what is reduced once per step.
    """

    def __init__(
        self, policy: ShardingPolicy, buckets: Sequence[Bucket], every_micro_batch: bool = True, bucket_bytes: int = 0
    ) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.layout.trains]
        self.reductions = ReductionQueue(policy, self.buckets, bucket_bytes)
        self.most_buffer_bytes = self.reductions.working.most_bytes + self.reductions.replicas.most_bytes
        self.every_round, self.rounds = every_micro_batch, 1
        # A backward runs the units in reverse; a bucket is complete with the gradients of its first unit.
        order: dict[int, list[BucketGradients]] = {}
        for bucket in sorted(self.buckets, key=lambda bucket: -bucket.layout.unit):
            parts = [BucketGradients(bucket, part, self.reductions) for part in bucket.gradient_parts]
            # those that wait for other parameters than the largest come last
            order.setdefault(bucket.layout.chunk, []).extend(sorted(parts, key=lambda one: len(one.shares)))
        self.orders = {chunk: LaunchOrder(buckets) for chunk, buckets in order.items()}
        self.parts_of: dict[int, list[tuple[LaunchOrder, BucketGradients, int]]] = {}  # by identity of a parameter
        self.parameters: dict[int, list[nn.Parameter]] = {}  # that train, by chunk
        self._deferring: dict[int, WeightGradQueue | None] = {}  # of vectors, by identity of a parameter
        self._hooks: list[RemovableHandle] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the working buffers through which gradients pass on their way to the shards."""
        return self.reductions.working.pool.nbytes + self.reductions.replicas.nbytes

    def attach(self, parameters: Mapping[str, nn.Parameter], wgrad_queues: Mapping[str, WeightGradQueue]) -> None:
        """Take every gradient that autograd and the chunks' queues compute for these parameters, both by qualified name.

        When the schedule splits backwards, vectors wait in the queue, too: alone they would keep every bucket of the chunk
        incomplete.
        """
        for queue in set(wgrad_queues.values()):
            queue.accumulator = self
        for order in self.orders.values():
            for one in order.buckets:
                for index, share in enumerate(one.shares):
                    parameter = parameters[share.slot.info.name]
                    if id(parameter) not in self.parts_of:
                        self.parameters.setdefault(one.bucket.layout.chunk, []).append(parameter)
                        if parameter.dim() == 1:
                            self._deferring[id(parameter)] = wgrad_queues.get(share.slot.info.name)
                        hook = parameter.register_post_accumulate_grad_hook(partial(_hand_over, ref(self)))
                        self._hooks.append(hook)
                    self.parts_of.setdefault(id(parameter), []).append((order, one, index))

    def detach(self) -> None:
        """Take no more gradients: autograd leaves them in the parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take(self, parameter: Tensor) -> None:
        """Take the gradient that autograd has left in a parameter."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        wgrad_queue = self._deferring.get(id(parameter))
        if wgrad_queue is not None and wgrad_queue.defers:
            wgrad_queue.defer(parameter, gradient)
        else:
            self.add(parameter, gradient.to_dense())  # of Embedding(sparse=True)

    def begin_step(self, micro_batches: int, step: int = 0) -> None:
        """Forget the last step.  Each parameter is expected once per micro-batch.  `step`: see `ReductionQueue`."""
        self.reductions.begin_step(step)
        for parameters in self.parameters.values():
            for parameter in parameters:
                parameter.grad = None  # autograd leaves one where a signal ends a backward before the hook
        for order in self.orders.values():
            order.begin_step()
            for one in order.buckets:  # with more, gradients lie there in all forwards but one
                one.begin_step(frees=micro_batches == 1)
        self.reductions.working.pool.begin_step()
        self.rounds = micro_batches

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter; its memory may be used again afterwards."""
        for share, view, is_first in self._open(weight):
            _add_elements(share, view, gradient, is_first=is_first)

    def add_products(self, weight: Tensor, factors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one micro-batch's gradient of a parameter [m, n], a sum of a.T @ b of [k, m] and [k, n], without a copy.

        A weight that has several parts has one after the other in memory if `factors` is a list, else all at once.
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
            del a, b  # before the next are computed
        self._launch(weight)

    def add_stacked(self, weight: Tensor, a: Tensor, b: Tensor, groups: Groups) -> None:
        """Add one micro-batch's gradient of experts' matrices, stacked as [experts * m, n]: of each one's rows a.T @ b."""
        whole = None
        for share, view, is_first in self._open(weight):
            if share.is_whole:
                groups.add_products(view.view(-1, a.shape[1], b.shape[1]), a, b, is_first=is_first)
                continue
            whole = groups.sum_products(a, b) if whole is None else whole
            _add_elements(share, view, whole, is_first=is_first)

    def add_rows(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter [m, n]: `gradient` [k, n], of these `rows`, int64 [k]."""
        for share, view, is_first in self._open(weight):
            if share.is_whole or share.rows is None:
                dense = embedding_dense_backward(gradient, rows, weight.shape[0], -1, False)
                _add_elements(share, view, dense, is_first=is_first)
                continue
            at, count = share.row_in_buffer(rows)
            dense = embedding_dense_backward(gradient, at, count + 1, count, False)[:count]
            (view.copy_ if is_first else view.add_)(dense.view(-1))

    def close_pass(self, chunk: int) -> None:
        """Count the gradients of one micro-batch of a chunk that have not come as zero; see [Note: one order]."""
        if (order := self.orders.get(chunk)) is not None:
            order.close_pass()
            self.reduce_due(order)

    def finish(self) -> None:
        """Have every bucket's gradient summed over all ranks that share it, including parameters that never came."""
        for order in self.orders.values():
            order.close(self.rounds)
            self.reduce_due(order)
            for one in order.buckets:
                if one.reduced < self.rounds:
                    self._reduce(one)
        self.reductions.finish()

    def _open(self, weight: Tensor, *, launches: bool = True) -> Iterator[tuple[Share, Tensor, bool]]:
        """What each part holds of a parameter: its elements in the buffer, and whether they are empty.

        A part that is complete after its use is reduced before the next one is opened, if `launches`.
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
        """Count a gradient of this step.  In a pipeline, weight gradients may wait for a later pass."""
        one.count(index, self.rounds)

    @property
    def reduces_soon(self) -> bool:
        """Whether a complete bucket is reduced after every micro-batch, not only after the last."""
        return self.every_round

    def is_due(self, one: BucketGradients) -> bool:
        """Whether a part whose round is complete is reduced now: after each round, or after the last."""
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
    """Autograd's hook.  Python's collector cannot follow it, so what it held would never be freed."""
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
    """Add the share's part of term number `at`, a.T @ b."""
    is_first = is_empty and at == 0
    if share.is_whole:
        add_product(view.view(share.slot.info.shape), a, b, is_first=is_first)
    elif share.rows is None:
        _add_elements(share, view, product_t(a.t(), b.t()), is_first=is_first)
    else:
        columns = torch.cat([piece.of(a).flatten(1) for piece in share.rows], dim=1)
        add_product(view.view(-1, b.shape[1]), columns, b, is_first=is_first)
