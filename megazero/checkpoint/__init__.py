"""Checkpoints of training; and, for scripts, `megazero.checkpoint(function, *args)`, which recomputes in the backward.

    y = megazero.checkpoint(block, x)
    y = megazero.checkpoint(function, x, scale=2.0)

The call returns what `function(*args, **kwargs)` returns, and keeps only its arguments; it is `checkpoint` of this package
too, whose help says more.  The field has one word for both, and the call is what torch.utils and DeepSpeed have under it.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from megazero.registry import added_name


class _CallablePackage(ModuleType):
    """This package; a call of it is `checkpoint`."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # a module may hold the call, and be copied or saved
        return import_module, (self.__name__,)


def __getattr__(name: str) -> Any:
    return added_name(__name__, name)


sys.modules[__name__].__class__ = _CallablePackage
