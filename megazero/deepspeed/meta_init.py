"""Builds models that are too large for one host: parameters without memory, which record their initialisation.

    with zero.Init():                       torch.empty / ones / randn ...   -> recorded, and the memory is freed
        model = Net()                       uniform_, normal_, fill_ ...     -> recorded, parameter by parameter
    initialize(model=model, ...)            replays the operations on one parameter after another, and keeps its shard

A replay is seeded by (seed, name of the parameter), so the initial weights are the same on every shape.  Buffers are built
as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from megazero.deepspeed.names import NAMES
from megazero.deepspeed.script_values import DeferredValues
from megazero.layers.counter_rng import derive_key
from megazero.zero.units import ModelParam

_FACTORIES = frozenset(NAMES["init"]["factories"].split())
_METADATA = frozenset(NAMES["init"]["metadata"].split())
_VALUES = {"data", "T", "mT"}
_OTHERS = frozenset(NAMES["init"]["arguments"].split())
_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "numpy"}


@dataclass
class _History:
    """The operations on one parameter, in order: (function, arguments, keywords, number of the result)."""

    make: Callable[[], Tensor]
    steps: list[tuple[Any, Any, Any, int]] = field(default_factory=list)
    # Where random numbers begin anew: (steps before it, identity).  Copies share those before they were copied.
    draws: list[tuple[int, object]] = field(default_factory=lambda: [(0, object())])

    def copy(self) -> _History:
        """Return a copy that shares the operations so far and records its own from now on."""
        return _History(self.make, list(self.steps), [*self.draws, (len(self.steps), object())])


@dataclass(frozen=True)
class _Result:
    """The result of an earlier step of a history; 0 is the parameter."""

    number: int


class MetaParameter(nn.Parameter):
    """A parameter on the meta device that records the operations on it."""

    history: _History
    number: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__set__" and func.__self__.__name__ == "data":
                raise RuntimeError("under zero.Init change a parameter's values in place, not by assigning to .data")
            if name in _READS:
                raise RuntimeError(f"{name}: under zero.Init no values are known; change the model before it")
            is_field = name in ("__get__", "__set__") and func.__self__.__name__ not in _VALUES
            if is_field or name in _METADATA:
                return func(*args, **kwargs)
            histories = {id(leaf.history): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)}
            if len(histories) > 1:
                raise RuntimeError(f"{name} mixes two parameters, and zero.Init replays each alone; build without it")
            history = next(iter(histories.values())).history
            changed = (kwargs or {}).get("out", args[0] if args and _changes_first(name) else None)
            if isinstance(changed, Tensor) and not isinstance(changed, cls):
                raise RuntimeError(f"{name} copies a parameter's values, which are not known under zero.Init")
            number = len(history.steps) + 1
            history.steps.append((func, tree_map(_record, args), tree_map(_record, kwargs), number))
            with torch.no_grad():
                result = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
            target = args[0] if args else None
            if isinstance(target, cls) and _changes_first(name) and not name.startswith("__"):
                return target  # in place: the same object
            return tree_map_only(Tensor, lambda value: _proxy(value, history, number, False), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> MetaParameter:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = _proxy(self.data, self.history.copy(), self.number, self.requires_grad)
        copied: MetaParameter = memo[id(self)]
        return copied

    def replay(self, seed: int, keys: Mapping[object, str]) -> Tensor:
        """Compute the initial values on the CPU.

        Args:
            seed: seed of the run.
            keys: by draw, the name that is combined with `seed`.
        """
        (_, first), *others = [(steps, derive_key(seed, keys[draw]) % 2**63) for steps, draw in self.history.draws]
        draws = dict(others)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch.manual_seed(first)
            results: dict[int, Any] = {0: self.history.make()}

            def recall(value: Any) -> Any:
                return results[value.number] if isinstance(value, _Result) else value

            for func, args, kwargs, number in self.history.steps:
                if number - 1 in draws:
                    torch.manual_seed(draws[number - 1])
                results[number] = func(*tree_map(recall, args), **tree_map(recall, kwargs))
            values: Tensor = results[self.number]
        return values


def deferred_values(params: Sequence[ModelParam], seed: int) -> DeferredValues:
    """Return a function that replays a parameter built under `Init`, once, with the run's seed."""
    recorded = {info.name: info.parameter for info in params if isinstance(info.parameter, MetaParameter)}
    keys: dict[object, str] = {}  # what copies share has the key of the first
    for name, parameter in recorded.items():
        for copies, (_, draw) in enumerate(parameter.history.draws):
            keys.setdefault(draw, f"{name} after {copies} copies" if copies else name)

    def replay(name: str) -> Tensor | None:
        parameter = recorded.pop(name, None)
        return None if parameter is None else parameter.replay(seed, keys)

    return replay


def _proxy(meta: Tensor, history: _History, number: int, requires_grad: bool) -> MetaParameter:
    made: MetaParameter = torch.Tensor._make_subclass(MetaParameter, meta.detach(), requires_grad)
    made.history, made.number = history, number
    return made


def _changes_first(name: str) -> bool:
    """Return whether a function changes its first argument in place."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _record(value: Any) -> Any:
    """Return what is recorded of an argument.  Tensors are copied, since the script may reuse their memory."""
    if isinstance(value, MetaParameter):
        return _Result(value.number)
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) and not value.is_meta else value


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta") if not isinstance(value, MetaParameter) else value.as_subclass(Tensor)
    return value


class Init(TorchFunctionMode):
    """Builds modules without memory for their parameters, in a `with` block.  Pass them to `initialize` on every rank.

    Before that, nothing may read the parameters.

    Args:
        module: a module that is built already; `initialize` shards it as it is.
        enabled: with False, modules are built as usual.
        others: DeepSpeed's further arguments, which have no effect: `initialize` reads the configuration, and parameters
            have no memory before it.

    Raises:
        ValueError: quantized weights are requested.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **others: Any) -> None:
        if unknown := others.keys() - _OTHERS:
            raise TypeError(f"zero.Init has no argument {', '.join(sorted(unknown))}")
        if others.get("zero_quantized_weights") or others.get("zero_quantized_nontrainable_weights"):
            raise ValueError("zero.Init quantizes no weights; write zero_quantized_weights in the configuration")
        super().__init__()
        self._enabled = enabled
        self._made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}  # by storage, the last factory call's result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._made and name not in _METADATA | {"__get__"}:
            for tensor in tensors:  # its values may change after it was made
                if not isinstance(tensor, MetaParameter):
                    self._made.pop(_storage_of(tensor), None)
        result = func(*args, **kwargs)
        if name in _FACTORIES and type(result) is Tensor and result.is_floating_point() and not tensors:
            self._made = {_storage_of(result): (result, lambda: func(*args, **kwargs))}
        return result

    def __enter__(self) -> Init:
        if self._enabled:
            self._hook = nn.modules.module.register_module_parameter_registration_hook(self._defer)  # type: ignore[arg-type]
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._enabled:
            return
        super().__exit__(*error)
        self._hook.remove()
        self._made.clear()

    def _defer(self, _: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        made = self._made.get(_storage_of(parameter))
        # values that were computed by other means must stay in memory
        make = made[1] if made is not None and made[0]._version == 0 else parameter.detach().clone().clone
        return _proxy(parameter.data.to("meta"), _History(make), 0, parameter.requires_grad)


def _storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory; 0 if its layout is not strided.  No mode sees the call."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
