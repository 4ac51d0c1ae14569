"""Every collective call of the project, asynchronous, counted, and with an error that names what was lost.

A call starts the operation and returns a `Pending`; its result may be used after `wait()`. Over an axis of one rank there
is no call and the `Pending` is already done, so that callers write one path.

[Note: messages on the CPU]  gloo's collectives are made for many hosts and few cores in use: its reduce-scatter moves an
all-reduce's bytes, its all-gather takes everything through memory that it allocates anew, and its all-reduce of a few bytes
takes 10 ms where four ranks share two cores.  So on the CPU, as long as ranks are few, all three are messages of every rank
to every other and sums in rank order: the fewest bytes, one wait, and the same bits on every rank.  An all-reduce is one
exchange of everything while it is small, and otherwise a reduce-scatter and an all-gather, whose second half begins when the
first is waited for.  Long messages go in pieces, so that one is summed while the next arrives.  NCCL keeps its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.parallel_state import Axis

T = TypeVar("T")

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GATHER_TAG, _REDUCE_TAG = 1, 2  # these messages never meet each other, or those of `exchange`
_MOST_MESSAGING_RANKS = 8  # beyond, the number of messages would tell
_ONE_EXCHANGE_BYTES = 1 << 20  # up to here one wait more costs more than the bytes that it would save
_PIECE_BYTES = 1 << 21

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_COMBINATIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}

# Also RuntimeErrors, but no peer is to blame.  (AcceleratorError: a kernel failed.)
_OF_THE_DEVICE = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))


class LostPeerError(RuntimeError):
    """A collective could not finish: a peer died, or did not come within the time limit.

    Args:
        operation: the collective.
        axis: what it ran over.
        reason: what torch says.
    """

    def __init__(self, operation: str, axis: Axis, reason: str) -> None:
        # not the axis itself: an error may outlive its process group
        self.operation, self.axis, self.ranks, self.rank = operation, axis.name, axis.ranks, axis.ranks[axis.index]
        self.reason = reason
        super().__init__(self._text("", "a rank was lost or is stuck. The first rank to fail holds the cause."))

    def _text(self, where: str, found: str) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return (
            f"{self.operation} over {self.axis}, as rank {self.rank} of ({shown}),{where} did not finish: {found} "
            f"({self.reason})"
        )

    def explain(self, step: int, found: str) -> None:
        """Say in which step it happened, and what became of the peers."""
        self.args = (self._text(f" in step {step}", found),)


def _reason(error: RuntimeError) -> str:
    """What torch says, in its first sentence and without the place in its source."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\[\]]*:\d+\] ", "", line).split(". ")[0]


