"""The units of a model: the modules whose weights stage 3 gathers together, and each forward waits for.

    GPTStage                    units
      embedding                 embedding
      blocks: ModuleList        blocks.0   blocks.1
      head                      head

A model lists them: its `units()` gives modules in forward order, which together hold every parameter.  Its `readers(unit)`
lists the layers of a unit, each of which reads its weights within its own forward alone, and can wait for those alone; none
where the unit waits as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from megazero.layers.spec import ParamSpec, whole_spec
from megazero.zero.bucket import Placement

Hook = TypeVar("Hook", bound=Callable[..., Any])

_NO_TASK = -1  # torch's number of the backward under way, where there is none


@dataclass(frozen=True, eq=False)
class UnitModule:
    """A module whose parameters are gathered together, for its forward and for its backward."""

    module: nn.Module
    attributes: tuple[tuple[nn.Module, str], ...]  # (module, attribute) of each parameter that belongs to it
    chunk: int  # the model chunk of this rank that it lies in
    spans_others: bool = False  # other units run within its forward
    beside: int = 0  # those of another number are in use at the same time: they have gather buffers of their own
    readers: tuple[nn.Module, ...] = ()  # layers that wait for their own weights; none: the module waits for all

    def reads(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """The modules whose forward reads parameters of the unit, each with those."""
        if not self.readers:
            yield self.module, [param for part, key in self.attributes if (param := part._parameters[key]) is not None]
        for reader in self.readers:
            yield reader, list(reader.parameters())


@dataclass(frozen=True, eq=False)
class Described:
    """A parameter as the engine hands it over."""

    name: str  # qualified name in the model
    parameter: nn.Parameter  # the module's own; may be on the meta device
    spec: ParamSpec  # what it is, globally
    group: int = 0  # the optimizer group that steps it
    matrix: bool = False  # which steps it whole
    placement: Placement | None = None  # the ranks that share it; None: those that share most parameters


def reading_no_weights(hook: Hook) -> Hook:
    """Say of a hook before a unit's forward that it reads no weights: its layers may still wait for theirs one by one."""
    hook.reads_no_weights = True  # type: ignore[attr-defined]
    return hook


def is_hooked(module: nn.Module) -> bool:
    """Whether a script's hooks run before a unit's forward: they may read all its weights."""
    return not all(hasattr(hook, "reads_no_weights") for hook in module._forward_pre_hooks.values())


def units_of(chunks: Sequence[Any], *, by_layer: bool = False, beside: bool = False) -> list[UnitModule]:
    """The units of this rank's chunks, in forward order.

    `by_layer`: let the layers that `model.readers` lists wait for themselves.  `beside`: two chunks run at the same time.
    """
    found = []
    for chunk, model in enumerate(chunks):
        for module in dict.fromkeys(model.units()):
            readers = tuple(model.readers(module)) if by_layer else ()
            places = parameter_attributes(module.modules())
            found.append(UnitModule(module, places, chunk, beside=chunk if beside else 0, readers=readers))
    return found


def parameter_attributes(modules: Iterable[nn.Module]) -> tuple[tuple[nn.Module, str], ...]:
    """(module, attribute) of every parameter that one of these modules holds itself."""
    return tuple((part, key) for part in modules for key, value in part._parameters.items() if value is not None)


def describe(model: nn.Module) -> Iterator[Described]:
    """Every parameter of a module once, in module order; one that `specs` does not name is whole on every tp rank."""
    seen: set[int] = set()
    for prefix, part in model.named_modules():
        specs = getattr(part, "specs", {})
        for key, parameter in part._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{key}" if prefix else key
            yield Described(name, parameter, specs.get(key) or whole_spec(name, tuple(parameter.shape)))


def in_backward() -> bool:
    """Whether this thread runs in a backward, as hooks do."""
    return torch._C._current_graph_task_id() != _NO_TASK
