"""Products of linear layers in fp8 (e4m3), with the same bytes on every cluster shape of a run.

    y  = x  @ W.T     x:  one scale per token     W: one scale per output row
    dx = dy @ W       dy: one scale per token     W: one scale per input column
    dW = dy.T @ x     in the run's own format, because it sums over tokens

    rowwise     [ k elements, one scale                     ]      where tp cuts k, the maximum is that of all its ranks
    blockwise   [ 128, a scale | 128, a scale | 64, a scale ]      where tp cuts k, it cuts between blocks

Blocks of a weight are squares of 128 x 128, which W and W.T have in common.  So both passes read the same rounded
weights, and stage 3 can gather those (`zero/fp8_gather.py`).

So no scale depends on which tokens or ranks share a tensor.  A scale is the smallest power of two that brings the
largest element to at most 448.  Powers of two are exact on every device, and so are the quantised elements in bf16 and
in fp32.  An infinite or undefined element makes its whole row or block infinite or undefined.

Where no fp8 kernel exists, the same quantised elements are multiplied in the run's format.

Experts' products round rows and matrices alike, each expert's own.  A router computes in fp32.

Source: Micikevicius et al. 2022 (e4m3); DeepSeek-AI 2024, section 3.3 (blocks of 128); Rouhani et al. 2023 (powers of
two).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.comm.collectives import all_reduce
from megazero.layers.experts import ExpertLinear, ExpertProduct, RowGroups
from megazero.layers.fp8_sizes import BLOCK, wrong_size
from megazero.layers.linear import ColumnParallelLinear, Product, RowParallelLinear, product_t
from megazero.layers.recompute import WHOLE
from megazero.layers.spec import ParamSpec
from megazero.parallel_state import Axis
from megazero.settings import ConfigError, Problem

Scaling: TypeAlias = Literal["rowwise", "blockwise"]

_MANTISSA_ABOVE_448 = 0x1FFFFF  # carries into the exponent if a mantissa is above that of 448 = 1.75 * 2^8
_EXPONENT, _INFINITY, _SMALLEST = 0x7F800000, 0x7F800000, 9 << 23  # smallest scale 2^-126, also for zeros


class Quantised(NamedTuple):
    """A matrix, represented as values * scales.

    Args:
        values: e4m3, [rows, k], contiguous; or [experts, rows, k].
        scales: fp32, [rows, blocks of k], contiguous along rows; or [experts, rows, blocks of k].
    """

    values: Tensor
    scales: Tensor


#: Multiplies a: [m, k] by b: [n, k], returning a @ b.T, [m, n], in the given dtype.
Multiply: TypeAlias = Callable[[Quantised, Quantised, torch.dtype], Tensor]

#: The same of rows a and each expert's own b: [experts, n, k].
MultiplyGroups: TypeAlias = Callable[[Quantised, Quantised, torch.dtype, RowGroups], Tensor]


class Kernels(NamedTuple):
    """The functions that multiply quantised matrices in a run: for linear layers, and for experts."""

    multiply: Multiply
    multiply_groups: MultiplyGroups


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Split rows into blocks, the last one padded with zeros.  [rows, k] -> [rows, blocks, block]."""
    missing = -x.shape[-1] % block
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, block))


def maxima(x: Tensor, block: int) -> Tensor:
    """Compute the largest magnitude in each block.  [rows, k] -> fp32 [rows, blocks]."""
    return _in_blocks(x, block).abs().amax(-1).float()


def scales_of(largest: Tensor) -> Tensor:
    """Compute the scales of blocks from the largest magnitude in each.  fp32 -> fp32."""
    bits = largest.view(torch.int32).clamp(_SMALLEST, _INFINITY) + _MANTISSA_ABOVE_448
    return bits.bitwise_and(_EXPONENT).view(torch.float32) * 2.0**-8


