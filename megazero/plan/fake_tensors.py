"""Runs a program on tensors without data, and records its operators and the bytes that would be live.

    with FakeTensors() as fake:                  torch's FakeTensorMode: shapes, types and storages, no memory
        y = layer(x); y.backward(gradient)       the project's own code
    fake.operators                               Operator and Message records, in order
    fake.live, fake.peak                         bytes of all referenced storages, now and at most

If the program reads a number from a tensor, an integer is 0 and any other number 1; experts get equally many rows.  The
tensors claim to be on the CPU, because torch without CUDA aborts in the backward of tensors on other devices.  The rules
below add the memory that kernels use inside:

    x: fp32 [n]    x.add_(y: bf16 [n])        inside a CPU's kernel y is copied to fp32: 4 n bytes more while it runs

Operands are converted as torch's TensorIterator does on a CPU (CUDA converts each element as it reads it).  Attention has
the block sizes of torch's flash_attention kernels.  The bytes of oneDNN were measured on one thread of torch 2.13, for
products of 48 to 2,048 rows and columns.

Source: torch's `FakeTensorMode` and the accounting of `torch.distributed._tools.mem_tracker`.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megazero.layers import experts

_aten = torch.ops.aten
_LIMIT = 512  # columns that oneDNN and attention take at once


def kernel_bytes(*, on_cuda: bool) -> Callable[[Any, Any, Any], int]:
    """Return the function that gives the bytes used inside an operator's kernel; for GPU kernels, it returns 0 (unknown)."""
    return (lambda *_: 0) if on_cuda else cpu_kernel_bytes


def cpu_kernel_bytes(operator: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that a CPU operator uses inside its kernel, in addition to its results."""
    if (rule := _RULES.get(operator.overloadpacket)) is not None:
        return rule(args, kwargs or {})
    if torch.Tag.pointwise in operator.tags:
        return _converted(args, kwargs)
    return 0


def _converted(args: Any, kwargs: Any) -> int:
    """Return the bytes of the copies of operands that are converted to the computing type."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    common = tensors[0].dtype
    for tensor in tensors[1:]:
        common = torch.promote_types(common, tensor.dtype) if tensor.dim() else common
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common and tensor.dim())


def _summed(args: Any, kwargs: Any) -> int:
    """A sum in another type converts all of its input."""
    wanted = kwargs.get("dtype")
    return args[0].numel() * wanted.itemsize if wanted not in (None, args[0].dtype) else 0


def _linear(args: Any, _: Any) -> int:
    """oneDNN's product of fp32: a copy of an input that is not contiguous, and a block of 64 columns of a factor.

    That is copied where the weight lies as a linear layer has it, or its columns a power of two apart, 2 KB at least.
    """
    x, weight = args[:2]
    inner, columns = weight.shape[1], weight.shape[0]
    copies = weight.is_contiguous() or (columns >= _LIMIT and columns.bit_count() == 1)
    block = 256 * min(inner, _LIMIT if inner <= 2 * _LIMIT else 2 * _LIMIT) + 1024 if copies else 896
    return x.nbytes * (not x.is_contiguous()) + block


def _product(args: Any, _: Any) -> int:
    """oneDNN's product of 16-bit factors [m, k] and [k, n]: 64 columns of a block of k, their sums for a block of rows.

    Of rows that do not lie one after the other a block is copied, and where k has several blocks the sums of all columns
    wait for the next one.  Blocks are even and have 256 rows, 1,024 columns and 512 of k at most, or 1,024 of a long k.
    On processors with AMX they are others, which are not planned.
    """
    a, b = args[-2], args[-1]
    if a.dtype not in (torch.bfloat16, torch.float16) or 0 in (*a.shape, *b.shape):
        return 0
    (rows, inner), columns, copies = a.shape, b.shape[1], a.stride(-1) != 1
    taken = min(_up(inner, 32), _LIMIT if copies or inner <= 2 * _LIMIT else 2 * _LIMIT)
    columns = _even_block(columns, 1024) if copies and inner > _LIMIT else min(columns, 64)
    columns = _up(columns, 64 if columns > 64 else 16)
    copied = 2 * (taken + 32 * (taken == _LIMIT)) if copies else 0
    return 1024 + 128 * copies + 128 * taken + _even_block(rows, 256) * (4 * columns + copied)


