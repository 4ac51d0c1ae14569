"""Names that come from a user's file: registries to look them up in, and answers to names that do not exist.

    SCHEDULES.register("mine", Mine())       then, in the run file:  parallel.schedule = "mine"

There is one registry for model families, one for schedules, optimizers, learning-rate schedules and callbacks.  The
package's own implementations are listed by import path and imported on first use, so that reading a run file stays fast.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
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
        kind: "module:attribute" of the class of which implementations are instances; without one they are functions.
    """

    def __init__(self, what: str, built_in: Mapping[str, str], kind: str = "") -> None:
        self.what, self._kind = what, kind
        self._built_in = dict(built_in)
        self._registered: dict[str, T] = {}

    def register(self, name: str, value: T) -> T:
        """Add an implementation under a new name.  The same one again is harmless.

        Raises:
            TypeError: it is something else.
            ValueError: the name is taken by another one.
        """
        if not (isinstance(value, _imported(self._kind)) if self._kind else callable(value)):
            wanted = f"an instance of {self._kind.partition(':')[2]}" if self._kind else "a function or a class"
            raise TypeError(f"{self.what} {name!r} must be {wanted}, got {value!r}")
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
            self._registered[name] = _imported(self._built_in[name])
        if name not in self._registered:
            raise UnknownNameError(f"unknown {self.what} {name!r}: {self.hint(name)}")
        return self._registered[name]

    def hint(self, name: str) -> str:
        """What to write instead of a name that does not exist."""
        return did_you_mean(closest(name, self), f"there are {', '.join(self)}")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._built_in or name in self._registered)

    def __iter__(self) -> Iterator[str]:
        """The names: those of the package first, then those that were added."""
        return iter(dict.fromkeys([*self._built_in, *self._registered]))


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class NameIn:
    """The type of a key that names something registered: `Annotated[str, NameIn(SCHEDULES)]`."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Editors complete the names that there are, and take any other: a script may register it."""
        return {"anyOf": [{"type": "string", "enum": list(self.registry)}, handler(schema)]}

    def _check(self, value: object) -> object:
        names = list(self.registry)
        if value not in names:
            shown = [f'"{name}"' for name in names]
            raise PydanticCustomError("name", f"be {', '.join(shown[:-1])} or {shown[-1]}", {"choices": names})
        return value


def closest(word: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Find the names most like a misspelt one, the likeliest first; case does not matter, nor _ for -.

    A word that two names share, as num_experts and num_layers do, makes them no more alike.  Of names that are equally
    alike, those with the same first letter are likelier: cpp means cp, not pp.
    """
    by_plain = {name.lower().replace("_", "-"): name for name in known}
    plain = word.lower().replace("_", "-")

    def likeness(name: str) -> tuple[float, bool]:
        return SequenceMatcher(None, name, plain).ratio(), name[:1] == plain[:1]

    similar = sorted(get_close_matches(plain, by_plain, n=n + 3, cutoff=cutoff), key=likeness, reverse=True)
    return [by_plain[name] for name in similar if _is_like(plain, name)][:n]


def _is_like(a: str, b: str) -> bool:
    shared = {*a.split("-")} & {*b.split("-")}
    a, b = ("-".join(part for part in name.split("-") if part not in shared) for name in (a, b))
    return not (a and b) or SequenceMatcher(None, a, b).ratio() >= (0.5 if shared else 0.65)


def did_you_mean(names: Sequence[str], otherwise: str = "") -> str:
    """Say which names were probably meant; where there is none, say something else."""
    return f"did you mean {' or '.join(names)}?" if names else otherwise


def unknown_name(what: str, name: str, known: Collection[str]) -> ValueError:
    """Make the error for a name that is not among the known ones; `what` is named, as in "optimizer type"."""
    hint = did_you_mean(closest(name, known, n=2))
    return ValueError(f"unknown {what} {name!r}: {f'{hint} There' if hint else 'there'} are {', '.join(sorted(known))}")


def keywords_of(factory: Callable[..., Any], *, positional: int = 0) -> dict[str, Parameter]:
    """Keywords that a constructor takes, after its first `positional` arguments."""
    named = [p for p in signature(factory).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {parameter.name: parameter for parameter in named[positional:]}


def check_keywords(what: str, keywords: Collection[str], known: dict[str, Parameter]) -> None:
    """Refuse keywords that a constructor does not have, and the lack of those that must be given.

    Args:
        what: what takes them, as in "WarmupLR".
        keywords: as written in a user's file.
        known: from `keywords_of`.

    Raises:
        ValueError: naming every such keyword, with a guess at what was meant.
    """
    problems = []
    for keyword in keywords:
        if keyword not in known:
            hint = did_you_mean(closest(keyword, known))
            problems.append(f"{what} has no parameter {keyword!r}" + (f" ({hint})" if hint else ""))
    for name, parameter in known.items():
        if parameter.default is Parameter.empty and name not in keywords:
            problems.append(f"{what} needs the parameter {name!r}")
    if problems:
        raise ValueError(f"{'; '.join(problems)}. Its parameters are {', '.join(known)}")
