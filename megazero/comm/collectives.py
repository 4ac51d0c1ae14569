"""Every collective call of the project, asynchronous, counted, and with an error that names what was lost.

A call starts the operation and returns a `Pending`; its result may be used after `wait()`. Over an axis of one rank there
is no call and the `Pending` is already done, so that callers write one path.

Ranks of one machine that compute on CPUs reduce and gather through memory that they share (`comm/in_memory.py`), and send
messages through it where `share_messages` was called (`comm/messages.py`). Other CPU ranks take gloo's primitives: a
reduce-scatter is an all-to-all of the parts and a local sum in rank order there, since gloo's own moves an all-reduce's
bytes, and an all-gather is messages that arrive where they belong, since gloo's own takes everything through memory that it
allocates anew. NCCL keeps its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm import in_memory
from megazero.comm.messages import Messages, Parcel, area_bytes
from megazero.comm.rendezvous import Listening, Meeting, meet
from megazero.comm.shared_memory import AREA_BYTES, Rounds, SharedMemory
from megazero.parallel_state import Axis, Shared

T = TypeVar("T")

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GATHER_TAG = 1  # messages of an all-gather never meet those of `exchange`
_MOST_SHARING_RANKS = 16  # beyond, signals of every rank to every other would tell

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

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for; an operation may be over and its end not yet known here."""
        return self._work is None and self._finish is None

    def wait(self) -> None:
        """Wait until the result may be used; more than once is harmless.  Raises: LostPeerError."""
        if self._work is not None and self._guard is not None:
            self._guard(self._work.wait)
        self._work = None
        if self._finish is not None:
            self._finish()
        self._finish = None


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
    room = _room(tensor, axis, "reduce")
    if room is not None:
        rounds = in_memory.all_reduce(room, tensor.detach().view(-1), _COMBINATIONS[op])
        return _in_room(room, rounds, "all_reduce", tensor, axis, sent)
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
    if shard.device.type != "cpu":
        work, guard = _start("all_gather", axis, sent, lambda: _all_gather(out, shard, group=axis.group, async_op=True))
        return Pending(work, guard)
    shard = shard.detach()
    places = [place.view(-1) for place in out.detach().view(axis.size, *shard.shape).unbind(0)]
    mine = places[axis.index]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard.view(-1))
    room = _room(shard, axis, "gather")
    if room is not None:
        return _in_room(room, in_memory.all_gather(room, places), "all_gather", shard, axis, sent)
    others = [place for place in range(axis.size) if place != axis.index and mine.numel()]

    def post() -> list[Any]:
        works = [dist.irecv(places[place], axis.ranks[place], axis.group, _GATHER_TAG) for place in others]
        return works + [dist.isend(mine, axis.ranks[place], axis.group, _GATHER_TAG) for place in others]

    works, guard = _start("all_gather", axis, sent, post)
    return Pending(finish=lambda: guard(lambda: _wait_for_all(works)))


def _wait_for_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def arriving_elements(full: int, axis: Axis, device: torch.device) -> int:
    """Elements of the `scratch` that a `reduce_scatter` of `full` elements uses.  All ranks of the axis ask."""
    on_gloo = device.type == "cpu" and axis.size > 1 and _room(torch.empty(0, device=device), axis, "reduce") is None
    return full if on_gloo else 0


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
    if full.device.type != "cpu":
        work, guard = _start(
            "reduce_scatter",
            axis,
            sent,
            lambda: _reduce_scatter(out, full, group=axis.group, async_op=True),
        )
        return Pending(work, guard)
    room = _room(full, axis, "reduce")
    if room is not None:
        parts = full.detach().view(axis.size, -1).unbind(0)
        rounds = in_memory.reduce_scatter(room, out.detach().view(-1), parts)
        return _in_room(room, rounds, "reduce_scatter", full, axis, sent)
    arriving = torch.empty_like(full) if scratch is None else scratch[: full.numel()].view_as(full)
    work, guard = _start(
        "reduce_scatter", axis, sent, lambda: dist.all_to_all_single(arriving, full, group=axis.group, async_op=True)
    )
    return Pending(
        work, guard, finish=lambda: in_memory.fold(out, arriving.view(axis.size, *out.shape).unbind(0), torch.add)
    )


