"""The tables of docs/config.md and the JSON schema beside the examples: `python tests/key_page.py` writes them anew."""

import json
from pathlib import Path

from megazero.config.document import json_schema, type_text, where_text
from megazero.config.schema import keys, sections
from megazero.settings import toml_value

PAGE = Path(__file__).parent.parent / "docs" / "config.md"
SCHEMA = PAGE.parent.parent / "examples" / "run.schema.json"


def to_markdown() -> str:
    """Give the documentation of every key as Markdown: a heading and a table for each section."""
    classes, parts = sections(), []
    for name, fields in keys().items():
        texts = classes[name].key_texts()
        part = f"## [{name}]\n\n{classes[name].__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for key, value in classes[name]().model_dump(include=set(fields)).items():
            default = "unset" if value is None else toml_value(value)
            meaning = f"{texts[key]}{where_text(fields[key])}"
            part += f"| `{key}` | {type_text(fields[key])} | `{default}` | {meaning} |\n"
        parts.append(part)
    return "\n".join(parts)


if __name__ == "__main__":
    HEAD = PAGE.read_text(encoding="utf-8").split("\n## [")[0]
    PAGE.write_text(f"{HEAD}\n{to_markdown()}", encoding="utf-8")
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
