"""The sums that end a step's gradients, once every bucket is reduced over its shards, and their norm.

reduced shards -> over replicas of the shard -> partial gradients over tp -> copies of tied parameters -> square_sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.parallel_state import Axis
from megazero.zero.bucket import Bucket, intersect

_NORM_BLOCK = 256  # as fast as longer blocks here, and 30 times closer


def sum_over_replicas(buckets: Sequence[Bucket]) -> None:
    """Sum the gradients of the ranks that hold the same shards."""
    for pending in [all_reduce(bucket.gradient, bucket.policy.replica) for bucket in buckets]:
        pending.wait()


def sum_partial_over_tp(buckets: Sequence[Bucket], tp: Axis) -> None:
    """Sum the gradients of which every tp rank has computed only a part."""
    parts = [
        bucket.owned_part(bucket.gradient, run)
        for bucket in buckets
        for partial, whole in bucket.layout.runs(lambda info: info.spec.sum_over_tp)
        if partial and (run := intersect(whole, bucket.owned)) is not None
    ]
    if not parts or tp.size == 1:
        return
    flat = torch.cat([part.to(buckets[0].policy.device) for part in parts])  # offloaded ones lie on the host
    all_reduce(flat, tp).wait()
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed)


def sum_tied(buckets: Sequence[Bucket], ties: Mapping[str, Axis]) -> None:
    """Sum the gradients of all copies of each tied parameter, on this rank and on others.

    Args:
        buckets: this rank's.
        ties: by logical name of a tied parameter, the ranks that hold a copy.
    """
    copies: dict[str, list[Tensor]] = {}
    for bucket in buckets:
        if bucket.layout.tied:
            copies.setdefault(bucket.layout.tie, []).append(bucket.gradient)
    for name in sorted(copies):
        # On the device, wherever each rank's own copies lie: all ranks must use one backend.
        total = copies[name][0].to(buckets[0].policy.device)  # itself, where it lies there
        for other in copies[name][1:]:
            total.add_(other.to(total.device))
        if name in ties:
            all_reduce(total, ties[name]).wait()
        for copy in copies[name]:
            if copy is not total:
                copy.copy_(total)


def gradient_square_sum(buckets: Sequence[Bucket], tp: Axis) -> Tensor:
    """fp64 scalar: this rank's share of the squared gradient norm.

    Over all ranks every logical element is counted once: each rank counts its own part of the shards, the first tp rank
    the parameters that every one of them holds, and the first copy of a tied parameter stands for all.
    """
    parts = [
        bucket.owned_part(bucket.gradient, run)
        for bucket in buckets
        if not bucket.is_second_copy
        for replicated, whole in bucket.layout.runs(lambda info: info.spec.split is None)
        if (run := intersect(whole, bucket.counted)) is not None and not (replicated and tp.index > 0)
    ]
    return square_sum(parts, buckets[0].policy.device)


def square_sum(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """fp64 sum of squares of flat fp32 tensors, in blocks: one long fp32 sum would lose digits.  A scalar on `device`.

    Two kernels a part and a few in all: a GPU would wait for the launches of more.
    """
    norms: dict[torch.device, list[Tensor]] = {device: []}
    for part in parts:
        blocks = part.numel() // _NORM_BLOCK
        whole, rest = part.split([blocks * _NORM_BLOCK, part.numel() - blocks * _NORM_BLOCK])
        here = norms.setdefault(part.device, [])
        here += [torch.linalg.vector_norm(whole.view(blocks, _NORM_BLOCK), dim=1)] if blocks else []
        here += [torch.linalg.vector_norm(rest, dim=0, keepdim=True)] if rest.numel() else []
    sums = [torch.cat(here).double().square().sum().to(device) for here in norms.values() if here]
    return sum(sums, torch.zeros((), dtype=torch.float64, device=device))
