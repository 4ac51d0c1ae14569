"""Attention where samples are split over ranks or hold several documents: Ulysses over heads, then a ring over keys.

    q, k, v [batch, heads, seq / (u r), size]
      | all-to-all over u ranks: fewer heads, more of the sequence        Ulysses (Jacobs et al. 2023)
      v
    q [batch, heads / u, seq / r, size] stays; k and v travel round r ranks   ring attention (Liu et al. 2023)

    step on rank 0 of 4              0         1        2        3         the next keys travel while a rank computes
    it has the keys of rank          0         3        2        1
    queries that see some of them    all       those of its later chunk    see `tiles` in token_layout.py

Each step of the ring gives a partial result with its log-sum-exp, and these are merged in fp32.  In the backward, the
gradients of keys and values follow the keys round the ring and end on the rank that owns them.  The gradients from a
rank's own queries for its own keys are never sent.  Every message overlaps with computation, including the last:

    backward of rank 0 of 2     own keys, some heads | keys of rank 1 | own keys, other heads
    on the link                 keys ->              |                | <- their gradients

If Ulysses ranks can communicate while they compute, heads are exchanged and used in groups:

    link          k v q0 | q1 | q2 | q3 |      | out0 | out1 | out2 | out3
    computing            | q0   | q1   | q2   | q3   |

So attention waits only for the first group, and the consumer of its output only for the last.  Keys and values travel
with the first group that reads them.  The backward does the same with gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, largest, ring_shift, runs_by_itself, wait_all
from megazero.comm.head_exchange import SequenceForHeads, start_heads_for_sequence
from megazero.layers.attention import CausalAttention, uncompiled
from megazero.layers.attention_kernels import TileKernel, activate_newest_flash_attention, merge, tile_kernel, windowed
from megazero.layers.recompute import WHOLE, Tape
from megazero.layers.saved_tensors import refuse_second_derivative
from megazero.layers.sequence_shard import SequenceShard, whole_samples
from megazero.layers.tile_calls import EVERYTHING, Call, Rows, calls
from megazero.layers.token_layout import HeadGroup, head_groups
from megazero.parallel_state import Axis

#: Of a call: the index of its keys, and their gradients: those of keys and those of values.
_CallGradients: TypeAlias = tuple[Rows, *tuple[Tensor, ...]]
_EVERY_HEAD = slice(None)


class Ring:
    """Causal attention within documents, from a rank's queries to the keys of all ring ranks.

    Args:
        axis: the ring.
        window: how many positions a query sees, including its own; None for all of its document up to itself.
        gradient_dtype: dtype in which the gradients of 16-bit keys and values are sent.
        tiles: kernel for one tile, used where tiles are not packed into one call.
    """

    def __init__(self, axis: Axis, window: int | None, gradient_dtype: torch.dtype, tiles: TileKernel) -> None:
        self.axis, self.window, self.gradient_dtype = axis, window, gradient_dtype
        self.tiles = tiles

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard) -> tuple[Tensor, Tensor]:
        """Attend from this rank's queries to the keys of all ring ranks.

        Args:
            q: [batch, heads, seq of a ring rank, size].
            k, v: [batch, kv heads, seq of a ring rank, size].
            shard: the position of each token in its sample and document.

        Returns:
            out with the shape of q, and the log-sum-exp of each query, [batch, heads, seq], in fp32 (fp64 if q is
            fp64).
        """
        result: _Merged | None = None
        for source, keys, values in _visits(k, v, self.axis):
            for call in self._calls(shard, source, q, k):
                found = call.forward(q, keys, values)
                if result is None and found[0].shape == q.shape:
                    result = _Merged(*found)
                    continue
                result = result or _Merged.empty(q)
                result.add(call.queries, *found)
        if result is None:
            raise ValueError("no query sees a key")
        return result.out.to(q.dtype), result.lse

    def _calls(self, shard: SequenceShard, source: int, q: Tensor, k: Tensor) -> list[Call]:
        return calls(shard, source, self.window, q, k, self.tiles)

    def key_gradients(self, k: Tensor, v: Tensor) -> KeyGradients:
        """Return an accumulator for the gradients of these keys and values, to be passed to `backward`."""
        return KeyGradients(k, v, self.axis, self.gradient_dtype)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        shard: SequenceShard,
        of_keys: KeyGradients,
    ) -> Tensor:
        """Return the gradient of q, and add the gradients of k and v to `of_keys`.

        On a ring of several ranks, `of_keys` must be used in one call only.

        Args:
            grad, out: with the shape of q.
            q, k, v, shard: as in `forward`.
            lse: as returned by `forward`.
            of_keys: from `key_gradients`.
        """
        here, dq = self.axis.index, _Sum(q)
        own = head_groups(q.shape[1], k.shape[1], min(self.axis.size, 2), shares_keys=True)

        def gradients(call: Call, heads: slice, *given: Tensor) -> list[Tensor]:
            """Return the gradients of a call's keys and values.  Add those of its queries to `dq`, so that they are
            freed before the next call.
            """
            of_queries, *others = call.backward(*given)
            dq.add(call.queries, of_queries, heads)
            return others

        def use_own_keys(heads: HeadGroup) -> None:
            its_grad, its_q, its_out, its_lse = (x[:, heads.queries] for x in (grad, q, out, lse))
            its_k, its_v = (x[:, heads.keys] for x in (k, v))
            for call in self._calls(shard, here, its_q, its_k):
                found = gradients(call, heads.queries, its_grad, its_q, its_k, its_v, its_out, its_lse)
                for sums, of_own in zip(of_keys.own(heads.keys), found, strict=True):
                    sums.add(call.keys, of_own)
                del found, of_own

        def use_keys_of(source: int, keys: Tensor, values: Tensor) -> None:
            its_calls, given = self._calls(shard, source, q, k), (grad, q, keys, values, out, lse)
            of_keys.add_and_pass_on([(call.keys, *gradients(call, _EVERY_HEAD, *given)) for call in its_calls])

        for arrival in _visits(k, v, self.axis):
            if arrival[0] == here:
                use_own_keys(own[0])
            else:
                use_keys_of(*arrival)
            del arrival  # frees the buffer of these keys
        for heads in own[1:]:
            use_own_keys(heads)
        return dq.total()


def fp32_or_wider(x: Tensor) -> torch.dtype:
    """Return the tensor's dtype if it is wider than fp32, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


