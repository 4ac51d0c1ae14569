"""The tables of docs/config.md, from the schema: `python tests/key_page.py` writes them anew."""

from pathlib import Path

from pydantic.fields import FieldInfo

from megazero.config import RunConfig
from megazero.config.document import type_text
from megazero.config.schema import keys, sections
from megazero.settings import ActsWhere, toml_value

PAGE = Path(__file__).parent.parent / "docs" / "config.md"


def to_markdown() -> str:
    """Give the documentation of every key as Markdown: a heading and a table for each section."""
    classes, parts = sections(), []
    for name, fields in keys().items():
        part = f"## [{name}]\n\n{classes[name].__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for key, value in classes[name]().model_dump(include=set(fields)).items():
            default = "unset" if value is None else toml_value(value)
            meaning = f"{fields[key].description}{_where(fields[key])}"
            part += f"| `{key}` | {type_text(fields[key])} | `{default}` | {meaning} |\n"
        parts.append(part)
    return "\n".join(parts)


def _where(field: FieldInfo) -> str:
    """Say where a key acts; nothing for one that always does."""
    parts = []
    for item in field.metadata:
        if isinstance(item, ActsWhere):
            values = item.values_in(RunConfig())
            is_one = f"= {' or '.join('unset' if value is None else toml_value(value) for value in values)}"
            above = f"> {item.above}" if item.above else "is set"
            parts.append(f"{' or '.join(item.keys.split())} {is_one if values else above}")
    return f" Only where {' and '.join(parts)}." if parts else ""


if __name__ == "__main__":
    HEAD = PAGE.read_text(encoding="utf-8").split("\n## [")[0]
    PAGE.write_text(f"{HEAD}\n{to_markdown()}", encoding="utf-8")
