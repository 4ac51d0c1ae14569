"""Writing: a run as a TOML file, which loads as the same run, and the documentation of every key, from the schema.

    [parallel]        | key  | type         | default | meaning                      |
    tp = 2            | `tp` | integer >= 1 | `1`     | Tensor-parallel degree: ...  |

A file has every key that has a value; an unset one is left out, and is unset again when read.
"""

import os
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

from megazero.config.load import ResolvedRun
from megazero.config.schema import RunConfig, keys, sections
from megazero.registry import NameIn
from megazero.settings import LARGEST_COUNT, Spelling, toml_value

_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false"}


def to_toml(run: RunConfig | ResolvedRun) -> str:
    """Write a run as TOML.

    Args:
        run: a config, or a resolved run, of which the filled-in config is written.
    """
    config = run.written if isinstance(run, ResolvedRun) else run
    tables = []
    for section, fields in keys().items():
        values = attrgetter(section)(config).model_dump()
        lines = [f"{key} = {toml_value(values[key])}\n" for key in fields if values[key] is not None]
        tables.append(f"[{section}]\n" + "".join(lines))
    return "\n".join(tables)


def save_config(run: RunConfig | ResolvedRun, path: str | Path) -> None:
    """Write a run to a file; a reader sees the whole old file or the whole new one.

    Args:
        run: a config, or a resolved run, of which the filled-in config is written.
        path: the file; missing directories are made.

    Raises:
        OSError: the file cannot be written; an older one is unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(to_toml(run))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@dataclass(frozen=True)
class KeyDoc:
    """What there is to know of one key."""

    section: str
    key: str
    type: str
    """What it takes, in words and TOML values."""
    default: str
    """As TOML; "unset" where leaving it out means something that no value says."""
    meaning: str


def document_keys() -> list[KeyDoc]:
    """Give the documentation of every key, in the order of the schema."""
    docs = []
    classes = sections()
    for name, fields in keys().items():
        defaults = classes[name]().model_dump()
        for key, field in fields.items():
            default = "unset" if defaults[key] is None else toml_value(defaults[key])
            taken = type_text(field.annotation, tuple(field.metadata))
            docs.append(KeyDoc(name, key, taken, default, field.description or ""))
    return docs


def to_markdown() -> str:
    """Give the documentation of every key as Markdown: a heading and a table for each section."""
    docs = document_keys()
    parts = []
    for name, section in sections().items():
        rows = [
            f"| `{doc.key}` | {doc.type} | `{doc.default}` | {doc.meaning} |\n" for doc in docs if doc.section == name
        ]
        head = f"## [{name}]\n\n{section.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        parts.append(head + "".join(rows))
    return "\n".join(parts)


def type_text(annotation: Any, metadata: tuple[object, ...] = ()) -> str:
    """Say in words what a field takes.

    Args:
        annotation: the type, as written in the schema.
        metadata: the constraints that stand beside it.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], _constraints(arguments[1:]))
    if text := _said_by(metadata):
        return text
    if origin in (Literal, Union, UnionType):
        say = toml_value if origin is Literal else type_text
        return " or ".join(say(part) for part in arguments if part is not NoneType)
    if origin is tuple:
        items = [type_text(part) for part in arguments if part is not Ellipsis]
        return f"list of {items[0]}" if Ellipsis in arguments else f"[{', '.join(items)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{ " + ", ".join(annotation.model_fields) + " }"
    return f"{_NAMES[annotation]} {' and '.join(_signs(metadata))}".rstrip()


def _said_by(metadata: tuple[object, ...]) -> str:
    """What the metadata alone says: the names of a registry, or that a key is written as a table; else nothing."""
    for item in metadata:
        if isinstance(item, NameIn):
            return " or ".join(map(toml_value, item.registry))
        if isinstance(item, Spelling):
            return item.text
    return ""


def _constraints(metadata: tuple[Any, ...]) -> tuple[object, ...]:
    """Unpack pydantic's Field(...), which keeps its constraints one level down."""
    return tuple(part for item in metadata for part in getattr(item, "metadata", (item,)))


def _signs(metadata: tuple[object, ...]) -> list[str]:
    signs = []
    for constraint in metadata:
        match constraint:
            case Ge(ge=bound):
                signs.append(f">= {bound}")
            case Gt(gt=bound):
                signs.append(f"> {bound}")
            case Le(le=bound) if bound not in (LARGEST_COUNT, 2**63 - 1):  # these are out of anyone's way
                signs.append(f"<= {bound}")
            case Lt(lt=bound):
                signs.append(f"< {bound}")
    return signs
