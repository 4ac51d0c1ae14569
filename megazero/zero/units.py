"""What stage 3 gathers at once: the modules of a model, cut into units, each with the parameters that its forward uses.

    Model                       units
      embedding                 embedding
      blocks: ModuleList        blocks.0   blocks.1        an element of a container is a unit as a whole
      head                      head
      scale: Parameter          Model, with `scale` alone   it is in use while the others run, and so never shares a buffer

A model may say so itself: its `units()` gives modules in forward order, which together hold every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from megazero.layers.spec import ParamSpec, whole_spec

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose parameters are gathered for its forward and for its backward.

    Args:
        module: the parameters are needed during its forward.
        attributes: (module, attribute) of each parameter that belongs to it.
        chunk: the model chunk of this rank that it lies in.
        spans_others: other units run within its forward.
    """

    module: nn.Module
    attributes: tuple[tuple[nn.Module, str], ...]
    chunk: int
    spans_others: bool = False


@dataclass(frozen=True, eq=False)
class Described:
    """A parameter as the engine hands it over.

    Args:
        name: qualified name in the model.
        parameter: the module's own; may be on the meta device.
        spec: what it is, globally.
        group: the optimizer group that steps it.
    """

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    group: int = 0


def units_of(chunks: Sequence[nn.Module]) -> list[Unit]:
    """The units of this rank's chunks, in forward order as far as the order of attributes shows it."""
    found = []
    for chunk, model in enumerate(chunks):
        own = getattr(model, "units", None)
        if callable(own):
            found += [Unit(module, tuple(_attributes(module)), chunk) for module in own()]
        else:
            found += _find(model, chunk, False)
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield part, key


def _find(module: nn.Module, chunk: int, is_element: bool) -> Iterator[Unit]:
    if next(module.parameters(), None) is None:
        return
    within = [part for part in module.modules() if part is not module]
    has_container = any(isinstance(part, _CONTAINERS) and next(part.parameters(), None) is not None for part in within)
    direct = tuple((module, key) for key, parameter in module._parameters.items() if parameter is not None)
    is_container = isinstance(module, _CONTAINERS)
    if not has_container and not is_container and (is_element or direct):
        yield Unit(module, tuple(_attributes(module)), chunk)
        return
    if direct:
        yield Unit(module, direct, chunk, spans_others=True)
    for child in module.children():
        yield from _find(child, chunk, is_container)


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
