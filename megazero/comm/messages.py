"""Messages between pairs of ranks: tags that separate operations, waits, and labels that ranks compare.

Messages with one tag between two ranks arrive in the order in which they were sent.  A message of unexpected length
ends the process, so messages of different operations must not be confused.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.memory import address_of
from megazero.parallel_state import Axis
from megazero.parallel_state.groups import Wait

# torch uses 0, as does `exchange`.
LABEL_TAG = 1
_FIRST_LABELLED_TAG, _LABELLED_TAGS = 2, 2**24
REDUCE_TAG, ALL_TO_ALL_TAG, OBJECT_TAG, RING_TAG, SUMS_TAG = range(2**25, 2**25 + 5)
LABEL_BYTES = 256

REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


class OrderError(RuntimeError):
    """Ranks have started different operations although each should have started the same one."""


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


def place_shard(out: Tensor, shard: Tensor, axis: Axis) -> list[Tensor]:
    """Copy this rank's shard to its position in the result of an all-gather.  Returns: all positions by rank, 1-D."""
    shards = list(out.detach().view(axis.size, shard.numel()).unbind(0))
    mine = shards[axis.index]
    if address_of(mine) != address_of(shard):
        mine.copy_(shard.detach().view(-1))
    return shards


def combine(out: Tensor, parts: Sequence[Tensor], op: Callable[..., Tensor]) -> None:
    """Combine at least two tensors pairwise, in rank order; `out` may be the first or the second of them."""
    op(parts[0], parts[1], out=out)
    for part in parts[2:]:
        op(out, part, out=out)


def encoded(label: str) -> bytes:
    """Return a label in the form that ranks compare, `LABEL_BYTES` long.  What identifies the operation must come
    first.
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
    """Send the label to the rank `step` places ahead.  The wait compares it with the label of the rank `step` places
    behind.

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
