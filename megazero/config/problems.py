"""Checks each key by itself: pydantic's errors in the words of a run file, and a guess for each unknown key.

    training.steps = "8"           ->  must be an integer; write 8
    training.micro_batch_size = 0  ->  must be >= 1 or "auto"; write 1
    model.num_head                 ->  a misspelt key of the same section:   did you mean model.num_heads?
    model.lr                       ->  a key of another section:             did you mean optimizer.lr?
    zero.ratio                     ->  a key of a section within it:         did you mean zero.offload.ratio?
    modle.num_heads                ->  a key of a misspelt section:          did you mean model.num_heads?

A value is suggested only if the schema accepts it. A guess at a name is reported, and never used.
"""

import math
import re
import tomllib
from collections.abc import Collection, Iterator
from contextlib import suppress
from copy import deepcopy
from importlib.resources import files
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megazero.config.schema import (
    BatchRamp,
    DataSource,
    ElasticShape,
    RunConfig,
    ValidationSource,
    keys,
    sections,
    without_key,
)
from megazero.models.activation_config import StageActivations
from megazero.models.config import RopeScaling
from megazero.registry import closest, did_you_mean
from megazero.settings import Problem, Section, toml_value

Path = tuple[str | int, ...]

# For keys that hold a table or a list of tables: the word for such a table, and its section.
_ITEMS: dict[str, tuple[str, type[Section]]] = {
    "data.sources": ("source", DataSource),
    "data.validation_sources": ("validation source", ValidationSource),
    "elastic.shapes": ("shape", ElasticShape),
    "activations.stages": ("stage", StageActivations),
    "training.batch_ramp": ("batch ramp", BatchRamp),
    "model.rope_scaling": ("rope scaling", RopeScaling),
}

# By pydantic's type of error, the rule that completes "must ..."; for other types, pydantic's message completes it.  Then
# words of other programs, and our value or key for each.
_MUST, _OTHER_WORDS, _OTHER_NAMES = tomllib.loads(files(__package__).joinpath("words.toml").read_text()).values()


def validate(tables: dict[str, Any]) -> tuple[list[Problem], RunConfig]:
    """Check every key of a run file by itself.

    Returns:
        The problems; and the run.  In it, wrong keys, and keys that a misspelt key probably meant, have no value.
    """
    problems: list[Problem] = []
    meant, rest, wrong = list[str](), deepcopy(tables), list[Path]()
    for path, errors in _errors(tables).items():
        for problem, names in _describe(tables, path, errors):
            problems.append(problem)
            meant += [name for name in names if _path_in_file(tables, tuple(name.split("."))) != tuple(name.split("."))]
        # what is inside a key is cut off:  data.sources[0].path -> data.sources      zero.offload.ratio -> the same
        depth = sum(_name(path[:end]) in sections() for end in range(1, len(path) + 1))
        wrong.append(path[: depth + 1])
        _get(rest, wrong[-1][:-1]).pop(wrong[-1][-1], None)
    config = RunConfig.model_validate(rest)
    for key in (*map(_name, wrong), *meant):
        config = without_key(config, key)
    return problems, config


