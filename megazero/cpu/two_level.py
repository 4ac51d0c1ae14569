"""Collectives over CPU ranks of several hosts with several ranks each: one level within a host, one between hosts.

    number in the group   0    1  |  2    3        H = 2 hosts of L = 2 ranks, n = H * L ranks in all
    host                  0    0  |  1    1
    number on its host    0    1  |  0    1

    reduce-scatter   a host sums its ranks' terms in shared memory; each rank sends one sum to each other host
    all-gather       each rank sends its shard to each other host, once; the ranks of a host share what has arrived
    all-reduce       a reduce-scatter, then an all-gather

Of a buffer of F bytes, a rank sends F/n (H - 1) to other hosts, and twice that in an all-reduce.  That is 1/L of what
it would send if every rank sent to every other.  Within the host it copies (L - 1)/L F.  An all-to-all has only one
level, because every row that crosses hosts is for one rank.

[Note: slices]  A long tensor is processed in slices: one is summed within the host while others are in transit.

[Note: two threads]  The second level must start as soon as the first has ended, whatever the rank is computing then, so
operations run in a thread of their own.  Ranks may differ in the order in which they start gathers and reductions, so
each of the two kinds has its own thread.

[Note: sums]  The ranks of a host are added in rank order, then the hosts in host order, in the tensor's own type.  So
every rank gets the same bits, and an element is rounded L + H - 2 times instead of n - 1 times.

NCCL detects the hosts itself and lays out its rings and trees accordingly
(https://github.com/NVIDIA/nccl-tests/issues/196), so its groups do not need this.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.backend import place_shard
from megazero.comm.messages import REDUCTIONS, combine, start_comparing, tag_of
from megazero.cpu import shared_memory
from megazero.cpu.rendezvous import HostRanks, Poller
from megazero.cpu.shared_memory import HALF_BYTES, Channel, Rounds, label_of, slices_of
from megazero.cpu.sockets import SocketBackend
from megazero.cpu.worker import Worker
from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Wait
from megazero.parallel_state.grid import Hosts

# Up to this size, an all-reduce sends the whole sum of each host: more bytes, but one message instead of two.
_SMALL_BYTES = 1 << 14
_SLICE_BYTES = 1 << 18  # of a reduce-scatter's message
_WINDOW = 4  # number of such slices in transit at once
_SCRATCH_BYTES = 1 << 23  # limit for all slices in transit together
_LONGEST_ITEM = 16  # bytes of the longest type: slices are multiples of it

_Op: TypeAlias = Callable[..., Tensor]
_Shards: TypeAlias = list[list[Tensor]]  # by host, and by number on the host; 1-D, of equal length


class ThreadedChannel:
    """A thread that runs operations in the order in which they are started.  If one fails, all later ones fail too.

    Args:
        host_ranks: the ranks of this host.
        index: number of this rank among them.
        timeout_seconds: how long an operation may wait for a peer.
        name: name of the thread.
    """

    def __init__(self, host_ranks: HostRanks, index: int, timeout_seconds: float, name: str) -> None:
        self._poller = Poller()
        self.channel = Channel(host_ranks, index, timeout_seconds, self._poller)  # used by the thread only
        self._timeout = timedelta(seconds=timeout_seconds)
        self._worker = Worker(name)
        self._failed: BaseException | None = None
        self._left: RuntimeError | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def start(self, label: str, rounds: Rounds) -> Wait:
        """Start an operation.  Its label must be the same on all ranks.  The returned wait raises the thread's
        exception.
        """
        if self._left is not None:
            return partial(_raise, self._left)
        return self._worker.post(partial(self._run, label, rounds))

    def _run(self, label: str, rounds: Rounds) -> Wait:
        if self._failed is None:
            try:
                self.channel.start(label, rounds)()
            except BaseException as error:
                self._failed = self._left or error
        if self._failed is not None:
            raise self._failed
        return lambda: None

    def wait_for(self, messages: Sequence[Any]) -> None:
        """Wait for messages in the thread.

        Raises: RuntimeError: a peer has died or exceeded the timeout, or this rank has closed the channel.
        """
        for message in messages:
            if self._left is not None:
                raise self._left
            message.wait(self._timeout)

    def scratch(self, rows: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return memory that the operations use one after the other, [rows, row_bytes / item size]."""
        if self._scratch.numel() < rows * row_bytes:
            self._scratch = torch.empty(rows * row_bytes, dtype=torch.uint8)
        return self._scratch[: rows * row_bytes].view(dtype).view(rows, -1)

    def close(self) -> None:
        """End the thread.  Unfinished operations fail.  In a forked child, which has no thread, do not disturb the
        peers.

        gloo cannot interrupt the wait for a message, so a thread in such a wait ends when the message arrives or times
        out.
        """
        self._left = RuntimeError("this rank has left its group and closed the shared memory")
        self._worker.close(self._left, self.channel.interrupt)
        self.channel.close()
        self._poller.forget()


