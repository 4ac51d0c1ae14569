"""Collectives of CPU ranks over sockets.  All but small all-reduces are messages between pairs of ranks.

Gloo's own collectives are slower.  Its all-gather copies through memory that it allocates for every call, its reduce-scatter
sends as many bytes as an all-reduce, and its all-reduce is a ring in which the link is idle between two steps.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from threading import Event
from typing import TypeAlias

import torch
from torch import Tensor

from megazero.comm import messages
from megazero.comm.backend import TorchBackend, over_contiguous, place_shard
from megazero.comm.messages import ProcessGroups
from megazero.cpu.shared_memory import poller_of
from megazero.cpu.worker import Start, Worker
from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Counts, Transfers, Wait
from megazero.parallel_state.state import Group

_Tensors: TypeAlias = Tensor | Sequence[Tensor]  # one entry per rank

_SMALL_BYTES = 2**16  # gloo's own all-reduce is used up to this size, because it sends fewer messages
_MOST_ARRIVING_BYTES = 2**23  # limit per group for the terms that wait to be added


class SocketBackend(TorchBackend):
    """Collectives over sockets.  A thread hands the messages to gloo.

    Args:
        name: name of the axis, for the threads.  Messages with one tag keep their order, so each group has its own threads.
        shares_hosts: whether some host has several ranks of the group.  All ranks must give the same value.  None: use
            the value of the axis, which is the same on all ranks if all hosts have equally many ranks.
    """

    needs_scratch = True
    _rings = ("all_reduce",)

    def __init__(self, name: str = "", *, shares_hosts: bool | None = None) -> None:
        super().__init__()
        self._messages = Worker(f"messages of {name}")
        # Waits for the terms of an all-reduce, adds them and sends the sum, while the first thread continues.
        self._sums = Worker(f"sums of {name}")
        self._shares_hosts = shares_hosts
        self._arriving: deque[tuple[int, Event]] = deque()  # bytes of each all-reduce, and whether its terms are added

    def _begin(self, axis: Axis, start: Start) -> Wait:
        assert axis.group is not None
        return self._messages.begin(start, axis.group.unfinished)

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        """Every rank receives its slice of all tensors, adds the slices in rank order, and sends the sum to all ranks.
        Several all-reduces overlap.
        """
        if not self._goes_in_messages(tensor, axis):
            return super().all_reduce(tensor, axis, op)
        slices, is_added = list(tensor.detach().view(-1).tensor_split(axis.size)), Event()
        mine, terms = slices[axis.index], list[Tensor]()

        def send_slices() -> Wait:
            self._limit_arriving(mine.nbytes * (axis.size - 1), is_added)
            terms.extend(mine if index == axis.index else torch.empty_like(mine) for index in range(axis.size))
            return _exchange(terms, slices, axis, messages.REDUCE_TAG)

        def send_sum() -> Wait:
            try:
                arrived()
                messages.combine(terms[0], terms, messages.REDUCTIONS[op])
                mine.copy_(terms[0])  # on the first rank both are the same tensor
            finally:
                terms.clear()
                is_added.set()
            return _exchange(slices, [mine] * axis.size, axis, messages.SUMS_TAG)

        arrived = self._messages.post(send_slices)
        return self._sums.post(send_sum)

    def _goes_in_messages(self, tensor: Tensor, axis: Axis) -> bool:
        """Whether to send an all-reduce as messages between pairs.  Small ones use gloo, and so do those whose terms would
        take too much memory.  If a host has several of the ranks, gloo's ring crosses each host's link only once.
        """
        shares_hosts = axis.shares_hosts if self._shares_hosts is None else self._shares_hosts
        arriving = tensor.nbytes // axis.size * (axis.size - 1)
        return tensor.nbytes > _SMALL_BYTES and arriving <= _MOST_ARRIVING_BYTES and not shares_hosts

    def _limit_arriving(self, nbytes: int, is_added: Event) -> None:
        """Wait until the oldest all-reduces have freed enough memory for `nbytes` more.  Runs in the thread of messages."""
        self._arriving = deque((size, is_added) for size, is_added in self._arriving if not is_added.is_set())
        while self._arriving and nbytes + sum(size for size, _ in self._arriving) > _MOST_ARRIVING_BYTES:
            self._arriving.popleft()[1].wait()
        self._arriving.append((nbytes, is_added))

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        """Exchange messages with every other rank.  They arrive at their positions in the result."""
        shards, tag = place_shard(out, shard, axis), messages.tag_of(label)
        leaving = [shards[axis.index]] * axis.size

        def start() -> Wait:
            return messages.in_turn(messages.start_comparing(label, axis), _exchange(shards, leaving, axis, tag))

        return self._begin(axis, start)

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Receive every rank's term for this rank into `out`, which is as long as `full`.  The caller sums the terms."""
        return self._swap_rows(axis, messages.REDUCE_TAG, out, full)

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return over_contiguous(out, x, partial(self._swap_rows, axis, messages.ALL_TO_ALL_TAG))

    def all_to_all_rows(self, out: Tensor, x: Tensor, axis: Axis, sends: Counts, receives: Counts) -> Wait:
        arriving, leaving = out.detach().split(list(receives)), x.detach().split(list(sends))
        arriving[axis.index].copy_(leaving[axis.index])
        return self._begin(axis, lambda: _exchange(arriving, leaving, axis, messages.ALL_TO_ALL_TAG))

    def _swap_rows(self, axis: Axis, tag: int, out: Tensor, x: Tensor) -> Wait:
        """Start to send row j of `x` to rank j, and to receive row i of `out` from rank i.  Both are contiguous."""
        arriving, leaving = (whole.detach().view(axis.size, whole.numel() // axis.size) for whole in (out, x))
        arriving[axis.index].copy_(leaving[axis.index])
        return self._begin(axis, lambda: _exchange(arriving, leaving, axis, tag))

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        progress(axis.group)
        return messages.in_turn(partial(progress, axis.group), self._begin(axis, partial(messages.shift, out, x, axis)))

    def link_bytes(self, operation: str, full: Tensor, axis: Axis) -> int:
        if operation != "all_reduce" or not self._goes_in_messages(full, axis):
            return super().link_bytes(operation, full, axis)
        each, longer = divmod(full.numel(), axis.size)
        mine = each + (axis.index < longer)  # the slices of the other ranks, and this rank's sum for each of them
        return (full.numel() - mine + mine * (axis.size - 1)) * full.element_size()

    def check_order(self) -> None:
        """No-op: here each gather already checks that all ranks gather the same thing."""


def _exchange(arriving: _Tensors, leaving: _Tensors, axis: Axis, tag: int) -> Wait:
    """Start to send to every other rank and to receive from each.  Returns the wait for all messages."""
    return partial(messages.wait_for, messages.swap(arriving, leaving, axis, tag))


class CpuMessages(ProcessGroups):
    """Messages of CPU ranks.  Before a rank waits for a message, its collectives in shared memory make progress."""

    def exchange(self, sends: Transfers, receives: Transfers, axis: Axis) -> list[Wait]:
        progress(axis.group)
        waits = super().exchange(sends, receives, axis)
        return [messages.in_turn(partial(progress, axis.group), wait) for wait in waits]


def progress(group: Group | None) -> None:
    """Continue all collectives in shared memory, which make no progress while this rank waits for a message.

    Otherwise this rank and the sender of the message could wait for each other.  Groups without shared memory are skipped,
    because they may belong to another thread.
    """
    if group is not None and group.shares_memory and (poller := poller_of(group)) is not None:
        poller.poll(0.0)  # all channels of this rank
