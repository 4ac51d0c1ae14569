"""The units of a model: modules whose weights stage 3 gathers together before each forward.

    GPTStage                    units
      embedding                 embedding
      blocks: ModuleList        blocks.0   blocks.1
      head                      head

A model lists them: `units()` returns modules in forward order that together hold every parameter.  `readers(unit)`
returns layers of a unit that read their weights only in their own forward and so can wait for those alone; none if the
unit must wait for all its weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from torch import nn

from megazero.layers.linear import WeightGradQueue
from megazero.layers.spec import ParamSpec, whole_spec
from megazero.parallel_state import Axis
from megazero.zero.sharding import Placement

#: Rows of logical tensors: the tensor's name, first row, end row, and the parameter that holds them.
Rows: TypeAlias = list[tuple[str, int, int, str]]


@dataclass(frozen=True, eq=False)
class UnitModule:
    """A module whose parameters are gathered together for its forward and its backward."""

    module: nn.Module
    attributes: tuple[tuple[nn.Module, str], ...]  # (module, attribute) of each of its parameters
    virtual_stage: int  # index of the virtual stage of this rank that contains it
    spans_others: bool = False  # other units run within its forward
    beside: int = 0  # units with different numbers run at the same time and so have separate gather buffers
    readers: tuple[nn.Module, ...] = ()  # layers that wait for their own weights; empty: the module waits for all

    def reads(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield each module that reads parameters of the unit in its forward, with those parameters."""
        if not self.readers:
            yield self.module, [param for mod, key in self.attributes if (param := mod._parameters[key]) is not None]
        for reader in self.readers:
            yield reader, list(reader.parameters())


@dataclass(frozen=True, eq=False)
class ModelParam:
    """A parameter of the model, as the engine passes it to ZeRO."""

    name: str  # qualified name in the model
    parameter: nn.Parameter  # the module's own; may be on the meta device
    spec: ParamSpec  # the parameter as a whole, over all ranks
    group: int = 0  # index of its optimizer group
    matrix: bool = False  # the optimizer updates it as a whole matrix
    placement: Placement | None = None  # the ranks that share it; None: the model's default


@dataclass(frozen=True)
class RankModel:
    """The stages of a model on this rank, before sharding.

    Args:
        units: see `ShardedParameters`.
        params: every parameter once, in forward order, with its optimizer group.
        ties: the ranks that hold a copy of a tied parameter, by its logical name.
        wgrad_queues: the queue that takes a parameter's weight gradients past autograd, by the parameter's name.
    """

    units: Sequence[UnitModule]
    params: Sequence[ModelParam]
    ties: Mapping[str, Axis] = field(default_factory=dict)
    wgrad_queues: Mapping[str, WeightGradQueue] = field(default_factory=dict)


def units_of(stages: Sequence[Any], *, by_layer: bool = False, beside: bool = False) -> list[UnitModule]:
    """Return the units of this rank's stages, in forward order.

    Args:
        by_layer: let the layers of `model.readers` wait for their own weights.
        beside: two stages run at the same time.
    """
    found = []
    for number, model in enumerate(stages):
        for module in dict.fromkeys(model.units()):
            readers = tuple(model.readers(module)) if by_layer else ()
            places = parameter_attributes(module.modules())
            found.append(UnitModule(module, places, number, beside=number if beside else 0, readers=readers))
    return found


def parameter_attributes(modules: Iterable[nn.Module]) -> tuple[tuple[nn.Module, str], ...]:
    """Return (module, attribute) of every parameter that one of these modules holds directly."""
    return tuple((module, key) for module in modules for key, value in module._parameters.items() if value is not None)


def describe(model: nn.Module) -> Iterator[ModelParam]:
    """Yield every parameter of a module once, in module order.  Tp does not split a parameter that has no entry in
    `specs`.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        specs = getattr(module, "specs", {})
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{key}" if prefix else key
            yield ModelParam(name, parameter, specs.get(key) or whole_spec(name, tuple(parameter.shape)))


def logical_rows(params: Sequence[ModelParam], ties: Mapping[str, Axis]) -> Rows:
    """Yield the rows of logical tensors that parameters hold, except for tensors that several stages share."""
    return [
        (rows.name, rows.offset, rows.offset + rows.rows, param.name)
        for param in params
        if not param.spec.tied
        for rows in param.spec.names.rows
        if rows.name not in ties
    ]


def check_parameters(params: Sequence[ModelParam], stage: int, held: Mapping[int, Rows]) -> None:
    """Check that at least one parameter trains, and that no two parameters have the same name in a checkpoint.

    Args:
        held: the rows that each pipeline stage holds.

    Raises:
        ValueError: no parameter trains on this rank, or two parameters would be written as the same tensor.
    """
    if not any(param.parameter.requires_grad for param in params):
        hint = "there is nothing to train there"
        raise ValueError(f"pipeline stage {stage} has no parameter that requires a gradient: {hint}")
    every = sorted((name, first, end, at, param) for at, rows in held.items() for name, first, end, param in rows)
    for (name, _, end, at, param), (other, first, _, other_at, other_param) in pairwise(every):
        if name == other and first < end:
            raise ValueError(
                f"two parameters have the logical name {name!r}: {param!r} of pipeline stage {at} and {other_param!r} of "
                f"stage {other_at}. A checkpoint would keep one of them, and both would begin with equal values: give "
                "each its own name"
            )
