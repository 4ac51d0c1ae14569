"""What is wrong with each key by itself: pydantic's errors in the words of a run file, unknown keys with a guess.

    training.steps = "8"           ->  must be an integer; write 8
    training.micro_batch_size = 0  ->  must be >= 1 or "auto"; write 1
    model.num_head                 ->  a misspelt key of the same section:   did you mean model.num_heads?
    model.lr                       ->  a key of another section:             did you mean optimizer.lr?
    zero.ratio                     ->  a key of a section within it:         did you mean zero.offload.ratio?
    modle.num_heads                ->  a key of a misspelt section:          did you mean model.num_heads?

A value is suggested only when the schema takes it. A guess at a name is reported, never used.
"""

import math
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megazero.config.schema import DataSource, ElasticShape, RunConfig, keys, sections
from megazero.settings import Problem, toml_value

Path = tuple[str | int, ...]

# What the tables in a list of tables are.
_ITEMS: dict[str, tuple[str, type[BaseModel]]] = {
    "data.sources": ("source", DataSource),
    "elastic.shapes": ("shape", ElasticShape),
}

# Each completes "must ...". An error with no line here has a message that does so itself.
_MUST = {
    "int_type": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "string_type": "be a string",
    "string_too_short": "not be empty",
    "bool_type": "be true or false",
    "tuple_type": "be a list",
    "too_short": "not be empty",
    "too_long": "have {max_length} values",
    "model_type": "be a table",
    "literal_error": "be {expected}",
    "greater_than": "be > {gt}",
    "greater_than_equal": "be >= {ge}",
    "less_than": "be < {lt}",
    "less_than_equal": "be <= {le}",
}


def validate(tables: dict[str, Any]) -> tuple[list[Problem], RunConfig, set[str]]:
    """Check every key of a run by itself.

    Args:
        tables: the run file as parsed.

    Returns:
        What is wrong; the run, with wrong keys at their defaults; and the keys, as `section.key`, whose values in it
        mean nothing, because they are wrong or because a misspelt key probably meant them.
    """
    problems: list[Problem] = []
    wrong_keys: set[str] = set()
    rest = deepcopy(tables)
    for path, errors in _errors(tables).items():
        for problem, meant in _describe(tables, path, errors):
            problems.append(problem)
            wrong_keys.update(key for key in meant if not _is_written(tables, key))
        wrong = _key_or_section(path)
        names = (f"{section}.{key}" for section, fields in keys().items() for key in fields)
        wrong_keys.update(name for name in names if f"{name}.".startswith(f"{_name(wrong)}."))
        _get(rest, wrong[:-1]).pop(wrong[-1], None)
    return problems, RunConfig.model_validate(rest), wrong_keys


def _is_written(tables: dict[str, Any], name: str) -> bool:
    path = tuple(name.split("."))
    return _path_in_file(tables, path) == path


def _key_or_section(path: Path) -> Path:
    """Cut off what is inside a key:  data.sources[0].path -> data.sources      zero.offload.ratio -> the same."""
    known = sections()
    depth = sum(_name(path[:end]) in known for end in range(1, len(path) + 1))
    return path[: depth + 1]


