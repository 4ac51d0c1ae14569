"""What stage 3 gathers at once, and a forward waits for: a model in units, each with the parameters that its forward uses.

    Model                       units
      embedding                 embedding
      blocks: ModuleList        blocks.0   blocks.1        an element of a container is a unit as a whole
      head                      head
      scale: Parameter          Model, with `scale` alone   it is in use while the others run, and so never shares a buffer

A model may say so itself: its `units()` gives modules in forward order, which together hold every parameter.  Its
`readers(unit)` names a unit's layers, each of which reads its weights within its own forward alone, and can wait for those
alone; none where the unit waits as a whole.
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
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose parameters are gathered for its forward and for its backward."""

    module: nn.Module
    attributes: tuple[tuple[nn.Module, str], ...]  # (module, attribute) of each parameter that belongs to it
    chunk: int  # the model chunk of this rank that it lies in
    spans_others: bool = False  # other units run within its forward
    readers: tuple[nn.Module, ...] = ()  # layers that wait for their own weights; none: the module waits for all

    def reads(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """The modules whose forward reads parameters of the unit, each with those."""
        if not self.readers:
            yield self.module, [one for part, key in self.attributes if (one := part._parameters[key]) is not None]
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


def units_of(chunks: Sequence[nn.Module], *, by_layer: bool = False) -> list[Unit]:
    """The units of this rank's chunks, in forward order as far as the order of attributes shows it.

    `by_layer`: let the layers that `model.readers` names wait for themselves.
    """
    found = []
    for chunk, model in enumerate(chunks):
        own = getattr(model, "units", None)
        if callable(own):
            readers_of = getattr(model, "readers", None) if by_layer else None
            for module in dict.fromkeys(own()):
                readers = tuple(readers_of(module)) if callable(readers_of) else ()
                found.append(Unit(module, _attributes(module.modules()), chunk, readers=readers))
        else:
            by_module = {unit.module: unit for unit in _find(model, chunk, False)}  # one may stand in two containers
            found += by_module.values()
    return found


def _attributes(modules: Iterable[nn.Module]) -> tuple[tuple[nn.Module, str], ...]:
    return tuple((one, key) for one in modules for key, value in one._parameters.items() if value is not None)


def _find(module: nn.Module, chunk: int, is_element: bool) -> Iterator[Unit]:
    holding = [part for part in module.modules() if next(part.parameters(), None) is not None]
    if not holding:
        return
    direct = _attributes([module])
    if (is_element or direct) and not any(isinstance(part, _CONTAINERS) for part in holding):
        yield Unit(module, _attributes(holding), chunk)
        return
    if direct:
        yield Unit(module, direct, chunk, spans_others=True)
    for child in module.children():
        yield from _find(child, chunk, isinstance(module, _CONTAINERS))


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
