"""The page of all keys of a DeepSpeed configuration, from the table itself, so that it cannot say anything else.

    | key | type and default | what becomes of it |
    |---|---|---|
    | `overlap_comm` | true or false | no effect: gradients are always reduced beside the backward |

A table like this stands under a heading for each block.
"""

import json
import math

from megazero.deepspeed.config_keys import BLOCKS
from megazero.deepspeed.config_kinds import Key, KeyStatus


def to_markdown_deepspeed() -> str:
    """Give every key as Markdown: a heading and a table for each block."""
    head = "| key | type and default | what becomes of it |\n|---|---|---|\n"
    parts = []
    for block in BLOCKS:
        rows = [f"| `{key.name}` | {_taken(key)} | {_becomes(key)} |\n" for key in block.keys]
        parts.append(f"## {block.title}\n\n{head}{''.join(rows)}")
    return "\n".join(parts)


def _taken(key: Key) -> str:
    return str(key.kind) if key.default is None else f"{key.kind}; `{_number(key)}`"


def _number(key: Key) -> str:
    """Write sizes as the reference does: 5e8."""
    value = key.default
    if isinstance(value, float) and value >= 1e5:
        power = int(math.log10(value))
        return f"{value / 10**power:g}e{power}"
    return json.dumps(value)


def _becomes(key: Key) -> str:
    return f"goes with `{key.text}`" if key.fate is KeyStatus.FOLLOWS else f"{key.fate.value}: {key.text}"
