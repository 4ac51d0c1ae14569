"""The tables of names of each family: its own, and those of transformers."""

from __future__ import annotations

from megazero.checkpoint.foreign.names import NameTable
from megazero.checkpoint.foreign.source import tables_of_transformers
from megazero.formats.gpt2_names import GPT2
from megazero.formats.llama_names import LLAMA, QWEN2, QWEN3

TABLES: dict[str, tuple[NameTable, ...]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt2": GPT2,
}
"""By family.  A script adds those of its own family."""


def tables_of(family: str) -> tuple[NameTable, ...]:
    """The tables of a family, the likeliest first."""
    return (*TABLES.get(family, ()), *tables_of_transformers(family))
