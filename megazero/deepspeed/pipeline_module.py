"""Pipelines of arbitrary layers, in the form that DeepSpeed users know; a rank builds only its own.

    layers            0    1    2   |   3    4   |   5    6   |   7        a list of specs, modules and callables
    virtual stage        stage 0    |  stage 1   |  stage 2   | stage 3    cut by `partition_method`
    rank, chunk           (0, 0)    |   (1, 0)   |   (0, 1)   |  (1, 1)    placed by the schedule: here interleaved, pp = 2

Any shape gives the same model: layer i is drawn under its own seed, `base_seed + i`, whichever rank builds it, and its
parameters are `layers.{i}.<name>` wherever it runs.

Between layers, on every cut, one tensor travels as itself and several travel as a tuple, which the next layer takes as its
one argument.  A 1-tuple is its tensor.

[Note: tied layers]  The layers of one key share the parameters that `tied_weight_attr` names, and nothing else.  On one
stage they are one Parameter.  A stage apart from the first layer holds a copy, drawn as the first layer draws it, so copies
are equal at the start; the engine sums their gradients.  DeepSpeed shares the whole module where a stage happens to hold
both layers; that would be another model on every cut.

Source: DeepSpeed, "Pipeline Parallelism" (tutorial and API documentation), runtime/pipe/module.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from megazero.models.stages import cut_evenly
from megazero.parallel_state import ParallelState, RankGrid, parallel_state_of
from megazero.schedules.action import Schedule
from megazero.schedules.kind import GivenSchedule, ScheduleKind
from megazero.schedules.registry import SCHEDULES
from megazero.settings import divisors, nearest_of, nearest_text

Tensors: TypeAlias = tuple[Tensor, ...]
PARTITION_METHODS = ("parameters", "uniform", "type:regex")


class LayerSpec:
    """A layer to be built later, on the ranks that run it.

    Args:
        typename: the class of the layer, an nn.Module.
        module_args, module_kwargs: what it is built with.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise TypeError(
                f"a LayerSpec takes a class of nn.Module and its arguments, got {typename!r}; "
                "a module or a callable stands in the list of layers as it is"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with the other layers of its key; see [Note: tied layers].

    Args:
        key: what the layers that share have in common.
        typename, module_args, module_kwargs: as in `LayerSpec`.
        forward_fn: (module, input) -> output, to use the layer by; None calls the module.
        tied_weight_attr: the shared parameter or parameters, as "weight" or "part.weight"; properties count.  Layers of one
            key may name theirs differently; they pair up in order.
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


Layer: TypeAlias = LayerSpec | nn.Module | Callable[[Any], Any]


def partition_balanced(weights: Sequence[int], parts: int) -> list[range]:
    """Cut a row of weights into non-empty runs whose heaviest is as light as can be.

    Args:
        weights: not negative, in order.
        parts: number of runs.

    Among the cuts with the lightest heaviest run, the most even one (least sum of squares, of weights and then of lengths)
    is taken; of equals, the one with the longer runs first.

    Raises:
        ValueError: fewer weights than parts.
    """
    if not 1 <= parts <= len(weights):
        raise ValueError(f"{parts} pipeline stages must be at least 1 and at most the number of layers, {len(weights)}")
    limit = _lightest_limit(weights, parts)
    sums, count = [0, *accumulate(weights)], len(weights)
    # best[start]: cost of the weights from `start` on in k runs, and where the first run ends; k grows
    best: dict[int, tuple[tuple[int, int], int]] = {count: ((0, 0), count)}
    ends: list[dict[int, int]] = []
    for wgrad_queue in range(parts):
        step: dict[int, tuple[tuple[int, int], int]] = {}
        for start in range(count - wgrad_queue):
            for stop in range(start + 1, count - wgrad_queue + 1):
                if (weight := sums[stop] - sums[start]) > limit:
                    break
                if stop in best:
                    rest, length = best[stop][0], stop - start
                    cost = (rest[0] + weight * weight, rest[1] + length * length)
                    if start not in step or cost <= step[start][0]:
                        step[start] = (cost, stop)
        best = step
        ends.append({start: stop for start, (_, stop) in step.items()})
    borders = [0]
    for step_ends in reversed(ends):
        borders.append(step_ends[borders[-1]])
    return [range(start, stop) for start, stop in pairwise(borders)]


def _lightest_limit(weights: Sequence[int], parts: int) -> int:
    """The least limit under which filling runs greedily needs no more than `parts`; more runs never need a higher one."""
    low, high = max(weights), sum(weights)
    while low < high:
        limit = (low + high) // 2
        runs, filled = 1, 0
        for weight in weights:
            filled += weight
            if filled > limit:
                runs, filled = runs + 1, weight
        low, high = (low, limit) if runs <= parts else (limit + 1, high)
    return low


@dataclass(frozen=True, eq=False)
class CanonicalParameter:
    """A parameter of a chunk, under the name that it has on any shape.

    Args:
        name: "layers.{index of the layer}.<name in the layer>"; of a tied parameter, that in the first layer of its key.
        owner, attribute: the module that holds it, and as what.
        parameter: itself.
        tied: layers share it.
        first_copy: this is the copy of the first layer, the one that counts in a norm or a checkpoint.
    """

    name: str
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter
    tied: bool
    first_copy: bool


class _Applied(nn.Module):
    """A tied layer used through its `forward_fn`; a module itself, so that hooks see this use and no other."""

    def __init__(self, module: nn.Module, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Any) -> Any:
        return self.function(self.module, x)


class _Writable(torch.autograd.Function):
    """The same values, as no leaf: what another stage sent gathers a gradient, and layers may write to it all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class LayerChunk(nn.Module):
    """The layers of one virtual stage.

    Args:
        stage: number of the virtual stage.
        stages: number of all virtual stages.
        layers: (index in the whole pipeline, layer), in order.
        tied: names of the tied parameters, by id of the parameter.
        first_copies: of these names, those whose first layer is here.
        checkpoint_interval: layers that are recomputed together in the backward; 0 recomputes none.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        layers: Sequence[tuple[int, Callable[[Any], Any]]],
        tied: Mapping[int, str],
        first_copies: Iterable[str],
        checkpoint_interval: int,
    ) -> None:
        super().__init__()
        self.stage, self.is_first, self.is_last = stage, stage == 0, stage == stages - 1
        self.indices = range(layers[0][0], layers[-1][0] + 1)
        self.checkpoint_interval = checkpoint_interval
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers if isinstance(layer, nn.Module)})
        self._functions = {index: layer for index, layer in layers if not isinstance(layer, nn.Module)}
        self.canonical_names = dict(self._name_tensors(tied))
        self._tied, self._first_copies = frozenset(tied.values()), frozenset(first_copies)

    def _name_tensors(self, tied: Mapping[int, str]) -> Iterator[tuple[str, str]]:
        """Qualified and canonical name of every parameter and buffer; engines may swap the tensors, the names stay."""
        for index, layer in self.layers.items():
            added = "module." if isinstance(layer, _Applied) else ""
            tensors = chain(layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False))
            for name, tensor in tensors:
                canonical = tied.get(id(tensor), f"layers.{index}.{name.removeprefix(added)}")
                yield f"layers.{index}.{name}", canonical

    def named_canonical_parameters(self) -> Iterator[CanonicalParameter]:
        """Every parameter once, in forward order."""
        for qualified, parameter in self.named_parameters():
            name = self.canonical_names[qualified]
            path, _, attribute = qualified.rpartition(".")
            tied = name in self._tied
            first = not tied or name in self._first_copies
            yield CanonicalParameter(name, self.get_submodule(path), attribute, parameter, tied, first)

    def units(self) -> list[nn.Module]:
        """The modules that ZeRO-3 gathers one at a time, in forward order: the layers that have parameters."""
        return [layer for layer in self.layers.values() if next(layer.parameters(), None) is not None]

    def forward(self, x: Tensors) -> Tensors:
        """Apply the layers in order.

        Args:
            x: what the stage before returned, or the inputs of a micro-batch.

        Raises:
            TypeError: a layer returned something that cannot pass between stages.
        """
        if not self.is_first:
            x = tuple(_Writable.apply(tensor) if tensor.requires_grad else tensor for tensor in x)
        if not (self.checkpoint_interval and torch.is_grad_enabled()):
            return self._run(self.indices, *x)
        for start in range(0, len(self.indices), self.checkpoint_interval):
            together = self.indices[start : start + self.checkpoint_interval]
            x = checkpoint(self._recomputable, together, *x, use_reentrant=False)
        return x

    def _recomputable(self, indices: range, *x: Tensor) -> Tensors:
        """Run layers that will start from `x` once more, and so must not write to it."""
        parts = chain.from_iterable(self.layers[str(i)].modules() for i in indices if i not in self._functions)
        if any(getattr(part, "inplace", False) for part in parts):
            x = tuple(tensor.clone() for tensor in x)
        return self._run(indices, *x)

    def _run(self, indices: range, *x: Tensor) -> Tensors:
        for index in indices:
            layer = self._functions[index] if index in self._functions else self.layers[str(index)]
            y = layer(x[0] if len(x) == 1 else x)
            x = (y,) if isinstance(y, Tensor) else tuple(y) if isinstance(y, tuple | list) else ()
            if not x or not all(isinstance(part, Tensor) for part in x):
                raise TypeError(
                    f"layer {index} ({_name_of(layer)}) returned {_describe(y)}; every layer of a pipeline returns a "
                    "tensor or a tuple of tensors, since any two may be on different ranks"
                )
        return x


