"""All collective calls of the project: asynchronous, counted, and with an error that names the lost peer.

A call starts the operation and returns a `Pending`; its result may be used after `wait()`.  Over an axis of one rank
nothing is sent and the `Pending` is already done, so callers need no special case.  A backend implements the
collectives of layers and ZeRO (see `comm/backend.py`), torch's process groups all others (see `comm/messages.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from megazero.comm.backend import address_of, choose_backend
from megazero.comm.messages import LostPeerError, OrderError, ProcessGroups, combine, lacks_memory
from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Counts, Transfers, Wait
from megazero.parallel_state.state import Backend, Group, Messages
from megazero.registry import added

T = TypeVar("T")

# These are RuntimeErrors too, but not the fault of a peer.  (AcceleratorError: a kernel failed.)
_OF_THE_DEVICE = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))


class Pending:
    """A running operation.  If `wait` is None, it has already ended.

    If it is dropped before its end, for example by a failed step, the operation continues.  `Group.unfinished` then
    holds it and its memory until the group's next operation.

    Args:
        wait: waits for the operation.
        finish: this rank's own work after the wait.
        group: the operation's group.
    """

    _wait: Wait | None = None  # needed by `__del__` if an interrupt stopped `__init__`
    _group: Group | None = None

    def __init__(self, wait: Wait | None = None, finish: Wait | None = None, group: Group | None = None) -> None:
        self._wait, self._finish, self._group = wait, finish, group

    def wait(self) -> None:
        """Wait until the result may be used.  Calling it again is harmless.  Raises: LostPeerError."""
        if self._wait is not None:
            try:
                self._wait()
            except RuntimeError:  # the operation has ended
                self._group = None
                raise
            self._wait = None
        if self._finish is not None:
            self._finish()
            self._finish = None

    def leave(self) -> None:
        """Leave the wait to the group's next operation."""
        if self._wait is not None and self._group is not None:
            self._group.unfinished.append(self._wait)
        self._wait = None

    def __del__(self) -> None:
        self.leave()


def wait_all(pendings: Iterable[Pending]) -> None:
    """Wait for operations one after another.  Raises: LostPeerError."""
    for pending in pendings:
        pending.wait()


def _guarded(operation: str, axis: Axis, call: Callable[[], T]) -> T:
    """Run a call that may wait for a peer.  Its time is measured, and its error names the operation."""
    entered = axis.traffic.enter(axis, operation)
    try:
        return call()
    except OrderError as error:
        raise OrderError(f"{axis.name}, as rank {axis.ranks[axis.index]} of {axis.ranks}: {error}") from None
    except _OF_THE_DEVICE:
        raise
    except RuntimeError as error:  # gloo and NCCL report a lost peer and a time-out as RuntimeError
        if lacks_memory(error):
            raise
        raise LostPeerError(operation, axis, error) from error
    finally:
        axis.traffic.leave(entered)


def _start(
    operation: str,
    axis: Axis,
    full: Tensor,
    start: Callable[[Backend], Wait],
    finish: Callable[[], object] | None = None,
    label: str = "",
) -> Pending:
    """Start a backend's collective.  `full` is the larger of its buffers."""
    backend = _backend(axis, full.device)
    if operation == "ring_shift":
        sent, linked = full.nbytes, full.nbytes * axis.is_off_host((axis.index + 1) % axis.size)
    else:
        sent = (1 + (operation == "all_reduce")) * full.nbytes * (axis.size - 1) // axis.size
        linked = backend.link_bytes(operation, full, axis)
    axis.traffic.add(axis.name, operation, sent, linked)
    return _started(f"{operation} of {label}" if label else operation, axis, partial(start, backend), finish)


def _started(operation: str, axis: Axis, start: Callable[[], Wait], finish: Callable[[], object] | None) -> Pending:
    _end_unfinished(axis)
    wait = _guarded(operation, axis, start)
    return Pending(partial(_guarded, operation, axis, wait), finish, axis.group)


def _end_unfinished(axis: Axis) -> None:
    """Wait for collectives of this group whose `Pending` was dropped without `wait()`."""
    unfinished = axis.group.unfinished if axis.group is not None else ()
    while unfinished:  # in the order of their start; garbage collection during a wait may append more
        try:
            unfinished[0]()
        except RuntimeError:  # the operation has ended
            unfinished.popleft()
            raise
        unfinished.popleft()


def _backend(axis: Axis, device: torch.device) -> Backend:
    """Return the backend for tensors on a device.  All ranks of the axis choose it at their first operation on that
    device.
    """
    if axis.group is None:
        raise RuntimeError(f"{axis.name} has {axis.size} ranks but no process group")
    backends = axis.group.backends
    if device.type not in backends:
        backends[device.type] = choose_backend(axis, axis.group, device, lambda offer: gather_objects(offer, axis))
    return backends[device.type]


def _messages(axis: Axis) -> Messages:
    """Return the implementation of broadcasts, messages between two ranks and exchanges of small values."""
    group = axis.group
    if group is None:
        return ProcessGroups()
    if group.messages is None:
        group.messages = added("messages").get(group.device.type, ProcessGroups)()
    return group.messages


