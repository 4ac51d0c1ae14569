r"""Messages between ranks over torch's process groups: their tags, the labels that ranks compare, and what fails.

Messages with one tag between two ranks arrive in the order in which they were sent.  A message of unexpected length
ends the process, so messages of different operations must not be confused.

Small picklable values are sent along a tree over host memory.

    eight ranks, by index          0           the parent of a rank: its index without the lowest bit that is set
                               /   |   \        a subtree: adjacent ranks, so that lists stay in rank order
                              1    2    4
                                   |   / \
                                   3  5   6
                                          |
                                          7

A rank has at most log2(n) children, so if groups connect on demand, no rank connects to more.  Every rank has a value
after 2 log2(n) messages; torch's own gathers need n, around a ring.
"""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Transfers, Wait
from megazero.settings import listed

T = TypeVar("T")

# torch uses 0, as does `exchange`.
LABEL_TAG = 1
_FIRST_LABELLED_TAG, _LABELLED_TAGS = 2, 2**24
REDUCE_TAG, ALL_TO_ALL_TAG, OBJECT_TAG, RING_TAG, SUMS_TAG = range(2**25, 2**25 + 5)
LABEL_BYTES = 256
# bytes of the first message; it begins with the length, which the receiver does not know, and most values fit in it
_FIRST_BYTES = 1024

REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}

# NCCL allocates outside torch's allocator, at the first operations of a communicator.  The last lines of its message
# tell what failed.
_NO_MEMORY = re.compile(r"out of memory|Failed to CUDA [a-z ]+ \d+ bytes|CUBLAS_STATUS_ALLOC_FAILED")
# NCCL 2.28.9 reported this on a full device, but it can also mean something else.
_OF_A_FULL_DEVICE = re.compile(r"unhandled cuda error(.|\n)*invalid argument")
_LEAST_FREE = 2**28  # bytes; a new communicator takes about half of it


class OrderError(RuntimeError):
    """Ranks have started different operations although each should have started the same one."""


class LostPeerError(RuntimeError):
    """A collective did not finish: a peer died, or did not join within the time limit."""

    def __init__(self, operation: str, axis: Axis, error: RuntimeError) -> None:
        # not the axis itself: the error may outlive its process group
        self.operation, self.axis, self.ranks, self.rank = operation, axis.name, axis.ranks, axis.ranks[axis.index]
        # the first sentence of torch's message, without its source line
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self.reason = re.sub(r"^\[[^\[\]]*:\d+\] ", "", line).split(". ")[0]
        super().__init__(self._text("", "a rank was lost or is stuck. The first rank to fail holds the cause."))

    def _text(self, where: str, found: str) -> str:
        ranks = listed([*map(str, self.ranks)])
        called = f"{self.operation} over {self.axis}, as rank {self.rank} of ({ranks}),{where}"
        return f"{called} did not finish: {found} ({self.reason})"

    def explain(self, step: int, found: str) -> None:
        """Add to the message the step of the failure and the findings about the peers."""
        self.args = (self._text(f" in step {step}", found),)


def lacks_memory(error: BaseException) -> bool:
    """Whether this rank's device is out of memory, according to torch, NCCL or cuBLAS, or its free memory if NCCL's
    message is unclear.
    """
    if isinstance(error, LostPeerError):
        return False
    if _NO_MEMORY.search(text := str(error)):
        return True
    return bool(_OF_A_FULL_DEVICE.search(text)) and torch.cuda.mem_get_info()[0] < _LEAST_FREE


def tag_of(label: str) -> int:
    """Return a tag for the messages of an operation with this label.  All operations without a label share one."""
    return _FIRST_LABELLED_TAG + (crc32(label.encode()) % _LABELLED_TAGS if label else 0)


def group_of(tensor: Tensor, axis: Axis) -> dist.ProcessGroup:
    """Return the process group that sends messages of such a tensor."""
    return axis.host_group if tensor.device.type == "cpu" else axis.process_group


def wait_for(works: Sequence[Any]) -> None:
    """Wait for messages, even after an interrupted wait: with gloo, a second wait for the same message never ends."""
    for work in works:
        if not (work.is_completed() and work.is_success()):
            work.wait()


def wait_of(work: Any, tensor: Tensor) -> Wait:
    """Return the function that waits for a tensor's message.  NCCL allows a second wait; gloo needs `wait_for`."""
    return partial(wait_for, [work]) if tensor.device.type == "cpu" else work.wait


def in_turn(*waits: Wait) -> Wait:
    """Return a function that calls all waits, one after another."""
    return lambda: [wait() for wait in waits]


def shift(out: Tensor, x: Tensor, axis: Axis) -> Wait:
    """Start to send `x` to the next rank of the axis, and to receive `out` from the previous one."""
    after, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    group = group_of(x, axis)
    sides = [dist.P2POp(dist.isend, x, after, group, RING_TAG), dist.P2POp(dist.irecv, out, before, group, RING_TAG)]
    return in_turn(*map(wait_of, dist.batch_isend_irecv(sides), (x, out)))


def swap(arriving: Tensor | Sequence[Tensor], leaving: Tensor | Sequence[Tensor], axis: Axis, tag: int) -> list[Any]:
    """Start to send `leaving[i]` to rank i and to receive `arriving[i]` from it, for all other ranks; in host memory.

    gloo writes messages to sockets without its threads, so any number of them can travel both ways at once.
    """
    others = [index for index in range(axis.size) if index != axis.index]
    where, group = [(index, axis.ranks[index]) for index in others], axis.host_group
    works: list[Any] = [dist.irecv(arriving[at], rank, group, tag) for at, rank in where if arriving[at].numel()]
    works += [dist.isend(leaving[at], rank, group, tag) for at, rank in where if leaving[at].numel()]
    return works


