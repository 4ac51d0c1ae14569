"""Two parameters with one logical name are refused before the first step: a checkpoint would keep one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.layers.spec import NamedRows, rows_spec
from megazero.parallel_state import Axis
from megazero.zero.units import ModelParam, Rows, check_parameters, logical_rows


def _described(*rows: NamedRows, tied: bool = False) -> list[ModelParam]:
    return [
        ModelParam(f"part{number}", nn.Parameter(torch.zeros(one.rows)), rows_spec((one,), tied=tied))
        for number, one in enumerate(rows)
    ]


def _rows(*rows: NamedRows, tied: bool = False, ties: tuple[str, ...] = ()) -> Rows:
    return logical_rows(_described(*rows, tied=tied), dict.fromkeys(ties, Axis("tied")))


A, B, LOW, HIGH = NamedRows("a", 4), NamedRows("b", 4), NamedRows("c", 4, 0, 8), NamedRows("c", 4, 4, 8)


@pytest.mark.parametrize(
    "held",
    [
        {0: _rows(A, B), 1: _rows(NamedRows("a.b", 4))},
        {0: _rows(LOW, HIGH)},  # two parts of one tensor
        {0: _rows(A, tied=True), 1: _rows(A, tied=True)},
        {0: _rows(A, ties=("a",)), 1: _rows(A, ties=("a",))},
        {0: _rows(NamedRows("a", 0), A)},
    ],
    ids=["names of their own", "parts", "tied", "tied by name", "nothing"],
)
def test_names_that_a_checkpoint_can_keep_apart_are_taken(held: dict[int, Rows]) -> None:
    check_parameters(_described(A), 0, held)


@pytest.mark.parametrize(
    ("held", "stages"),
    [
        ({0: _rows(A, B, A)}, (0, 0)),
        ({0: _rows(A), 1: _rows(B), 2: _rows(A)}, (0, 2)),
        ({0: _rows(LOW, NamedRows("c", 4, 3, 8))}, (0, 0)),
        ({0: _rows(A), 1: _rows(A, tied=True) + _rows(A)}, (0, 1)),
    ],
    ids=["one stage", "two stages", "parts that overlap", "one of them tied"],
)
def test_one_name_for_two_parameters_is_refused(held: dict[int, Rows], stages: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="two parameters have the logical name") as caught:
        check_parameters(_described(A), 0, held)
    assert f"of pipeline stage {stages[0]} and" in str(caught.value)
    assert f"of stage {stages[1]}." in str(caught.value)
