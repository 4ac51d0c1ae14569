"""One TOML file is one run: its keys, its rules, and everything that is wrong with it at once.

Only what a run is gets imported here.  What reads, checks and writes run files is imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megazero.config.derive import ResolvedRun
from megazero.config.schema import RunConfig
from megazero.settings import ConfigError

if TYPE_CHECKING:
    from megazero.config.document import check_regular, copy_aside, save_config, to_toml
    from megazero.config.load import load_config, resolve

__all__ = [
    "ConfigError",
    "ResolvedRun",
    "RunConfig",
    "check_regular",
    "copy_aside",
    "load_config",
    "resolve",
    "save_config",
    "to_toml",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        import_module(f"megazero.config.{'load' if name in ('load_config', 'resolve') else 'document'}"), name
    )