def combine(out: Tensor, terms: Sequence[Tensor], op: Callable[..., Tensor]) -> None:
    """Combine at least two tensors pairwise, in rank order; `out` may be the first or the second of them."""
    op(terms[0], terms[1], out=out)
    for term in terms[2:]:
        op(out, term, out=out)


def encoded(label: str) -> bytes:
    """Return a label in the form that ranks compare, `LABEL_BYTES` long.  It is cut, so the text that identifies the
    operation must come first.
    """
    return label.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)


def check_labels(labels: Mapping[int, bytes], expected: bytes) -> None:
    """Check that all ranks are in the same operation.

    Args:
        labels: encoded labels of other ranks, by their index in the group.
        expected: this rank's label.

    Raises: OrderError, a label differs.
    """
    for index, found in labels.items():
        if found != expected:
            theirs, mine = (label.decode(errors="replace").strip() for label in (found, expected))
            operations = f"number {index} of the group is in {theirs}, this one in {mine}"
            hint = "every rank must run the same modules in the same order"
            raise OrderError(f"ranks differ in the order of their operations: {operations}; {hint}")


def start_comparing(
    label: str, axis: Axis, step: int = 1, wait_for: Callable[[Sequence[Any]], object] = wait_for
) -> Wait:
    """Send the label to the rank `step` places ahead.  The returned wait compares it with the label of the rank `step`
    places behind.

    This is one message over host memory, however many ranks there are; none if the label is empty.
    """
    if not label:
        return lambda: None
    mine, theirs = encoded(label), torch.empty(LABEL_BYTES, dtype=torch.uint8)
    leaving, before = torch.frombuffer(bytearray(mine), dtype=torch.uint8), (axis.index - step) % axis.size
    works: list[Any] = [
        dist.irecv(theirs, axis.ranks[before], axis.host_group, LABEL_TAG),
        dist.isend(leaving, axis.ranks[(axis.index + step) % axis.size], axis.host_group, LABEL_TAG),
    ]

    def wait() -> None:
        wait_for(works)
        check_labels({before: bytes(theirs.numpy())}, mine)

    return wait


class ProcessGroups:
    """Broadcasts, point-to-point messages and exchanges of small values, over the process groups of an axis."""

    def broadcast(self, tensor: Tensor, axis: Axis, source: int) -> Wait:
        wait: Wait = dist.broadcast(tensor, src=axis.ranks[source], group=axis.process_group, async_op=True).wait
        return wait

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis) -> list[Wait]:
        group = group_of((*sends, *receives)[0][0], axis)
        operations = [dist.P2POp(dist.isend, tensor, peer, group=group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, buffer, peer, group=group) for buffer, peer in receives]
        works = dist.batch_isend_irecv(operations)
        waits = [wait_of(work, operation.tensor) for work, operation in zip(works, operations, strict=False)]
        return waits if len(waits) == len(operations) else waits * len(operations)  # NCCL: one wait for all

    def gather(self, values: list[Any], axis: Axis) -> list[Any]:
        found = _joined([pickle.dumps(value) for value in values], lambda ours, theirs: ours + theirs, axis)
        return [pickle.loads(value) for value in found]

    def from_first(self, value: T, axis: Axis) -> T:
        message = _spread(pickle.dumps(value) if axis.index == 0 else b"", axis)
        return value if axis.index == 0 else pickle.loads(message)

    def largest(self, numbers: Sequence[float], axis: Axis) -> Sequence[float]:
        return _joined(list(numbers), lambda ours, theirs: [max(pair) for pair in zip(ours, theirs, strict=True)], axis)


def parent(index: int) -> int:
    """Return the parent, in the tree of ranks, of a rank other than the first."""
    return index & (index - 1)


def children(index: int, size: int) -> list[int]:
    """Return the children of a rank in the tree of ranks, nearest first."""
    reach = index & -index or size
    steps = (1 << bit for bit in range(reach.bit_length()))
    return [index + step for step in steps if step < reach and index + step < size]


def _joined(value: T, join: Callable[[T, T], T], axis: Axis) -> T:
    """Combine the values of all ranks with `join`, in rank order, up a tree of ranks.  Every rank gets the result."""
    for child in children(axis.index, axis.size):
        value = join(value, pickle.loads(_receive(axis, child)))
    message = pickle.dumps(value)
    if axis.index:
        _send(message, axis, parent(axis.index))
    result: T = pickle.loads(_spread(message, axis))
    return result


def _spread(message: bytes, axis: Axis) -> bytes:
    """Return the first rank's message on every rank."""
    if axis.index:
        message = _receive(axis, parent(axis.index))
    for child in reversed(children(axis.index, axis.size)):  # the largest subtree first
        _send(message, axis, child)
    return message


def _send(message: bytes, axis: Axis, index: int) -> None:
    begin = len(message).to_bytes(8, "little") + message
    for block in (begin[:_FIRST_BYTES].ljust(_FIRST_BYTES), begin[_FIRST_BYTES:]):
        if block:
            leaving = torch.frombuffer(bytearray(block), dtype=torch.uint8)
            dist.send(leaving, axis.ranks[index], axis.host_group, OBJECT_TAG)


def _receive(axis: Axis, index: int) -> bytes:
    def receive(size: int) -> bytes:
        arriving = torch.empty(size, dtype=torch.uint8)
        dist.recv(arriving, axis.ranks[index], axis.host_group, OBJECT_TAG)
        return arriving.numpy().tobytes()

    first = receive(_FIRST_BYTES)
    rest = 8 + int.from_bytes(first[:8], "little") - _FIRST_BYTES
    return first[8:] + receive(rest) if rest > 0 else first[8 : _FIRST_BYTES + rest]
