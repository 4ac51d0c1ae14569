"""Makes DeepSpeed's modules, as scripts import them, from the tables in `names.toml`.

    megazero.deepspeed.runtime.utils    a module made from HOMES["runtime.utils"]; its names are imported on first use
    deepspeed.runtime.utils             the same module object, after a call of `stand_for_deepspeed`
    deepspeed.moe.layer.MoE             unsupported: the import succeeds, a call is an error

Imports of unsupported names succeed because scripts import at their top what only some of their options use.
"""

import sys
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

from megazero.deepspeed.names import HOMES, NAMES

_ROOM = "megazero.deepspeed"


def lookup(module: str, name: str) -> Any:
    """Return deepspeed.<module>.<name>.  `module` is "" for the package itself.  Raises: AttributeError."""
    path = f"{module}.{name}".lstrip(".")
    if name in _names_of(module):
        home, attribute = _names_of(module)[name]
        return getattr(import_module(home), attribute)
    if not name.startswith("__"):
        if _has_module(path):
            return import_module(f"{_ROOM}.{path}")
        if _is_unsupported(path):
            return _unsupported(path)
    raise AttributeError(_unknown(path))


def find_modules_of_the_mirror() -> None:
    """Let `import` find modules such as megazero.deepspeed.runtime.utils, for which there is no file."""
    sys.meta_path.append(_MirrorFinder())


def stand_for_deepspeed() -> None:
    """Let `import deepspeed`, and imports of its submodules, give this package, even if DeepSpeed is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _AliasFinder())


class _MirrorFinder(MetaPathFinder, Loader):
    """Makes the modules that `names.toml` describes; asked after Python's own finders."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if not fullname.startswith(_ROOM + "."):
            return None
        module = fullname.removeprefix(_ROOM + ".")
        if not (_has_module(module) or _is_unsupported(module)):
            raise ModuleNotFoundError(_unknown(module))
        return spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__.removeprefix(_ROOM + ".")
        module.__doc__ = f"The names of deepspeed.{path}; see docs/deepspeed.md."
        module.__getattr__ = partial(lookup, path)  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted([*vars(module), *_names_of(path)])  # type: ignore[method-assign]


class _AliasFinder(MetaPathFinder, Loader):
    """Gives the modules of this room under the name `deepspeed`."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        is_ours = fullname.partition(".")[0] == "deepspeed" and find_spec(f"megazero.{fullname}") is not None
        return spec_from_loader(fullname, self, is_package=True) if is_ours else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(f"megazero.{module.__name__}")

    def find_distributions(self, context: Any) -> list[Distribution]:
        """Return metadata of DeepSpeed, where transformers and accelerate look up its version."""
        return [_Metadata()] if context.name == "deepspeed" else []


class _Metadata(Distribution):
    """The metadata of `deepspeed` for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        return f"Name: deepspeed\nVersion: {import_module(_ROOM).__version__}" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class _Unsupported(type):
    """The class of unsupported names: they can be imported and have attributes, but cannot be called."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(cls.mro()[-2].__doc__)  # of a subclass, too

    __iter__ = __getitem__ = __index__ = __float__ = __call__  # of an enumeration, a table, a constant

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unsupported(f"{cls.__module__}.{cls.__name__}.{name}".removeprefix("deepspeed."))


@cache
def _unsupported(path: str) -> type:
    module, _, name = f"deepspeed.{path}".rpartition(".")
    text = f"megazero does not support deepspeed.{path}; docs/deepspeed.md says what to use instead"
    return _Unsupported(name, (), {"__module__": module, "__doc__": text})


@cache
def _names_of(module: str) -> dict[str, tuple[str, str]]:
    """Return the public names of a module, with the (module, attribute) of each."""
    found = {}
    for home, names in HOMES.get(module, {}).items():
        for name in names.split():
            public, _, attribute = name.partition("=")
            found[public] = (home if home.startswith("megazero.") else f"{_ROOM}.{home}", attribute or public)
    return found


def _has_module(path: str) -> bool:
    return any(f"{module}.".startswith(f"{path}.") for module in HOMES)


@cache
def _is_unsupported(path: str) -> bool:
    """Return whether a pattern names it, or a module that it is in."""
    words = path.split(".")
    parents = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    return any(fnmatchcase(parent, pattern) for parent in parents for pattern in NAMES["unsupported"].split())


def _unknown(path: str) -> str:
    return f"megazero has no deepspeed.{path}; docs/deepspeed.md lists what it has of DeepSpeed's names"
