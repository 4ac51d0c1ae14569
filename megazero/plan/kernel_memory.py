"""Memory that kernels of a CPU take inside, and that no tensor of a program shows.

    x: fp32 [n]    x.add_(y: bf16 [n])        y is copied to fp32 first: 4 n bytes more while it runs

Operands are converted as torch's TensorIterator does on a CPU (CUDA converts each element as it is read).  Attention's
blocks are those of torch's flash_attention kernels; what oneDNN takes for itself was measured on one thread of torch 2.13,
for products of 48 to 2,048 rows and columns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
_LIMIT = 512  # columns that oneDNN and attention take at once


def kernel_bytes(*, on_cuda: bool) -> Callable[[Any, Any, Any], int]:
    """Return the function that gives an operator's inner bytes; those of GPU kernels are unknown and taken as 0."""
    return (lambda *_: 0) if on_cuda else cpu_kernel_bytes


def cpu_kernel_bytes(operator: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that an operator uses internally while it runs, beside its results."""
    if (rule := _RULES.get(operator.overloadpacket)) is not None:
        return rule(args, kwargs or {})
    if torch.Tag.pointwise in operator.tags:
        return _converted(args, kwargs)
    return 0


def _converted(args: Any, kwargs: Any) -> int:
    """Return the bytes of operands that are converted to the computing type."""
    tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
    if len({one.dtype for one in tensors}) < 2:
        return 0
    common = tensors[0].dtype
    for one in tensors[1:]:
        common = torch.promote_types(common, one.dtype) if one.dim() else common
    return sum(one.numel() * common.itemsize for one in tensors if one.dtype != common and one.dim())


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
