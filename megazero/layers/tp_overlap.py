"""Hides the forward's gathers and scatters over tp behind products, where sequence parallelism has them.

    pieces      gather 0 | gather 1 | gather 2 | ...                     of each rank's part of the sequence
                         | W x 0    | W x 1    | ...                     and before a scatter the other way around

Pieces win where tp crosses a network, which is slow beside the products.  A token's product and the order of its sum over tp
do not depend on the piece, but for what a library's kernel for fewer rows may round otherwise.
"""

import torch
from torch import Tensor, nn

from megazero.comm.autograd import scatter_sequence, start_gather_sequence, start_scatter_sequence
from megazero.layers.linear import ColumnParallelLinear, Product, RowParallelLinear
from megazero.parallel_state import Axis


class Pieces:
    """Cuts each rank's part of the sequence into `count` pieces."""

    def __init__(self, count: int = 4) -> None:
        self.count = count

    def gathered(self, x: Tensor, weight: Tensor, tp: Axis, product: Product) -> Tensor:
        """As `linear.gathered`."""
        y = x.new_empty(tp.size * x.shape[0], *x.shape[1:-1], weight.shape[0])
        filled = y.unflatten(0, (tp.size, -1)).split(-(-x.shape[0] // self.count), dim=1)
        arriving = [start_gather_sequence(piece, tp) for piece in x.chunk(self.count)]
        for out, (full, pending) in zip(filled, arriving, strict=True):
            pending.wait()
            out.copy_(product.forward(full, weight).view(out.shape))
        return y

    def scattered(self, x: Tensor, weight: Tensor, tp: Axis, product: Product) -> Tensor:
        """This rank's part of the sum of products.  [seq, batch, in / tp], [out, in / tp] -> [seq / tp, batch, out]."""
        pieces = x.unflatten(0, (tp.size, -1)).chunk(self.count, dim=1)
        leaving = [start_scatter_sequence(product.forward(piece.flatten(0, 1), weight), tp) for piece in pieces]
        for _, pending in leaving:
            pending.wait()
        return torch.cat([part for part, _ in leaving])


def hide_exchanges(module: nn.Module, overlap: Pieces) -> None:
    """Have the linear layers of a module under sequence parallelism exchange as `overlap` does."""
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.exchange = overlap.gathered
        elif isinstance(layer, RowParallelLinear) and layer.reduce is scatter_sequence:
            layer.exchange, layer.entry = overlap.scattered, "scattered"
