"""What carries the collectives of a group: the implementations of `parallel_state.Backend`, and their choice.

CPU tensors of a CPU run, on one host    SharedMemoryBackend    memory that the ranks share
other CPU tensors                        GlooBackend            messages over sockets
tensors of other devices                 TorchBackend           torch's collectives, over NCCL
"""

from __future__ import annotations

from collections import deque
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.rendezvous import Gather, Poller, rendezvous
from megazero.comm.shared_memory import (
    AREA_BYTES,
    LABEL_BYTES,
    Channel,
    SharedMemoryBackend,
    check_labels,
    encoded,
    place_shard,
)
from megazero.parallel_state import Axis, Backend, Group, Wait

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_LABEL_TAG, _GATHER_TAG = (
    1,
    2,
)  # keep messages of an all-gather (2 and above) and its label apart from those of `exchange`
_MOST_UNCHECKED = 1000  # gathers whose labels wait to be compared; the oldest ones' arrived long ago
_MOST_SHARING_RANKS = 16  # every rank signals every other, which is slow among more


class TorchBackend:
    """torch's own collectives, for NCCL.

    [Note: labels of a GPU's gathers]  The wait for a collective orders the GPU's work and returns; the host goes on and
    keeps the GPU busy.  The wait for a label would hold the host until its neighbour's host has started the same gather,
    so that every delay of one host would become a delay of all.  So labels are compared together, in `check_order`, which
    comes at the end of every backward pass: what wrong weights have computed until then has not reached a weight.
    """

    needs_scratch = False
    needs_contiguous = True

    def __init__(self) -> None:
        self._unchecked: deque[Wait] = deque()  # in the order of their gathers

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        return dist.all_reduce(tensor, op=_REDUCTIONS[op], group=axis.process_group, async_op=True).wait

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        if label:
            if len(self._unchecked) == _MOST_UNCHECKED:
                self._unchecked.popleft()()
            self._unchecked.append(_compare(label, axis))
        return _all_gather(out, shard, group=axis.process_group, async_op=True).wait

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        return _reduce_scatter(out, full, group=axis.process_group, async_op=True).wait

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return dist.all_to_all_single(out, x, group=axis.process_group, async_op=True).wait

    def check_order(self) -> None:
        while self._unchecked:
            self._unchecked.popleft()()

    def progress(self) -> bool:
        """torch's threads make progress."""
        return False

    def close(self) -> None:
        """There is nothing to release."""


class GlooBackend(TorchBackend):
    """Gloo, with two collectives replaced.

    Gloo's all-gather copies through memory that it allocates each time, and its reduce-scatter moves an all-reduce's bytes.
    """

    needs_scratch = True

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        """Messages to and from every other rank, straight to their positions in the result."""
        check, shards, group = _compare(label, axis), place_shard(out, shard, axis), axis.process_group
        # A message of another length would end the process, so those of different labels do not meet.
        tag = _GATHER_TAG + (crc32(label.encode()) % 2**24 if label else 0)
        mine = shards[axis.index]
        others = [index for index in range(axis.size) if index != axis.index and mine.numel()]
        works: list[Any] = [dist.irecv(shards[index], axis.ranks[index], group, tag) for index in others]
        works += [dist.isend(mine, axis.ranks[index], group, tag) for index in others]
        return lambda: (check(), [work.wait() for work in works])

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        """An all-to-all of the parts into `out`, which is as long as `full`; the caller sums them."""
        return self.all_to_all(out, full, axis)


def _compare(label: str, axis: Axis) -> Wait:
    """Tell the next rank what this one starts; the wait compares it with what the rank before has told.

    One message over host memory, however many ranks there are.  Without a label there is none.
    """
    if not label:
        return lambda: None
    mine, theirs = encoded(label), torch.empty(LABEL_BYTES, dtype=torch.uint8)
    told, before = torch.frombuffer(bytearray(mine), dtype=torch.uint8), (axis.index - 1) % axis.size
    works: list[Any] = [
        dist.irecv(theirs, axis.ranks[before], axis.process_group, _LABEL_TAG),
        dist.isend(told, axis.ranks[(axis.index + 1) % axis.size], axis.process_group, _LABEL_TAG),
    ]

    def wait() -> None:
        for work in works:
            work.wait()
        check_labels({before: bytes(theirs.numpy())}, mine)

    return wait


def choose_backend(axis: Axis, group: Group, device: torch.device, gather: Gather) -> Backend:
    """The backend for a group's tensors of a device.  All its ranks call this at the same operation and choose the same."""
    if device.type != "cpu":
        return TorchBackend()
    if not group.shares_memory or axis.size > _MOST_SHARING_RANKS:
        return GlooBackend()
    reduce = rendezvous(axis.index, axis.size, AREA_BYTES, gather)
    gathers = rendezvous(axis.index, axis.size, AREA_BYTES, gather) if reduce else None
    if reduce is None or gathers is None:
        return GlooBackend()
    backends = (backend for one in group.siblings for backend in one.backends.values())
    poller = next((one.poller for one in backends if isinstance(one, SharedMemoryBackend)), None) or Poller()
    channels = [Channel(one, axis.index, group.timeout_seconds, poller) for one in (reduce, gathers)]
    return SharedMemoryBackend(channels[0], channels[1], poller)