def _errors(tables: dict[str, Any]) -> dict[Path, list[ErrorDetails]]:
    """Validate, and group the errors by their place in the file: a key of several types has an error for each type."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    try:
        RunConfig.model_validate(tables)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            # A list that is too short only because its items are wrong has an error of its own for each of these.
            if detail["type"] != "too_short" or not detail["input"]:
                by_path.setdefault(_path_in_file(tables, detail["loc"]), []).append(detail)
    return by_path


def _path_in_file(tables: dict[str, Any], location: Path) -> Path:
    """Return how far a pydantic location exists in the file; the rest of it names types or missing keys."""
    value: Any = tables
    for depth, key in enumerate(location):
        inside = isinstance(value, dict) and key in value
        if not inside and not (isinstance(value, list) and isinstance(key, int) and key < len(value)):
            return location[:depth]
        value = value[key]
    return location


def _describe(tables: dict[str, Any], path: Path, errors: list[ErrorDetails]) -> list[tuple[Problem, list[str]]]:
    """Convert the errors of a key to problems, each with the keys that a misspelt name may have meant."""
    value, key = _get(tables, path), _name(path)
    if errors[0]["type"] == "extra_forbidden":
        return _unknown(key, _name(path[:-1]), str(path[-1]), value)
    phrases = list(dict.fromkeys(map(_must, errors)))
    joint = " and " if errors[0]["type"] == "missing" else " or "  # all that is missing, or one of several types
    rule = "must " + joint.join([phrases[0], *(phrase.removeprefix("be ") for phrase in phrases[1:])])
    return [(Problem(key, value, rule, _hint(tables, path, errors)), [])]


def _must(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        key = error["loc"][-1]
        return f"have {key + 1} values" if isinstance(key, int) else f"have a {key}"
    if error["type"] not in _MUST:
        return error["msg"]
    context = {key: str(item).removesuffix(".0").replace("'", '"') for key, item in error.get("ctx", {}).items()}
    return _MUST[error["type"]].format(**context)


def _hint(tables: dict[str, Any], path: Path, errors: list[ErrorDetails]) -> str:
    """Suggest the candidates that the schema accepts, or else the default."""
    known, key, home = sections(), _name(path), _name(path[:-1])
    if key in known:
        return f"write [{key}] and its keys below it"
    taken = []
    for candidate in candidates(_get(tables, path), errors):
        changed = deepcopy(tables)
        _get(changed, path[:-1])[path[-1]] = candidate
        if not any(other[: len(path)] == path for other in _errors(changed)):
            taken.append(toml_value(candidate))
    default = known[home]().model_dump().get(str(path[-1])) if home in known else None
    if key in _ITEMS and any(error["type"] == "model_type" for error in errors):
        return f"its keys are {', '.join(_ITEMS[key][1].model_fields)}"
    if not taken and any(error["type"] == "name" for error in errors):
        return "a name of your own must be registered by a script that launch.extensions lists"
    if taken or default is None:
        return f"write {' or '.join(dict.fromkeys(taken))}" if taken else ""
    return f"the default is {toml_value(default)}"


def candidates(value: object, errors: list[ErrorDetails]) -> Iterator[object]:
    """Return values that are near a wrong value: the value in another type, the nearest bound, the most similar word.

    Args:
        errors: pydantic's errors on the value.
    """
    types, contexts = {error["type"] for error in errors}, [error.get("ctx", {}) for error in errors]
    expected = [context.get("expected", "") for context in contexts]
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            yield from tomllib.loads(f"value = {value.lower()}").values()
        words = [word for context in contexts for word in context.get("choices", ())]
        yield from (context["listed"] for context in contexts if context.get("listed"))
        yield from ["host"] if value == "cpu" else []
        words += [word for text in expected for word in re.findall(r"'([^']*)'", text)]
        other = _OTHER_WORDS.get(value.lower())
        yield from [other] if other in words else closest(value, words)
    elif isinstance(value, float) and math.isfinite(value):
        yield from sorted({math.floor(value), math.ceil(value)})
    elif type(value) is int:
        if "bool_type" in types and value in (0, 1):
            yield bool(value)
        numbers = [int(number) for text in expected for number in re.findall(r"\b\d+\b", text)]
        yield from sorted(numbers, key=lambda number: abs(number - value))[:1]
    elif isinstance(value, list):
        yield from (context["listed"] for context in contexts if context.get("listed"))
    if "tuple_type" in types:
        yield [value]
    if "string_type" in types:
        yield value if isinstance(value, str) else toml_value(value)
    if not (isinstance(value, float) and math.isnan(value)):
        yield from (context[bound] for context in contexts for bound in ("ge", "le") if bound in context)


def _get(tables: dict[str, Any], path: Path) -> Any:
    value: Any = tables
    for key in path:
        value = value[key]
    return value


def _name(path: Path) -> str:
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "".join(steps).removeprefix(".")


# ---------------------------------------------------------------------------------------------------------------------
# Names that do not exist


def _unknown(key: str, home: str, last: str, value: object) -> list[tuple[Problem, list[str]]]:
    """Yield problems for a name that does not exist; for an unknown section, a problem for each key below it."""
    known, paths = sections(), [f"{section}.{key}" for section, fields in keys().items() for key in fields]
    choices = f"the sections are {', '.join(known)}"
    if home and home not in known:
        name, item = _ITEMS[home.partition("[")[0]]
        section, meant = home.partition("[")[0].rpartition(".")[0], closest(last, item.model_fields)
        every = f"it is a key of [{section}], for every {name}" if last in keys().get(section, ()) else ""
        hint = every or did_you_mean(meant, f"the keys of a {name} are {', '.join(item.model_fields)}")
        return [(Problem(key, value, "unknown key", hint), [])]
    if not isinstance(value, dict):
        meant = likely_keys(last, home, keys().get(home, ()), paths)
        if not home:
            return [(Problem(key, value, "a key outside any section", did_you_mean(meant, choices)), meant)]
        elsewhere = meant and all(name.rpartition(".")[0] != home for name in meant)
        rule = f"unknown key in [{home}]" if elsewhere else "unknown key"
        return [(Problem(key, value, rule, did_you_mean(meant, _keys_of(home))), meant)]
    section = "".join(closest(key, known))
    if not value:
        return [(Problem(key, None, "unknown section", f"did you mean [{section}]?" if section else choices), [])]
    found = []
    for name, item in value.items():
        same = f"{section}.{name}"
        meant = [same] if same in paths else likely_keys(name, section, keys().get(section, ()), paths)
        hint = did_you_mean(meant, _keys_of(section) if section else choices)
        found.append((Problem(f"{key}.{name}", item, f"unknown section [{key}]", hint), meant))
    return found


def likely_keys(name: str, home: str, siblings: Collection[str], known: Collection[str]) -> list[str]:
    """Guess which keys a name means: keys of that name anywhere, else a similar one in its section, else similar ones.

    Args:
        name: the unknown name.
        home: path of the section that contains it; empty at the top.
        siblings: names of the keys in this section.
        known: paths of all keys.
    """

    def named(last: str) -> list[str]:
        paths = [path for path in known if path.rpartition(".")[2] == last]
        least = min((path.count(".") for path in paths), default=0)
        # a user who means an inner section writes its name
        paths = [path for path in paths if path.count(".") == least]
        return paths if len(paths) <= 3 else []  # more keys of one name say nothing about which was meant

    if same := named(name) or [path for path in [_OTHER_NAMES.get(name.lower(), "")] if path in known]:
        return same
    if close := closest(name, siblings):
        return [f"{home}.{close[0]}".removeprefix(".")]
    return [path for last in closest(name, sorted({path.rpartition(".")[2] for path in known})) for path in named(last)]


def _keys_of(home: str) -> str:
    return f"the keys of [{home}] are {', '.join(sections()[home].model_fields)}"
