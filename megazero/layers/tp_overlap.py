"""Overlaps the gathers and scatters of sequence parallelism over tp with products, in the forward.

    pieces      gather 0 | gather 1 | gather 2 | ...                     of each rank's sequence shard
                         | W x 0    | W x 1    | ...                     and before a scatter the other way around

Pieces are faster where tp crosses a network, on which an exchange takes longer than a product.  They change neither a
token's product nor the order of its sum over tp, except that a library's kernel for fewer rows may round differently.
Over NVLink, torch's fused products over symmetric memory split an exchange by ranks, and copy engines move the shards
instead of kernels.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from megazero.comm.autograd import scatter_sequence, start_gather_sequence, start_scatter_sequence
from megazero.comm.symmetric_memory import can_fuse, gather_and_multiply, multiply_and_scatter
from megazero.layers.linear import ColumnParallelLinear, Product, RowParallelLinear
from megazero.parallel_state import Axis


class Overlap(Protocol):
    """A linear layer's exchange over tp together with its product, so that they can overlap."""

    def gathered(self, x: Tensor, weight: Tensor, tp: Axis, product: Product) -> Tensor:
        """Gather x over tp and multiply; see `linear.gathered`."""

    def scattered(self, x: Tensor, weight: Tensor, tp: Axis, product: Product) -> Tensor:
        """Multiply, and return this rank's sequence shard of the sum over tp.

        [seq, batch, in / tp], [out, in / tp] -> [seq / tp, batch, out].
        """


class Piecewise:
    """Overlaps the exchange with the product by cutting each rank's sequence shard into `count` pieces."""

    def __init__(self, count: int = 4) -> None:
        self.count = count

    def gathered(self, x: Tensor, weight: Tensor, tp: Axis, product: Product) -> Tensor:
        y = x.new_empty(tp.size * x.shape[0], *x.shape[1:-1], weight.shape[0])
        filled = y.unflatten(0, (tp.size, -1)).split(-(-x.shape[0] // self.count), dim=1)
        arriving = [start_gather_sequence(piece, tp) for piece in x.chunk(self.count)]
        for out, (full, pending) in zip(filled, arriving, strict=True):
            pending.wait()
            out.copy_(product.forward(full, weight).view(out.shape))
        return y

    def scattered(self, x: Tensor, weight: Tensor, tp: Axis, product: Product) -> Tensor:
        pieces = x.unflatten(0, (tp.size, -1)).chunk(self.count, dim=1)
        leaving = [start_scatter_sequence(product.forward(piece.flatten(0, 1), weight), tp) for piece in pieces]
        for _, pending in leaving:
            pending.wait()
        return torch.cat([shard for shard, _ in leaving])


class Symmetric:
    """Reads the shards of other ranks directly from their GPUs; for products in the dtype of their factors."""

    def gathered(self, x: Tensor, weight: Tensor, tp: Axis, _: Product) -> Tensor:
        return gather_and_multiply(x.contiguous(), weight, tp)

    def scattered(self, x: Tensor, weight: Tensor, tp: Axis, _: Product) -> Tensor:
        return multiply_and_scatter(x, weight, tp)


def overlap_of(setting: str, tp: Axis, device: torch.device) -> Overlap:
    """Return the overlap that `parallel.tp_overlap` names; "symmetric" falls back to "pieces" if the ranks are not GPUs
    of one host.
    """
    return Symmetric() if setting == "symmetric" and can_fuse(tp, device) else Piecewise()


def hide_exchanges(module: nn.Module, overlap: Overlap) -> None:
    """Let the sequence-parallel linear layers of a module use the exchanges of `overlap`."""
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.exchange = overlap.gathered
        elif isinstance(layer, RowParallelLinear) and layer.reduce is scatter_sequence:
            layer.exchange, layer.entry = overlap.scattered, "scattered"
