"""The page of all keys of a DeepSpeed configuration, from the tables themselves, so that it cannot say anything else."""

import json

from pydantic.fields import FieldInfo

from megazero.config.document import type_text
from megazero.deepspeed.config_refused import NO_EFFECT, REFUSED
from megazero.deepspeed.config_schema import honoured_keys


def to_markdown_deepspeed() -> str:
    """Give every key as Markdown: three tables, by what becomes of the key."""
    keys = honoured_keys().items()
    honoured = "".join(f"| `{key}` | {_taken(info)} | {info.description} |\n" for key, info in keys)
    no_effect = "".join(f"| `{key}` | {note} |\n" for key, note in NO_EFFECT.items())
    refused = "".join(f"| `{key}` | {refusal.reason} |\n" for key, refusal in REFUSED.items())
    return (
        f"## Honoured\n\n| key | type and default | what it sets |\n|---|---|---|\n{honoured}\n"
        f"## No effect\n\n| key | why |\n|---|---|\n{no_effect}\n"
        f"## Refused\n\n| key | why |\n|---|---|\n{refused}"
    )


def _taken(info: FieldInfo) -> str:
    taken, default = type_text(info), json.dumps(info.default)
    if info.default is None:
        return taken
    power = len(default) - 1
    return f"{taken}; `{default[0]}e{power}`" if default[1:] == "0" * power and power > 4 else f"{taken}; `{default}`"
