"""How a value is written in TOML, for saved files, for documentation and for error messages.

True -> true      3e-4 -> 0.0003      (0.9, 0.95) -> [0.9, 0.95]      {"path": "a"} -> { path = "a" }
"""

import json
import re


def toml_value(value: object) -> str:
    """Write one value as TOML; reading the text gives an equal value back.

    Args:
        value: what TOML can hold: bool, int, float, str, date or time, and lists and string-keyed dicts of these.
    """
    match value:
        case bool():  # before int: True is an int in Python
            return "true" if value else "false"
        case str():
            # JSON strings are TOML strings, but for one control character that JSON lets through.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case dict():
            return "{ " + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
        case _:
            return str(value)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_value(name)