def _room(tensor: Tensor, axis: Axis, purpose: str) -> SharedMemory | None:
    """Where the ranks of an axis share memory for a purpose; None on other devices, several machines and for many ranks."""
    shared = axis.shared
    if tensor.device.type != "cpu" or shared is None:
        return None
    if (axis.ranks, purpose) not in shared.rooms:  # the first operation, whichever it is on each rank
        for of in ("reduce", "gather"):
            shared.rooms[axis.ranks, of] = _meet(axis, shared, AREA_BYTES, SharedMemory)
    room: SharedMemory | None = shared.rooms[axis.ranks, purpose]
    return room


def _meet(axis: Axis, shared: Shared, bytes_each: int, room: Callable[[Meeting, float, Listening], T]) -> T | None:
    if axis.size > _MOST_SHARING_RANKS:
        return None
    if shared.listening is None:
        shared.listening = Listening()
    meeting = meet(axis.index, axis.size, bytes_each, partial(gather_objects, axis=axis))
    return None if meeting is None else room(meeting, shared.timeout_seconds, shared.listening)


def _in_room(room: SharedMemory, rounds: Rounds, operation: str, of: Tensor, axis: Axis, sent: int) -> Pending:
    label = f"{operation} of {of.numel()} {of.dtype} over {axis.name}"
    begun, guard = _start(operation, axis, sent, lambda: room.begin(label, rounds))
    return Pending(finish=lambda: guard(lambda: room.finish(begun)))


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


def share_messages(axis: Axis) -> None:
    """Let what `exchange` sends among the ranks of an axis go through memory, if they share any.  All of them call it.

    Axes of the same ranks share it, too: what a pair of ranks sends one way it posts in one order, over whichever axis.
    """
    shared = axis.shared
    if shared is not None and axis.size > 1 and (axis.ranks, "messages") not in shared.rooms:
        shared.rooms[axis.ranks, "messages"] = _meet(axis, shared, area_bytes(axis.size), Messages)


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> list[Pending]:
    """Post point-to-point operations together.

    Args:
        sends: (tensor, global rank to send to); contiguous; must not change before its `Pending` is done.  To be waited for
            before an operation that its receiver joins later: in memory, one that is not done at once moves only while this
            rank sends, or waits here.
        receives: (buffer, global rank to receive from); contiguous.
        axis: the ranks among which messages travel; both sides must post a pair's messages in the same order.

    Returns: one `Pending` per operation, sends first.
    """
    if not sends and not receives:
        return []
    sent = sum(tensor.nbytes for tensor, _ in sends)
    room: Messages | None = axis.shared.rooms.get((axis.ranks, "messages")) if axis.shared is not None else None
    if room is not None:
        return _by_memory(room, sends, receives, axis, sent)
    operations = [dist.P2POp(dist.isend, tensor, peer, group=axis.group) for tensor, peer in sends]
    operations += [dist.P2POp(dist.irecv, buffer, peer, group=axis.group) for buffer, peer in receives]
    works, guard = _start("send_recv", axis, sent, lambda: dist.batch_isend_irecv(operations))
    if len(works) < len(operations):  # NCCL returns one handle for the whole batch
        works = list(works) * len(operations)
    return [Pending(work, guard) for work in works]


def _by_memory(
    room: Messages,
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    axis: Axis,
    sent: int,
) -> list[Pending]:
    def post() -> list[tuple[Parcel, int]]:
        going = [(room.send(tensor, place), place) for tensor, place in _by_place(sends, axis)]
        return going + [(room.receive(buffer, place), place) for buffer, place in _by_place(receives, axis)]

    posted, guard = _start("send_recv", axis, sent, post)

    def pending(parcel: Parcel, place: int) -> Pending:
        return Pending() if parcel.is_done else Pending(finish=lambda: guard(lambda: room.finish(parcel, place)))

    return [pending(parcel, place) for parcel, place in posted]


def _by_place(operations: Sequence[tuple[Tensor, int]], axis: Axis) -> list[tuple[Tensor, int]]:
    return [(tensor, axis.ranks.index(rank)) for tensor, rank in operations]