class Pending:
    """An operation under way.

    Args:
        work: what torch returned, or None when there was nothing to do.
        guard: makes the call that waits; see `_Guard`.
        finish: runs once after the operation, for example a local sum.
    """

    def __init__(
        self,
        work: dist.Work | None = None,
        guard: _Guard | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._guard = guard
        self._finish = finish

    def wait(self) -> None:
        """Wait until the result may be used; more than once is harmless.  Raises: LostPeerError."""
        work, self._work = self._work, None
        if work is not None and self._guard is not None:
            self._guard(work.wait)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class _Guard:
    """Makes the calls of one operation that may wait for a peer: timed, and with an error that names what was lost."""

    __slots__ = ("_axis", "_operation")

    def __init__(self, operation: str, axis: Axis) -> None:
        self._operation, self._axis = operation, axis

    def __call__(self, call: Callable[[], T]) -> T:
        traffic = self._axis.traffic
        entered = traffic.enter(self._axis, self._operation)
        try:
            return call()
        except _OF_THE_DEVICE:
            raise
        except RuntimeError as error:  # gloo and NCCL report a lost peer and a time-out as RuntimeError
            raise LostPeerError(self._operation, self._axis, _reason(error)) from error
        finally:
            traffic.leave(entered)


def _start(operation: str, axis: Axis, sent_bytes: int, call: Callable[[], Any]) -> tuple[Any, _Guard]:
    axis.traffic.add(axis.name, operation, sent_bytes)
    guard = _Guard(operation, axis)
    return guard(call), guard


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Replace `tensor` by its sum or maximum over the axis.

    Args:
        tensor: contiguous, equal shape and dtype on every rank; overwritten.
        axis: the ranks that take part.
        op: "sum" or "max".
    """
    if axis.size == 1:
        return Pending()
    sent = 2 * tensor.nbytes * (axis.size - 1) // axis.size
    if _by_messages(tensor, axis):
        flat = tensor.view(-1)
        if tensor.nbytes * (axis.size - 1) <= _ONE_EXCHANGE_BYTES:
            return _exchange_all(flat, axis, sent, op)
        return _reduce_then_gather(flat, axis, sent, op)
    work, guard = _start(
        "all_reduce",
        axis,
        sent,
        lambda: dist.all_reduce(tensor, op=_REDUCTIONS[op], group=axis.group, async_op=True),
    )
    return Pending(work, guard)


def numbers_of(reduced: Tensor, axis: Axis) -> list[float]:
    """The numbers of an `all_reduce` that was waited for, on the host.

    On CUDA it is here, and not in `Pending.wait`, that the host waits for the device and so for its peers.
    """
    return list(_Guard("all_reduce", axis)(reduced.tolist) if axis.size > 1 else reduced.tolist())


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Pending:
    """Replace `tensor` by that of one rank.

    Args:
        tensor: contiguous, equal shape and dtype on every rank; overwritten but on the source.
        axis: the ranks that take part.
        source: place of the sending rank on the axis.
    """
    if axis.size == 1:
        return Pending()
    sent = tensor.nbytes if axis.index == source else 0
    work, guard = _start(
        "broadcast",
        axis,
        sent,
        lambda: dist.broadcast(tensor, src=axis.ranks[source], group=axis.group, async_op=True),
    )
    return Pending(work, guard)


def _check_parts(whole: Tensor, part: Tensor, axis: Axis) -> None:
    if whole.shape != (part.shape[0] * axis.size, *part.shape[1:]):
        raise ValueError(
            f"over {axis.name} of {axis.size} ranks, parts {list(part.shape)} do not make up {list(whole.shape)}"
        )


def all_gather(out: Tensor, shard: Tensor, axis: Axis) -> Pending:
    """Concatenate every rank's `shard` into `out`, in rank order.

    Args:
        out: 1-D or leading dimension n * shard's; contiguous.
        shard: contiguous; may be this rank's own part of `out`.
        axis: the ranks that take part.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_parts(out, shard, axis)
    if axis.size == 1:
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return Pending()
    sent = shard.nbytes * (axis.size - 1)
    if not _by_messages(shard, axis):
        work, guard = _start("all_gather", axis, sent, lambda: _all_gather(out, shard, group=axis.group, async_op=True))
        return Pending(work, guard)
    places = out.view(axis.size, *shard.shape).unbind(0)
    mine = places[axis.index]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard)
    works, guard = _start("all_gather", axis, sent, lambda: _swap([mine] * axis.size, places, axis, _GATHER_TAG))
    return Pending(finish=lambda: guard(lambda: _wait_for(works)))


def arriving_elements(full: int, axis: Axis, device: torch.device) -> int:
    """Elements of the `scratch` that a `reduce_scatter` of `full` elements asks for."""
    return full - full // axis.size if device.type == "cpu" else 0


