"""Ring attention: queries stay, keys and values go round the ranks (Liu et al. 2023).

    step on rank 0 of 4              0         1        2        3         while a rank computes, the next keys travel
    it has the keys of rank          0         3        2        1
    queries that see some of them    all       those of its later chunk    see `tiles` in token_layout.py

Each step gives a part of the result with its log-sum-exp, and parts are merged in fp32.  In the backward the gradients
of keys and values follow them round the ring, and end on the rank that the keys belong to.  What that rank's own queries
add to them is never sent.

    backward of rank 0 of 2     own keys, some heads | keys of rank 1 | own keys, other heads
    on the link                 keys ->              |                | <- their gradients

So each message has something to hide behind, the last one too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, ring_shift
from megazero.layers.causal_squares import merge
from megazero.layers.head_pieces import HeadPiece, head_pieces
from megazero.layers.sample_part import SamplePart
from megazero.layers.tile_calls import EVERYTHING, Call, Rows, calls
from megazero.parallel_state import Axis

_KeyPart: TypeAlias = tuple[Rows, *tuple[Tensor, ...]]  # of a call: where its keys are, gradients of keys and of values
_EVERY_HEAD = slice(None)


class Ring:
    """Causal attention within documents of a rank's queries to the keys of all ring ranks.

    Args:
        axis: the ring.
        window: how many positions a query sees, its own included; None for all of its document up to itself.
        gradient_dtype: in which the gradients of keys and values travel, where keys have 16 bits.
        on_cpu: cut tiles as is best there; see causal_squares.py and cpu_bf16.py.
    """

    def __init__(self, axis: Axis, window: int | None, gradient_dtype: torch.dtype, *, on_cpu: bool = False) -> None:
        self.axis, self.window, self.gradient_dtype = axis, window, gradient_dtype
        self.on_cpu = on_cpu

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: SamplePart) -> tuple[Tensor, Tensor]:
        """out, as q, and for each query the log-sum-exp, [batch, heads, seq] in fp32, or in fp64 for fp64.

        Args:
            q: [batch, heads, seq of a ring rank, size].
            k, v: [batch, kv heads, seq of a ring rank, size].
            part: what the queries see.
        """
        result: _Merged | None = None
        for source, keys, values in _visits(k, v, self.axis):
            for call in self._calls(part, source, q, k):
                found = call.forward(q, keys, values)
                if result is None and found[0].shape == q.shape:
                    result = _Merged(*found)
                    continue
                result = result or _Merged.empty(q)
                result.add(call.queries, *found)
        if result is None:
            raise ValueError("no query sees a key")
        return result.out.to(q.dtype), result.lse

    def _calls(self, part: SamplePart, source: int, q: Tensor, k: Tensor) -> list[Call]:
        return calls(part, source, self.window, q, k, on_cpu=self.on_cpu)

    def key_gradients(self, k: Tensor, v: Tensor) -> KeyGradients:
        """Where `backward` adds the gradients of these keys and values."""
        return KeyGradients(k, v, self.axis, self.gradient_dtype)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: SamplePart,
        of_keys: KeyGradients,
    ) -> Tensor:
        """Gradients of q.  Those of k and v are added to `of_keys`, which on a ring of several ranks takes one call.

        Args:
            grad, out: as q.
            lse: of the forward; other arguments as there.
        """
        here, dq = self.axis.index, _Sum(q)
        own = head_pieces(q.shape[1], k.shape[1], min(self.axis.size, 2), shares_keys=True)

        def gradients(call: Call, heads: slice, *given: Tensor) -> list[Tensor]:
            """Of a call's keys and values; those of its queries are added, and freed before the next call."""
            of_queries, *others = call.backward(*given)
            dq.add(call.queries, of_queries, heads)
            return others

        def use_own_keys(heads: HeadPiece) -> None:
            its_grad, its_q, its_out, its_lse = (x[:, heads.queries] for x in (grad, q, out, lse))
            its_k, its_v = (x[:, heads.keys] for x in (k, v))
            for call in self._calls(part, here, its_q, its_k):
                found = gradients(call, heads.queries, its_grad, its_q, its_k, its_v, its_out, its_lse)
                for sums, of_own in zip(of_keys.own(heads.keys), found, strict=True):
                    sums.add(call.keys, of_own)
                del found, of_own

        def use_keys_of(source: int, keys: Tensor, values: Tensor) -> None:
            its_calls, given = self._calls(part, source, q, k), (grad, q, keys, values, out, lse)
            of_keys.add_and_pass_on([(call.keys, *gradients(call, _EVERY_HEAD, *given)) for call in its_calls])

        for visit in _visits(k, v, self.axis):
            if visit[0] == here:
                use_own_keys(own[0])
            else:
                use_keys_of(*visit)
            del visit  # with the buffer of keys that are used no more
        for heads in own[1:]:
            use_own_keys(heads)
        return dq.total()


