"""Broadcasts, messages between two ranks and small values over torch's process groups: see `parallel_state.Messages`.

Small picklable values are sent along a tree over host memory.

    eight ranks, by index          0           the parent of a rank: its index without the lowest bit that is set
                               /   |   \\        a subtree: adjacent ranks, so that lists stay in rank order
                              1    2    4
                                   |   / \
                                   3  5   6
                                          |
                                          7

A rank has at most log2(n) children, so if groups connect on demand, no rank connects to more.  Every rank has a value
after 2 log2(n) messages; torch's own gathers need n, around a ring.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.messages import OBJECT_TAG, group_of, wait_of
from megazero.parallel_state import Axis
from megazero.parallel_state.groups import Transfers, Wait

T = TypeVar("T")
# bytes of the first message; it begins with the length, which the receiver does not know, and most values fit in it
_FIRST_BYTES = 1024


class ProcessGroups:
    """Sends over the process groups of the given axis."""

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
    """Return the parent of a rank other than the first."""
    return index & (index - 1)


def children(index: int, size: int) -> list[int]:
    """Return the children of a rank, nearest first."""
    reach = index & -index or size
    steps = (1 << bit for bit in range(reach.bit_length()))
    return [index + step for step in steps if step < reach and index + step < size]


def _joined(value: T, join: Callable[[T, T], T], axis: Axis) -> T:
    """Join the values of all ranks in rank order, up the tree.  Every rank gets the result."""
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
    for part in (begin[:_FIRST_BYTES].ljust(_FIRST_BYTES), begin[_FIRST_BYTES:]):
        if part:
            leaving = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            dist.send(leaving, axis.ranks[index], axis.host_group, OBJECT_TAG)


def _receive(axis: Axis, index: int) -> bytes:
    def receive(size: int) -> bytes:
        arriving = torch.empty(size, dtype=torch.uint8)
        dist.recv(arriving, axis.ranks[index], axis.host_group, OBJECT_TAG)
        return arriving.numpy().tobytes()

    first = receive(_FIRST_BYTES)
    rest = 8 + int.from_bytes(first[:8], "little") - _FIRST_BYTES
    return first[8:] + receive(rest) if rest > 0 else first[8 : _FIRST_BYTES + rest]
