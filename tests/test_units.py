"""Units: every parameter lies in one, and an element of a container is one as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megazero.deepspeed.script_units import script_units_of as units_of
from megazero.layers.spec import whole_spec
from megazero.zero.units import describe


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class _Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class _Model(nn.Module):
    """The picture in units.py: an embedding, blocks, a head, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(_Flat() for _ in range(3))
        self.dropout = nn.Dropout()
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(4))


def _found(*models: nn.Module) -> list[tuple[str, int, set[str], bool]]:
    """(module, chunk, its parameters, spans_others) by qualified names."""
    chunks = nn.ModuleList(models)
    modules = {module: name for name, module in chunks.named_modules()}
    names = {id(parameter): name for name, parameter in chunks.named_parameters(remove_duplicate=False)}
    return [
        (
            modules[unit.module],
            unit.virtual_stage,
            {names[id(part._parameters[key])] for part, key in unit.attributes},
            unit.spans_others,
        )
        for unit in units_of(models)
    ]


def _below(model: nn.Module, prefix: str) -> set[str]:
    return {f"0.{name}" for name, _ in model.named_parameters() if name.startswith(prefix + ".")}


def test_the_units_of_the_picture() -> None:
    model = _Model()
    assert _found(model) == [
        ("0", 0, {"0.scale"}, True),
        ("0.embedding", 0, {"0.embedding.weight"}, False),
        *((f"0.blocks.{index}", 0, _below(model, f"blocks.{index}"), False) for index in range(3)),
        ("0.head", 0, {"0.head.weight", "0.head.bias"}, False),
    ]


@pytest.mark.parametrize(
    "make",
    [
        _Model,
        _Flat,
        _Block,
        lambda: nn.Sequential(_Block(), nn.Tanh(), _Block()),
        lambda: nn.ModuleDict({"a": _Model(), "b": nn.ModuleList([_Block()])}),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2),
        lambda: nn.Transformer(4, 2, 1, 1, 8),
        lambda: nn.LSTM(4, 4, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.Linear(4, 4),
    ],
)
def test_every_parameter_is_in_one_unit(make) -> None:
    model = make()
    places = [(part, key) for unit in units_of([model]) for part, key in unit.attributes]
    assert len({(id(part), key) for part, key in places}) == len(places)
    assert {id(part._parameters[key]) for part, key in places} == {id(p) for p in model.parameters()}


def test_a_shared_parameter_is_in_each_unit_that_has_it_and_described_once() -> None:
    model = _Model()
    model.head.weight = model.embedding.weight
    in_units = [
        sum(part._parameters[key] is model.head.weight for part, key in unit.attributes) for unit in units_of([model])
    ]
    assert in_units == [0, 1, 0, 0, 0, 1]
    described = list(describe(model))
    assert [one.name for one in described if one.parameter is model.head.weight] == ["embedding.weight"]
    assert {one.name for one in described} == {name for name, _ in model.named_parameters()}


def test_a_model_may_say_its_units_itself() -> None:
    class Own(_Model):
        def units(self) -> list[nn.Module]:
            return [self.head, self]

    model = Own()
    assert [unit.module for unit in units_of([model])] == [model.head, model]


def test_a_module_may_describe_its_parameters_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    told = whole_spec("told", (3,))
    model[0].specs = {"bias": told}
    specs = {one.name: one.spec for one in describe(model)}
    assert specs["0.bias"] is told
    assert specs["0.weight"] == whole_spec("0.weight", (3, 2))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (1, 2, 3, 4), (0,), (0, 5), (5, 0), (2, 0, 3)])
def test_a_parameter_of_any_shape_has_its_elements_in_its_spec(shape: tuple[int, ...]) -> None:
    spec = whole_spec("p", shape)
    assert spec.local_shape(1) == spec.local_shape(4) == shape
    assert spec.logical_shapes() in ({"p": shape}, {})  # a tensor without rows has no blocks
    assert sum(region.numel for region in spec.regions(0, 1)) == torch.Size(shape).numel()
    out: Tensor = torch.empty(torch.Size(shape).numel())
    spec.init_weights(out, 0, 0, 1, 3)
