"""Attention where samples are cut over ranks, or hold several documents: Ulysses over heads, then a ring over keys.

    q, k, v [batch, heads, seq / (u r), size]
      | all-to-all over u ranks: fewer heads, more of the sequence        (Ulysses, Jacobs et al. 2023)
      v
    q [batch, heads / u, seq / r, size] stays; k and v go round r ranks   (ring_attention.py)

Where the ranks of Ulysses communicate while they compute, heads are exchanged and used in pieces:

    link          k v q0 | q1 | q2 | q3 |      | out0 | out1 | out2 | out3
    computing            | q0   | q1   | q2   | q3   |

So attention waits for the first piece's arrival, and whoever reads its output for the last one's.  Keys and values go with
the first piece that reads them.  The backward does the same with gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.comm.autograd import refuse_second_derivative
from megazero.comm.collectives import Pending, largest, runs_by_itself
from megazero.comm.head_exchange import SequenceForHeads, start_heads_for_sequence
from megazero.layers.attention_kernels import uncompiled
from megazero.layers.head_pieces import HeadPiece, head_pieces
from megazero.layers.recompute import KeptResults
from megazero.layers.ring_attention import KeyGradients, Ring
from megazero.layers.sample_part import SamplePart
from megazero.parallel_state import Axis

_MOST_PIECES = 4  # attention waits for 1/4 of what is exchanged
_LEAST_CUDA_ROWS = 1 << 15  # of queries in a piece: 256 blocks of flash attention, enough for all multiprocessors


class ContextAttention:
    """Causal attention within documents, over all ranks of context parallelism, which make it together.

    Args:
        ulysses, ring: the two axes.
        window: how many positions a query sees, its own included; None for all of its document up to itself.
        gradient_dtype: in which the gradients of keys and values travel, where keys have 16 bits.
        on_cuda: whether the run computes there; a plan's tensors do not say so.
    """

    def __init__(
        self, ulysses: Axis, ring: Axis, window: int | None, gradient_dtype: torch.dtype, *, on_cuda: bool = False
    ) -> None:
        self.ulysses, self.ring = ulysses, Ring(ring, window, gradient_dtype, on_cpu=not on_cuda)
        # Each message of a ring is of one piece, so all its ranks need one answer; their exchanges are in other groups.
        (waits,) = largest([float(not runs_by_itself(ulysses))], ring)
        self._most_pieces, self._least_rows = 1 if waits else _MOST_PIECES, _LEAST_CUDA_ROWS if on_cuda else 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: SamplePart, *, kept: KeptResults | None = None) -> Tensor:
        """q: [batch, heads, seq of the rank, size], k and v: [batch, kv heads, ...] -> as q.

        Raises: ValueError where the part is of other samples, or keys and values do not fit the queries.
        """
        return uncompiled(self._attend)(q, k, v, part, kept)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, part: SamplePart, kept: KeptResults | None) -> Tensor:
        rows, samples = part.rows.shape
        if q.shape[2] != rows or not part.is_of(q.shape[0]):
            raise ValueError(
                f"a micro-batch's `part` must be of its own samples: got {q.shape[0]} samples of {q.shape[2]} tokens on "
                f"this rank, and a part of {samples} samples of {rows} tokens"
            )
        heads, kv_heads = q.shape[1], max(k.shape[1], 1)
        if k.shape != v.shape or k.shape != (q.shape[0], kv_heads, *q.shape[2:]) or heads % kv_heads:
            raise ValueError(
                "keys and values must have the queries' batch, seq and size, and as many heads as divide theirs: got q "
                f"{list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; [batch, heads, seq, size] is expected"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"queries, keys and values must be of one type: got {q.dtype}, {k.dtype} and {v.dtype}")
        # The kernels read neighbours in the last dimension, whatever its stride.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if k.shape[1] < self.ulysses.size:  # ranks that share a key head; autograd sums their gradients
            k, v = (x.repeat_interleave(self.ulysses.size // x.shape[1], dim=1) for x in (k, v))
        out: Tensor = _Attention.apply(q, k, v, self, part, kept)
        return out

    def pieces(self, q: Tensor, k: Tensor) -> list[HeadPiece]:
        """The pieces in which the heads that a rank attends with are exchanged and used.  q, k: as in `attend`."""
        heads, kv_heads = q.shape[1] // self.ulysses.size, k.shape[1] // self.ulysses.size
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        most = max(1, min(self._most_pieces, rows // self._least_rows))
        # pieces that share keys would send them round a ring each
        return head_pieces(heads, kv_heads, most, shares_keys=self.ring.axis.size == 1)


class _Piece(NamedTuple):
    """A piece on its way to the ranks that attend with it.

    Args:
        heads: which they are.
        q: its queries.
        keys: keys and values of it and of the pieces that follow and share them; None where it shares those before.
        pending: after which all of these may be used.
    """

    heads: HeadPiece
    q: Tensor
    keys: tuple[Tensor, Tensor] | None
    pending: list[Pending]


def _exchanged(pieces: list[HeadPiece], q: Tensor, k: Tensor, v: Tensor, ulysses: Axis) -> Iterator[_Piece]:
    """Begin the exchange of all pieces, the first one's first, and yield each when it has arrived."""
    under_way = []
    for number, heads in enumerate(pieces):
        new = number == 0 or pieces[number - 1].keys != heads.keys
        given = [(k, heads.keys), (v, heads.keys), (q, heads.queries)] if new else [(q, heads.queries)]
        started = [start_heads_for_sequence(x, ulysses, chosen) for x, chosen in given]
        tensors = [tensor for tensor, _ in started]
        keys = (tensors[0], tensors[1]) if new else None
        under_way.append(_Piece(heads, tensors[-1], keys, [pending for _, pending in started]))
    for piece in under_way:
        for one in piece.pending:
            one.wait()
        yield piece


