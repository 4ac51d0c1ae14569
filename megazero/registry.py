"""What the package can be extended by: things that a run file names, and that a script may add.

    SCHEDULES.register("mine", Mine())       then, in the run file:  parallel.schedule = "mine"

Each room has its own registry: model families, schedules, optimizers, learning-rate schedules, callbacks.  What the package
itself brings is listed by import path and imported when it is first asked for, so that reading a run file stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownNameError(KeyError):
    """A name that nothing is registered under; the text says which names there are."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(Generic[T]):
    """Implementations by name.

    Args:
        what: what is registered, for messages: "schedule".
        built_in: by name, "module:attribute" of what the package brings.
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
        return name in self._built_in or name in self._registered

    def __iter__(self) -> Iterator[str]:
        """The names: those of the package first, then those that were added."""
        return iter(dict.fromkeys([*self._built_in, *self._registered]))
