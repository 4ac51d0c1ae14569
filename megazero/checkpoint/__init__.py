"""Checkpoints of training; and, for scripts, `megazero.checkpoint(function, *args)`: see `layers/checkpoint.py`.

The field has one word for both, and the call is what torch.utils and DeepSpeed have under it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package; a call of it is `checkpoint`."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return import_module("megazero.layers.checkpoint").checkpoint(function, *args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