class _Merged:
    """The result of attention to all keys so far.

    Args:
        out: [batch, heads, seq, size]; in fp32 once a second result has been merged.
        lse: [batch, heads, seq], in fp32 or wider.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    @staticmethod
    def empty(q: Tensor) -> _Merged:
        """Return the result for queries that have not seen any key."""
        out = torch.zeros_like(q, dtype=fp32_or_wider(q))
        return _Merged(out, torch.full_like(out[..., 0], -torch.inf))

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Merge the result of some queries over further keys.  Each of these queries must see at least one of the keys."""
        self.out = self.out.to(fp32_or_wider(self.out))
        mine, its_lse = self.out[rows], self.lse[rows]
        merge(mine, its_lse, out, lse)
        if any(isinstance(index, Tensor) for index in rows):  # indexing by a tensor copies
            self.out[rows], self.lse[rows] = mine, its_lse


class _Sum:
    """A sum of contributions to a tensor; in fp32 if there is more than one."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Rows, term: Tensor, heads: slice = _EVERY_HEAD) -> None:
        """Add a contribution to some rows of some heads."""
        if self._total is None and term.shape == self._like.shape:
            self._total = term
            return
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=fp32_or_wider(self._like))
        self._total = self._total.to(fp32_or_wider(self._like))
        self._total[:, heads][rows] += term

    def total(self) -> Tensor:
        """Return the sum in the type of the tensor."""
        return torch.zeros_like(self._like) if self._total is None else self._total.to(self._like.dtype)


def _visits(k: Tensor, v: Tensor, ring: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (ring rank, its keys, its values) for every ring rank, this one first.

    The next keys are in transit while the caller uses the current ones.
    """
    size, here = ring.size, ring.index
    if size == 1:
        yield here, k, v
        return
    used, leaving = (k, v), torch.stack((k, v))
    arriving = torch.empty_like(leaving)
    for step in range(size - 1):
        pending = ring_shift(arriving, leaving, ring)
        yield (here - step) % size, *used
        pending.wait()
        arriving, leaving = leaving, arriving
        used = leaving[0], leaving[1]
    del arriving, leaving  # during the last step only the buffer of the keys in use remains
    yield (here + 1) % size, *used


