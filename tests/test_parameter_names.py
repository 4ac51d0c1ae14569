"""Two parameters with one logical name are refused before the first step: a checkpoint would keep one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import run_world
from torch import nn

from megazero.config import ResolvedRun, RunConfig, resolve
from megazero.engine import gpt, initialize
from megazero.layers.spec import NamedRows, rows_spec
from megazero.parallel_state import Axis, ParallelState
from megazero.zero.sharded_model import Rows, check_parameters, logical_rows
from megazero.zero.units import Described, describe


def _described(*rows: NamedRows, tied: bool = False) -> list[Described]:
    return [
        Described(f"part{number}", nn.Parameter(torch.zeros(one.rows)), rows_spec((one,), tied=tied))
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


def _run(pp: int) -> ResolvedRun:
    model = {"family": "llama", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32, "seq_len": 8}
    document = {"model": model, "parallel": {"pp": pp}, "training": {"micro_batch_size": 1, "accumulation": pp}}
    return resolve(RunConfig.model_validate(document), pp)


def _without_layer_numbers(rank: int, pp: int) -> str:
    def forgetful(chunks: nn.Module) -> list[Described]:
        def named(one: Described) -> Described:
            rows = [replace(part, name=part.name.replace("layers.1.", "layers.0.")) for part in one.spec.names.rows]
            return replace(one, spec=replace(one.spec, names=replace(one.spec.names, rows=tuple(rows))))

        return [named(one) for one in describe(chunks)]

    run = _run(pp)
    initialize(run.config, ParallelState(run.grid, rank, timeout_seconds=30))  # with their numbers
    gpt.describe = forgetful
    with pytest.raises(ValueError, match="two parameters have the logical name") as caught:
        initialize(run.config, ParallelState(run.grid, rank, timeout_seconds=30))
    return str(caught.value)


@pytest.mark.parametrize("pp", [1, 2])
def test_an_engine_refuses_a_family_whose_layers_have_the_same_names(pp: int) -> None:
    for told in run_world(pp, _without_layer_numbers, pp):
        assert "'model.layers.0." in told
        assert "of pipeline stage 0 and" in told
        assert f"of stage {pp - 1}." in told
