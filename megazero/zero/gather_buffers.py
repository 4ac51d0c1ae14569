"""Which units of stage 3 share a gather buffer, and so how many of them are gathered ahead of the one in use.

    position of a unit in its chunk    0   1   2   3   4   5   6
    three buffers                      A   B   C   A   B   C   A

While the unit in one buffer is computed with, the others are filled with those that follow.  All buffers together hold the
largest unit and at most `prefetch_bytes` more; there are always two.  Each is as large as the largest of its units:

    bytes = sum over buffers of the largest unit in it

Where a unit has several buckets, the i-th buckets of its units share a buffer; if that takes 1/32 more, each unit has one.

A gather policy says how long a gathered unit stays:
    action    units take turns in the buffers: every forward and backward gathers anew what has made room; least memory
    chunk     units at the same position of different chunks share: a chunk stays until another chunk runs
    step      each unit its own: gathered once per step; the memory of whole weights
A parameter that several units use, or that is in use while other units run, has a buffer of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.zero.bucket import BucketLayout


@dataclass(frozen=True)
class BufferPlan:
    """The buckets of each gather buffer."""

    buffers: tuple[tuple[BucketLayout, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each buffer."""
        return tuple(max(layout.padded_numel for layout in members) for members in self.buffers)

    @property
    def elements(self) -> int:
        """Of all buffers together."""
        return sum(self.sizes)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """By name of each bucket its buffer, [padded]."""
        found = {}
        for members, size in zip(self.buffers, self.sizes, strict=True):
            buffer = torch.zeros(size, dtype=dtype, device=device)
            found.update({layout.name: buffer[: layout.padded_numel] for layout in members})
        return found


def plan_buffers(
    layouts: Sequence[BucketLayout], chunk_of_unit: Sequence[int], gather_policy: str, prefetch_elements: int
) -> BufferPlan:
    """Give every bucket that is gathered a buffer.

    Args:
        layouts: all buckets; persistent ones are not gathered.
        chunk_of_unit: the model chunk of each unit, in forward order.
        gather_policy: "action", "chunk" or "step".
        prefetch_elements: elements of weights that may lie in the buffers beside the largest unit.
    """
    alone, sharing = list[BucketLayout](), list[_Shared]()
    of_units = Counter[tuple[int, bool]]()
    for one in layouts:
        if one.tie is not None or gather_policy == "step" or one.slots[0].info.alone:
            alone += [] if one.persistent else [one]
        elif not one.persistent:
            position = one.unit - chunk_of_unit.index(chunk_of_unit[one.unit])
            sharing.append(_Shared(position, of_units[one.unit, one.trains], one))
            of_units[one.unit, one.trains] += 1
    count = max((one.position + 1 for one in sharing), default=0)
    if gather_policy == "action":
        units = Counter[int]()
        for _, _, one in sharing:
            units[one.unit] += one.padded_numel
        most = max(units.values(), default=0) + prefetch_elements
        count = next((n for n in range(count, 2, -1) if sum(_in_turn(sharing, n).sizes) <= most), 2)
    return BufferPlan((*_in_turn(sharing, count).buffers, *((one,) for one in alone)))


class _Shared(NamedTuple):
    """A bucket that shares its buffer with those of the same number of other units."""

    position: int  # of its unit in its chunk
    number: int  # among the buckets of the unit
    layout: BucketLayout


def _in_turn(sharing: Sequence[_Shared], count: int) -> BufferPlan:
    """Units whose positions are equal modulo `count` share buffers; what is frozen has buffers beside what trains."""
    members: dict[tuple[int, int, bool], list[BucketLayout]] = {}
    for position, number, one in sharing:
        members.setdefault((position % count, number, one.trains), []).append(one)
    return BufferPlan(tuple(map(tuple, members.values())))
