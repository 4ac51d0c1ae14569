"""The units of a model: modules whose weights stage 3 gathers together before each forward.

    GPTStage                    units
      embedding                 embedding
      blocks: ModuleList        blocks.0   blocks.1
      head                      head

A model lists them: `units()` returns modules in forward order that together hold every parameter.  `readers(unit)`
returns layers of a unit that read their weights only in their own forward and so can wait for those alone; none if the
unit must wait for all its weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from megazero.layers.spec import ParamSpec, whole_spec
from megazero.zero.bucket import Placement

Hook = TypeVar("Hook", bound=Callable[..., Any])

_NO_TASK = -1  # torch's task number outside any backward


@dataclass(frozen=True, eq=False)
class UnitModule:
    """A module whose parameters are gathered together for its forward and its backward."""

    module: nn.Module
    attributes: tuple[tuple[nn.Module, str], ...]  # (module, attribute) of each of its parameters
    chunk: int  # the model chunk of this rank that contains it
    spans_others: bool = False  # other units run within its forward
    beside: int = 0  # units with different numbers run at the same time and so have separate gather buffers
    readers: tuple[nn.Module, ...] = ()  # layers that wait for their own weights; empty: the module waits for all

    def reads(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield each module that reads parameters of the unit in its forward, with those parameters."""
        if not self.readers:
            yield self.module, [param for part, key in self.attributes if (param := part._parameters[key]) is not None]
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


def reading_no_weights(hook: Hook) -> Hook:
    """Mark a pre-forward hook as one that reads no weights, so that the unit's layers may still wait one by one."""
    hook.reads_no_weights = True  # type: ignore[attr-defined]
    return hook


def is_hooked(module: nn.Module) -> bool:
    """Whether a script has put pre-forward hooks on the unit, which may read all its weights."""
    return not all(hasattr(hook, "reads_no_weights") for hook in module._forward_pre_hooks.values())


def units_of(chunks: Sequence[Any], *, by_layer: bool = False, beside: bool = False) -> list[UnitModule]:
    """Return the units of this rank's chunks, in forward order.

    Args:
        by_layer: let the layers of `model.readers` wait for their own weights.
        beside: two chunks run at the same time.
    """
    found = []
    for chunk, model in enumerate(chunks):
        for module in dict.fromkeys(model.units()):
            readers = tuple(model.readers(module)) if by_layer else ()
            places = parameter_attributes(module.modules())
            found.append(UnitModule(module, places, chunk, beside=chunk if beside else 0, readers=readers))
    return found


def parameter_attributes(modules: Iterable[nn.Module]) -> tuple[tuple[nn.Module, str], ...]:
    """Return (module, attribute) of every parameter that one of these modules holds directly."""
    return tuple((part, key) for part in modules for key, value in part._parameters.items() if value is not None)


def describe(model: nn.Module) -> Iterator[ModelParam]:
    """Yield every parameter of a module once, in module order.  A parameter without an entry in `specs` is whole on
    every tp rank.
    """
    seen: set[int] = set()
    for prefix, part in model.named_modules():
        specs = getattr(part, "specs", {})
        for key, parameter in part._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{key}" if prefix else key
            yield ModelParam(name, parameter, specs.get(key) or whole_spec(name, tuple(parameter.shape)))


def in_backward() -> bool:
    """Whether this thread is in a backward, as hooks may be."""
    return torch._C._current_graph_task_id() != _NO_TASK
