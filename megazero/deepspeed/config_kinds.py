"""What a key of a DeepSpeed configuration is: the type and range that it takes, and what becomes of it.

    integer(1)       1, 8               not true, not 8.0, not "8"        "integer >= 1"
    SIZE             500000000, 5e8     not 1.5                           "integer >= 0, also written as 5e8"
    words("a", "b")  "a", "A"           not "c"                           "a" or "b"

JSON has one type of number, and configurations write numbers of elements as 5e8; everything else is strict.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Literal

from megazero.settings import LARGEST_COUNT

Base = Literal["", "boolean", "integer", "size", "number", "string", "list", "table", "anything"]
_TYPES: dict[Base, type | tuple[type, ...]] = {
    "": (),
    "boolean": bool,
    "integer": int,
    "size": int,
    "number": (),
    "string": str,
    "list": (list, tuple),
    "table": Mapping,
    "anything": object,
}
_INFINITE = 1e300
_NAMES = {"boolean": "true or false", "size": "integer", "anything": "any value"}


@dataclass(frozen=True)
class Kind:
    """The values that a key takes."""

    base: Base = ""
    """The type; empty where only `choices` are taken."""
    low: float | None = None
    """Smallest number that is taken."""
    high: float | None = None
    """Largest number that is taken."""
    choices: tuple[object, ...] = ()
    """Values taken beside those of the type; the case of letters does not matter."""

    def accepts(self, value: object) -> bool:
        """Tell whether a value, as JSON gives it, may stand there."""
        return self._choice(value) is not None or (self._is_of_base(value) and self._is_in_range(value))

    def canonical(self, value: object) -> object:
        """Give an accepted value as the rest of the program reads it: 5e8 as an integer, words as documented."""
        if (choice := self._choice(value)) is not None:
            return choice[0]
        return int(value) if self.base == "size" and isinstance(value, float) else value

    def __str__(self) -> str:
        parts = [json.dumps(choice) for choice in self.choices]
        if self.base:
            signs = [] if self.low is None else [f">= {self.low:g}"]
            signs += [] if self.high in (None, LARGEST_COUNT) else [f"<= {self.high:g}"]
            name = " ".join([_NAMES.get(self.base, self.base), *([" and ".join(signs)] if signs else [])])
            parts.insert(0, name + (", also written as 5e8" if self.base == "size" else ""))
        return " or ".join(parts)

    def must(self) -> str:
        """Say what a value must be."""
        article = {"integer": "an ", "size": "an ", "number": "a ", "string": "a ", "list": "a ", "table": "a "}
        return f"must be {article.get(self.base, '')}{self}"

    def near(self, value: object) -> list[object]:
        """Give accepted values near one that is not: the same in another type, a neighbour, the most similar word."""
        found: list[object] = []
        if isinstance(value, str):
            with suppress(ValueError):
                found.append(json.loads(value.lower()))
            close = get_close_matches(value.lower(), [c for c in self.choices if isinstance(c, str)], n=1)
            found += close
        elif isinstance(value, float) and math.isfinite(value):
            found += sorted({math.floor(value), math.ceil(value)})
        elif isinstance(value, int) and self.base == "boolean" and value in (0, 1):
            found.append(bool(value))
        if self.base == "list":
            found.append([value])
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers = [choice for choice in self.choices if isinstance(choice, int)]
            bounds = [bound for bound in (self.low, self.high, *numbers) if bound is not None]
            found += [int(bound) for bound in sorted(bounds, key=lambda bound: abs(bound - value))[:1]]
        return [candidate for candidate in found if self.accepts(candidate)]

    def _choice(self, value: object) -> tuple[object] | None:
        """Find a value among the choices; in a tuple, since null may be one."""
        wanted = value.lower() if isinstance(value, str) else value
        for choice in self.choices:
            if type(choice) is type(wanted) and choice == wanted:
                return (choice,)
        return None

    def _is_of_base(self, value: object) -> bool:
        if isinstance(value, bool):  # before int: True is an int in Python
            return self.base in ("boolean", "anything")
        if isinstance(value, float) and self.base == "size":
            return value.is_integer()
        if isinstance(value, int | float) and self.base == "number":
            return abs(value) < _INFINITE
        return isinstance(value, _TYPES[self.base])

    def _is_in_range(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def integer(low: int | None = None, high: int | None = None, *choices: object) -> Kind:
    """Give the kind of an integer between two bounds, which are taken too."""
    return Kind("integer", low, high, choices)


def words(*choices: object) -> Kind:
    """Give the kind of a value that is one of a few, strings in lower case."""
    return Kind(choices=choices)


BOOLEAN = Kind("boolean")
COUNT = integer(1, LARGEST_COUNT)
WHOLE = integer(0)
SIZE = Kind("size", 0)
NUMBER = Kind("number")
NOT_NEGATIVE = Kind("number", 0)
SHARE = Kind("number", 0, 1)
STRING = Kind("string")
LIST = Kind("list")
TABLE = Kind("table")
ANYTHING = Kind("anything")


class KeyStatus(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"
    FOLLOWS = "follows"


@dataclass(frozen=True)
class Key:
    """One key of one block."""

    name: str
    """Its name within the block, with dots where it lies deeper."""
    kind: Kind
    default: object
    """What DeepSpeed documents; None where there is no value, and then null is taken too."""
    fate: KeyStatus
    text: str
    """Honoured: into which setting. No effect or refused: why. Follows: the key that it goes with."""
    harmless: tuple[object, ...] = ()
    """Refused: values beside the default that ask for nothing."""


@dataclass(frozen=True)
class Block:
    """The keys below one table of the configuration."""

    path: str
    """The table, from the top; empty for the top itself."""
    title: str
    keys: tuple[Key, ...]


def block(path: str, *keys: Key, title: str = "") -> Block:
    """Describe a table; its title is its path unless there is a better one."""
    return Block(path, title or path, keys)


def honoured(name: str, kind: Kind, default: object, text: str) -> Key:
    """Describe a key that sets something."""
    return Key(name, kind, default, KeyStatus.HONOURED, text)


def no_effect(name: str, kind: Kind, default: object, text: str) -> Key:
    """Describe a key that tunes what is done another way here."""
    return Key(name, kind, default, KeyStatus.NO_EFFECT, text)


def refused(name: str, kind: Kind, default: object, text: str, harmless: tuple[object, ...] = ()) -> Key:
    """Describe a key that cannot be ignored silently."""
    return Key(name, kind, default, KeyStatus.REFUSED, text, harmless)


def follows(switch: str, *rows: tuple[str, Kind, object]) -> tuple[Key, ...]:
    """Describe keys that say how to do what another key of the block asks for."""
    return tuple(Key(name, kind, default, KeyStatus.FOLLOWS, switch) for name, kind, default in rows)
