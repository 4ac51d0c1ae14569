"""Names that a run file may use, and that a script may add to without editing the package.

    SCHEDULES.register("mine", Mine())       then, in the run file:  parallel.schedule = "mine"

There is one registry for model families, one for schedules, optimizers, learning-rate schedules and callbacks.  The
package's own implementations are listed by import path and imported on first use, so that reading a run file stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")


class UnknownNameError(KeyError):
    """A name that nothing is registered under; the text says which names there are."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(Generic[T]):
    """Implementations by name.

    Args:
        what: what is registered, for messages: "schedule".
        built_in: by name, "module:attribute" of the package's own implementation.
    """

    def __init__(self, what: str, built_in: Mapping[str, str]) -> None:
        self.what = what
        self._built_in = dict(built_in)
        self._registered: dict[str, T] = {}

    def register(self, name: str, value: T) -> T:
        """Add an implementation under a new name.  The same one again is harmless.

        Raises:
            ValueError: the name is taken by another one.
        """
        if name in self._built_in or self._registered.get(name, value) is not value:
            raise ValueError(f"{self.what} {name!r} is already registered; choose another name")
        self._registered[name] = value
        return value

    def is_built_in(self, name: str) -> bool:
        """Whether a name is the package's own."""
        return name in self._built_in

    def __getitem__(self, name: str) -> T:
        """Raises: UnknownNameError, with the name that was probably meant."""
        if name in self._built_in and name not in self._registered:
            module, _, attribute = self._built_in[name].partition(":")
            self._registered[name] = getattr(import_module(module), attribute)
        if name not in self._registered:
            raise UnknownNameError(f"unknown {self.what} {name!r}: {self.hint(name)}")
        return self._registered[name]

    def hint(self, name: str) -> str:
        """What to write instead of a name that does not exist."""
        by_lower = {known.lower().replace("_", "-"): known for known in self}
        close = get_close_matches(name.lower().replace("_", "-"), by_lower, n=1)
        return f"did you mean {by_lower[close[0]]!r}?" if close else f"there are {', '.join(self)}"

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._built_in or name in self._registered)

    def __iter__(self) -> Iterator[str]:
        """The names: those of the package first, then those that were added."""
        return iter(dict.fromkeys([*self._built_in, *self._registered]))


@dataclass(frozen=True)
class NameIn:
    """The type of a key that names something registered: `Annotated[str, NameIn(SCHEDULES)]`."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if value not in self.registry:
            names = list(self.registry)
            shown = [f'"{name}"' for name in names]
            raise PydanticCustomError("name", f"be {', '.join(shown[:-1])} or {shown[-1]}", {"choices": names})
        return value
