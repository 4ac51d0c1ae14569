"""Registries of names that scripts and annexes add, and suggestions for misspelt names.

    SCHEDULES.register("mine", Mine())       then, in the run file:  parallel.schedule = "mine"

There is one registry for model families, one for schedules, optimizers, learning-rate schedules and callbacks.  The
package's own implementations are listed by import path and imported on first use, so that reading a run file stays fast.

An annex is a room that no training needs.  It adds commands, callbacks or readers of checkpoints to the trunk:

    megazero/plan/annex.toml   [command]
                               plan = "megazero.plan.commands:plan"
                                 |
    added("command")  <----------+     every room with an `annex.toml` adds to a seam, by name

The trunk imports no annex: it asks a seam, and trains the same where nothing was added to it.

    seam             what is added                                                                      asked by
    command          a command of the command line, or a group of commands (`typer.Typer`)              cli
    checkpoint command   a command of `megazero checkpoint`                                             cli
    check            (ResolvedRun, gpu, device_gib, ranks of a node) -> Schedule -> `check.DeviceNeeds` cli
    context          (ResolvedRun, document lengths of some samples | None) -> lines of `check` on attention   training
    export           (step, out, dtype, names) -> `Exported`, by the form that --to names                cli
    token file       (path, cache, Tokenizer, log) -> prefix of a pair with its tokens, by suffix                  data
    start line       (ResolvedRun, Schedule, torch.device) -> a line for the terminal                   training
    callback         RunContext -> Callback, after the metrics are written             training
    out of memory    (error, ResolvedRun, ParallelState, Engine | None) -> text                         training
    peak FLOP/s      (name of a CUDA device, dtype) -> number | None                                    training
    backend          (Axis, Group, gather) -> `Backend` of tensors on a type of device, as by "cpu"              comm
    messages         () -> `Messages` of a run on a type of device                                      comm
    sharding plan    (`ShardingPlan` of a run on a type of device, world) -> another one               zero
    rank             ranks of this host -> None, before a rank on a type of device makes process groups    comm
    kernel           () -> a kernel that is faster on this machine than torch's, or None, by what it computes   layers
    name             what a script finds in a module of the trunk, by its full name                     megazero, pipe, zero
"""

import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class UnknownNameError(KeyError):
    """Nothing is registered under this name; the message lists the known names."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(Generic[T]):
    """Implementations by name.

    Args:
        what: the noun for messages, such as "schedule".
        built_in: "module:attribute" of the package's own implementations, by name.
        base: "module:attribute" of the base class of what is registered; "" for functions.
    """

    def __init__(self, what: str, built_in: Mapping[str, str], base: str = "") -> None:
        self.what, self._base = what, base
        self._built_in = dict(built_in)
        self._registered: dict[str, T] = {}

    def register(self, name: str, value: T) -> T:
        """Register an implementation under a new name.  Registering the same value again has no effect.

        Raises:
            TypeError: `value` is no such implementation.
            ValueError: another implementation has this name.
        """
        if not (isinstance(value, _imported(self._base)) if self._base else callable(value)):
            wanted = f"an instance of {self._base.partition(':')[2]}" if self._base else "a function or a class"
            raise TypeError(f"{self.what} {name!r} must be {wanted}, got {value!r}")
        if name in self._built_in or self._registered.get(name, value) is not value:
            raise ValueError(f"{self.what} {name!r} is already registered; choose another name")
        self._registered[name] = value
        return value

    def is_built_in(self, name: str) -> bool:
        """Whether the package itself registers this name."""
        return name in self._built_in

    def __getitem__(self, name: str) -> T:
        """Return the implementation, importing it if needed.  Raises: UnknownNameError, with a suggestion."""
        if name in self._built_in and name not in self._registered:
            self._registered[name] = _imported(self._built_in[name])
        if name not in self._registered:
            raise UnknownNameError(f"unknown {self.what} {name!r}: {self.hint(name)}")
        return self._registered[name]

    def hint(self, name: str) -> str:
        """Return a suggestion in place of a name that does not exist."""
        return did_you_mean(closest(name, self), f"there are {', '.join(self)}")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._built_in or name in self._registered)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names: the package's own, then the added ones."""
        return iter(dict.fromkeys([*self._built_in, *self._registered]))


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def added(seam: str) -> dict[str, Any]:
    """Import and return what annexes add at a seam, by name.  A command that never asks for a seam imports nothing."""
    return {name: _imported(path) for table in _tables() for name, path in table.get(seam, {}).items()}


def added_name(module: str, name: str) -> Any:
    """Return an attribute that an annex adds to a module of the trunk; for its `__getattr__`.  Raises: AttributeError."""
    for table in _tables():
        if path := table.get("name", {}).get(f"{module}.{name}"):
            return _imported(path)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


@cache
def _tables() -> list[Mapping[str, Mapping[str, str]]]:
    """Return the table of each annex, in alphabetical order."""
    return [tomllib.loads(table.read_text("utf-8")) for table in sorted(Path(__file__).parent.glob("*/annex.toml"))]


def closest(word: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are most similar to a misspelt one, the likeliest first.

    Case and the difference of _ and - are ignored.  A word that two names share, such as num in num_experts and num_layers,
    makes them no more similar.  Of equally similar names, one with the same first letter is likelier: cpp means cp, not pp.
    """
    by_plain = {name.lower().replace("_", "-"): name for name in known}
    plain = word.lower().replace("_", "-")

    def likeness(name: str) -> tuple[float, bool]:
        return SequenceMatcher(None, name, plain).ratio(), name[:1] == plain[:1]

    similar = sorted(get_close_matches(plain, by_plain, n=n + 3, cutoff=cutoff), key=likeness, reverse=True)
    return [by_plain[name] for name in similar if _is_like(plain, name)][:n]


def _is_like(a: str, b: str) -> bool:
    shared = {*a.split("-")} & {*b.split("-")}
    a, b = ("-".join(word for word in name.split("-") if word not in shared) for name in (a, b))
    return not (a and b) or SequenceMatcher(None, a, b).ratio() >= (0.5 if shared else 0.7)


def did_you_mean(names: Sequence[str], otherwise: str = "") -> str:
    """Return a question with the names that were probably meant, or `otherwise` if there are none."""
    return f"did you mean {' or '.join(names)}?" if names else otherwise


def unknown_name(what: str, name: str, known: Collection[str]) -> ValueError:
    """Return the error for an unknown name.

    Args:
        what: what the name is for, such as "optimizer type".
        name: the unknown name.
        known: all known names.
    """
    hint = did_you_mean(closest(name, known, n=2))
    return ValueError(f"unknown {what} {name!r}: {f'{hint} There' if hint else 'there'} are {', '.join(sorted(known))}")


def keywords_of(factory: Callable[..., Any], *, positional: int = 0) -> dict[str, Parameter]:
    """Return the keyword parameters of a constructor, without its first `positional` parameters."""
    named = [p for p in signature(factory).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {parameter.name: parameter for parameter in named[positional:]}


def check_keywords(what: str, keywords: Collection[str], known: dict[str, Parameter]) -> None:
    """Refuse keywords that a constructor does not have, and missing keywords that it needs.

    Args:
        what: name of the constructor, such as "WarmupLR".
        keywords: the keywords in a user's file.
        known: the constructor's keywords, from `keywords_of`.

    Raises:
        ValueError: lists every such keyword, with a suggestion.
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
