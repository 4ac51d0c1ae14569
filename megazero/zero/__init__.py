"""ZeRO: state sharded over data-parallel ranks.  For scripts: `Init` and `gathered_parameters`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero.zero.full_params import gathered_parameters
    from megazero.zero.meta_init import Init

_HOME = {"Init": "megazero.zero.meta_init", "gathered_parameters": "megazero.zero.full_params"}
__all__ = ["Init", "gathered_parameters"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module megazero.zero has no attribute {name!r}")