def runs_by_itself(axis: Axis) -> bool:
    """Whether operations over an axis of several ranks continue while this rank computes.  All ranks of the axis must
    call this.

    Operations in the memory of one host do not: each rank copies its slice when it waits, so splitting them only adds
    waits.
    """
    return axis.group is not None and _backend(axis, axis.group.device).runs_by_itself


def _check_contiguous(operation: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            hint = f"one of shape {list(tensor.shape)} has strides {tensor.stride()}"
            raise ValueError(f"{operation} takes contiguous tensors; {hint}")


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Replace `tensor` by its sum or maximum over the axis.

    Args:
        tensor: contiguous, equal shape and dtype on every rank; overwritten.
        op: "sum" or "max".

    Raises:
        ValueError: it is not contiguous; also raised by the other operations.
    """
    if axis.size == 1:
        return Pending()
    _check_contiguous("all_reduce", tensor)
    if axis.factors:
        first, *others = axis.factors
        begun = all_reduce(tensor, first, op)

        def finish() -> None:
            for factor in others:
                all_reduce(tensor, factor, op).wait()

        return Pending(begun.wait, finish)
    return _start("all_reduce", axis, tensor, lambda backend: backend.all_reduce(tensor, axis, op))


def numbers_of(reduced: Tensor, axis: Axis) -> list[float]:
    """Return the numbers of a finished `all_reduce`.  On CUDA the host waits for its peers here, not in `Pending.wait`."""
    return list(_guarded("all_reduce", axis, reduced.tolist) if axis.size > 1 else reduced.tolist())


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Pending:
    """Replace `tensor` by the tensor of one rank.

    Args:
        tensor: contiguous, equal shape and dtype on every rank; overwritten, except on the source.
        source: index of the sending rank on the axis.
    """
    if axis.size == 1:
        return Pending()
    _check_contiguous("broadcast", tensor)
    sent = tensor.nbytes * (axis.index == source)
    axis.traffic.add(axis.name, "broadcast", sent, sent * any(map(axis.is_off_host, range(axis.size))))
    return _started("broadcast", axis, partial(_messages(axis).broadcast, tensor, axis, source), None)


def _check_fits(axis: Axis, out: Tensor, x: Tensor, *, fits: bool) -> None:
    if not fits:
        shapes = f"{x.dtype} {list(x.shape)} and {list(out.shape)}"
        raise ValueError(f"over {axis.name} of {axis.size} ranks, {shapes} do not fit")


def _is_whole(whole: Tensor, shard: Tensor, axis: Axis) -> bool:
    return whole.shape == (shard.shape[0] * axis.size, *shard.shape[1:])


def all_gather(out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Pending:
    """Concatenate every rank's `shard` into `out`, in rank order.

    Args:
        out: contiguous; in dimension 0 it is as long as the shards of all ranks together.
        shard: contiguous; may be this rank's slice of `out`.
        label: names the gather in errors.  Ranks must gather in the same order: if their labels differ, `wait`, or on a
            GPU the next `check_order`, raises OrderError with both labels.
    """
    _check_fits(axis, out, shard, fits=_is_whole(out, shard, axis))
    if axis.size == 1:
        if address_of(out) != address_of(shard):
            out.copy_(shard)
        return Pending()
    _check_contiguous("all_gather", out, shard)
    return _start("all_gather", axis, out, lambda backend: backend.all_gather(out, shard, axis, label), label=label)


def check_order(axis: Axis) -> None:
    """Compare the labels of all gathers since the last call over the ranks, unless `wait` has compared them; see
    `comm/backend.py`.

    Raises: OrderError.
    """
    for backend in axis.group.backends.values() if axis.group is not None else ():
        _guarded("all_gather", axis, backend.check_order)


def arriving_elements(full: int, axis: Axis) -> int:
    """Return the elements of `scratch` that a `reduce_scatter` of `full` elements uses.  All ranks of the axis must
    call this.
    """
    return full if axis.group is not None and _backend(axis, axis.group.device).needs_scratch else 0


def reduce_scatter(out: Tensor, full: Tensor, axis: Axis, scratch: Tensor | None = None) -> Pending:
    """Sum `full` over the axis and write this rank's shard of the sum to `out`.

    Args:
        out: contiguous; in dimension 0 its size is that of `full` / axis size; may be this rank's slice of `full`.
        full: contiguous; dimension 0 is divisible by the axis size.  Do not change it before `wait`.
        scratch: 1-D, at least `arriving_elements`; allocated if None.  `out` may be its beginning.
    """
    _check_fits(axis, out, full, fits=_is_whole(full, out, axis))
    if axis.size == 1:
        if address_of(out) != address_of(full):
            out.copy_(full)
        return Pending()
    _check_contiguous("reduce_scatter", out, full)
    if not _backend(axis, full.device).needs_scratch:
        return _start("reduce_scatter", axis, full, lambda backend: backend.reduce_scatter(out, full, axis))
    arriving = torch.empty_like(full) if scratch is None else scratch[: full.numel()].view_as(full)
    terms = arriving.view(axis.size, *out.shape).unbind(0)
    add_up = partial(combine, out, terms, torch.add)  # in rank order
    return _start("reduce_scatter", axis, full, lambda backend: backend.reduce_scatter(arriving, full, axis), add_up)


def all_to_all(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Send `x[j]` to rank j, and receive `out[i]` from rank i.

    Args:
        out: [axis size, ...]; with any strides, and in other memory than `x`.
        x: shape and dtype of `out`, the same on every rank; with any strides.  Do not change it before `wait`.

    Raises:
        ValueError: the shapes or types differ.
    """
    _check_fits(axis, out, x, fits=out.shape == x.shape and out.dtype == x.dtype and x.shape[:1] == (axis.size,))
    if axis.size == 1:
        out.copy_(x)
        return Pending()
    return _start("all_to_all", axis, x, lambda backend: backend.all_to_all(out, x, axis))


def all_to_all_rows(out: Tensor, x: Tensor, axis: Axis, sends: Counts, receives: Counts) -> Pending:
    """Send the first `sends[0]` rows of `x` to rank 0, the next `sends[1]` to rank 1, and so on; fill `out` with the
    rows from rank 0, then from rank 1, and so on.

    Args:
        out, x: [sum of receives, ...] and [sum of sends, ...]; contiguous.  Do not change `x` before `wait`.
        sends, receives: number of rows to and from each rank of the axis; `receives[i]` rows come from rank i.

    Raises:
        ValueError: the counts do not match the tensors.
    """
    shapes = [(sum(counts), *x.shape[1:]) for counts in (receives, sends)]
    fits = [out.shape, x.shape] == shapes and out.dtype == x.dtype and {len(sends), len(receives)} == {axis.size}
    _check_fits(axis, out, x, fits=fits)
    if axis.size == 1:
        out.copy_(x)
        return Pending()
    _check_contiguous("all_to_all", out, x)
    row = x[:1].nbytes
    sent = [count * row * (index != axis.index) for index, count in enumerate(sends)]
    linked = sum(nbytes for index, nbytes in enumerate(sent) if axis.is_off_host(index))
    backend = _backend(axis, x.device)
    axis.traffic.add(axis.name, "all_to_all", sum(sent), linked)
    return _started("all_to_all", axis, lambda: backend.all_to_all_rows(out, x, axis, sends, receives), None)


def ring_shift(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Send `x` to the next rank of the axis, and receive `out` from the previous one.  The last rank sends to the
    first.

    Args:
        out: contiguous, in other memory than `x`.
        x: contiguous, shape and dtype the same on every rank.  Do not change it before `wait`.
    """
    if axis.size == 1:
        out.copy_(x)
        return Pending()
    _check_contiguous("ring_shift", out, x)
    return _start("ring_shift", axis, x, lambda backend: backend.ring_shift(out, x, axis))


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Return every rank's `value`, in rank order, on every rank.  For small picklable values."""
    return gather_lists([value], axis)


def gather_lists(values: list[T], axis: Axis) -> list[T]:
    """Return the values of all ranks as one list, in rank order, on every rank.  If no rank has values, almost nothing is
    sent.
    """
    return _of_values("gather_objects", values, axis, lambda messages: messages.gather(values, axis))


def _of_values(operation: str, own: T, axis: Axis, call: Callable[[Messages], T]) -> T:
    """Exchange small values; their bytes are not counted.  `own`: the result if the axis has one rank."""
    if axis.size == 1:
        return own
    axis.traffic.add(axis.name, operation, 0)
    return _guarded(operation, axis, lambda: call(_messages(axis)))


def from_first(value: T, axis: Axis) -> T:
    """Return the `value` of the axis's first rank on every rank.  The other values are not sent.  For picklable values."""
    return _of_values("from_first", value, axis, lambda messages: messages.from_first(value, axis))


def largest(numbers: Sequence[float], axis: Axis) -> list[float]:
    """Return the elementwise maximum of all ranks' numbers, on every rank."""
    return list(_of_values("largest", numbers, axis, lambda messages: messages.largest(numbers, axis)))


def exchange(sends: Transfers, receives: Transfers, axis: Axis) -> list[Pending]:
    """Start point-to-point operations together.

    Args:
        sends: (tensor, global rank to send to); contiguous.  Do not change a tensor before the wait for its `Pending`.
        receives: (buffer, global rank to receive from); contiguous.
        axis: the ranks that exchange messages; both sides must post the messages of a pair in the same order.

    Returns: one `Pending` per operation, sends first.
    """
    if not sends and not receives:
        return []

    _end_unfinished(axis)
    linked = sum(tensor.nbytes for tensor, peer in sends if axis.is_off_host(axis.ranks.index(peer)))
    axis.traffic.add(axis.name, "send_recv", sum(tensor.nbytes for tensor, _ in sends), linked)
    waits = _guarded("send_recv", axis, lambda: _messages(axis).exchange(sends, receives, axis))
    return [Pending(partial(_guarded, "send_recv", axis, wait), group=axis.group) for wait in waits]
