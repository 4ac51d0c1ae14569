"""What a parameter is in the whole model: the description that storage, initial values, norms and checkpoints read.

A module's own ("local") tensor is a stack of named rows along dimension 0, each cut over TP.  In a checkpoint they are rows
of one logical tensor under its Hugging Face name:

    fused q|k|v, tp = 2                       logical tensors
    rank 0  [ q0 | k0 | v0 ]                  q_proj = q0 q1
    rank 1  [ q1 | k1 | v1 ]      <->         k_proj = k0 k1
                                              v_proj = v0 v1

Random numbers are keyed by the position in the logical tensor, so neither the fused layout nor the cut changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from megazero.layers.counter_rng import derive_key, normal

_SEED = 1234  # of layers that a script builds for itself; `megazero train` draws with its own
_DRAW_ELEMENTS = 1 << 17  # elements drawn at a time: a few MB of scratch, which a CPU keeps in its cache


@dataclass(frozen=True)
class Initializer:
    """Initial values: "normal" with standard deviation `std`, "zeros" or "ones"."""

    kind: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02


@dataclass(frozen=True)
class NamedRows:
    """Rows of a parameter, perhaps fused with others, that are rows of one logical tensor.

    Args:
        name: canonical (Hugging Face) name of the logical tensor.
        rows: how many, all TP ranks together.
        offset: first of these rows in the logical tensor.
        logical_rows: rows of the whole logical tensor; None when these are all.
    """

    name: str
    rows: int
    offset: int = 0
    logical_rows: int | None = None


class LocalRows(NamedTuple):
    """Rows [start, stop) of a section that one TP rank holds, from row `first` of its tensor on."""

    section: NamedRows
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class Region:
    """A rectangle of a local parameter, and its position in the logical tensor `name`.

    Args:
        local_rows: (start, stop) in the local tensor's dimension 0.
        rows: (start, stop) in the logical tensor's dimension 0, before any transposition.
        columns: (start, stop) in dimension 1; None for 1-D parameters.
        shape: of the logical tensor, before any transposition.
        transposed: the checkpoint stores the logical tensor as [columns, rows].
        whole: shape of the stored tensor, where it is neither [rows] nor [rows, columns].
    """

    name: str
    local_rows: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    shape: tuple[int, ...]
    transposed: bool
    whole: tuple[int, ...] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the logical tensor as a checkpoint stores it."""
        return self.whole if self.whole is not None else self.shape[::-1] if self.transposed else self.shape


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model, whatever the cluster.

    Args:
        sections: the logical tensors, or parts of them, that are stacked along dimension 0.
        columns: size of dimension 1; None for a 1-D parameter.
        split: the dimension cut over TP, or None for a parameter that every TP rank holds.
        sum_over_tp: a replicated parameter whose gradient on each TP rank covers only part of the sequence.
        tied: the embedding that first and last pipeline stage share.
        transposed: stored [in, out] in a checkpoint (GPT-2's Conv1D).
        matrix: a weight between the features of a block, which an optimizer of matrices steps whole, section by section.
        whole: the shape of a parameter that has none or more than two dimensions and is not cut; `columns` is then all but
            the first of them, flattened.

    Columns that are cut must be divisible by tp.  Rows are cut into ceil(size / tp) each; the surplus rows of the last rank
    are padding: zero, masked in use, and part of no logical tensor.
    """

    sections: tuple[NamedRows, ...]
    columns: int | None = None
    split: Literal[0, 1] | None = None
    init: Initializer = Initializer()
    sum_over_tp: bool = False
    tied: bool = False
    decay: bool = True
    transposed: bool = False
    matrix: bool = False
    whole: tuple[int, ...] | None = None

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one TP rank's tensor."""
        if self.whole is not None:
            return self.whole
        cut = tp_size if self.split == 0 else 1
        rows = sum(-(-section.rows // cut) for section in self.sections)
        return (rows,) if self.columns is None else (rows, self.width(tp_size))

    def width(self, tp_size: int) -> int:
        """Elements of one row of a TP rank's tensor."""
        if self.split == 1 and self.columns is not None and self.columns % tp_size:
            raise ValueError(f"{self.sections[0].name}: its {self.columns} columns must be divisible by tp={tp_size}")
        return (1 if self.columns is None else self.columns) // (tp_size if self.split == 1 else 1)

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the logical tensors as a checkpoint stores them, by name."""
        return {region.name: region.stored_shape for region in self.regions(0, 1)}

    def regions(self, tp_rank: int, tp_size: int) -> Iterator[Region]:
        """The regions of one TP rank's tensor; they cover it once, padding excepted."""
        width = self.width(tp_size)
        start = width * tp_rank if self.split == 1 else 0
        columns = None if self.columns is None else (start, start + width)
        for section, first, low, high in self.local_sections(tp_rank, tp_size):
            total = section.logical_rows or section.rows
            if high > low:
                yield Region(
                    section.name,
                    (first, first + high - low),
                    (section.offset + low, section.offset + high),
                    columns,
                    (total,) if self.columns is None else (total, self.columns),
                    self.transposed,
                    self.whole,
                )

    def local_sections(self, tp_rank: int, tp_size: int) -> Iterator[LocalRows]:
        """What one TP rank's tensor holds of each section, padding excepted."""
        first = 0
        for section in self.sections:
            part = -(-section.rows // tp_size) if self.split == 0 else section.rows
            low = min(part * tp_rank, section.rows) if self.split == 0 else 0
            yield LocalRows(section, first, low, min(low + part, section.rows))
            first += part

    def init_weights(self, out: Tensor, start: int, tp_rank: int, tp_size: int, seed: int) -> None:
        """Fill `out`, fp32 and 1-D: elements [start, start + len(out)) of the flattened local tensor."""
        out.zero_()
        width = self.width(tp_size)
        for region in self.regions(tp_rank, tp_size):
            low = max(region.local_rows[0] * width, start)
            high = min(region.local_rows[1] * width, start + out.numel())
            for at in range(low, high, _DRAW_ELEMENTS):
                stop = min(at + _DRAW_ELEMENTS, high)
                self._draw_region(out[at - start : stop - start], at, width, region, seed)

    def _draw_region(self, out: Tensor, at: int, width: int, region: Region, seed: int) -> None:
        if self.init.kind != "normal":
            out.fill_(1.0 if self.init.kind == "ones" else 0.0)
            return
        local = torch.arange(at, at + out.numel(), dtype=torch.int64, device=out.device)
        row = local // width - region.local_rows[0] + region.rows[0]
        column = local % width + (region.columns[0] if region.columns else 0)
        last = 1 if region.columns is None else region.shape[0] if region.transposed else region.shape[1]
        index = column * last + row if region.transposed else row * last + column
        out.copy_(normal(derive_key(seed, region.name), index) * self.init.std)


def vector_spec(
    name: str, size: int, init: Initializer, *, split: Literal[0] | None = None, sum_over_tp: bool = False
) -> ParamSpec:
    """Spec of a norm weight or a bias: 1-D, never decayed."""
    return ParamSpec((NamedRows(name, size),), None, split, init, sum_over_tp, decay=False)


def whole_spec(name: str, shape: tuple[int, ...], *, tied: bool = False) -> ParamSpec:
    """Spec of a parameter of any shape that every TP rank holds whole; `tied`: it has a copy on another stage."""
    rows, columns = (shape[0] if shape else 1), (prod(shape[1:]) if len(shape) > 1 else None)
    return ParamSpec((NamedRows(name, rows),), columns, tied=tied, whole=None if len(shape) in (1, 2) else shape)


def bias_spec(weight: ParamSpec, sections: tuple[NamedRows, ...], *, sum_over_tp: bool = False) -> ParamSpec:
    """Spec of the bias that goes with a linear layer's weight: zero at the start, never decayed."""
    split: Literal[0] | None = 0 if weight.split == 0 else None
    return ParamSpec(sections, None, split, Initializer("zeros"), sum_over_tp, decay=False)


def drawn_parameter(spec: ParamSpec, tp_rank: int = 0, tp_size: int = 1) -> nn.Parameter:
    """A parameter with its initial values; on the meta device without any, to be filled shard by shard."""
    values = torch.empty(spec.local_shape(tp_size))
    if not values.is_meta:
        spec.init_weights(values.view(-1), 0, tp_rank, tp_size, _SEED)
    return nn.Parameter(values)


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a shape."""
    return prod(shape)
