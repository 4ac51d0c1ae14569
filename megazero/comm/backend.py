"""What carries the collectives of a group: the implementations of `parallel_state.Backend`, and their choice.

CPU tensors of a CPU run, on one host           SharedMemoryBackend    memory that the ranks share
the same, on hosts with as many ranks each      TwoLevelBackend        memory within a host, messages between hosts
other CPU tensors of a CPU run                  GlooBackend            messages over sockets
CPU tensors of other runs                       HostBackend            messages over sockets, in the group of all ranks
tensors of other devices                        TorchBackend           torch's collectives, over NCCL
"""

from __future__ import annotations

from collections import deque
from functools import partial
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.labels import start_comparing
from megazero.comm.lane import Lane
from megazero.comm.messages import ALL_TO_ALL_TAG, REDUCE_TAG, SUMS_TAG, shift, swap, swap_parts, tag_of, wait_for
from megazero.comm.rendezvous import Gather, Offer, Poller, rendezvous, this_host
from megazero.comm.shared_memory import AREA_BYTES, REDUCTIONS, Channel, SharedMemoryBackend, combine, place_shard
from megazero.comm.two_level import Hosts, TwoLevelBackend, hosts_of
from megazero.comm.worker import Post, Worker, at_once, in_turn
from megazero.parallel_state import Axis
from megazero.parallel_state.groups import Backend, Group, Wait
from megazero.parallel_state.state import MOST_SHARING_RANKS

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TORCH_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_SMALL_BYTES = 2**16  # smaller all-reduces are gloo's own: fewer messages
_MOST_ARRIVING_BYTES = 2**23  # of parts that wait to be added, in a group
_MOST_UNCHECKED = 1000  # gathers whose labels wait to be compared; the oldest ones' arrived long ago


class TorchBackend:
    """torch's own collectives, for NCCL.

    [Note: labels of a GPU's gathers]  The wait for a collective orders the GPU's work and returns; the host goes on and
    keeps the GPU busy.  The wait for a label would hold the host until its neighbour's host has started the same gather,
    so that every delay of one host would become a delay of all.  So labels are compared together, in `check_order`, which
    comes at the end of every backward pass: what wrong weights have computed until then has not reached a weight.
    """

    needs_scratch = False
    needs_contiguous = True
    _rings: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter")  # each rank sends to the next one alone

    def __init__(self) -> None:
        self._unchecked: deque[Wait] = deque()  # in the order of their gathers

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        return dist.all_reduce(tensor, op=_TORCH_OPS[op], group=axis.process_group, async_op=True).wait

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        if label:
            if len(self._unchecked) == _MOST_UNCHECKED:
                self._unchecked.popleft()()
            self._unchecked.append(start_comparing(label, axis))
        return _all_gather(out, shard, group=axis.process_group, async_op=True).wait

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        return _reduce_scatter(out, full, group=axis.process_group, async_op=True).wait

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return dist.all_to_all_single(out, x, group=axis.process_group, async_op=True).wait

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return shift(out, x, axis)

    def link_bytes(self, operation: str, full: Tensor, axis: Axis) -> int:
        part = full.nbytes // axis.size
        if operation not in self._rings:
            return part * sum(axis.is_apart(index) for index in range(axis.size))
        sent = (1 + (operation == "all_reduce")) * (full.nbytes - part)
        return sent if axis.is_apart((axis.index + 1) % axis.size) else 0

    def check_order(self) -> None:
        while self._unchecked:
            self._unchecked.popleft()()

    def progress(self) -> bool:
        """torch's threads make progress."""
        return False

    def close(self) -> None:
        """There is nothing to release."""