def _errors(tables: dict[str, Any]) -> dict[Path, list[ErrorDetails]]:
    """Validate; group the errors by where in the file they are, as a key of several types has one for each."""
    try:
        RunConfig.model_validate(tables)
    except ValidationError as error:
        by_path: dict[Path, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            if detail["type"] == "too_short" and detail["input"]:
                continue  # the list is empty only because its items are wrong, which has an error of its own
            by_path.setdefault(_path_in_file(tables, detail["loc"]), []).append(detail)
        return by_path
    return {}


def _path_in_file(tables: dict[str, Any], location: Path) -> Path:
    """Give the part of a pydantic location that the file has; the rest names types, or what is missing."""
    value: Any = tables
    for depth, part in enumerate(location):
        inside = isinstance(value, dict) and part in value
        if not inside and not (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            return location[:depth]
        value = value[part]
    return location


def _describe(tables: dict[str, Any], path: Path, errors: list[ErrorDetails]) -> list[tuple[Problem, list[str]]]:
    """Turn the errors of one key into problems, each with the keys that a misspelt one may have meant."""
    value, key = _get(tables, path), _name(path)
    if errors[0]["type"] == "extra_forbidden":
        home, last = _name(path[:-1]), str(path[-1])
        if home and home not in sections():
            return [(_unknown_in_item(key, last, value), [])]
        if not home or isinstance(value, dict):
            return _unknown_section(key, value)
        return [_unknown_key(key, last, home, value)]
    phrases = list(dict.fromkeys(map(_must, errors)))
    rule = "must " + " or ".join([phrases[0], *(phrase.removeprefix("be ") for phrase in phrases[1:])])
    return [(Problem(key, value, rule, _hint(tables, path, errors)), [])]


def _must(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        part = error["loc"][-1]
        return f"have {part + 1} values" if isinstance(part, int) else f"have a {part}"
    phrase = _MUST.get(error["type"], error["msg"])
    context = {key: str(item).removesuffix(".0").replace("'", '"') for key, item in error.get("ctx", {}).items()}
    return phrase.format(**context) if error["type"] in _MUST else phrase


def _hint(tables: dict[str, Any], path: Path, errors: list[ErrorDetails]) -> str:
    """Suggest the candidates that the schema takes."""
    known, key, home = sections(), _name(path), _name(path[:-1])
    if key in known:
        return f"write [{key}] and its keys below it"
    taken = []
    for candidate in candidates(_get(tables, path), errors):
        changed = deepcopy(tables)
        _get(changed, path[:-1])[path[-1]] = candidate
        if not any(other[: len(path)] == path for other in _errors(changed)):
            taken.append(toml_value(candidate))
    if not taken and home in known:
        default = known[home]().model_dump()[str(path[-1])]
        return "" if default is None else f"the default is {toml_value(default)}"
    return f"write {' or '.join(dict.fromkeys(taken))}" if taken else ""


def candidates(value: object, errors: list[ErrorDetails]) -> Iterator[object]:
    """Give values near a wrong one: the same in another type, the nearest bound, the most similar word.

    Args:
        value: the wrong one.
        errors: what pydantic says of it.
    """
    kinds = {error["type"] for error in errors}
    if isinstance(value, str):
        with suppress(tomllib.TOMLDecodeError):
            yield from tomllib.loads(f"value = {value.lower()}").values()
        words = [word for error in errors for word in _choices(error)]
        yield from get_close_matches(value.lower(), words, n=1)
    elif isinstance(value, float) and math.isfinite(value):
        yield from sorted({math.floor(value), math.ceil(value)})
    elif type(value) is int:
        if "bool_type" in kinds and value in (0, 1):
            yield bool(value)
        texts = [error.get("ctx", {}).get("expected", "") for error in errors]
        numbers = [int(number) for text in texts for number in re.findall(r"\b\d+\b", text)]
        yield from sorted(numbers, key=lambda number: abs(number - value))[:1]
    if "tuple_type" in kinds:
        yield [value]
    if "string_type" in kinds:
        yield value if isinstance(value, str) else toml_value(value)
    contexts = [error.get("ctx", {}) for error in errors]
    if not (isinstance(value, float) and math.isnan(value)):
        yield from (context[bound] for context in contexts for bound in ("ge", "le") if bound in context)


def _choices(error: ErrorDetails) -> list[str]:
    context = error.get("ctx", {})
    return [*context.get("choices", ()), *re.findall(r"'([^']*)'", context.get("expected", ""))]


def _get(tables: dict[str, Any], path: Path) -> Any:
    value: Any = tables
    for part in path:
        value = value[part]
    return value


def _name(path: Path) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


# ---------------------------------------------------------------------------------------------------------------------
# Names that do not exist.  A problem comes with the keys that may have been meant, as `section.key`.


def _unknown_key(key: str, last: str, home: str, value: object) -> tuple[Problem, list[str]]:
    """Describe a key that its section does not have."""
    meant = _meant(last, home)
    elsewhere = meant and all(name.rpartition(".")[0] != home for name in meant)
    rule = f"unknown key in [{home}]" if elsewhere else "unknown key"
    return Problem(key, value, rule, _did_you_mean(meant) or _keys_of(home)), meant


def _unknown_section(name: str, value: object) -> list[tuple[Problem, list[str]]]:
    """Describe a name that is no section of a run file, one problem for each key below it."""
    known = sections()
    home = next(iter(get_close_matches(name, known, n=1)), None)
    choices = f"the sections are {', '.join(known)}"
    if not isinstance(value, dict):
        meant = _meant(name, None)
        return [(Problem(name, value, "a key outside any section", _did_you_mean(meant) or choices), meant)]
    if not value:
        return [(Problem(name, None, "unknown section", f"did you mean [{home}]?" if home else choices), [])]
    found = []
    for key, item in value.items():
        meant = _meant(key, home)
        hint = _did_you_mean(meant) or (_keys_of(home) if home else choices)
        found.append((Problem(f"{name}.{key}", item, f"unknown section [{name}]", hint), meant))
    return found


def _unknown_in_item(key: str, last: str, value: object) -> Problem:
    """Describe a key that a table in a list, such as `data.sources`, does not have."""
    name, item = _ITEMS[key.partition("[")[0]]
    known = item.model_fields
    close = get_close_matches(last, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the keys of a {name} are {', '.join(known)}"
    return Problem(key, value, "unknown key", hint)


def _meant(key: str, home: str | None) -> list[str]:
    """Look for a key: the same name, in its own section first; a similar one there; a similar one anywhere."""
    known = keys()
    if home and key in known[home]:
        return [f"{home}.{key}"]
    if same := [f"{section}.{key}" for section in known if key in known[section]]:
        return same
    if home and (close := get_close_matches(key, known[home], n=1)):
        return [f"{home}.{close[0]}"]
    close = get_close_matches(key, sorted({name for names in known.values() for name in names}), n=1)
    return [f"{section}.{name}" for name in close for section in known if name in known[section]]


def _did_you_mean(meant: list[str]) -> str:
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def _keys_of(home: str) -> str:
    return f"the keys of [{home}] are {', '.join(sections()[home].model_fields)}"
