"""Tensors that hold nothing, and what happens to them: every operator, and the bytes that would live.

    with FakeTensors() as fake:                  torch's FakeTensorMode: shapes, types and storages, no memory
        y = layer(x); y.backward(gradient)       the project's own code
    fake.operators                               Operator and Message, in order
    fake.live, fake.peak                         bytes of all storages that are referenced, now and at most

A number that the program asks of a tensor is 0 where it is an integer and 1 where it is not.  The tensors are said to be on
the CPU: torch without CUDA ends the process in the backward pass of others.  Memory within a kernel is not seen.

Source: torch's `FakeTensorMode` and the accounting of `torch.distributed._tools.mem_tracker`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Value(NamedTuple):
    """A tensor as an operator sees it.  `storage` numbers the storages of one `FakeTensors`; views share one."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Operator:
    """One operator of torch: `aten.mm.default`.  Views are left out."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Message:
    """A collective call or a message that begins here; bytes that this rank sends, and of them to other hosts."""

    operation: str
    axis: str
    sent_bytes: int
    link_bytes: int = 0


Event: TypeAlias = Operator | Message


class FakeTensors:
    """A context in which tensors hold nothing.

    Attributes:
        operators: what was called, if `records`; may be cleared at any time.
        live, peak: bytes of storages; `peak` may be set to `live`.
    """

    def __init__(self, *, records: bool = False) -> None:
        self.records = records
        self.operators: list[Event] = []
        self.live = self.peak = 0
        self._watch, self._stack = _Watch(self), ExitStack()
        self._storages: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # by address: number, bytes, itself
        self._count = 0

    def __enter__(self) -> Self:
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._stack.enter_context(self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def value(self, tensor: Tensor) -> Value:
        """What is recorded of a tensor, whose storage lives from now on if it was not known."""
        return Value(self._number(tensor), tuple(tensor.shape), tensor.dtype)

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            size, self._count = storage.nbytes(), self._count + 1
            self._storages[key] = self._count, size, weakref.ref(storage, lambda _: self._free(key))
            self.live += size
            self.peak = max(self.peak, self.live)
        return self._storages[key][0]

    def _free(self, key: int) -> None:
        self.live -= self._storages.pop(key)[1]


class _Watch(TorchDispatchMode):
    """Sees every operator after autograd."""

    def __init__(self, owner: FakeTensors) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number_of(args[0])
        result = func(*args, **(kwargs or {}))
        outputs = [self._owner.value(one) for one in _tensors(result)]
        if self._owner.records:
            inputs = [self._owner.value(one) for one in _tensors((args, kwargs))]
            known = {one.storage for one in inputs}
            if func._schema.is_mutable or not all(one.storage in known for one in outputs):
                self._owner.operators.append(Operator(str(func), tuple(inputs), tuple(outputs)))
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    return (one for one in tree_iter(values) if isinstance(one, Tensor) and one.device.type != "meta")


def _number_of(x: Tensor) -> int | float | bool:
    if x.dtype is torch.bool:
        return False
    return 1.0 if x.dtype.is_floating_point else 0
