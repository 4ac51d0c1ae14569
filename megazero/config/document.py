"""Writes a run as a TOML file that loads as the same run, and describes keys in words and as a JSON schema.

    [parallel]
    tp = 2            integer >= 1            {"type": "integer", "minimum": 1}

A file contains every key that has a value.  An unset key is left out, so it is unset when the file is read.
"""

import errno
import os
import shutil
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megazero.config.derive import ResolvedRun
from megazero.config.schema import RunConfig, is_section, keys, sections
from megazero.settings import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    ActsWhere,
    NameIn,
    Section,
    Spelling,
    hide_passwords,
    toml_value,
)

_OURS = "# Written by megazero when a run starts, with every key: a later start writes it anew.\n"
_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def to_toml(run: RunConfig | ResolvedRun) -> str:
    """Format a run as TOML, with the filled-in keys if it is resolved.  A password in a URL becomes ***."""
    config = run.written if isinstance(run, ResolvedRun) else run
    tables = []
    for section, fields in keys().items():
        values = hide_passwords(attrgetter(section)(config).model_dump(include=set(fields), exclude_none=True))
        tables.append(f"[{section}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items()))
    return "\n".join(tables)


def copy_aside(path: Path) -> Path:
    """Copy a file that will be overwritten; return the path of the copy, which ends in .before-1, .before-2 and so on.

    Raises: OSError: the file cannot be copied; no partial copy is left.
    """
    names = (path.with_name(f"{path.name}.before-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    try:
        shutil.copyfile(path, aside)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside


def check_regular(path: Path) -> None:
    """Refuse a path that is no regular file: opening a pipe would block until somebody writes to it.

    Raises: FileExistsError.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is no regular file", str(path))


def save_config(run: RunConfig | ResolvedRun, path: str | Path) -> Path | None:
    """Write a run to a TOML file atomically: a reader sees either the old or the new content, complete.

    Returns: the path of a copy of the older file, if that was not written by a run.

    Raises:
        OSError: the file cannot be written; an older file is unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_regular(path)
    is_ours = not path.exists() or path.read_bytes().startswith(_OURS.encode())
    aside = None if is_ours else copy_aside(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(_OURS + to_toml(run))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return aside


def reference(name: str = "") -> str:
    """Return a run file in which every key has its default, below its description and type; "" for an unknown name.

    Args:
        name: a section or a key, such as "zero.offload" or "training.steps"; empty for all keys.
    """
    classes, tables = sections(), []
    for section, fields in keys().items():
        own = [key for key in fields if f"{section}.{key}.".startswith(f"{name}." if name else "")]
        if not own:
            continue
        defaults, texts = classes[section]().model_dump(), classes[section].key_texts()
        tables.append(f"# {classes[section].__doc__}\n[{section}]\n")
        for key in own:
            text = f"# {texts[key]}{where_text(fields[key])}\n# {type_text(fields[key])}\n"
            unset = defaults[key] is None
            tables.append(text + (f"# {key} is unset\n" if unset else f"{key} = {toml_value(defaults[key])}\n"))
    return "\n".join(tables)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of run files, which editors use to check and complete them."""
    schema: dict[str, Any] = _for_toml(RunConfig.model_json_schema())
    for section in Section.__subclasses__():  # those of lists of tables, too
        for key, text in section.key_texts().items() if section.__name__ in schema["$defs"] else ():
            schema["$defs"][section.__name__]["properties"][key]["description"] = text
    return {"$schema": "http://json-schema.org/draft-07/schema#"} | schema  # which the TOML plug-ins of editors know


def _for_toml(schema: Any) -> Any:
    """Return a schema without null (TOML has none), titles, and the defaults of whole sections."""
    if isinstance(schema, list):
        return [_for_toml(item) for item in schema if item != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    names = {"prefixItems": "items"}  # as draft 7 has it
    left_out = {"title"} | ({"default"} if isinstance(schema.get("default"), dict | list | None) else set())
    return {names.get(key, key): _for_toml(value) for key, value in schema.items() if key not in left_out}


def where_text(field: FieldInfo) -> str:
    """Return a sentence on when a key has an effect; "" if it always has."""
    conditions = []
    for item in field.metadata:
        if isinstance(item, ActsWhere):
            values = item.values_in(RunConfig())
            listed = f"= {' or '.join('unset' if value is None else toml_value(value) for value in values)}"
            section, _, key = item.keys.rpartition(".")
            other = keys().get(section, {}).get(key)
            is_number = item.above or (other is not None and type(other.default) in (int, float))
            above = f"> {item.above}" if is_number else "is set"
            conditions.append(f"{' or '.join(item.keys.split())} {listed if values else above}")
    return f" Only where {' and '.join(conditions)}." if conditions else ""


def type_text(field: FieldInfo) -> str:
    """Describe the values of a key in words and TOML."""
    return _text(field.annotation, tuple(field.metadata))


def _text(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Describe the values of a type and its constraints."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:  # pydantic's Field(...) keeps its constraints one level down
        return _text(arguments[0], tuple(each for item in arguments[1:] for each in getattr(item, "metadata", (item,))))
    for item in metadata:
        if isinstance(item, NameIn | Spelling):
            return item.text if isinstance(item, Spelling) else " or ".join(map(toml_value, item.registry))
    if origin in (Literal, Union, UnionType):
        text_of = toml_value if origin is Literal else _text
        return " or ".join(text_of(item) for item in arguments if item is not NoneType)
    if origin is tuple:
        items = [_text(item) for item in arguments if item is not Ellipsis]
        return f"list of {items[0]}" if Ellipsis in arguments else f"[{', '.join(items)}]"
    if is_section(annotation):
        return "{ " + ", ".join(annotation.model_fields) + " }"
    bounds = [(sign, getattr(item, name, None)) for item in metadata for name, sign in _SIGNS.items()]
    shown = [
        f"{sign} {bound}" for sign, bound in bounds if bound not in (None, LARGEST_COUNT, LARGEST_NUMBER, 2**63 - 1)
    ]
    return f"{_NAMES[annotation]} {' and '.join(shown)}".rstrip()