def reduce_scatter(out: Tensor, full: Tensor, axis: Axis, scratch: Tensor | None = None) -> Pending:
    """Sum `full` over the axis and keep this rank's part in `out`.

    Args:
        out: this rank's 1/n of `full`'s leading dimension; contiguous; may be this rank's own part of `full`.
        full: contiguous; its leading dimension divides by the axis size. Not to be changed before `wait`.
        axis: the ranks that take part.
        scratch: 1-D, at least `arriving_elements`, for the parts that arrive on the CPU; made here when None. `out` may be
            its beginning.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_parts(full, out, axis)
    if axis.size == 1:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return Pending()
    sent = full.nbytes * (axis.size - 1) // axis.size
    if not _by_messages(full, axis):
        work, guard = _start(
            "reduce_scatter",
            axis,
            sent,
            lambda: _reduce_scatter(out, full, group=axis.group, async_op=True),
        )
        return Pending(work, guard)
    parts = list(full.view(axis.size, -1).unbind(0))
    arriving = full.new_empty(full.numel() - out.numel()) if scratch is None else scratch
    return _reduce_parts(out.view(-1), parts, arriving, axis, "reduce_scatter", sent, torch.add)


# [Note: messages on the CPU]


def _by_messages(tensor: Tensor, axis: Axis) -> bool:
    return tensor.device.type == "cpu" and axis.size <= _MOST_MESSAGING_RANKS


def _swap(sends: Sequence[Tensor], receives: Sequence[Tensor], axis: Axis, tag: int) -> list[Any]:
    """Send a tensor to each other rank, and receive one from each; both lists by place on the axis."""
    others = [place for place in range(axis.size) if place != axis.index]
    works = [
        dist.irecv(receives[place], axis.ranks[place], axis.group, tag) for place in others if receives[place].numel()
    ]
    works += [dist.isend(sends[place], axis.ranks[place], axis.group, tag) for place in others if sends[place].numel()]
    return works


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _combine(out: Tensor, own: Tensor, arrived: Sequence[Tensor], at: int, combine: Callable[..., Tensor]) -> None:
    """out = the parts in rank order; `own` is that of place `at`, and may be `out`, which may be the first to arrive."""
    parts = [*arrived[:at], own, *arrived[at:]]
    total = parts[0]
    for index, part in enumerate(parts[1:], 1):
        total = combine(total, part, out=out if index == len(parts) - 1 else arrived[0])


def _exchange_all(flat: Tensor, axis: Axis, sent: int, op: str) -> Pending:
    arrived = list(flat.new_empty(axis.size - 1, flat.numel()).unbind(0))
    receives = [*arrived[: axis.index], flat, *arrived[axis.index :]]
    works, guard = _start("all_reduce", axis, sent, lambda: _swap([flat] * axis.size, receives, axis, _REDUCE_TAG))

    def finish() -> None:
        guard(lambda: _wait_for(works))
        _combine(flat, flat, arrived, axis.index, _COMBINATIONS[op])

    return Pending(finish=finish)


def _reduce_then_gather(flat: Tensor, axis: Axis, sent: int, op: str) -> Pending:
    parts = list(flat.tensor_split(axis.size))
    mine = parts[axis.index]
    arriving = flat.new_empty(mine.numel() * (axis.size - 1))
    reducing = _reduce_parts(mine, parts, arriving, axis, "all_reduce", sent, _COMBINATIONS[op])

    def finish() -> None:
        reducing.wait()
        guard = _Guard("all_reduce", axis)
        works = guard(lambda: _swap([mine] * axis.size, parts, axis, _GATHER_TAG))
        guard(lambda: _wait_for(works))

    return Pending(finish=finish)


def _reduce_parts(
    out: Tensor,
    parts: Sequence[Tensor],
    arriving: Tensor,
    axis: Axis,
    operation: str,
    sent: int,
    combine: Callable[..., Tensor],
) -> Pending:
    """Send every rank its part, and combine those that arrive with one's own, piece by piece.  All tensors are 1-D."""
    own = parts[axis.index]
    rooms = arriving[: own.numel() * (axis.size - 1)].view(axis.size - 1, -1)
    receives = [*rooms[: axis.index].unbind(0), own, *rooms[axis.index :].unbind(0)]
    step = _PIECE_BYTES // own.element_size()
    starts = range(0, max(part.numel() for part in parts), step)

    def post() -> list[list[Any]]:
        return [
            _swap(
                [part[start : start + step] for part in parts],
                [part[start : start + step] for part in receives],
                axis,
                _REDUCE_TAG,
            )
            for start in starts
        ]

    pieces, guard = _start(operation, axis, sent, post)

    def finish() -> None:
        for start, works in zip(starts, pieces, strict=True):
            guard(partial(_wait_for, works))
            piece = slice(start, start + step)
            _combine(out[piece], own[piece], [room[piece] for room in rooms.unbind(0)], axis.index, combine)

    return Pending(finish=finish)


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Every rank's `value`, in rank order, on every rank.  For small picklable values."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    _start("gather_objects", axis, 0, lambda: dist.all_gather_object(values, value, group=axis.group))
    return values


def agree(action: Callable[[], T], axis: Axis, raises: type[Exception]) -> T:
    """Run an action that may fail on some ranks only; if it fails on any, every rank raises.

    Args:
        action: makes no collective call.
        axis: the ranks that run it.
        raises: what all raise, with the texts of the failures; a subclass of it, where that was raised first.
    """
    answer: list[T] = []
    failure: tuple[str, type[Exception]] | None = None
    cause = None
    try:
        answer.append(action())
    except Exception as error:
        # one with arguments of its own cannot be made from a text
        is_plain = isinstance(error, raises) and type(error).__init__ is raises.__init__
        failure, cause = (str(error) or repr(error), type(error) if is_plain else raises), error
    found = [one for one in gather_objects(failure, axis) if one is not None]
    if found:
        raise found[0][1]("\n".join(dict.fromkeys(text for text, _ in found))) from cause
    return answer[0]


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> list[Pending]:
    """Post point-to-point operations together.

    Args:
        sends: (tensor, global rank to send to); the tensor must not change before its `Pending` is done.
        receives: (buffer, global rank to receive from).
        axis: the ranks among which messages travel; both sides must post a pair's messages in the same order.

    Returns: one `Pending` per operation, sends first.
    """
    operations = [dist.P2POp(dist.isend, tensor, peer, group=axis.group) for tensor, peer in sends]
    operations += [dist.P2POp(dist.irecv, buffer, peer, group=axis.group) for buffer, peer in receives]
    if not operations:
        return []
    works, guard = _start(
        "send_recv", axis, sum(t.nbytes for t, _ in sends), lambda: dist.batch_isend_irecv(operations)
    )
    if len(works) < len(operations):  # NCCL returns one handle for the whole batch
        works = list(works) * len(operations)
    return [Pending(work, guard) for work in works]
