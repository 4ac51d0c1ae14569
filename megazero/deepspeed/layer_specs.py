"""The layers of a pipeline as a list of specs, modules and callables; its partition; and a stage as a module.

layers     0    1    2   |   3    4   |   5    6   |   7        a layer is a LayerSpec, an nn.Module or a callable
stages        range(3)   | range(3,5) | range(5,7) | range(7,8)  balanced by parameters, by count, or by name
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megazero.deepspeed.recompute import checkpoint
from megazero.models.stages import cut_evenly
from megazero.registry import closest, did_you_mean

Tensors: TypeAlias = tuple[Tensor, ...]
PARTITION_METHODS = ("parameters", "uniform", "type:regex")


class LayerSpec:
    """A class of nn.Module with its arguments.  The ranks that run the layer build it."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise TypeError(f"a LayerSpec takes a class of nn.Module, got {typename!r}; list anything else as it is")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with the other layers of its key; see [Note: tied layers].

    Args:
        key: the common name of the layers that share parameters.
        forward_fn: (module, input) -> output, called in place of the module; None calls the module.
        tied_weight_attr: names of the shared parameters, such as "weight" or "sub.weight"; properties are allowed.  Layers
            of a key may use different names; they are paired in order.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)


class AppliedLayer(nn.Module):
    """A tied layer that is called through its `forward_fn`.  It is a separate module, with hooks for this use alone."""

    def __init__(self, module: nn.Module, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Any) -> Any:
        return self.function(self.module, x)


Layer: TypeAlias = LayerSpec | nn.Module | Callable[[Any], Any]


def partition_layers(
    layers: Sequence[Layer], stages: int, method: str, trainable: Callable[[int, Layer], int]
) -> list[range]:
    """Partition layers into virtual stages.

    Args:
        layers: the layers, in order.
        stages: number of virtual stages.
        method: see `PipelineModule`.
        trainable: (index, layer) -> number of trainable parameters, for the method "parameters".
    """
    lower = method.lower()
    if lower == "uniform":
        return [layout.layers for layout in cut_evenly(len(layers), stages)]
    if lower == "parameters":
        return partition_balanced([trainable(index, layer) for index, layer in enumerate(layers)], stages)
    if lower.startswith("type:"):
        return partition_balanced(_matches(layers, method[len("type:") :]), stages)
    hint = did_you_mean(closest(method, PARTITION_METHODS), f"it must be one of {', '.join(PARTITION_METHODS)}")
    raise ValueError(f"partition_method={method!r} is unknown; {hint}")


def partition_balanced(weights: Sequence[int], stages: int) -> list[range]:
    """Partition a row of non-negative weights into non-empty stages, such that the heaviest is as light as possible.

    The last stages are filled first, because under 1F1B the first stages hold activations longest.

    Raises: ValueError: there are fewer weights than stages.
    """
    if not 1 <= stages <= len(weights):
        raise ValueError(
            f"{stages} pipeline stages must be at least 1 and at most the number of layers, {len(weights)}"
        )

    def fill(limit: int) -> list[range]:
        """Fill stages up to a limit, the last stage first.  If the limit is too low, the first layers are left over."""
        found, stop = list[range](), len(weights)
        for before in reversed(range(stages)):  # as many stages come before, and each needs a layer
            start = stop - 1
            while start > before and sum(weights[start - 1 : stop]) <= limit:
                start -= 1
            found.append(range(start, stop))
            stop = start
        return found[::-1]

    limits = range(max(weights), sum(weights))
    return fill(limits.start + bisect_left(limits, True, key=lambda limit: fill(limit)[0].start == 0))


def check_layers(layers: Iterable[Layer] | nn.Sequential) -> list[Layer]:
    """Return the layers as a list.  Raises: TypeError, ValueError: an entry cannot be a layer; the message names it."""
    if not isinstance(layers, Iterable) or isinstance(layers, Mapping | nn.ModuleDict | str):
        raise TypeError(f"layers must be a list of layers or an nn.Sequential, got {describe_value(layers)}")
    checked = list(layers)
    owners: dict[int, int] = {}
    for index, layer in enumerate(checked):
        _check_layer(index, layer)
        if not isinstance(layer, nn.Module):
            continue
        for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
            first = owners.setdefault(id(tensor), index)
            if first != index:
                raise ValueError(f"layers {first} and {index} share {name!r}; write both as TiedLayerSpec with one key")
    return checked