class _Attention(torch.autograd.Function):
    """Attention of a rank's tokens to all of their sample."""

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
        ulysses, pieces = attention.ulysses, attention.pieces(q, k)
        results, saved, keys = SequenceForHeads(ulysses, q.shape[1] // ulysses.size), list[Tensor](), (k, v)
        for piece in _exchanged(pieces, q, k, v, ulysses):
            keys = piece.keys or keys
            compute = partial(attention.ring.forward, piece.q, *keys, part)
            out, lse = compute() if kept is None else kept.through(compute)
            saved += (*(piece.keys or ()), piece.q, out, lse)
            results.start(out, piece.heads.queries)
        ctx.save_for_backward(*saved)
        ctx.attention, ctx.part, ctx.pieces, ctx.kv_heads = attention, part, pieces, k.shape[1] // ulysses.size
        return results.result().detach()  # the graph holds this one, and what is kept holds no graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention over ranks or documents")
        ulysses, ring, kv_heads, part = ctx.attention.ulysses, ctx.attention.ring, ctx.kv_heads, ctx.part
        saved = deque(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # so that each is freed when it has been used, before all gradients have arrived
        grads = deque(start_heads_for_sequence(grad, ulysses, piece.queries) for piece in ctx.pieces)
        dq = SequenceForHeads(ulysses, grad.shape[1] // ulysses.size)
        dk, dv = SequenceForHeads(ulysses, kv_heads), SequenceForHeads(ulysses, kv_heads)

        def of_queries(k: Tensor, v: Tensor, of_keys: KeyGradients) -> Tensor:
            its_grad, pending = grads.popleft()
            pending.wait()
            q, out, lse = saved.popleft(), saved.popleft(), saved.popleft()
            return ring.backward(its_grad, q, k, v, out, lse, part, of_keys)

        def use_all(keys: slice, sharing: Iterable[HeadPiece]) -> None:
            k, v = saved.popleft(), saved.popleft()
            of_keys = ring.key_gradients(k, v)
            for piece in sharing:
                dq.start(of_queries(k, v, of_keys), piece.queries)
            for result, total in zip((dk, dv), of_keys.total(), strict=True):
                result.start(total, keys)

        for keys, sharing in groupby(ctx.pieces, lambda piece: piece.keys):
            use_all(keys, sharing)
        return dq.result(), dk.result(), dv.result(), None, None, None
