"""Implementations of the collectives: the trunk's classes for `parallel_state.Backend`.

tensors on the run's device                  TorchBackend    torch's collectives, over NCCL or gloo
tensors in host memory of a run on GPUs      HostBackend     messages over the gloo group of all ranks
tensors on a device that an annex supports   the annex's backend, at the seam "backend"

[Note: why an annex adds no process group]  The transports of CPU ranks were tried as a Python `ProcessGroup` that torch's
calls reach.  On two ranks, steps of ZeRO-1 and ZeRO-3 took the same time, and a small all-reduce took 1.1 times as long.
But torch's calls take only contiguous tensors, so an all-to-all of heads needs two copies: it took 1.6 times as long, and a
step with cp = 2 took 1.06 times the host's time.  They have no argument for a gather's label, nor for the memory into which
a reduce-scatter over sockets receives its terms, which the plan counts.  They have no ring shift either: send and receive
through gloo took 3 to 16 times as long as a shift through shared memory.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm import messages
from megazero.parallel_state import Axis
from megazero.parallel_state.axis import Counts, Wait
from megazero.parallel_state.state import Backend, Group
from megazero.registry import added

GatherObjects: TypeAlias = Callable[[Any], list[Any]]  # returns every rank's value, in rank order, on every rank

# torch 2.13 renamed both; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TORCH_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_MOST_UNCHECKED = 1000  # limit for gathers with labels that are not compared yet; those of the oldest arrived long ago


class TorchBackend:
    """torch's collectives.

    [Note: labels of a GPU's gathers]  Waiting for a collective only orders work on the GPU, and the host continues and
    keeps the GPU busy.  Waiting for a label would block the host until its neighbour's host has started the same
    gather, so every delay of one host would delay all of them.  So labels are compared together, in `check_order`, at
    the end of every backward pass: results of wrong weights have not changed a weight by then.
    """

    needs_scratch = False
    runs_by_itself = True
    _rings: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter")  # each rank sends only to the next one

    def __init__(self) -> None:
        self._unchecked: deque[Wait] = deque()  # label comparisons, in the order of their gathers

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        return dist.all_reduce(tensor, op=_TORCH_OPS[op], group=axis.process_group, async_op=True).wait

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        if label:
            if len(self._unchecked) == _MOST_UNCHECKED:
                self._unchecked.popleft()()
            self._unchecked.append(messages.start_comparing(label, axis))
        return _all_gather(out, shard, group=axis.process_group, async_op=True).wait

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis) -> Wait:
        return _reduce_scatter(out, full, group=axis.process_group, async_op=True).wait

    def all_to_all(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        group = axis.process_group
        return over_contiguous(out, x, lambda y, x: dist.all_to_all_single(y, x, group=group, async_op=True).wait)

    def all_to_all_rows(self, out: Tensor, x: Tensor, axis: Axis, sends: Counts, receives: Counts) -> Wait:
        counts = list(receives), list(sends)
        return dist.all_to_all_single(out, x, *counts, group=axis.process_group, async_op=True).wait

    def ring_shift(self, out: Tensor, x: Tensor, axis: Axis) -> Wait:
        return messages.shift(out, x, axis)

    def link_bytes(self, operation: str, full: Tensor, axis: Axis) -> int:
        shard_bytes = full.nbytes // axis.size
        if operation not in self._rings:
            return shard_bytes * sum(axis.is_off_host(index) for index in range(axis.size))
        sent = (1 + (operation == "all_reduce")) * (full.nbytes - shard_bytes)
        return sent if axis.is_off_host((axis.index + 1) % axis.size) else 0

    def check_order(self) -> None:
        while self._unchecked:
            self._unchecked.popleft()()

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""


class HostBackend(TorchBackend):
    """Collectives of host memory in a run on GPUs.  Its groups use only NCCL, so messages go over the gloo group of all
    ranks.

    Only gathers and sums are needed: for offloaded gradients, and for data that the readers of a checkpoint exchange.
    """

    _rings = ()

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Wait:
        shards = place_shard(out, shard, axis)
        under_way = messages.swap(shards, [shards[axis.index]] * axis.size, axis, messages.tag_of(label))
        return messages.in_turn(messages.start_comparing(label, axis), partial(messages.wait_for, under_way))

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Wait:
        """Gather every rank's tensor and reduce in rank order."""
        every = tensor.new_empty(axis.size, tensor.numel())
        terms = every.view(axis.size, *tensor.shape).unbind(0)
        arrive = self.all_gather(every, tensor.view(-1), axis)
        return messages.in_turn(arrive, partial(messages.combine, tensor, terms, messages.REDUCTIONS[op]))

    def link_bytes(self, operation: str, full: Tensor, axis: Axis) -> int:
        sent = full.nbytes if operation == "all_reduce" else full.nbytes // axis.size
        return sent * sum(axis.is_off_host(index) for index in range(axis.size))


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's memory for as long as the memory is in use."""
    return int(tensor.untyped_storage()._cdata)


def address_of(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's memory, see `storage_of`, and the byte at which the tensor begins there."""
    return storage_of(tensor), int(tensor.storage_offset()) * tensor.element_size()


def place_shard(out: Tensor, shard: Tensor, axis: Axis) -> list[Tensor]:
    """Copy this rank's shard to its position in the result of an all-gather.  Returns: all positions by rank, 1-D."""
    shards = list(out.detach().view(axis.size, shard.numel()).unbind(0))
    mine = shards[axis.index]
    if address_of(mine) != address_of(shard):
        mine.copy_(shard.detach().view(-1))
    return shards


def over_contiguous(out: Tensor, x: Tensor, start: Callable[[Tensor, Tensor], Wait]) -> Wait:
    """Start an operation that needs contiguous tensors.  Copies `x` before and the result after it if they are not."""
    if out.is_contiguous():
        return start(out, x.contiguous())
    arriving = out.new_empty(out.shape)
    return messages.in_turn(start(arriving, x.contiguous()), partial(out.copy_, arriving))


def choose_backend(axis: Axis, group: Group, device: torch.device, gather: GatherObjects) -> Backend:
    """Return the backend for a group's tensors on a device.  All ranks of the group must call this at the same operation;
    they choose the same backend.
    """
    if group.device.type != device.type:
        return HostBackend()
    backend = added("backend").get(device.type)
    made: Backend = TorchBackend() if backend is None else backend(axis, group, gather)
    return made