@dataclass(frozen=True)
class _Tie:
    """The layers of one key: indices and specs in order, and the canonical names of what they share."""

    layers: tuple[tuple[int, TiedLayerSpec], ...]
    names: tuple[str, ...]


class PipelineModule(nn.Module):
    """This rank's chunks of a pipeline of layers.

    Args:
        layers: specs, modules and callables in order, or an nn.Sequential.  A `LayerSpec` is built on the ranks that run it;
            prefer it.  A ready-made nn.Module is used as it is, and dropped where it does not run: that it is equal on all
            ranks is the user's care.  A callable has no parameters.
        num_stages: pipeline ranks; they must divide the ranks of the world, and the rest is data parallelism.
        topology: the rank grid, instead of `num_stages`, where there is more to say.
        loss_fn: (outputs, labels) -> loss, of one element; applied by the engine after the last stage, not by the chunk.
        seed_layers: only True, see Raises.
        base_seed: layer i is drawn under seed `base_seed + i`, on the CPU; the global generators are left as they were.
        partition_method: what stages are balanced by: "parameters" (trainable ones), "uniform" (layers), or "type:regex"
            (layers whose class or function name has a match, in any case of letters).
        activation_checkpoint_interval: layers that are recomputed together in the backward; 0 recomputes none.
        schedule: name of a schedule, or a schedule of the user's own; it says which rank runs which virtual stage.
        virtual_stages: chunks per rank, for "interleaved"; other schedules have their own number.
        parallel_state: the rank's place and groups, where they exist already; made here otherwise.
        device: where this rank computes; without it cuda:LOCAL_RANK where there is CUDA, else the CPU.

    Attributes:
        chunks: nn.ModuleList of `LayerChunk`, in the order of the rank's chunks.
        partition: the layers of each virtual stage.
        placement: virtual stage -> (pipeline rank, chunk).
        tied_copies: canonical name of every tied parameter -> the virtual stages that hold it; the first is the first copy.

    Raises:
        ValueError: numbers that do not fit, an unknown name, layers that share parameters without a key, or
            seed_layers=False: drawn from one running generator, the weights would depend on the number of stages.
        TypeError: something in `layers` that is no layer.
    """

    def __init__(
        self,
        layers: Iterable[Layer] | nn.Sequential,
        num_stages: int | None = None,
        topology: RankGrid | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = True,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        *,
        schedule: str | Schedule = "1f1b",
        virtual_stages: int = 1,
        parallel_state: ParallelState | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not seed_layers:
            raise ValueError(
                "seed_layers=False would draw initial weights that depend on the number of stages; leave it out, and "
                f"vary base_seed={base_seed} for other weights"
            )
        if activation_checkpoint_interval < 0:
            raise ValueError(
                f"activation_checkpoint_interval={activation_checkpoint_interval} must be 0 or more layers"
            )
        all_layers = _checked_layers(layers)
        self.loss_fn, self.base_seed = loss_fn, base_seed
        self.schedule_kind, chunks = _schedule_kind(schedule, virtual_stages)
        self.parallel_state = state = _find_place(num_stages, topology, device, parallel_state)
        self.placement = self.schedule_kind.placement(state.pp.size, chunks)
        if len({rank for rank, _ in self.placement}) != state.pp.size:
            raise ValueError(f"the schedule is for another number of stages than num_stages={state.pp.size}")
        self.schedule = schedule
        self.partition = self._cut(all_layers, partition_method)
        self._ties = self._find_ties(all_layers)
        stage_of = [stage for stage, indices in enumerate(self.partition) for _ in indices]
        self.tied_copies = {
            name: tuple(sorted({stage_of[index] for index, _ in tie.layers}))
            for tie in self._ties.values()
            for name in tie.names
        }
        self._chunks = [
            self._build_chunk(stage, all_layers, activation_checkpoint_interval)
            for stage, (rank, _) in enumerate(self.placement)  # a rank's chunks come in order
            if rank == state.at.pp
        ]
        self.chunks = nn.ModuleList(self._chunks)

    @property
    def holds_all(self) -> bool:
        """Whether this rank has every stage."""
        return len(self._chunks) == len(self.placement)

    def named_canonical_parameters(self) -> Iterator[CanonicalParameter]:
        """Every parameter of this rank's chunks; a tied one once for each chunk that holds it."""
        for chunk in self._chunks:
            yield from chunk.named_canonical_parameters()

    def holders(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a tied parameter, in order."""
        return tuple(sorted({self.placement[stage][0] for stage in self.tied_copies[name]}))

    def forward(self, x: Tensor | Tensors) -> Tensor | Tensors:
        """The whole model, where one rank holds it; elsewhere the engine runs the chunks by the schedule."""
        if not self.holds_all:
            raise RuntimeError(
                f"pipeline rank {self.parallel_state.at.pp} has {len(self._chunks)} of {len(self.placement)} stages and "
                "cannot run the model alone; give the module to the engine"
            )
        passed: Tensors = (x,) if isinstance(x, Tensor) else x
        for chunk in self._chunks:
            passed = chunk(passed)
        return passed[0] if len(passed) == 1 else passed

    def _cut(self, layers: Sequence[Layer], method: str) -> list[range]:
        """Layers to virtual stages."""
        stages = len(self.placement)
        if len(layers) < stages:
            raise ValueError(
                f"{len(layers)} layers are too few for {stages} virtual stages, {stages // self.parallel_state.pp.size} on "
                f"each of {self.parallel_state.pp.size} ranks; every stage needs one"
            )
        if method.lower() == "uniform":
            return [layout.layers for layout in cut_evenly(len(layers), stages)]
        if method.lower() == "parameters":
            return partition_balanced([self._trainable(i, layer) for i, layer in enumerate(layers)], stages)
        if method.lower().startswith("type:"):
            return partition_balanced(_matches(layers, method[len("type:") :]), stages)
        if method.lower() == "profile":
            raise ValueError(
                f'partition_method="profile" does not exist (nor in DeepSpeed); {_one_of(PARTITION_METHODS)}'
            )
        raise ValueError(f"partition_method={method!r} is unknown; {_one_of(PARTITION_METHODS, method)}")

    def _trainable(self, index: int, layer: Layer) -> int:
        if not isinstance(layer, LayerSpec | nn.Module):
            return 0
        module = self._skeleton(index, layer) if isinstance(layer, LayerSpec) else layer
        return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)

    def _skeleton(self, index: int, spec: LayerSpec) -> nn.Module:
        """The layer without its numbers; where it cannot be built on the meta device, in full, to be thrown away."""
        try:
            with _seeded(0, self.parallel_state.device), torch.device("meta"):
                return _without_lazy(index, spec.build())
        except Exception:  # a constructor may look at its numbers in any way
            return self._build(index, spec)

    def _build(self, index: int, spec: LayerSpec) -> nn.Module:
        """The layer under its own seed, on the CPU."""
        try:
            with _seeded(self.base_seed + index, self.parallel_state.device):
                return _without_lazy(index, spec.build())
        except Exception as error:
            error.add_note(f"while building layer {index}, {spec!r}")
            raise

    def _find_ties(self, layers: Sequence[Layer]) -> dict[str, _Tie]:
        members: dict[str, list[tuple[int, TiedLayerSpec]]] = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, TiedLayerSpec):
                members.setdefault(layer.key, []).append((index, layer))
        return {key: self._tie(key, specs) for key, specs in members.items()}

    def _tie(self, key: str, specs: Sequence[tuple[int, TiedLayerSpec]]) -> _Tie:
        first, spec = specs[0]
        for index, other in specs:
            if len(other.tied_weight_attr) != len(spec.tied_weight_attr) or not spec.tied_weight_attr:
                raise ValueError(
                    f"layers {first} and {index} of key {key!r} must tie the same number of parameters, one at least; their "
                    f"tied_weight_attr are {list(spec.tied_weight_attr)} and {list(other.tied_weight_attr)}"
                )
        module = self._skeleton(first, spec)
        names = []
        for attribute in spec.tied_weight_attr:
            shared = _parameter_at(module, attribute, first)
            names.append(next(name for name, parameter in module.named_parameters() if parameter is shared))
        return _Tie(tuple(specs), tuple(f"layers.{first}.{name}" for name in names))

    def _build_chunk(self, stage: int, layers: Sequence[Layer], checkpoint_interval: int) -> LayerChunk:
        shared: dict[str, list[nn.Parameter]] = {}  # key -> this stage's copy of what the layers of that key share
        built: list[tuple[int, Callable[[Any], Any]]] = []
        for index in self.partition[stage]:
            layer = layers[index]
            if isinstance(layer, TiedLayerSpec):
                module = self._build_tied(index, layer, shared)
                layer = module if layer.forward_fn is None else _Applied(module, layer.forward_fn)
            elif isinstance(layer, LayerSpec):
                layer = self._build(index, layer)
            if isinstance(layer, nn.Module):
                layer.to(self.parallel_state.device)
            built.append((index, layer))
        tied = {
            id(parameter): name
            for key, parameters in shared.items()
            for parameter, name in zip(parameters, self._ties[key].names, strict=True)
        }
        first_copies = [name for name in tied.values() if self.tied_copies[name][0] == stage]
        return LayerChunk(stage, len(self.placement), built, tied, first_copies, checkpoint_interval)

    def _build_tied(self, index: int, spec: TiedLayerSpec, shared: dict[str, list[nn.Parameter]]) -> nn.Module:
        """A layer with its key's parameters in place of its own; the stage's first of that key brings them along."""
        module = self._build(index, spec)
        own = [_parameter_at(module, attribute, index) for attribute in spec.tied_weight_attr]
        first, first_spec = self._ties[spec.key].layers[0]
        if index == first:
            shared[spec.key] = own
        elif spec.key not in shared:
            source = self._build(first, first_spec)
            shared[spec.key] = [_parameter_at(source, attribute, first) for attribute in first_spec.tied_weight_attr]
        for attribute, mine, theirs in zip(spec.tied_weight_attr, own, shared[spec.key], strict=True):
            if mine.shape != theirs.shape:
                raise ValueError(
                    f"layers {first} and {index} of key {spec.key!r} tie {attribute!r}, but their shapes are "
                    f"{list(theirs.shape)} and {list(mine.shape)}"
                )
            _replace(module, mine, theirs)
        return module


def _parameter_at(module: nn.Module, attribute: str, index: int) -> nn.Parameter:
    """The parameter at a dotted path of attributes."""
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not any(found is parameter for parameter in module.parameters()):
        names = ", ".join(name for name, _ in module.named_parameters())
        raise ValueError(
            f"layer {index} ({type(module).__name__}) has no parameter {attribute!r} to tie; its parameters: {names}"
        )
    return found


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put one parameter wherever a module has another."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from `seed`, on the CPU unless a layer asks for its device, and leave torch's generators as they were."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _without_lazy(index: int, module: nn.Module) -> nn.Module:
    if any(is_lazy(tensor) for tensor in chain(module.parameters(), module.buffers())):
        raise ValueError(
            f"layer {index} ({type(module).__name__}) gets its shapes from its first input; give them when it is built"
        )
    return module


def _checked_layers(layers: Iterable[Layer] | nn.Sequential) -> list[Layer]:
    """The layers as a list.  Raises: as `PipelineModule`."""
    if not isinstance(layers, Iterable) or isinstance(layers, Mapping | nn.ModuleDict | str):
        raise TypeError(f"layers must be a list of layers or an nn.Sequential, got {_describe(layers)}")
    checked = list(layers)
    owners: dict[int, int] = {}
    for index, layer in enumerate(checked):
        if problem := _problem_with(layer):
            raise TypeError(f"layer {index} {problem}")
        if not isinstance(layer, nn.Module):
            continue
        for name, tensor in chain(_without_lazy(index, layer).named_parameters(), layer.named_buffers()):
            first = owners.setdefault(id(tensor), index)
            if first != index:
                raise ValueError(
                    f"layers {first} and {index} share {name!r}, which different ranks cannot; write both as "
                    "TiedLayerSpec with one key"
                )
    return checked


def _problem_with(layer: object) -> str:
    """Why something in the list is no layer; "" when it is one."""
    if isinstance(layer, PipelineModule | LayerChunk):
        return "is a pipeline itself; give its layers instead"
    if isinstance(layer, LayerSpec | nn.Module):
        return ""
    if isinstance(layer, type):
        name = layer.__name__
        return f"is the class {name} itself; write LayerSpec({name}, ...), or an object of it"
    owner = getattr(layer, "__self__", None)
    if isinstance(owner, nn.Module):
        return f"is a method of a {type(owner).__name__}, whose parameters nobody would train; give the module itself"
    return "" if callable(layer) else f"is {_describe(layer)}; a layer is a LayerSpec, an nn.Module or a callable"


def _matches(layers: Sequence[Layer], expression: str) -> list[int]:
    """1 for each layer whose name the expression finds, 0 for the others."""
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f'partition_method="type:{expression}" is no regular expression: {error}') from error
    found = [int(pattern.search(_name_of(layer)) is not None) for layer in layers]
    if not any(found):
        names = ", ".join(dict.fromkeys(map(_name_of, layers)))
        raise ValueError(f'partition_method="type:{expression}" matches none of the layers, which are {names}')
    return found


def _name_of(layer: object) -> str:
    """Name of a layer's class or function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, _Applied):
        return type(layer.module).__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def _describe(value: object) -> str:
    """A wrong value in a few words."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"


def _one_of(known: Iterable[str], word: str = "") -> str:
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it must be one of {', '.join(known)}"


def _schedule_kind(schedule: str | Schedule, virtual_stages: int) -> tuple[ScheduleKind, int]:
    """The kind of schedule, and its chunks per rank."""
    if not isinstance(schedule, Schedule) and schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; {_one_of(SCHEDULES, schedule)}")
    kind = GivenSchedule(schedule) if isinstance(schedule, Schedule) else SCHEDULES[schedule]
    return kind, kind.chunks_of(virtual_stages)


def _find_place(
    num_stages: int | None, topology: RankGrid | None, device: torch.device | None, state: ParallelState | None
) -> ParallelState:
    """The state that is given, if it agrees with the rest; else this rank among those of torch.distributed, or alone."""
    if topology is not None and not isinstance(topology, RankGrid):
        raise TypeError(f"topology must be a megazero RankGrid, got {_describe(topology)}; or leave it out")
    if state is not None:
        said = (
            ("topology", topology, state.grid),
            ("num_stages", num_stages, state.grid.pp),
            ("device", device, state.device),
        )
        for name, value, actual in said:
            if value not in (None, actual):
                raise ValueError(f"{name}={value}, but the parallel_state has {actual}; leave {name} out")
        return state
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized() and launched > 1:
        raise ValueError(
            f"{launched} ranks were started but torch.distributed does not know of them; call "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl") first, or "gloo" without CUDA'
        )
    if topology is not None and num_stages not in (None, topology.pp):
        raise ValueError(f"num_stages={num_stages}, but the topology has pp={topology.pp}; leave num_stages out")
    world = dist.get_world_size() if dist.is_initialized() else 1
    return parallel_state_of(topology or _grid(num_stages, world), device)


def _grid(num_stages: int | None, world: int) -> RankGrid:
    """So many pipeline stages; the rest of the world is data parallelism."""
    if num_stages is None:
        raise ValueError("num_stages, topology or parallel_state must say how many pipeline stages there are")
    if num_stages < 1 or world % num_stages:
        nearest = nearest_text(nearest_of(num_stages, divisors(world)))
        raise ValueError(f"num_stages={num_stages} must divide the world of {world} ranks; {nearest}")
    return RankGrid(pp=num_stages, dp=world // num_stages)
