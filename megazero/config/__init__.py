"""One TOML file is one run: its keys, its rules, and everything that is wrong with it at once.

Only what a run is gets imported here.  What reads and checks run files is imported when first used.
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
