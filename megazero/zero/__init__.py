"""ZeRO: state sharded over data-parallel ranks.  For scripts: `Init` and `gathered_parameters`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero.zero.deferred import Init
    from megazero.zero.gathered import gathered_parameters

_HOME = {"Init": "megazero.zero.deferred", "gathered_parameters": "megazero.zero.gathered"}
__all__ = ["Init", "gathered_parameters"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module megazero.zero has no attribute {name!r}")
