"""Communication over torch's process groups.

NCCL runs torch's collectives as they are.  On gloo two of them are replaced: its reduce-scatter moves an all-reduce's bytes,
so the parts are exchanged and summed here, in rank order; its all-gather copies through memory that it allocates each time,
so every shard is sent straight to its position in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.parallel_state import Axis, Work

T = TypeVar("T")

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_GATHER_TAG = 1  # keeps the messages of an all-gather apart from those of `exchange`


class TorchBackend:
    """torch's own collectives, for NCCL."""

    needs_scratch = False

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Work:
        """One collective of torch."""
        return Work(dist.all_reduce(tensor, op=_REDUCTIONS[op], group=axis.process_group, async_op=True).wait)

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis) -> Work:
        """One collective of torch."""
        return Work(_all_gather(out, shard, group=axis.process_group, async_op=True).wait)

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis, _: Tensor | None) -> Work:
        """One collective of torch."""
        return Work(_reduce_scatter(out, full, group=axis.process_group, async_op=True).wait)

    def close(self) -> None:
        """There is nothing to release."""


class GlooBackend(TorchBackend):
    """Collectives of CPU tensors over gloo."""

    needs_scratch = True

    def all_gather(self, out: Tensor, shard: Tensor, axis: Axis) -> Work:
        """A message to and from every other rank."""
        shards, group = place_shard(out, shard, axis), axis.process_group
        mine = shards[axis.index]
        others = [index for index in range(axis.size) if index != axis.index and mine.numel()]
        works: list[Any] = [dist.irecv(shards[index], axis.ranks[index], group, _GATHER_TAG) for index in others]
        works += [dist.isend(mine, axis.ranks[index], group, _GATHER_TAG) for index in others]
        return Work(lambda: [work.wait() for work in works])

    def reduce_scatter(self, out: Tensor, full: Tensor, axis: Axis, scratch: Tensor | None) -> Work:
        """An all-to-all of the parts, then a local sum."""
        arriving = torch.empty_like(full) if scratch is None else scratch[: full.numel()].view_as(full)
        work = dist.all_to_all_single(arriving, full, group=axis.process_group, async_op=True)
        return Work(work.wait, lambda: combine(out, arriving.view(axis.size, *out.shape).unbind(0), torch.add))


def place_shard(out: Tensor, shard: Tensor, axis: Axis) -> list[Tensor]:
    """Copy this rank's shard to its position in the result of an all-gather.  Returns: all positions by rank, 1-D."""
    shard = shard.detach()
    shards = [one.view(-1) for one in out.detach().view(axis.size, *shard.shape).unbind(0)]
    mine = shards[axis.index]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard.view(-1))
    return shards


def combine(out: Tensor, parts: Sequence[Tensor], op: Callable[..., Tensor]) -> None:
    """Combine at least two parts pairwise, in rank order; `out` may be the first or the second of them."""
    op(parts[0], parts[1], out=out)
    for part in parts[2:]:
        op(out, part, out=out)


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Work:
    """Replace `tensor` by that of the rank with index `source`."""
    return Work(dist.broadcast(tensor, src=axis.ranks[source], group=axis.process_group, async_op=True).wait)


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis
) -> list[Callable[[], object]]:
    """Post point-to-point operations together.  Returns: what waits for each, sends first."""
    operations = [dist.P2POp(dist.isend, tensor, peer, group=axis.process_group) for tensor, peer in sends]
    operations += [dist.P2POp(dist.irecv, buffer, peer, group=axis.process_group) for buffer, peer in receives]
    works = dist.batch_isend_irecv(operations)
    if len(works) < len(operations):  # NCCL returns one handle for the whole batch
        works = list(works) * len(operations)
    return [work.wait for work in works]


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Every rank's picklable value, in rank order, on every rank."""
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.process_group)
    return values