def quantise(x: Tensor, largest: Tensor, block: int) -> Quantised:
    """Round a matrix to e4m3 (nearest, ties to even).  `largest`: the largest magnitude in each block, fp32 [rows,
    blocks].
    """
    scales = scales_of(largest)
    # Compute 1 / scale from its exponent: a division would be rounded on some devices.
    inverse = (0x7F000000 - scales.view(torch.int32)).view(torch.float32)
    values = (_in_blocks(x, block).float() * inverse.unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    return Quantised(values.to(torch.float8_e4m3fn).contiguous(), scales.mT.contiguous().mT)


def quantise_alone(x: Tensor, block: int) -> Quantised:
    """Round a matrix to e4m3 without communication: this rank must hold all elements that share a scale."""
    return quantise(x, maxima(x, block), block)


def quantise_squares(x: Tensor, block: int) -> Quantised:
    """Round matrices to e4m3, with one scale for each square of `block` x `block`."""
    of_squares = maxima(maxima(x, block).mT, block).mT
    return quantise(x, of_squares.repeat_interleave(block, -2)[..., : x.shape[-2], :], block)


def dequantise(x: Quantised, block: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix that a quantised one represents; exact in bf16 and fp32."""
    blocks = _in_blocks(x.values.to(dtype), block) * x.scales.to(dtype).unsqueeze(-1)
    return blocks.flatten(-2)[..., : x.values.shape[-1]]


def scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """Compute a @ b.T with torch's fp8 kernel.  With several blocks per row it always sums in fp32, since torch has no
    other kernel.
    """
    fast = a.scales.shape[-1] == 1
    return torch._scaled_mm(a.values, b.values.t(), a.scales, b.scales.t(), out_dtype=dtype, use_fast_accum=fast)


def emulated(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """Compute a @ b.T from the quantised elements with a 16- or 32-bit kernel."""
    block = BLOCK if a.scales.shape[-1] > 1 else max(1, a.values.shape[-1])
    return product_t(dequantise(a, block, dtype), dequantise(b, block, dtype))


def scaled_grouped_mm(a: Quantised, b: Quantised, dtype: torch.dtype, groups: RowGroups) -> Tensor:
    """Multiply each row of a by its expert's matrix with torch's grouped fp8 kernel, which takes one scale per row."""
    scales = a.scales.squeeze(-1), b.scales.squeeze(-1)
    matrices = b.values.transpose(1, 2)
    return torch._scaled_grouped_mm(a.values, matrices, *scales, offs=groups.ends, out_dtype=dtype, use_fast_accum=True)


def emulated_groups(a: Quantised, b: Quantised, dtype: torch.dtype, groups: RowGroups) -> Tensor:
    """Multiply each row of a by its expert's matrix in `dtype`, from the quantised elements."""
    block = BLOCK if a.scales.shape[-1] > 1 else max(1, a.values.shape[-1])
    return groups.times(dequantise(a, block, dtype), dequantise(b, block, dtype))


EMULATED = Kernels(emulated, emulated_groups)


@cache
def _own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return FunctionType(function.__code__.replace(co_name=f"{function.__name__}_{name}"), globals())


class FeatureAxes(NamedTuple):
    """The axes that split the features of x (in a row-parallel layer) and of y (in a column-parallel layer)."""

    of_x: Axis = WHOLE
    of_y: Axis = WHOLE


class Fp8Product(Product):
    """The two products of a linear layer with quantised factors.

    Args:
        scaling: whether a row or a block shares a scale.
        multiply: multiplies quantised factors.
        axes: the ranks that split the features of x and of y.
        name: name of the layer within its block; layers of the same name in different blocks share compiled code.
    """

    def __init__(self, scaling: Scaling, multiply: Multiply, axes: FeatureAxes, name: str) -> None:
        self._name = name
        self._block = 0 if scaling == "rowwise" else BLOCK  # 0: a whole row
        self._multiply = multiply
        self._axes = FeatureAxes() if self._block else axes
        self._functions = maxima, quantise, quantise_alone, quantise_squares if self._block else quantise_alone
        self._maxima, self._quantise, self._quantise_alone, self._quantise_weight = self._functions

    def compile(self, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
            return  # the compiler cannot generate e4m3 code there
        # Each layer has its own code, compiled for x, W, dy and W.T: torch limits how many sizes it compiles one code
        # for.
        self._maxima, self._quantise, self._quantise_alone, self._quantise_weight = (
            compiled(_own_code(function, self._name)) for function in self._functions
        )

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._product(x, weight, self._axes.of_x)

    def backward(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._product(grad, weight.t(), self._axes.of_y)

    def _product(self, x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        a, b = x.detach().reshape(-1, x.shape[-1]), weight.detach()
        block = self._block or a.shape[-1]
        if axis.size == 1:
            factors = self._quantise_alone(a, block), self._quantise_weight(b, block)
        else:
            largest = torch.cat([self._maxima(a, block), self._maxima(b, block)])
            all_reduce(largest, axis, "max").wait()
            of_a, of_b = largest.split([len(a), len(b)])
            factors = self._quantise(a, of_a, block), self._quantise(b, of_b, block)
        y = self._multiply(*factors, x.dtype)
        # Like matmul, do not return what autograd regards as a view: a view could not be summed over tp in place.
        result: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], len(b)])
        return result


class Fp8ExpertProduct(ExpertProduct):
    """The products of experts with quantised factors."""

    def __init__(self, scaling: Scaling, multiply_groups: MultiplyGroups) -> None:
        self._block = 0 if scaling == "rowwise" else BLOCK  # 0: a whole row
        self._multiply = multiply_groups

    def times(self, x: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        block, of_weights = self._block or x.shape[-1], quantise_squares if self._block else quantise_alone
        return self._multiply(quantise_alone(x, block), of_weights(weights, block), x.dtype, groups)


def kernels_on(device: torch.device, dtype: torch.dtype, scaling: Scaling) -> Kernels:
    """Choose the products of a run: torch's fp8 kernels that the device has if the run is in bf16, otherwise the
    emulation.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.cuda is None:
        return EMULATED
    capability, cuda = torch.cuda.get_device_capability(device), tuple(map(int, torch.version.cuda.split(".")))
    if scaling == "blockwise":  # grouped kernels have no blocks
        return EMULATED._replace(multiply=scaled_mm) if capability[0] == 9 and cuda >= (12, 9) else EMULATED
    groups = scaled_grouped_mm if capability in ((9, 0), (10, 0)) else emulated_groups
    return Kernels(scaled_mm, groups) if capability[0] >= 9 else EMULATED


def use_fp8(block: nn.Module, scaling: Scaling, kernels: Kernels) -> None:
    """Let the linear layers and experts of a block multiply in fp8.

    Raises: ConfigError: the block has no linear layer, or a layer with an unsupported size.
    """
    for experts in (module for module in block.modules() if isinstance(module, ExpertLinear)):
        spec = experts.specs["weight"]
        _check_sizes(spec, [spec.names.rows[0].rows], spec.shape[1], 1, scaling)
        experts.product = Fp8ExpertProduct(scaling, kernels.multiply_groups)
    layers = [module for module in block.modules() if isinstance(module, ColumnParallelLinear | RowParallelLinear)]
    if not layers:
        rule = f"must be none: a {type(block).__name__} has no linear layer of this package"
        raise ConfigError([Problem("precision.fp8", scaling, rule, "build them with `BuildContext.column` and `row`")])
    for number, layer in enumerate(layers):
        spec = layer.specs["weight"]
        sizes = [rows.rows for rows in spec.names.rows] if spec.split == 0 else [spec.shape[1]]
        _check_sizes(spec, sizes, spec.shape[1 if spec.split == 0 else 0], layer.tp.size, scaling)
        axes = FeatureAxes(of_y=layer.tp) if isinstance(layer, ColumnParallelLinear) else FeatureAxes(of_x=layer.tp)
        layer.product = Fp8Product(scaling, kernels.multiply, axes, str(number))
        layer.specs["weight"] = replace(spec, in_fp8_squares=scaling == "blockwise")


def _check_sizes(spec: ParamSpec, sizes: Sequence[int], other: int, tp: int, scaling: Scaling) -> None:
    """Check the sizes of a matrix; see `wrong_size`.  Raises: ConfigError: no kernel supports them, or tp would cut
    within a block.
    """
    if wrong := wrong_size(sizes, other, tp, scaling):
        size, step = wrong
        rule = f"needs multiples of {step} features where parallel.tp={tp}, and {spec.name} has {size}"
        raise ConfigError([Problem("precision.fp8", scaling, rule, 'take other sizes, or write "none"')])
