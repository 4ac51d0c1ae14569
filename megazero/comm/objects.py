"""Small picklable values of all ranks of an axis, along a tree over host memory.

    eight ranks, by index          0           the parent of a rank: its index without the lowest bit that is set
                               /   |   \\        a subtree: neighbours, so that lists stay in rank order
                              1    2    4
                                   |   / \\
                                   3  5   6
                                          |
                                          7

A rank has at most log2(n) children, so with groups that connect on demand nobody connects to more, and a value is told after
2 log2(n) messages.  torch's own gathers go round a ring of n.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megazero.comm.messages import OBJECT_TAG
from megazero.parallel_state import Axis

T = TypeVar("T")
# of a message whose length the other side does not know: its length, and what follows; most end in it
_FIRST_BYTES = 1024


def parent(index: int) -> int:
    """The parent of a rank that is not the first."""
    return index & (index - 1)


def children(index: int, size: int) -> list[int]:
    """The children of a rank, nearest first."""
    reach = index & -index or size
    steps = (1 << bit for bit in range(reach.bit_length()))
    return [index + step for step in steps if step < reach and index + step < size]


def gather(values: list[T], axis: Axis) -> list[T]:
    """The lists of all ranks as one, in rank order, on every rank."""
    found = [pickle.dumps(value) for value in values]
    for child in children(axis.index, axis.size):
        found += pickle.loads(_receive(axis, child))
    whole = pickle.dumps(found)
    if axis.index:
        _send(whole, axis, parent(axis.index))
    return [pickle.loads(one) for one in pickle.loads(_spread(whole, axis))]


def largest(numbers: Sequence[float], axis: Axis) -> Sequence[float]:
    """The largest of each of some numbers of all ranks, on every rank."""
    for child in children(axis.index, axis.size):
        numbers = [max(pair) for pair in zip(numbers, pickle.loads(_receive(axis, child)), strict=True)]
    whole = pickle.dumps(numbers)
    if axis.index:
        _send(whole, axis, parent(axis.index))
    found: Sequence[float] = pickle.loads(_spread(whole, axis))
    return found


def from_first(value: T, axis: Axis) -> T:
    """The value of the first rank, on every rank."""
    told = _spread(pickle.dumps(value) if axis.index == 0 else b"", axis)
    return value if axis.index == 0 else pickle.loads(told)


def _spread(message: bytes, axis: Axis) -> bytes:
    """The first rank's message, on every rank."""
    if axis.index:
        message = _receive(axis, parent(axis.index))
    for child in reversed(children(axis.index, axis.size)):  # the largest subtree first
        _send(message, axis, child)
    return message


def _send(message: bytes, axis: Axis, index: int) -> None:
    begin = len(message).to_bytes(8, "little") + message
    for part in (begin[:_FIRST_BYTES].ljust(_FIRST_BYTES), begin[_FIRST_BYTES:]):
        if part:
            dist.send(
                torch.frombuffer(bytearray(part), dtype=torch.uint8), axis.ranks[index], axis.host_group, OBJECT_TAG
            )


def _receive(axis: Axis, index: int) -> bytes:
    def receive(size: int) -> bytes:
        arriving = torch.empty(size, dtype=torch.uint8)
        dist.recv(arriving, axis.ranks[index], axis.host_group, OBJECT_TAG)
        return arriving.numpy().tobytes()

    first = receive(_FIRST_BYTES)
    rest = 8 + int.from_bytes(first[:8], "little") - _FIRST_BYTES
    return first[8:] + receive(rest) if rest > 0 else first[8 : _FIRST_BYTES + rest]