def _even_block(size: int, most: int) -> int:
    return -(-size // -(-size // most))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _blocks_of(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the queries and keys per block of torch's attention kernels."""
    rows = q.shape[2]
    return min(256 if rows >= 768 else 64 if rows >= 192 else 32, rows), min(_LIMIT, k.shape[2])


def _attention(args: Any, _: Any) -> int:
    q, k = args[:2]
    rows, keys = _blocks_of(q, k)
    scores = 4 * (rows * keys + 2 * rows + rows * q.shape[3])
    return scores + (2 * rows * keys if q.dtype != torch.float32 else 0)


def _attention_backward(args: Any, _: Any) -> int:
    grad, q, k = args[:3]
    rows, keys = _blocks_of(q, k)
    copied = grad.nbytes * (not grad.transpose(1, 2).is_contiguous())
    narrow = 0 if q.dtype == torch.float32 else 2 * rows * keys + 107_652
    return copied + 8 * rows * keys + 4 * rows + narrow


_RULES: Mapping[Any, Callable[[Any, Any], int]] = {
    torch.ops.mkldnn._linear_pointwise: _linear,
    _aten.mm: _product,
    _aten.addmm: _product,
    _aten.sum: _summed,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.copy_: lambda *_: 0,
    _aten._to_copy: lambda *_: 0,
}


# ---- tensors without data


class Value(NamedTuple):
    """A tensor as an operator sees it.  `storage` numbers its storage within one `FakeTensors`; views share a storage."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Operator:
    """A recorded call of a torch operator, such as `aten.mm.default`.  Views are not recorded.

    Args:
        is_causal: the argument of that name, for attention.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    is_causal: bool = False


@dataclass(frozen=True)
class Message:
    """The record of a collective or of a message, at the place where it starts.

    Args:
        sent_bytes: bytes that this rank sends.
        link_bytes: the part of these bytes that goes to other hosts.
        fills: numbers of the storages that it writes.
    """

    operation: str
    axis: str
    sent_bytes: int
    link_bytes: int = 0
    fills: frozenset[int] = frozenset()


Event: TypeAlias = Operator | Message


class FakeTensors:
    """A context in which tensors have shapes and storages but no data.

    Args:
        records: record every operator.
        kernel_bytes: (operator, args, kwargs) -> bytes that the kernel allocates inside while it runs.
        groups_products: one kernel multiplies the rows of all experts.

    Attributes:
        operators: the recorded operators and messages; may be cleared at any time.
        live: bytes of all storages now.
        peak: most live bytes so far; may be reset to `live`.
        on_free: called with the number of each storage that is freed.
    """

    def __init__(
        self,
        *,
        records: bool = False,
        kernel_bytes: Callable[..., int] = cpu_kernel_bytes,
        groups_products: bool = False,
    ) -> None:
        self.records, self.kernel_bytes, self._mode = records, kernel_bytes, FakeTensorMode(allow_non_fake_inputs=True)
        self._mode.groups_products = groups_products  # type: ignore[attr-defined]
        self.operators: list[Event] = []
        self.live = self.peak = 0
        self._watch, self._stack = _Watch(self), ExitStack()
        self._storages: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # by address: number, bytes, itself
        self._count = 0
        self.on_free: Callable[[int], object] = lambda _: None

    def __enter__(self) -> Self:
        self._stack.enter_context(self._mode)
        self._stack.enter_context(self._watch)
        # For good, since other threads may have contexts of their own: both ask the tensors.
        experts.row_counts, experts.has_kernel = _row_counts, _has_kernel
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The recorded collectives and messages."""
        return tuple(event for event in self.operators if isinstance(event, Message))

    def value(self, tensor: Tensor) -> Value:
        """Return the `Value` of a tensor.  A new storage counts as live from now on."""
        return Value(self.number(tensor), tuple(tensor.shape), tensor.dtype)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage.  A new storage counts as live from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            size, self._count = storage.nbytes(), self._count + 1
            self._storages[key] = self._count, size, weakref.ref(storage, lambda _: self._free(key))
            self.live += size
            self.peak = max(self.peak, self.live)
        return self._storages[key][0]

    def _free(self, key: int) -> None:
        number, size, _ = self._storages.pop(key)
        self.live -= size
        self.on_free(number)


_COUNTED, _HAS_KERNEL = experts.row_counts, experts.has_kernel


def _has_kernel(*factors: Tensor) -> bool:
    first = factors[0]
    if not isinstance(first, FakeTensor):
        return _HAS_KERNEL(*factors)
    return first.fake_mode.groups_products  # type: ignore[attr-defined]


def _row_counts(counts: Tensor, total: int) -> list[int]:
    """Return the counts, or equal parts of the total if they hold no numbers."""
    if not isinstance(counts, FakeTensor):
        return _COUNTED(counts, total)
    experts_count = counts.numel()
    return [(expert + 1) * total // experts_count - expert * total // experts_count for expert in range(experts_count)]


class _Watch(TorchDispatchMode):
    """A dispatch mode that sees every operator below autograd."""

    def __init__(self, owner: FakeTensors) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked more often than all operators together
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 0
        if func is torch.ops.aten._fused_sdp_choice.default:
            return _choice_of_attention(args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        inside = self._owner.kernel_bytes(func, args, kwargs)
        outputs = [self._owner.value(tensor) for tensor in _tensors(result)]
        self._owner.peak = max(self._owner.peak, self._owner.live + inside)
        if self._owner.records:
            inputs = [self._owner.value(tensor) for tensor in _tensors((args, kwargs))]
            known = {value.storage for value in inputs}
            if func._schema.is_mutable or not all(value.storage in known for value in outputs):
                is_causal = _is_causal(func, args, kwargs)
                self._owner.operators.append(Operator(str(func), tuple(inputs), tuple(outputs), is_causal))
        return result


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Return the `is_causal` argument of an operator."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[at] if at < len(args) else (kwargs or {}).get("is_causal", False))
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor) and not _is_meta(value))


def _is_meta(tensor: Tensor) -> bool:
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device  # the former costs no dispatch
    return bool(device.type == "meta")


def _choice_of_attention(args: Any, kwargs: Any) -> Any:
    """Return torch's choice for short real tensors like these: for tensors without data it would take the plain formula."""
    with unset_fake_temporarily():
        short = [torch.empty(*tensor.shape[:-2], 2, tensor.shape[-1], dtype=tensor.dtype) for tensor in args[:3]]
        mask = None if len(args) < 4 or args[3] is None else torch.empty(2, 2, dtype=args[3].dtype)
        every: list[Any] = [short[0].requires_grad_(args[0].requires_grad), *short[1:], mask, *args[4:]]
        return torch._fused_sdp_choice(*every, **kwargs)
