"""What a parameter is in the whole model: the description that storage, initial values, norms and checkpoints are based
on.

A parameter has a global shape, a placement for each dimension, and names.  A checkpoint stores rows of its dimension 0
as rows of logical tensors under their Hugging Face names.  If TP splits dimension 0, it splits the rows of each name:

    fused q|k|v, tp = 2                       logical tensors
    rank 0  [ q0 | k0 | v0 ]                  q_proj = q0 q1
    rank 1  [ q1 | k1 | v1 ]      <->         k_proj = k0 k1
                                              v_proj = v0 v1

EP does not split the matrices of an expert.  It gives each rank all rows of some experts: gate | up of experts 0
and 1 to one rank, of 2 and 3 to another.

Random numbers are keyed by the position in the logical tensor, so neither fusing nor splitting changes the initial
values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from megazero.layers.counter_rng import derive_key, normal
from megazero.parallel_state import Axis, ParallelState

_SEED = 1234  # for layers that a script builds itself; `megazero train` uses its own seed
_DRAW_ELEMENTS = 1 << 17  # elements drawn at a time: a few MB of scratch, which a CPU keeps in its cache


@dataclass(frozen=True)
class Initializer:
    """Initial values: "normal" with standard deviation `std`, "zeros" or "ones"."""

    method: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02


#: Placement of one dimension: the axis that splits it, or None if it is whole on every rank.
Placement: TypeAlias = Literal["tp", "ep"] | None


@dataclass(frozen=True)
class NamedRows:
    """Rows of a parameter, possibly fused with other rows, that are rows of one logical tensor.

    Args:
        name: canonical (Hugging Face) name of the logical tensor.
        rows: number of rows, over all ranks.
        offset: the first of these rows in the logical tensor.
        logical_rows: number of rows of the whole logical tensor; None if it has only these.
    """

    name: str
    rows: int
    offset: int = 0
    logical_rows: int | None = None


class LocalRows(NamedTuple):
    """The rows [start, stop) of `named` that one rank holds, beginning at row `first` of its local tensor."""

    named: NamedRows
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class StoredNames:
    """How a checkpoint stores a parameter.

    Args:
        rows: the logical tensors, or rows of them, that are stacked along dimension 0.
        transposed: logical tensors are stored with their dimensions reversed: [in, out] (GPT-2's Conv1D).
    """

    rows: tuple[NamedRows, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Region:
    """A box of a logical tensor that lies in consecutive elements of a rank's flattened ("local") tensor.

    Args:
        name: name of the logical tensor.
        start: the first of these elements.
        corner: first index of the box in each dimension of the logical tensor.
        shape: shape of the box, and of the local elements.
        whole: shape of the logical tensor.
        transposed: see `StoredNames`; corner and shapes are given before the transposition.
    """

    name: str
    start: int
    corner: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    transposed: bool

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return prod(self.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index of the logical tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.corner, self.shape, strict=True))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the logical tensor as a checkpoint stores it."""
        return self.whole[::-1] if self.transposed else self.whole

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance, in elements of the stored tensor, between neighbouring indices of each logical dimension."""
        stored = tuple(prod(self.stored_shape[dim + 1 :]) for dim in range(len(self.whole)))
        return stored[::-1] if self.transposed else stored


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model, independent of the cluster.

    Args:
        names: the logical tensors that its rows belong to.
        shape: shape over all ranks, with any number of dimensions.
        placement: how each dimension is split.  At most one dimension is split: any by "tp", or the first by "ep", which
            distributes whole named rows over its ranks.
        init: its initial values.
        sum_over_tp: it is replicated over TP, and each rank's gradient covers only part of the sequence.
        tied: it is the embedding that the first and last pipeline stages share.
        decay: weight decay applies.
        matrix: it maps features to features within a block; a matrix optimizer updates each of its logical tensors as a
            whole.
        buffer: it has no gradient, its layer changes it, and every rank holds it whole and in fp32.
        in_fp8_squares: products round it to fp8 in squares of 128 x 128, so it may be gathered in fp8.

    If TP splits a later dimension, its size must be divisible by tp.  If TP splits rows, each rank has ceil(size / tp)
    of them; surplus rows of the last ranks are padding: zero, masked in use, and part of no logical tensor.
    """

    names: StoredNames
    shape: tuple[int, ...]
    placement: tuple[Placement, ...]
    init: Initializer = Initializer()
    sum_over_tp: bool = False
    tied: bool = False
    decay: bool = True
    matrix: bool = False
    buffer: bool = False
    in_fp8_squares: bool = False

    @property
    def name(self) -> str:
        """Canonical name of the first logical tensor."""
        return self.names.rows[0].name

    @cached_property
    def split(self) -> int | None:
        """The dimension that TP or EP splits; None if every TP rank holds the whole parameter."""
        return next((dim for dim, axis in enumerate(self.placement) if axis is not None), None)

    @property
    def of_experts(self) -> bool:
        """Whether EP splits the parameter."""
        return "ep" in self.placement

    def axis(self, state: ParallelState) -> Axis:
        """Return the axis that splits the parameter.

        In the methods below, `index` is this rank's index in the axis, and `size` is the number of its ranks.
        """
        return state.ep if self.of_experts else state.tp

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Compute the shape of one rank's tensor."""
        rows = sum(self._row_count(named, size) for named in self._named_rows(0, size))
        return (rows, *self._local_row(size)) if self.shape else ()

    def _named_rows(self, index: int, size: int) -> tuple[NamedRows, ...]:
        """Return the named rows that this rank holds, or holds a shard of."""
        if not self.of_experts:
            return self.names.rows
        each, surplus = divmod(len(self.names.rows), size)
        if surplus:
            raise ValueError(f"{self.name}: {len(self.names.rows)} matrices of experts must be divisible by ep={size}")
        return self.names.rows[index * each : (index + 1) * each]

    def _row_count(self, named: NamedRows, size: int) -> int:
        return -(-named.rows // size) if self.placement[:1] == ("tp",) else named.rows

    def _local_row(self, size: int) -> tuple[int, ...]:
        """Compute the shape of one row of a rank's tensor."""
        for dim, whole in enumerate(self.shape):
            if 0 < dim == self.split and whole % size:
                raise ValueError(f"{self.name}: its dimension {dim} of {whole} must be divisible by tp={size}")
        return tuple(whole // (size if dim == self.split else 1) for dim, whole in enumerate(self.shape) if dim)

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the logical tensors as a checkpoint stores them, by name."""
        return {region.name: region.stored_shape for region in self.regions(0, 1)}

    def regions(self, index: int, size: int) -> Iterator[Region]:
        """Yield the regions of one rank's tensor.  They cover each element once, except padding."""
        if not self.shape:
            yield Region(self.name, 0, (), (), (), transposed=False)
            return
        row = self._local_row(size)
        corner = tuple(extent * index * (dim == self.split) for dim, extent in enumerate(row, 1))
        for named, first, low, high in self.local_rows(index, size):
            if high > low:
                whole = (named.logical_rows or named.rows, *self.shape[1:])
                place = (named.offset + low, *corner), (high - low, *row)
                yield Region(named.name, first * prod(row), *place, whole, self.names.transposed)

    def local_rows(self, index: int, size: int) -> Iterator[LocalRows]:
        """Yield the rows that one rank's tensor holds of each logical tensor, without padding."""
        first = 0
        for named in self._named_rows(index, size):
            rows = self._row_count(named, size)
            low = min(rows * index, named.rows) if self.placement[:1] == ("tp",) else 0
            yield LocalRows(named, first, low, min(low + rows, named.rows))
            first += rows

    def init_weights(self, out: Tensor, start: int, index: int, size: int, seed: int) -> None:
        """Fill `out`, fp32 and 1-D, with the initial values of elements [start, start + len(out)) of the flattened
        local tensor.
        """
        out.zero_()
        for region in self.regions(index, size):
            low = max(region.start, start)
            high = min(region.start + region.numel, start + out.numel())
            for at in range(low, high, _DRAW_ELEMENTS):
                stop = min(at + _DRAW_ELEMENTS, high)
                self._draw_region(out[at - start : stop - start], at - region.start, region, seed)

    def _draw_region(self, out: Tensor, at: int, region: Region, seed: int) -> None:
        """Fill `out` with the initial values of a region, starting at the region's element `at`."""
        if self.init.method != "normal":
            out.fill_(1.0 if self.init.method == "ones" else 0.0)
            return
        rest = torch.arange(at, at + out.numel(), dtype=torch.int64, device=out.device)
        index = torch.zeros_like(rest)
        for size, first, stride in reversed([*zip(region.shape, region.corner, region.strides, strict=True)][1:]):
            index += (rest % size + first) * stride
            rest = rest // size
        if region.shape:
            index += (rest + region.corner[0]) * region.strides[0]
        out.copy_(normal(derive_key(seed, region.name), index) * self.init.std)


def rows_spec(
    rows: tuple[NamedRows, ...],
    columns: int | None = None,
    split: Literal[0, 1] | None = None,
    init: Initializer = Initializer(),
    *,
    sum_over_tp: bool = False,
    tied: bool = False,
    decay: bool = True,
    matrix: bool = False,
    transposed: bool = False,
) -> ParamSpec:
    """Build the spec of a matrix of named rows, or of a vector if `columns` is None.  `split`: the dimension that TP
    splits.
    """
    shape = (sum(named.rows for named in rows), *(() if columns is None else (columns,)))
    placement: tuple[Placement, ...] = tuple("tp" if dim == split else None for dim in range(len(shape)))
    return ParamSpec(StoredNames(rows, transposed), shape, placement, init, sum_over_tp, tied, decay, matrix)


def expert_spec(experts: Sequence[tuple[NamedRows, ...]], columns: int, init: Initializer = Initializer()) -> ParamSpec:
    """Build the spec of the stacked matrices of a layer's experts, [all rows, columns].  Each has named rows (gate |
    up).
    """
    rows = tuple(named for expert in experts for named in expert)
    shape = sum(named.rows for named in rows), columns
    return ParamSpec(StoredNames(rows), shape, ("ep", None), init, matrix=True)


def vector_spec(name: str, size: int, init: Initializer, *, sum_over_tp: bool = False) -> ParamSpec:
    """Build the spec of a norm's weight or bias: 1-D, without weight decay."""
    return rows_spec((NamedRows(name, size),), init=init, sum_over_tp=sum_over_tp, decay=False)


def buffer_spec(name: str, size: int) -> ParamSpec:
    """Build the spec of a vector that its layer changes; see `ParamSpec.buffer`.  Initially zero."""
    rows = StoredNames((NamedRows(name, size),))
    return ParamSpec(rows, (size,), (None,), Initializer("zeros"), decay=False, buffer=True)


def whole_spec(name: str, shape: tuple[int, ...], *, tied: bool = False) -> ParamSpec:
    """Build the spec of a parameter of any shape that every TP rank holds whole.  `tied`: another stage has a copy of
    it.
    """
    rows = NamedRows(name, shape[0] if shape else 1)
    return ParamSpec(StoredNames((rows,)), shape, (None,) * len(shape), tied=tied)


def bias_spec(weight: ParamSpec, rows: tuple[NamedRows, ...], *, sum_over_tp: bool = False) -> ParamSpec:
    """Build the spec of the bias that belongs to a linear layer's weight: initially zero, without weight decay."""
    split: Literal[0] | None = 0 if weight.split == 0 else None
    return rows_spec(rows, None, split, Initializer("zeros"), sum_over_tp=sum_over_tp, decay=False)


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer of the whole model, y = x @ W.T + b, independent of the cluster.

    Args:
        rows: names of the outputs: one logical tensor, or several that are fused.
        in_features: size of x.
        bias: logical names of the biases; empty for none.  They are initially zero.
        init: initial values of W.
        transposed: see `StoredNames`.
    """

    rows: tuple[NamedRows, ...]
    in_features: int
    bias: tuple[NamedRows, ...] = ()
    init: Initializer = Initializer()
    transposed: bool = False

    def params(self, split: Literal[0, 1], *, sum_over_tp: bool = False) -> dict[str, ParamSpec]:
        """Build the specs of "weight", with dimension `split` split over TP, and of "bias", with this `sum_over_tp`."""
        weight = rows_spec(self.rows, self.in_features, split, self.init, transposed=self.transposed, matrix=True)
        bias = {"bias": bias_spec(weight, self.bias, sum_over_tp=sum_over_tp)} if self.bias else {}
        return {"weight": weight} | bias


def drawn_parameter(spec: ParamSpec, index: int = 0, size: int = 1) -> nn.Parameter:
    """Create a parameter with its initial values.  On the meta device it has none; they are filled in later, shard by
    shard.
    """
    values = torch.empty(spec.local_shape(size))
    if not values.is_meta:
        spec.init_weights(values.view(-1), 0, index, size, _SEED)
    return nn.Parameter(values, requires_grad=not spec.buffer)
