"""Exchanges that are messages between pairs of ranks, and the tags that keep their kinds apart.

Messages of one tag between two ranks arrive in the order in which they were sent.  One of another length than expected ends
the process, so those of different operations must not meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from megazero.comm.worker import Post, at_once, in_turn
from megazero.parallel_state import Axis
from megazero.parallel_state.groups import Wait

# 0 is torch's own: `exchange`.
LABEL_TAG = 1
_FIRST_LABELLED_TAG, _LABELLED_TAGS = 2, 2**24
REDUCE_TAG, ALL_TO_ALL_TAG, OBJECT_TAG, RING_TAG, SUMS_TAG = range(2**25, 2**25 + 5)


def tag_of(label: str) -> int:
    """A tag for the messages of an operation with a label; the same for all without one."""
    return _FIRST_LABELLED_TAG + (crc32(label.encode()) % _LABELLED_TAGS if label else 0)


def group_of(tensor: Tensor, axis: Axis) -> dist.ProcessGroup:
    """The group that carries messages of such a tensor."""
    return axis.host_group if tensor.device.type == "cpu" else axis.process_group


def wait_for(works: Sequence[Any]) -> None:
    """Wait for messages, also after an interrupted wait: with gloo a second wait for the same message never ends."""
    for work in works:
        if not (work.is_completed() and work.is_success()):
            work.wait()


def wait_of(work: Any, tensor: Tensor) -> Wait:
    """What waits for the message of a tensor, also after an interrupted wait; NCCL's may be waited for at any time."""
    return partial(wait_for, [work]) if tensor.device.type == "cpu" else work.wait


def shift(out: Tensor, x: Tensor, axis: Axis) -> Wait:
    """Start to send `x` to the next rank of the axis, and to receive `out` from the one before."""
    after, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    group = group_of(x, axis)
    sides = [dist.P2POp(dist.isend, x, after, group, RING_TAG), dist.P2POp(dist.irecv, out, before, group, RING_TAG)]
    return in_turn(*map(wait_of, dist.batch_isend_irecv(sides), (x, out)))


def swap(arriving: Tensor | Sequence[Tensor], leaving: Tensor | Sequence[Tensor], axis: Axis, tag: int) -> list[Any]:
    """Start to send `leaving[i]` to rank i and to receive `arriving[i]` from it, for all other ranks; of host memory.

    A message reaches its socket without a thread of gloo's: as many as there are go both ways at once.
    """
    others = [index for index in range(axis.size) if index != axis.index and arriving[index].numel()]
    works: list[Any] = [dist.irecv(arriving[index], axis.ranks[index], axis.host_group, tag) for index in others]
    works += [dist.isend(leaving[index], axis.ranks[index], axis.host_group, tag) for index in others]
    return works


def swap_parts(out: Tensor, x: Tensor, axis: Axis, tag: int, post: Post = at_once) -> Wait:
    """Start to send part j of `x` to rank j, and to receive part i of `out` from rank i; contiguous, of host memory."""
    arriving, leaving = (whole.detach().view(axis.size, whole.numel() // axis.size) for whole in (out, x))
    arriving[axis.index].copy_(leaving[axis.index])
    return post(lambda: partial(wait_for, swap(arriving, leaving, axis, tag)))
