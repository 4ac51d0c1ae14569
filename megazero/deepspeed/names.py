"""DeepSpeed's names as data: `names.toml` lists what scripts import, `config_keys.toml` the keys that set nothing here."""

import tomllib
from pathlib import Path
from typing import Any


def read_table(file: str) -> dict[str, Any]:
    """Return a table of this folder."""
    return tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))


NAMES = read_table("names.toml")
#: By module of DeepSpeed, "" for the package: file of this room, or module of the package -> its names.
HOMES: dict[str, dict[str, str]] = {
    module.removeprefix("deepspeed").lstrip("."): homes
    for modules, homes in NAMES["homes"].items()
    for module in modules.split()
}
