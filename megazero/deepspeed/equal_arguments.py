"""Checks that the arguments of recomputed calls, of which each rank keeps a part, are equal on all ranks.

A call is checked the first time it is made with such shapes.  The ranks decide that alike, since they make the same calls:
by the function's code, and the modules and numbers of layers that it holds (Megatron's `custom(start, end)`).  So a closure
that a script makes anew for every call is checked once, and of a stack of equal layers each is.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.collectives import all_reduce, numbers_of
from megazero.layers.counter_rng import random_bits
from megazero.parallel_state import Axis

_AT_ONCE = 1 << 19  # elements whose random numbers are in memory
_LAYERS = 1 << 10  # larger numbers are not those of layers: a seed would make every call a new one
_ROOM = 1 << 14  # calls; where a script makes a new module for every call, the old ones are forgotten


class EqualArguments:
    """The calls that have passed the check."""

    def __init__(self) -> None:
        self._passed: set[Hashable] = set()

    def clear(self) -> None:
        """Check every call again."""
        self._passed.clear()

    def check(self, name: str, function: Any, others: Sequence[Any], tensors: Sequence[Tensor], axis: Axis) -> None:
        """Check a call of a function, with `tensors` and `others` as arguments; a collective call if it is a new one.

        Raises: ValueError: a tensor differs between the ranks of the axis.
        """
        if not tensors:
            return
        call = (*_identity(function, others), *((tensor.shape, tensor.dtype) for tensor in tensors))
        if call in self._passed:
            return
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
        if len(self._passed) >= _ROOM:
            self._passed.clear()
        self._passed.add(call)


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


class _This(weakref.ref[Any]):
    """An object, not one that equals it, and not one that gets its address when it has died."""

    def __init__(self, one: Any) -> None:
        self._hash = id(one)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _This) and self() is not None and self() is other())


def _identity(function: Any, others: Sequence[Any]) -> Iterator[Hashable]:
    """What tells a function from others: its code, and the modules and small numbers that it holds, or is given."""
    found: list[Any] = [one for one in others if isinstance(one, nn.Module)]
    found.append(function)
    owner, seen = function, set[int]()  # the object that is called, or whose method is
    while found:
        one = found.pop()
        if isinstance(one, int):
            if 0 <= one < _LAYERS:
                yield one
        elif id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, FunctionType):
                yield one.__code__
                found += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
                found += map(_contents, one.__closure__ or ())
            elif isinstance(one, MethodType):
                found += [one.__func__, one.__self__]
                owner = one.__self__ if one is owner else owner
            elif isinstance(one, partial):
                found += [one.func, *one.args, *one.keywords.values()]
                owner = one.func if one is owner else owner
            elif type(one) in (nn.Sequential, nn.ModuleList):  # a slice of one is a new one
                found += one
            elif isinstance(one, nn.Module) or one is owner:
                yield _This(one) if type(one).__weakrefoffset__ else type(one).__qualname__


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty as yet
        return None