def _raise(error: BaseException) -> None:
    raise error


class TwoLevelBackend(SocketBackend):
    """Collectives for ranks on several hosts with equally many ranks each.  Each kind of operation has its own thread.

    All-to-alls and shifts have one level and use sockets.

    Args:
        name: name of the axis.
        reduce, gather: the threads that run reductions and gathers.
    """

    needs_scratch = False

    def __init__(self, name: str, hosts: Hosts, reduce: ThreadedChannel, gather: ThreadedChannel) -> None:
        super().__init__(name)
        self.hosts, self._reduce, self._gather = hosts, reduce, gather
        self._close = weakref.finalize(self, _close_all, reduce, gather)

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        label = label_of("all_reduce", tensor, axis)
        links = _Links(self._reduce, self.hosts, axis, label)
        return self._reduce.start(label, _all_reduce(links, tensor.detach().view(-1), REDUCTIONS[op]))

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        place_shard(out, shard, axis)
        links = _Links(self._gather, self.hosts, axis, whole := label_of("all_gather", shard, axis, label))
        return self._gather.start(whole, _all_gather(links, _shards(self.hosts, out.detach()), is_labelled=bool(label)))

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        label = label_of("reduce_scatter", full, axis)
        links, shards = _Links(self._reduce, self.hosts, axis, label), _shards(self.hosts, full.detach())
        return self._reduce.start(label, _reduce_scatter(links, out.detach().view(-1), shards, REDUCTIONS["sum"]))

    def link_bytes(self, operation: str, full: Tensor, axis: Axis) -> int:
        return link_bytes_between(self.hosts, operation, full, axis)

    def close(self) -> None:
        """End both threads."""
        self._close()


