"""One TOML file is one run: its keys, its rules, and everything that is wrong with it at once."""

from megazero.config.document import check_regular, copy_aside, save_config, to_toml
from megazero.config.load import ResolvedRun, load_config, resolve
from megazero.config.schema import RunConfig
from megazero.settings import ConfigError

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
