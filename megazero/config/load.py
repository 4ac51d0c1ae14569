"""Reading a run: a TOML file, then overrides, then every check there is; all that is wrong is told in one error.

    file ------ tables --+-- types and ranges (the schema) --+
    key=value --/        |   names (typos)                   +-- none: ResolvedRun     some: ConfigError
                         +-- rules over the keys that hold --+

Only a file that is not TOML ends it early, since there is nothing to check.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megazero.config.extensions import import_extensions
from megazero.config.resolve import ResolvedRun, resolve
from megazero.config.rules import broken_rules
from megazero.config.schema import sections
from megazero.config.validate import validate
from megazero.settings import ConfigError, Problem

Tables = dict[str, Any]


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> ResolvedRun:
    """Read a run file, apply overrides, and resolve it for a number of ranks.

    Args:
        path: the TOML file.
        overrides: `section.key=value` each, the later ones winning. The value is read as TOML; what is not TOML, such
            as a bare word, is a string.
        world_size: number of ranks; None for the number that `launch.nproc_per_node` starts.

    Raises:
        ConfigError: with everything that is wrong with the file, the overrides, and the two together.
    """
    tables = _read(Path(path))
    problems = [problem for text in overrides if (problem := _override(tables, text))]
    problems += _imported_extensions(tables)
    schema_problems, config, wrong_keys = validate(tables)
    problems += schema_problems
    if world_size is None:
        ranks = config.launch.nproc_per_node
        if "launch.nproc_per_node" in wrong_keys:
            wrong_keys.add("world_size")
        problems += map(_told_of_launch, broken_rules(config, ranks, wrong_keys))
    else:
        ranks = world_size
        problems += broken_rules(config, ranks, wrong_keys)
    if problems:
        raise ConfigError(problems, str(path))
    return resolve(config, ranks)


def _imported_extensions(tables: Tables) -> list[Problem]:
    """Import what `launch.extensions` names, before the checks: they accept the names that it registers."""
    launch = tables.get("launch")
    return import_extensions(launch.get("extensions", ())) if isinstance(launch, dict) else []


def _told_of_launch(problem: Problem) -> Problem:
    """Name the key that the number of ranks came from."""
    return replace(problem, place="launch.nproc_per_node") if problem.place == "world_size" else problem


def _read(path: Path) -> Tables:
    def fail(rule: str, hint: str = "", line: int | None = None) -> ConfigError:
        place = str(path) if line is None else f"{path}:{line}"
        return ConfigError([Problem(place, None, rule, hint)], str(path))

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise fail("no such file", _similar_files(path)) from None
    except UnicodeDecodeError as error:
        raise fail(f"is not UTF-8 at byte {error.start}", "a run file is TOML text") from None
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        lines = text.split("\n")
        number = int(found[1]) if found else len(lines)  # "at end of document"
        raise fail(f"is not TOML: {error}", f"the line reads: {lines[number - 1].strip()}", number) from None


def _similar_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no directory {path.parent} either"
    close = get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def _override(tables: Tables, text: str) -> Problem | None:
    """Apply one `section.key=value` to the tables, or say why it cannot be."""
    name, separator, written = (part.strip() for part in text.partition("="))
    *outer, key = name.split(".")
    if not separator or not all((*outer, key)):
        return Problem("override", text, "must have the form section.key=value", "for example training.steps=100")
    if name in sections():
        return Problem("override", text, f"{name} is a section", f"name one of its keys: {name}.key=value")
    table: Any = tables
    for depth, part in enumerate(outer, start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            place = ".".join(outer[:depth])
            # Of a section the schema tells that the file makes it a value.
            return None if place in sections() else Problem("override", text, f"{place} is no section")
    table[key] = _override_value(written)
    return None


def _override_value(written: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError:
        return written
    value = parsed["value"]
    # No key is a date, but a directory may well be named after one.
    return written if len(parsed) > 1 or isinstance(value, date | time) else value