def link_bytes_between(hosts: Hosts, operation: str, full: Tensor, axis: Axis) -> int:
    """Compute the bytes that a rank sends to other hosts in an operation.  `full`: the longer of its two buffers."""
    shard_bytes, others = full.nbytes // axis.size, hosts.count - 1
    if operation == "all_to_all":
        return shard_bytes * hosts.size * others
    if operation == "all_reduce":
        whole = _evenly(full, axis.size) * full.element_size()
        return others * (2 * whole // axis.size + full.nbytes - whole)
    return shard_bytes * others


def _close_all(*threads: ThreadedChannel) -> None:
    for thread in threads:
        thread.close()


def _shards(hosts: Hosts, flat: Tensor) -> _Shards:
    """Split a buffer into equal shards, one for each rank."""
    return [list(of_host.unbind(0)) for of_host in flat.view(hosts.count, hosts.size, -1).unbind(0)]


class _Links:
    """The messages of one operation, exchanged with the ranks of the same number on other hosts."""

    def __init__(self, thread: ThreadedChannel, hosts: Hosts, axis: Axis, label: str) -> None:
        self.thread, self.hosts, self.axis, self.label = thread, hosts, axis, label
        self._tag = tag_of(label)

    def send(self, tensor: Tensor, host: int) -> Any:
        return dist.isend(tensor, self._rank(host), self.axis.host_group, self._tag)

    def receive(self, tensor: Tensor, host: int) -> Any:
        return dist.irecv(tensor, self._rank(host), self.axis.host_group, self._tag)

    def _rank(self, host: int) -> int:
        return self.axis.ranks[host * self.hosts.size + self.hosts.local]


def _reduce_scatter(links: _Links, out: Tensor, shards: _Shards, op: _Op) -> Rounds:
    """Set `out` to the sum of every rank's shard for this rank.  `out` may be this rank's own shard."""
    thread, hosts = links.thread, links.hosts
    if not out.numel():
        yield from shared_memory.reduce_scatter_rounds(thread.channel, out, shards[hosts.host], op)
        return
    rows = 2 * hosts.count - 1  # each host's sum for this rank, and this host's sum for each other host
    longest = min(_SLICE_BYTES, HALF_BYTES // (hosts.size - 1), _SCRATCH_BYTES // (_WINDOW * rows))
    scratch = thread.scratch(_WINDOW * rows, longest // _LONGEST_ITEM * _LONGEST_ITEM, out.dtype)
    under_way: deque[tuple[Tensor, Tensor, list[Any]]] = deque()

    def finish() -> None:
        result, sums, messages = under_way.popleft()
        thread.wait_for(messages)
        combine(result, sums.unbind(0), op)

    for number, at in enumerate(slices_of(out.numel(), scratch.shape[1])):
        if len(under_way) == _WINDOW:
            finish()
        window = scratch[number % _WINDOW * rows :][:rows, : at.stop - at.start]
        sums, leaving = window[: hosts.count], window[hosts.count :]
        messages = [links.receive(sums[other], other) for other in hosts.others]
        for other, total in zip(hosts.others, leaving, strict=True):
            terms = [shard[at] for shard in shards[other]]
            yield from shared_memory.reduce_scatter_rounds(thread.channel, total, terms, op)
            messages.append(links.send(total, other))
        own = [shard[at] for shard in shards[hosts.host]]
        yield from shared_memory.reduce_scatter_rounds(thread.channel, sums[hosts.host], own, op)
        under_way.append((out[at], sums, messages))
    while under_way:
        finish()


def _all_gather(links: _Links, shards: _Shards, *, is_labelled: bool = False) -> Rounds:
    """Fill every rank's shard.  This rank's own shard is already filled."""
    thread, hosts = links.thread, links.hosts
    mine = shards[hosts.host][hosts.local]
    slices = slices_of(mine.numel(), HALF_BYTES // mine.element_size()) if mine.numel() else []
    check = start_comparing(links.label if is_labelled else "", links.axis, hosts.size, thread.wait_for)
    arriving = [
        (other, at, links.receive(shards[other][hosts.local][at], other)) for at in slices for other in hosts.others
    ]
    leaving = [links.send(mine[at], other) for at in slices for other in hosts.others]
    yield from shared_memory.all_gather_rounds(thread.channel, shards[hosts.host])
    check()
    for other, at, message in arriving:
        thread.wait_for([message])
        yield from shared_memory.all_gather_rounds(thread.channel, [shard[at] for shard in shards[other]])
    thread.wait_for(leaving)


def _evenly(flat: Tensor, ranks: int) -> int:
    """Return how many elements of an all-reduce can be divided evenly among all ranks."""
    return 0 if flat.nbytes <= _SMALL_BYTES else flat.numel() // ranks * ranks


def _all_reduce(links: _Links, flat: Tensor, op: _Op) -> Rounds:
    """Replace a 1-D tensor by its reduction over all ranks."""
    thread, hosts = links.thread, links.hosts
    divided = _evenly(flat, links.axis.size)
    if divided:
        shards = _shards(hosts, flat[:divided])
        yield from _reduce_scatter(links, shards[hosts.host][hosts.local], shards, op)
        yield from _all_gather(links, shards)
    rest = flat[divided:]
    if rest.numel() or not divided:
        yield from shared_memory.all_reduce_rounds(thread.channel, rest, op)
    if rest.numel():
        sums = rest.repeat(hosts.count, 1)
        messages = [links.receive(sums[other], other) for other in hosts.others]
        messages += [links.send(sums[hosts.host], other) for other in hosts.others]
        thread.wait_for(messages)
        combine(rest, sums.unbind(0), op)