def fp32_or_wider(x: Tensor) -> torch.dtype:
    """fp32, or the type of the tensor where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class _Merged:
    """The result of attention over the keys that have been used so far.

    Args:
        out: [batch, heads, seq, size]; in fp32 from the second part on.
        lse: [batch, heads, seq], in fp32 or wider.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    @staticmethod
    def empty(q: Tensor) -> _Merged:
        """Of queries that have seen no key."""
        out = torch.zeros_like(q, dtype=fp32_or_wider(q))
        return _Merged(out, torch.full_like(out[..., 0], -torch.inf))

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Add the result of some queries over further keys; each of these queries sees one of the keys at least."""
        self.out = self.out.to(fp32_or_wider(self.out))
        mine, its_lse = self.out[rows], self.lse[rows]
        merge(mine, its_lse, out, lse)
        if any(isinstance(one, Tensor) for one in rows):  # copies, not views
            self.out[rows], self.lse[rows] = mine, its_lse


class _Sum:
    """A sum of parts of a tensor, in fp32 where it has several."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Rows, part: Tensor, heads: slice = _EVERY_HEAD) -> None:
        """Add to some rows of some heads."""
        if self._total is None and part.shape == self._like.shape:
            self._total = part
            return
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=fp32_or_wider(self._like))
        self._total = self._total.to(fp32_or_wider(self._like))
        self._total[:, heads][rows] += part

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


class KeyGradients:
    """The gradients of keys and values, each on its way to the rank that the keys belong to.

    Those of rank j's keys start on rank j + 1, and each rank adds its part after it has used j's keys: size - 1 messages.

    Args:
        k, v: keys and values of this rank.
        ring: the axis.
        gradient_dtype: of the messages, where keys have 16 bits.
    """

    def __init__(self, k: Tensor, v: Tensor, ring: Axis, gradient_dtype: torch.dtype) -> None:
        self._ring, self._own_keys = ring, (k, v)
        self._dtype = fp32_or_wider(k) if k.dtype == fp32_or_wider(k) else gradient_dtype
        self._own: dict[tuple[int, int], list[_Sum]] = {}  # by the heads' start and stop
        self._arriving: Tensor | None = None
        self._leaving: Tensor | None = None
        self._pending = Pending()

    def own(self, heads: slice) -> list[_Sum]:
        """What this rank's queries give to some heads of its own keys, and of its values."""
        return self._own.setdefault((heads.start, heads.stop), [_Sum(x[:, heads]) for x in self._own_keys])

    def add_and_pass_on(self, parts: list[_KeyPart]) -> None:
        """Add what this rank's queries give to the keys and values of another rank."""
        self._pending.wait()
        if self._arriving is None:
            k, _ = self._own_keys
            self._arriving = k.new_zeros((2, *k.shape), dtype=self._dtype)
        for seen, *of_tile in parts:
            for travelling, part in zip(self._arriving, of_tile, strict=True):
                travelling[seen] += part
        free = torch.empty_like(self._arriving) if self._leaving is None else self._leaving
        self._pending = ring_shift(free, self._arriving, self._ring)
        self._leaving, self._arriving = self._arriving, free

    def total(self) -> tuple[Tensor, Tensor]:
        """Gradients of this rank's keys and values; to be asked once."""
        self._pending.wait()
        dk, dv = (torch.empty_like(x) for x in self._own_keys)
        while self._own:
            (start, stop), sums = self._own.popitem()
            for number, (whole, own) in enumerate(zip((dk, dv), sums, strict=True)):
                if self._arriving is not None:
                    own.add(EVERYTHING, self._arriving[number, :, start:stop])
                whole[:, start:stop] = own.total()
        return dk, dv
