"""Checks that the arguments of recomputed calls, of which each rank keeps a part, are equal on all ranks.

The first calls are checked: a script whose ranks have parts of a tensor has them in every call.  The ranks make the same
calls, so all of them stop checking at the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce, numbers_of
from megazero.layers.counter_rng import random_bits
from megazero.parallel_state import Axis

_AT_ONCE = 1 << 19  # elements whose random numbers are in memory
_CHECKED = 1 << 10  # calls


class EqualArguments:
    """The calls that are still to be checked."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Check as many calls again."""
        self._left = _CHECKED

    def check(self, name: str, tensors: Sequence[Tensor], axis: Axis) -> None:
        """Check a call of the function `name` with `tensors` as arguments; a collective call, where it is checked.

        Raises: ValueError: a tensor differs between the ranks of the axis.
        """
        if not tensors or not self._left:
            return
        self._left -= 1
        sums = torch.stack([_position_sum(tensor) for tensor in tensors])
        extremes = torch.stack([sums, -sums])
        all_reduce(extremes, axis, "max").wait()
        numbers = numbers_of(extremes.view(-1), axis)
        for number, (most, least) in enumerate(zip(numbers[: len(sums)], numbers[len(sums) :], strict=True)):
            if most != -least:
                raise ValueError(
                    f"partition_activations: argument {number} of {name}, of shape {list(tensors[number].shape)}, differs "
                    f"between the ranks {list(axis.ranks)} of tensor parallelism, so they cannot share it; set "
                    "partition_activations to false, or mark the tensor with no_checkpointing = True"
                )


def _position_sum(tensor: Tensor) -> Tensor:
    """int64, of 50 bits: a sum of a tensor's bits, each element times a random odd number of its position.

    Elements that differ, or have changed places, give another sum but for about one case in 2^32 at most.  It is exact, so
    it is the same on every device.  Source: multiply-shift hashing (Dietzfelbinger et al. 1997), whose high bits are random.
    """
    words = {1: torch.int8, 2: torch.int16}.get(tensor.itemsize, torch.int32)  # the sum's high bits see 32 of a word
    flat = tensor.reshape(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        position = torch.arange(start, start + part.numel(), device=part.device)
        total += (random_bits(0, position) | 1).mul_(part).sum()
    return total >> 14
