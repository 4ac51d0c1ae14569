"""Attention where samples are cut over ranks, or hold several documents: Ulysses over heads, then a ring over keys.

    q, k, v [batch, heads, seq / (u r), size]
      | all-to-all over u ranks: fewer heads, more of the sequence        (Ulysses, Jacobs et al. 2023)
      v
    q [batch, heads / u, seq / r, size] stays; k and v go round r ranks   (ring attention, Liu et al. 2023)

    step on ring rank 0 of 4         0         1        2        3         while a rank computes, the next keys travel
    it has the keys of rank          0         3        2        1
    queries that see some of them    all       those of its later chunk    see `tiles` in token_layout.py

Each step gives a part of the result with its log-sum-exp, and parts are merged in fp32.  In the backward the gradients
of keys and values follow them round the ring, and end on the rank that the keys belong to.  What that rank's own queries
add to them is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megazero.comm.autograd import all_heads_for_sequence, sequence_for_heads
from megazero.comm.collectives import Pending, ring_shift
from megazero.layers.recompute import KeptResults
from megazero.layers.sample_part import SamplePart
from megazero.layers.tile_calls import EVERYTHING, Rows, calls
from megazero.parallel_state import Axis

_KeyPart: TypeAlias = tuple[Rows, Tensor, Tensor]  # of a call: where its keys are, gradients of keys and of values


def fp32_or_wider(x: Tensor) -> torch.dtype:
    """fp32, or the type of the tensor where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class ContextAttention:
    """Causal attention within documents, over all ranks of context parallelism.

    Args:
        ulysses, ring: the two axes.
        window: how many positions a query sees, its own included; None for all of its document up to itself.
        gradient_dtype: in which the gradients of keys and values travel, where keys have 16 bits.
    """

    def __init__(self, ulysses: Axis, ring: Axis, window: int | None, gradient_dtype: torch.dtype) -> None:
        self.ulysses, self.ring, self.window, self.gradient_dtype = ulysses, ring, window, gradient_dtype

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: SamplePart, *, kept: KeptResults | None = None) -> Tensor:
        """q: [batch, heads, seq of the rank, size], k and v: [batch, kv heads, ...] -> as q.

        Raises: ValueError where the part is of other samples.
        """
        rows, samples = part.rows.shape
        if q.shape[2] != rows or samples not in (1, q.shape[0]):
            raise ValueError(
                f"a micro-batch's `part` must be of its own samples: got {q.shape[0]} samples of {q.shape[2]} tokens on "
                f"this rank, and a part of {samples} samples of {rows} tokens"
            )
        if k.shape[1] < self.ulysses.size:  # ranks that share a key head; autograd sums their gradients
            k, v = (x.repeat_interleave(self.ulysses.size // x.shape[1], dim=1) for x in (k, v))
        q, k, v = all_heads_for_sequence((q, k, v), self.ulysses)
        out: Tensor = _RingAttention.apply(q, k, v, self, part, kept)
        return sequence_for_heads(out, self.ulysses)


class _RingAttention(torch.autograd.Function):
    """Attention of a ring rank's queries to the keys of all of the ring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: ContextAttention,
        part: SamplePart,
        kept: KeptResults | None,
    ) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            return _forward(q, k, v, attention, part)

        out, lse = compute() if kept is None else kept.through(compute)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.attention, ctx.part = attention, part
        return out.detach()  # the graph holds this one, and what is kept holds no graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(grad, q, k, v, out, lse, ctx.attention, ctx.part), None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, attention: ContextAttention, part: SamplePart) -> tuple[Tensor, Tensor]:
    """out, as q, and for each query the log-sum-exp, fp32 [batch, heads, seq]."""
    result: _Merged | None = None
    for source, keys, values in _visits(k, v, attention.ring):
        for call in calls(part, source, attention.window, q):
            found = call.forward(q, keys, values)
            if result is None and found[0].shape == q.shape:
                result = _Merged(*found)
                continue
            result = result or _Merged.empty(q)
            result.add(call.queries, *found)
    if result is None:
        raise ValueError("no query sees a key")
    return result.out.to(q.dtype), result.lse


class _Merged:
    """The result of attention over the keys that have been used so far.

    Args:
        out: [batch, heads, seq, size]; in fp32 from the second part on.
        lse: fp32 [batch, heads, seq].
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    @staticmethod
    def empty(q: Tensor) -> _Merged:
        """Of queries that have seen no key."""
        out = torch.zeros_like(q, dtype=fp32_or_wider(q))
        return _Merged(out, torch.full_like(out[..., 0], -torch.inf))

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Add the result of some queries over further keys, each of which sees one at least.

        out - s (out - more), with s = sigmoid(lse of more - lse): no exponential of a large number.
        """
        self.out = self.out.to(fp32_or_wider(self.out))
        mine, before = self.out[rows], self.lse[rows]
        self.out[rows] = mine.lerp_(out.to(mine.dtype), torch.sigmoid(lse - before).unsqueeze(-1))
        self.lse[rows] = torch.logaddexp(before, lse)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attention: ContextAttention,
    part: SamplePart,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, of_keys = _Sum(q), _KeyGradients(k, v, attention)
    for source, keys, values in _visits(k, v, attention.ring):
        parts: list[_KeyPart] = []
        for call in calls(part, source, attention.window, q):
            of_queries, of_these_keys, of_values = call.backward(grad, q, keys, values, out, lse)
            dq.add(call.queries, of_queries)
            if source == attention.ring.index:
                of_keys.add_own(call.keys, of_these_keys, of_values)
            else:
                parts.append((call.keys, of_these_keys, of_values))
        if source != attention.ring.index:
            of_keys.add_and_pass_on(parts)
    return dq.total(), *of_keys.total()


class _Sum:
    """A sum of parts of a tensor, in fp32 where it has several."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Rows, part: Tensor) -> None:
        if self._total is None and part.shape == self._like.shape:
            self._total = part
            return
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=fp32_or_wider(self._like))
        self._total = self._total.to(fp32_or_wider(self._like))
        self._total[rows] += part

    def total(self) -> Tensor:
        """In the type of the tensor."""
        return torch.zeros_like(self._like) if self._total is None else self._total.to(self._like.dtype)


def _visits(k: Tensor, v: Tensor, ring: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(ring rank, its keys, its values) for every rank, this one first.  The next keys travel while these are used."""
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
    del arriving, leaving  # while the last keys are used, theirs is the only buffer
    yield (here + 1) % size, *used


class _KeyGradients:
    """The gradients of keys and values, each on its way to the rank that the keys belong to.

    Those of rank j's keys start on rank j + 1, and each rank adds its part after it has used j's keys: size - 1 messages.
    """

    def __init__(self, k: Tensor, v: Tensor, attention: ContextAttention) -> None:
        self._ring, self._like = attention.ring, k
        self._dtype = fp32_or_wider(k) if k.dtype == fp32_or_wider(k) else attention.gradient_dtype
        self._own = _Sum(k), _Sum(v)
        self._arriving: Tensor | None = None
        self._leaving: Tensor | None = None
        self._pending = Pending()

    def add_own(self, seen: Rows, of_keys: Tensor, of_values: Tensor) -> None:
        """Add what this rank's queries give to some of its own keys and values."""
        for own, part in zip(self._own, (of_keys, of_values), strict=True):
            own.add(seen, part)

    def add_and_pass_on(self, parts: list[_KeyPart]) -> None:
        """Add what this rank's queries give to the keys and values of another rank."""
        self._pending.wait()
        if self._arriving is None:
            self._arriving = self._like.new_zeros((2, *self._like.shape), dtype=self._dtype)
        for seen, *of_tile in parts:
            for travelling, part in zip(self._arriving, of_tile, strict=True):
                travelling[seen] += part
        free = torch.empty_like(self._arriving) if self._leaving is None else self._leaving
        self._pending = ring_shift(free, self._arriving, self._ring)
        self._leaving, self._arriving = self._arriving, free

    def total(self) -> tuple[Tensor, Tensor]:
        """Gradients of this rank's keys and values."""
        self._pending.wait()
        if self._arriving is not None:
            self.add_own(EVERYTHING, *self._arriving)
        return self._own[0].total(), self._own[1].total()
