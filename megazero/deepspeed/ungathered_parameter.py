"""A proxy that takes the place of a parameter in its module while stage 3 has not gathered it.

The proxy has the parameter's shape, dtype and device, but no values.  Code that reads it outside its unit's forward (a
tied output projection, `state_dict`, a penalty on weights) gets a whole copy, gathered for this use, through which
gradients flow.  Code that would change it gets an error, since the change of a copy would be lost.  While `whole` is set,
the proxy stands for that tensor, which may be changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from megazero.deepspeed.names import NAMES

Gather: TypeAlias = Callable[[], Tensor]

_METADATA = frozenset(NAMES["ungathered"]["metadata"].split())
_VIEWS = frozenset(NAMES["ungathered"]["views"].split())
_VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}  # attributes that are tensors; others describe the parameter
_CHANGES = {"__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


class _GatherWhole(torch.autograd.Function):
    """A whole copy of a parameter; its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gather: Gather) -> Tensor:
        return gather()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class UngatheredParameter(nn.Parameter):
    """The proxy of a parameter while its weights are sharded over the ranks."""

    label: str
    stands_for: nn.Parameter
    whole_copy: Gather
    whole: Tensor | None

    @staticmethod
    def of(name: str, parameter: nn.Parameter, gather: Gather) -> UngatheredParameter:
        """Return the proxy of a parameter.

        Args:
            name: qualified name, for errors.
            gather: returns a whole copy; collective over the ranks that share the weights.
        """
        device = parameter.device
        with torch._C._DisableTorchDispatch():  # of a mode's own tensors there are no others
            empty = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            made: UngatheredParameter = torch.Tensor._make_subclass(UngatheredParameter, empty, parameter.requires_grad)
        made.label, made.stands_for, made.whole_copy, made.whole = name, parameter, gather, None
        return made

    def restore(self) -> nn.Parameter:
        """Return the parameter with whole values in its own memory.  The proxy stands for it from now on.  Collective."""
        if self.whole is not self.stands_for:
            self.stands_for.data = self.whole_copy()
            self.whole = self.stands_for
        return self.stands_for

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a new parameter with the whole values."""
        copied = memo[id(self)] = nn.Parameter(self.whole_copy(), requires_grad=self.requires_grad)
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0911
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is torch.autograd.grad:  # the parameter is what a graph knows
            return func(*_pytree.tree_map(real, args), **_pytree.tree_map(real, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            is_open = any(opened(leaf) is not leaf for leaf in _pytree.tree_leaves((args, kwargs)))
        if is_open:
            return func(*_pytree.tree_map(opened, args), **_pytree.tree_map(opened, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            field = func.__self__.__name__ if name == "__get__" else None
            asks_type = name == "type" and len(args) + len(kwargs) == 1  # with a dtype it converts the values
            if asks_type or name in _METADATA or (field is not None and field not in _VALUES):
                return func(*args, **kwargs)
            if name in ("__repr__", "__format__"):
                return f"UngatheredParameter({args[0].label}, {list(args[0].shape)}, {args[0].dtype})"
            if name == "__set__" and func.__self__.__name__ == "grad" and args[1] is None:
                return None  # as zero_grad does; the engine has taken the gradient
            if name == "requires_grad_" or (name == "__set__" and func.__self__.__name__ == "requires_grad"):
                func(args[0].stands_for, *args[1:], **kwargs)  # what the forward uses; the end of a step checks it
                return func(*args, **kwargs)
            _refuse_change(cls, name, args, kwargs)
            if name == "__set__" and not isinstance(args[0], cls):
                raise RuntimeError("an ungathered parameter cannot be made another tensor's data; gather it first")
            result = func(*_pytree.tree_map(_whole, args), **_pytree.tree_map(_whole, kwargs))
            if field is None and name not in _VIEWS:
                return result
            label = next(leaf.label for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            return _ReadOnly.of(result, label)


class _ReadOnly(Tensor):
    """A view of a whole copy.  It refuses changes such as `p.data.mul_(2)`, which are meant for the parameter."""

    label: str

    @staticmethod
    def of(result: Any, label: str) -> Any:
        """Return a result in which tensors refuse changes."""
        if not isinstance(result, Tensor):
            return result
        made = result.as_subclass(_ReadOnly)
        made.label = label
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name not in ("__set__", "register_hook"):
                _refuse_change(cls, name, args, kwargs)
            if UngatheredParameter in types:  # its values are to be gathered first
                return UngatheredParameter.__torch_function__(func, types, args, kwargs)
            result = func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, cls) and name in _VIEWS:
            return cls.of(result, first.label)
        return _pytree.tree_map(_plain, result)


def real(value: Any) -> Any:
    """Return the parameter of a proxy; return any other value unchanged."""
    return value.stands_for if isinstance(value, UngatheredParameter) else value


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, _ReadOnly) else value


def _refuse_change(cls: type[UngatheredParameter | _ReadOnly], name: str, args: Any, kwargs: Any) -> None:
    """Raises: RuntimeError, the function changes a tensor of this class in place."""
    in_place = name.endswith("_") and not name.endswith("__")  # with _foreach_mul_ and its like
    changes = in_place or name in _CHANGES or name.startswith("register_")
    for leaf in _pytree.tree_leaves((args[:1] if changes else (), kwargs.get("out"))):
        if isinstance(leaf, cls):
            raise RuntimeError(f"{name} on {leaf.label}, whose weights are spread over ranks; use GatheredParameters")


def opened(value: Any) -> Any:
    """Return the whole tensor of a proxy within GatheredParameters; return any other value unchanged."""
    return value if not isinstance(value, UngatheredParameter) or value.whole is None else value.whole


def _whole(value: Any) -> Any:
    if not isinstance(value, UngatheredParameter):
        return value
    return _GatherWhole.apply(value.stands_for, value.whole_copy)
