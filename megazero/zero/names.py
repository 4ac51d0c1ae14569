"""No two parameters of a model may be one in its checkpoint.

stage 0   layers.0.up.weight   rows 0 to 64
stage 1   layers.0.up.weight   rows 0 to 64       the layer's number was forgotten: one of them would be lost
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from megazero.parallel_state import Axis
from megazero.zero.units import Described

Rows: TypeAlias = list[tuple[str, int, int, str]]  # of a logical tensor: its name, first row, end; whose they are


def logical_rows(described: Sequence[Described], ties: Mapping[str, Axis]) -> Rows:
    """The rows of logical tensors that parameters hold, but for those that stages share."""
    every = [(section, one) for one in described if not one.spec.tied for section in one.spec.names.rows]
    return [
        (section.name, section.offset, section.offset + section.rows, one.name)
        for section, one in every
        if section.name not in ties
    ]


def check_parameters(described: Sequence[Described], stage: int, held: Mapping[int, Rows]) -> None:
    """`held`: by pipeline stage.  Raises: ValueError: nothing trains here, or two parameters are one in a checkpoint."""
    if not any(one.parameter.requires_grad for one in described):
        raise ValueError(
            f"pipeline stage {stage} has no parameter that requires a gradient: there is nothing to train there"
        )
    every = sorted((name, first, end, at, whose) for at, rows in held.items() for name, first, end, whose in rows)
    for (name, _, end, at, whose), (other, first, _, its, theirs) in pairwise(every):
        if name == other and first < end:
            raise ValueError(
                f"two parameters have the logical name {name!r}: {whose!r} of pipeline stage {at} and {theirs!r} of stage "
                f"{its}. A checkpoint would keep one of them, and both would begin with equal values: give each its own name"
            )