class GlooBackend(TorchBackend):
    """Gloo, with all but its small all-reduces replaced by messages.

    Gloo's all-gather copies through memory that it allocates each time, its reduce-scatter moves an all-reduce's bytes, and
    its all-reduce is a ring, each step of which waits for the one before while the link is idle.

    Args:
        post: hands messages over; where a thread does, it is this group's alone: messages of one tag keep their order.
        post_sum: waits for the parts of an all-reduce, adds them and hands the sum over; a second thread, so that the first
            goes on with the next operation.
        shares_hosts: a host has several ranks of the group, the same on all of them; None: as the axis says, whose ranks
            must then all know the same number of neighbours.
    """

    needs_scratch = True
    _rings = ("all_reduce",)

    def __init__(self, post: Post = at_once, post_sum: Post = at_once, *, shares_hosts: bool | None = None) -> None:
        super().__init__()
        self._post, self._post_sum, self._shares_hosts = post, post_sum, shares_hosts
        self._arriving: deque[tuple[int, Event]] = deque()  # bytes of all-reduces, and whether they are added

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        """Every rank gets its part of all tensors, adds them in rank order and sends the sum to all; several overlap."""
        if not self._goes_in_messages(tensor, axis):
            return super().all_reduce(tensor, axis, op)
        parts, is_added = list(tensor.detach().view(-1).tensor_split(axis.size)), Event()
        mine, of_ranks = parts[axis.index], list[Tensor]()

        def send_parts() -> Wait:
            self._limit_arriving(mine.nbytes * (axis.size - 1), is_added)
            of_ranks.extend(mine if index == axis.index else torch.empty_like(mine) for index in range(axis.size))
            return partial(wait_for, swap(of_ranks, parts, axis, REDUCE_TAG))

        def send_sum() -> Wait:
            try:
                arrived()
                combine(of_ranks[0], of_ranks, REDUCTIONS[op])
                mine.copy_(of_ranks[0])  # of the first rank they are one tensor
            finally:
                of_ranks.clear()
                is_added.set()
            return partial(wait_for, swap(parts, [mine] * axis.size, axis, SUMS_TAG))

        arrived = self._post(send_parts)
        return self._post_sum(send_sum)

    def _goes_in_messages(self, tensor: Tensor, axis: Axis) -> bool:
        """Not a small all-reduce, nor one for which much memory arrives, nor where hosts have several of the ranks: there a
        ring crosses each host's link once."""
        shares_hosts = axis.shares_hosts if self._shares_hosts is None else self._shares_hosts
        arriving = tensor.nbytes // axis.size * (axis.size - 1)
        return tensor.nbytes > _SMALL_BYTES and arriving <= _MOST_ARRIVING_BYTES and not shares_hosts

    def _limit_arriving(self, nbytes: int, is_added: Event) -> None:
        """Wait for the oldest all-reduces until what arrives fits; in the thread that posts."""
        while self._arriving and (
            self._arriving[0][1].is_set() or nbytes + sum(one for one, _ in self._arriving) > _MOST_ARRIVING_BYTES
        ):
            self._arriving.popleft()[1].wait()
        self._arriving.append((nbytes, is_added))

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        """Messages to and from every other rank, straight to their positions in the result."""
        shards, tag = place_shard(out, shard, axis), tag_of(label)
        leaving = [shards[axis.index]] * axis.size
        return self._post(
            lambda: in_turn(start_comparing(label, axis), partial(wait_for, swap(shards, leaving, axis, tag)))
        )

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        """The ranks' parts for this one into `out`, which is as long as `full`; the caller sums them."""
        return swap_parts(out, full, axis, REDUCE_TAG, self._post)

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return swap_parts(out, x, axis, ALL_TO_ALL_TAG, self._post)

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return self._post(partial(shift, out, x, axis))

    def link_bytes(self, operation: str, full: Tensor, axis: Axis) -> int:
        if operation != "all_reduce" or not self._goes_in_messages(full, axis):
            return super().link_bytes(operation, full, axis)
        each, longer = divmod(full.numel(), axis.size)
        mine = each + (axis.index < longer)  # the others' parts, and this one's sum to each of them
        return (full.numel() - mine + mine * (axis.size - 1)) * full.element_size()


class HostBackend(GlooBackend):
    """Host memory of a run on GPUs: messages over the gloo group of all ranks, since groups of GPUs are NCCL's alone."""

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        every = tensor.new_empty(axis.size, tensor.numel())
        arrive = self.all_gather(every, tensor.view(-1), axis)
        parts = every.view(axis.size, *tensor.shape).unbind(0)

        def wait() -> None:
            arrive()
            combine(tensor, parts, REDUCTIONS[op])

        return wait

    def link_bytes(self, operation: str, full: Tensor, axis: Axis) -> int:
        if operation == "all_reduce":  # each rank sends all
            return full.nbytes * sum(axis.is_apart(index) for index in range(axis.size))
        return super().link_bytes(operation, full, axis)


def kind_between(hosts: Hosts | None) -> type[GlooBackend | TwoLevelBackend | SharedMemoryBackend]:
    """What carries the tensors of a CPU run among ranks on these hosts, if they can share memory; see `hosts_of`."""
    if hosts is None or not 1 < hosts.size <= MOST_SHARING_RANKS:
        return GlooBackend
    return TwoLevelBackend if hosts.count > 1 else SharedMemoryBackend


def choose_backend(axis: Axis, group: Group, device: torch.device, gather: Gather) -> Backend:
    """The backend for a group's tensors of a device.  All its ranks call this at the same operation and choose the same."""
    if device.type != "cpu":
        return TorchBackend()
    if group.device.type != "cpu":
        return HostBackend()
    hosts, shares_hosts = None, axis.shares_hosts
    if group.shares_memory:
        each, rank = group.neighbours, axis.ranks[axis.index]
        name = this_host() + (f" {rank // each} of {each}" if each > 1 else "")  # so one machine passes for several
        names = [one[0] for one in gather((name, "")) if one is not None]
        hosts, shares_hosts = hosts_of(names, axis.index), len(set(names)) < len(names)
    post = Worker(f"messages of {axis.name}", is_brief=True).post

    def over_sockets() -> GlooBackend:
        # hosts may have started different numbers of ranks, and so differ in what they think of others
        shares = [one is None or one[0] != "alone" for one in gather(("shares" if shares_hosts else "alone", ""))]
        return GlooBackend(post, Worker(f"sums of {axis.name}").post, shares_hosts=any(shares))

    if hosts is None or kind_between(hosts) is GlooBackend:
        return over_sockets()
    first = hosts.host * hosts.size

    def gather_on_host(offer: Offer) -> list[Offer]:
        return gather(offer)[first : first + hosts.size]

    found = [rendezvous(hosts.local, hosts.size, AREA_BYTES, gather_on_host) for _ in range(2)]
    made = [one for one in found if one is not None]
    if not all(gather((name, "") if len(made) == len(found) else None)):
        return over_sockets()
    if hosts.count > 1:
        lanes = [Lane(one, hosts.local, group.timeout_seconds, f"lane of {axis.name}") for one in made]
        return TwoLevelBackend(hosts, lanes[0], lanes[1], post)
    backends = (backend for one in group.siblings for backend in one.backends.values())
    poller = next((one.poller for one in backends if isinstance(one, SharedMemoryBackend)), None) or Poller()
    channels = [Channel(one, axis.index, group.timeout_seconds, poller) for one in made]
    return SharedMemoryBackend(channels[0], channels[1], poller)