class KeyGradients:
    """The gradients of keys and values, accumulated while they travel to the rank that owns the keys.

    The gradients for rank j's keys start on rank j + 1, and each rank adds its contribution after it has used j's keys:
    size - 1 messages.

    Args:
        k, v: keys and values of this rank.
        ring: the axis of the ring.
        gradient_dtype: dtype of the messages, if keys have 16 bits.
    """

    def __init__(self, k: Tensor, v: Tensor, ring: Axis, gradient_dtype: torch.dtype) -> None:
        self._ring, self._own_keys = ring, (k, v)
        self._dtype = fp32_or_wider(k) if k.dtype == fp32_or_wider(k) else gradient_dtype
        self._own: dict[tuple[int, int], list[_Sum]] = {}  # key: first and last + 1 head
        self._arriving: Tensor | None = None
        self._leaving: Tensor | None = None
        self._pending = Pending()

    def own(self, heads: slice) -> list[_Sum]:
        """Return the sums for the gradients, from this rank's queries, of some heads of its own keys and values."""
        return self._own.setdefault((heads.start, heads.stop), [_Sum(x[:, heads]) for x in self._own_keys])

    def add_and_pass_on(self, found: list[_CallGradients]) -> None:
        """Add this rank's gradients for another rank's keys and values to those that arrived, and send the sum on."""
        self._pending.wait()
        if self._arriving is None:
            k, _ = self._own_keys
            self._arriving = k.new_zeros((2, *k.shape), dtype=self._dtype)
        for seen, *of_call in found:
            for travelling, gradient in zip(self._arriving, of_call, strict=True):
                travelling[seen] += gradient
        free = torch.empty_like(self._arriving) if self._leaving is None else self._leaving
        self._pending = ring_shift(free, self._arriving, self._ring)
        self._leaving, self._arriving = self._arriving, free

    def total(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values.  Call it once."""
        self._pending.wait()
        dk, dv = (torch.empty_like(x) for x in self._own_keys)
        while self._own:
            (start, stop), sums = self._own.popitem()
            for number, (whole, own) in enumerate(zip((dk, dv), sums, strict=True)):
                if self._arriving is not None:
                    own.add(EVERYTHING, self._arriving[number, :, start:stop])
                whole[:, start:stop] = own.total()
        return dk, dv


_MISSING_SHARD = (
    "a micro-batch without `shard`, but parallel.cp splits samples or data.document_mask separates documents; "
    "make one with BatchSlice.sequence_shard, and cut tokens and labels with `shard.cut`"
)
_MOST_GROUPS = 4  # attention waits for the first 1/4 of the exchange
_LEAST_CUDA_ROWS = 1 << 15  # minimum rows of queries in a group: 256 flash-attention blocks fill all multiprocessors


class ContextAttention:
    """Causal attention within documents over all context-parallel ranks, which must construct it together.

    Args:
        axes: the Ulysses axis and the ring axis.
        window: how many positions a query sees, including its own; None for all of its document up to itself.
        gradient_dtype: dtype in which the gradients of 16-bit keys and values are sent.
        on_cuda: whether the run computes on CUDA.  The tensors of a plan are on the CPU even then.
    """

    supports_shards = True

    def __init__(
        self, axes: tuple[Axis, Axis], window: int | None, gradient_dtype: torch.dtype, *, on_cuda: bool = False
    ) -> None:
        ulysses, ring = axes
        self.ulysses, self.ring = ulysses, Ring(ring, window, gradient_dtype, tile_kernel(on_cpu=not on_cuda))
        # Each ring message carries one group of heads, so all ranks of a ring must form the same groups.  Their Ulysses
        # axes differ.
        (waits,) = largest([float(not runs_by_itself(ulysses))], ring)
        self._most_groups, self._least_rows = 1 if waits else _MOST_GROUPS, _LEAST_CUDA_ROWS if on_cuda else 1

    def without_window(self) -> ContextAttention:
        """Return the same attention without a window, for layers that see their whole document."""
        other, ring = copy(self), self.ring
        other.ring = Ring(ring.axis, None, ring.gradient_dtype, ring.tiles)
        return other

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None = None, *, tape: Tape | None = None
    ) -> Tensor:
        """Attend from this rank's tokens to all tokens of their documents.

        Args:
            q: [batch, heads, seq of the rank, size].
            k, v: [batch, kv heads, seq of the rank, size].
            shard: the position of each token in its sample and document.
            tape: records or replays the results.

        Returns: the shape of q.

        Raises: ValueError: the shard belongs to other samples, or keys and values do not fit the queries.
        """
        if shard is None:
            raise ValueError(_MISSING_SHARD)
        return uncompiled(self._attend)(q, k, v, shard, tape)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard, tape: Tape | None) -> Tensor:
        rows, samples = shard.rows.shape
        if q.shape[2] != rows or not shard.fits(q.shape[0]):
            raise ValueError(
                f"a micro-batch's `shard` must belong to its samples: got {q.shape[0]} samples of {q.shape[2]} tokens on "
                f"this rank, and a shard of {samples} samples of {rows} tokens"
            )
        heads, kv_heads = q.shape[1], max(k.shape[1], 1)
        fits = k.shape == v.shape == (q.shape[0], kv_heads, *q.shape[2:]) and q.dtype == k.dtype == v.dtype
        if not fits or heads % kv_heads:
            got = "; ".join(f"{name} {list(x.shape)} of {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
            rule = (
                "keys and values must have the queries' dtype, batch, seq and size, and heads that divide their heads"
            )
            raise ValueError(f"{rule}: got {got}; [batch, heads, seq, size] is expected")
        # The kernels assume that the last dimension is contiguous, whatever its stride says.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if k.shape[1] < self.ulysses.size:  # ranks share a kv head; autograd sums their gradients
            k, v = (x.repeat_interleave(self.ulysses.size // x.shape[1], dim=1) for x in (k, v))
        out: Tensor = _Attention.apply(q, k, v, self, shard, tape)
        return out

    def head_groups(self, q: Tensor, k: Tensor) -> list[HeadGroup]:
        """Return the groups in which this rank's heads are exchanged and used.  q, k: as in `attend`."""
        heads, kv_heads = q.shape[1] // self.ulysses.size, k.shape[1] // self.ulysses.size
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        most = max(1, min(self._most_groups, rows // self._least_rows))
        # In a ring, each of several groups with the same keys would send these keys round again.
        return head_groups(heads, kv_heads, most, shares_keys=self.ring.axis.size == 1)


class KernelWindow(CausalAttention):
    """Causal attention to the last `size` positions with kernels that support a window: on CUDA in 16 bits."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self._recorded = size, ContextAttention((WHOLE, WHOLE), size, torch.float32, on_cuda=True)
        if device.type == "cuda":
            activate_newest_flash_attention(device)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, tape: Tape | None) -> Tensor:
        return windowed(q, k, v, self.size) if tape is None and q.is_cuda else uncompiled(self._through)(q, k, v, tape)

    def _through(self, q: Tensor, k: Tensor, v: Tensor, tape: Tape | None) -> Tensor:
        return self._recorded.attend(q, k, v, whole_samples(q.shape[2], 1, 0, 1, 0, q.device), tape=tape)


class _ArrivingHeads(NamedTuple):
    """A group of heads in transit to the rank that computes their attention.

    Args:
        heads: the heads of this group.
        q: its queries.
        keys: keys and values of this group and of the following groups that share them; None if it shares those of an
            earlier group.
        pending: must be waited for before these tensors are used.
    """

    heads: HeadGroup
    q: Tensor
    keys: tuple[Tensor, Tensor] | None
    pending: list[Pending]


def _exchanged(groups: list[HeadGroup], q: Tensor, k: Tensor, v: Tensor, ulysses: Axis) -> Iterator[_ArrivingHeads]:
    """Start the exchange of all groups in order, and yield each group when it has arrived."""
    under_way = []
    for number, heads in enumerate(groups):
        new = number == 0 or groups[number - 1].keys != heads.keys
        given = [(k, heads.keys), (v, heads.keys), (q, heads.queries)] if new else [(q, heads.queries)]
        started = [start_heads_for_sequence(x, ulysses, chosen) for x, chosen in given]
        tensors = [tensor for tensor, _ in started]
        keys = (tensors[0], tensors[1]) if new else None
        under_way.append(_ArrivingHeads(heads, tensors[-1], keys, [pending for _, pending in started]))
    for arriving in under_way:
        wait_all(arriving.pending)
        yield arriving


class _Attention(torch.autograd.Function):
    """Attention from a rank's tokens to all tokens of their sample."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: ContextAttention, shard: SequenceShard, tape: Tape | None
    ) -> Tensor:
        ulysses, groups = attention.ulysses, attention.head_groups(q, k)
        results, saved, keys = SequenceForHeads(ulysses, q.shape[1] // ulysses.size), list[Tensor](), (k, v)
        for arrived in _exchanged(groups, q, k, v, ulysses):
            keys = arrived.keys or keys
            compute = partial(attention.ring.forward, arrived.q, *keys, shard)
            out, lse = compute() if tape is None else tape.through(compute)
            saved += (*(arrived.keys or ()), arrived.q, out, lse)
            results.start(out, arrived.heads.queries)
        ctx.save_for_backward(*saved)
        ctx.attention, ctx.shard, ctx.groups, ctx.kv_heads = attention, shard, groups, k.shape[1] // ulysses.size
        return results.result().detach()  # autograd attaches the graph to this tensor; the tape's tensor has no graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention over ranks or documents")
        ulysses, ring, kv_heads, shard = ctx.attention.ulysses, ctx.attention.ring, ctx.kv_heads, ctx.shard
        saved = deque(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # free each after its use, before all gradients have arrived
        grads = deque(start_heads_for_sequence(grad, ulysses, group.queries) for group in ctx.groups)
        dq = SequenceForHeads(ulysses, grad.shape[1] // ulysses.size)
        dk, dv = SequenceForHeads(ulysses, kv_heads), SequenceForHeads(ulysses, kv_heads)

        def of_queries(k: Tensor, v: Tensor, of_keys: KeyGradients) -> Tensor:
            its_grad, pending = grads.popleft()
            pending.wait()
            q, out, lse = saved.popleft(), saved.popleft(), saved.popleft()
            return ring.backward(its_grad, q, k, v, out, lse, shard, of_keys)

        def use_all(keys: slice, sharing: Iterable[HeadGroup]) -> None:
            k, v = saved.popleft(), saved.popleft()
            of_keys = ring.key_gradients(k, v)
            for group in sharing:
                dq.start(of_queries(k, v, of_keys), group.queries)
            for result, total in zip((dk, dv), of_keys.total(), strict=True):
                result.start(total, keys)

        for keys, sharing in groupby(ctx.groups, lambda group: group.keys):
            use_all(keys, sharing)
        return dq.result(), dk.result(), dv.result(), None, None, None
