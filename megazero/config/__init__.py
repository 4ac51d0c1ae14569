"""The run file: one TOML file is one run.  Its keys, the rules between them, and a report of all problems at once.

Only the classes of a run are imported here; the functions that read and check run files are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megazero.config.derive import ResolvedRun
from megazero.config.schema import RunConfig
from megazero.settings import ConfigError

if TYPE_CHECKING:
    from megazero.config.load import load_config, resolve

__all__ = ["ConfigError", "ResolvedRun", "RunConfig", "load_config", "resolve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("megazero.config.load"), name)