def _check_layer(index: int, layer: object) -> None:
    owner = getattr(layer, "__self__", None)
    if isinstance(layer, type) or isinstance(owner, nn.Module):
        what = layer.__name__ if isinstance(layer, type) else f"a method of a {type(owner).__name__}"
        raise TypeError(f"layer {index} is {what}; write LayerSpec(class, ...), or give the module itself, to train it")
    if not isinstance(layer, LayerSpec) and not callable(layer):
        raise TypeError(f"layer {index} is {describe_value(layer)}; a layer is a LayerSpec, an nn.Module or a callable")


def _matches(layers: Sequence[Layer], expression: str) -> list[int]:
    """Return 1 for each layer whose name the expression matches, else 0."""
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f'partition_method="type:{expression}" is no regular expression: {error}') from error
    found = [int(pattern.search(name_of(layer)) is not None) for layer in layers]
    if not any(found):
        names = ", ".join(dict.fromkeys(map(name_of, layers)))
        raise ValueError(f'partition_method="type:{expression}" matches none of the layers, which are {names}')
    return found


def name_of(layer: object) -> str:
    """Return the name of a layer's class or function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    layer = layer.module if isinstance(layer, AppliedLayer) else layer
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def describe_value(value: object) -> str:
    """Describe a value of the wrong type in a few words."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"


class _Writable(torch.autograd.Function):
    """The identity.  Its result is no leaf, so layers may write to it in place although it needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class LayerChunk(nn.Module):
    """The layers of one virtual stage.

    Args:
        layers: (index in the whole pipeline, layer), in order.
        tied: canonical names of the tied parameters, by id of the parameter.
        checkpoint_interval: number of layers that are recomputed together in the backward; 0 recomputes none.

    Attributes:
        canonical_names: qualified name of each parameter and buffer -> its name under any partition, "layers.{index}.<name
            in the layer>"; a tied parameter has its name in the first layer of its key.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        layers: Sequence[tuple[int, Callable[[Any], Any]]],
        tied: Mapping[int, str],
        checkpoint_interval: int,
    ) -> None:
        super().__init__()
        self.stage, self.is_first, self.is_last = stage, stage == 0, stage == stages - 1
        self._checkpoint_interval = checkpoint_interval
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers if isinstance(layer, nn.Module)})
        self._functions = {index: layer for index, layer in layers if not isinstance(layer, nn.Module)}
        self._indices = range(layers[0][0], layers[-1][0] + 1)
        self.canonical_names: dict[str, str] = {}  # found once: engines may swap the tensors, the names stay
        for index, layer in self.layers.items():
            added = "module." if isinstance(layer, AppliedLayer) else ""
            tensors = chain(layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False))
            for name, tensor in tensors:
                canonical = tied.get(id(tensor), f"layers.{index}.{name.removeprefix(added)}")
                self.canonical_names[f"layers.{index}.{name}"] = canonical

    def units(self) -> list[nn.Module]:
        """Return the modules that ZeRO-3 gathers one at a time, in forward order: the layers with parameters."""
        return [layer for layer in self.layers.values() if next(layer.parameters(), None) is not None]

    def forward(self, x: Tensors) -> Tensors:
        """Apply the layers in order to the outputs of the previous stage, or to the inputs of a micro-batch."""
        if not self.is_first:
            x = tuple(_Writable.apply(tensor) if tensor.requires_grad else tensor for tensor in x)
        indices, interval = self._indices, self._checkpoint_interval
        if not (interval and torch.is_grad_enabled()):
            return self._run(indices, *x)
        for start in range(0, len(indices), interval):
            x = checkpoint(self._recomputable, indices[start : start + interval], *x)
        return x

    def _recomputable(self, indices: range, *x: Tensor) -> Tensors:
        """Run layers on a copy of `x` if they write in place, since the recomputation starts from `x` again."""
        modules = chain.from_iterable(self.layers[str(i)].modules() for i in indices if i not in self._functions)
        if any(getattr(module, "inplace", False) for module in modules):
            x = tuple(tensor.clone() for tensor in x)
        return self._run(indices, *x)

    def _run(self, indices: range, *x: Tensor) -> Tensors:
        for index in indices:
            layer = self._functions[index] if index in self._functions else self.layers[str(index)]
            y = layer(x[0] if len(x) == 1 else x)
            x = (y,) if isinstance(y, Tensor) else tuple(y) if isinstance(y, tuple | list) else ()
            if not x or not all(isinstance(tensor, Tensor) for tensor in x):
                raise TypeError(f"layer {index} ({name_of(layer)}) returned {describe_value(y)}, not tensors")
        return x
