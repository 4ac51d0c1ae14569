"""Each key of a DeepSpeed configuration by itself: is it known, may it be written here, is its value taken.

    {"zero_optimization": {"stage": 2, "overlap_comm": true, "overlap_com": true}}
        zero_optimization.stage           sets something (config_schema)      -> its value, checked by pydantic
        zero_optimization.overlap_comm    has no effect (config_keys.toml)    -> the note on such keys
        zero_optimization.overlap_com     unknown                             -> a problem, with the likeliest key

Relations between keys are judged once every key holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megazero.config.document import type_text
from megazero.config.problems import candidates, likely_keys
from megazero.deepspeed.config_schema import DeepSpeedJson, honoured_keys
from megazero.deepspeed.names import read_table
from megazero.registry import closest, did_you_mean
from megazero.settings import Problem

_KEYS = read_table("config_keys.toml")
UNCHECKED: list[str] = _KEYS["unchecked"].split()
NO_EFFECT = [f"{block}.{name}".lstrip(".") for block, names in _KEYS["no_effect"].items() for name in names.split()]
REFUSED: dict[str, list[object]] = _KEYS["refused"]
"""By key, the values that ask for nothing; null, {} and {"enabled": false} never do."""
_OFF_WHEN_FALSE = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_ON_BY_DEFAULT = "timers.throughput.enabled"
_ARTICLES = {"integer": "an ", "number": "a ", "string": "a ", "table": "a "}

_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_OTHER_NAMES = {name: f"stage3_{name}" for name in _KEYS["prefixed"].split()}


def check_keys(config: Mapping[str, Any]) -> tuple[DeepSpeedJson, KeyCheck]:
    """Check a parsed configuration: the keys that hold, the others at their defaults, and what was found beside them."""
    modern = dict(config)  # without the forms of older versions
    if isinstance(stage := modern.get("zero_optimization"), bool):
        modern["zero_optimization"] = {"stage": int(stage)}
    if "bfloat16" in modern and "bf16" not in modern:
        modern["bf16"] = modern.pop("bfloat16")
    check = KeyCheck()
    if isinstance(zero := modern.get("zero_optimization"), Mapping):
        names = {name: _OTHER_NAMES.get(name, name) for name in zero}
        names |= {old: block for old, block in _OFFLOADS.items() if zero.get(old) is True}
        for name, key in names.items():
            if name != key and key in zero:
                rule = f"is another name of {key}, which is written too"
                check.problems.append(Problem(f"zero_optimization.{name}", zero[name], rule, "keep one of them"))
        written = {key: {"device": "cpu"} if key == _OFFLOADS.get(name) else zero[name] for name, key in names.items()}
        modern["zero_optimization"] = written
    return DeepSpeedJson.model_validate(check.read_table(modern, "")), check


@dataclass(frozen=True)
class KeyCheck:
    """Reads tables, and gathers what is found beside their values.

    Args:
        idle: the keys that are written and have no effect.
    """

    problems: list[Problem] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    honoured: dict[str, FieldInfo] = field(default_factory=honoured_keys)

    def read_table(self, table: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Give the keys that set something and hold, of the table at a path; the path of the top is empty."""
        values: dict[str, Any] = {}
        for name, value in table.items():
            key = f"{path}.{name}".removeprefix(".")
            if key in self.honoured:
                if self._is_value(value, key):
                    values[name] = value
            elif key in NO_EFFECT:
                if value is not None and not (key.endswith(".enabled") and value is (key == _ON_BY_DEFAULT)):
                    self.idle.append(key)
            elif key in REFUSED:
                if not _asks_for_nothing(value, REFUSED[key]):
                    self.problems.append(Problem(key, value, "is not supported (deepspeed_config.md)", "leave it out"))
            elif names := self._names(key):
                if isinstance(value, Mapping):
                    inner = self.read_table(value, key)
                    if any(path.startswith(f"{key}.") for path in self.honoured):
                        values[name] = inner
                elif value is not None and not (value is False and key in _OFF_WHEN_FALSE):
                    self.problems.append(Problem(key, value, "must be a table", f"its keys are {', '.join(names)}"))
            elif key.partition(".")[0] not in UNCHECKED or closest(str(name), self._names(path), cutoff=0.74):
                self._unknown(key, str(name), path, value)  # within an unchecked block only what looks like a known key
        return values

    def _is_value(self, value: object, key: str) -> bool:
        """Tell whether a key that sets something is written with a value that it takes."""
        info = self.honoured[key]
        if value is None and info.default is None:
            return False
        errors = _errors(key, value)
        if isinstance(value, Mapping) and not errors:  # parameters, checked by who reads them
            found = [name for name, item in value.items() if item == "auto"]
            self.problems.extend(_placeholder(f"{key}.{name}", "auto", "write the value itself") for name in found)
        if not errors:
            return True
        taken = type_text(info)
        if isinstance(value, str) and value.lower() == "auto":
            self.problems.append(_placeholder(key, value, f"write the value itself: {taken}"))
            return False
        near = [json.dumps(candidate) for candidate in candidates(value, errors) if not _errors(key, candidate)]
        default = "leave it out" if info.default is None else f"the default is {json.dumps(info.default)}"
        hint = f"write {' or '.join(dict.fromkeys(near))}" if near else default
        self.problems.append(Problem(key, value, f"must be {_ARTICLES.get(taken.split()[0], '')}{taken}", hint))
        return False

    def _unknown(self, key: str, name: str, home: str, value: object) -> None:
        """Report a key that does not exist."""
        siblings, known = self._names(home), [*self.honoured, *NO_EFFECT, *REFUSED]
        meant = likely_keys(name, home, siblings, known)
        every = f"the keys of {home} are {', '.join(siblings)}" if home else "docs/deepspeed_config.md has every key"
        self.problems.append(Problem(key, value, "unknown key", did_you_mean(meant, every)))

    def _names(self, path: str) -> list[str]:
        """Give the names directly below a table; none where there is no such table."""
        start = f"{path}." if path else ""
        below = [key.removeprefix(start) for key in (*self.honoured, *NO_EFFECT, *REFUSED) if key.startswith(start)]
        return list(dict.fromkeys(name.partition(".")[0] for name in below))


def _errors(key: str, value: object) -> list[ErrorDetails]:
    """Give what pydantic says of one value, written alone."""
    written = value
    for name in reversed(key.split(".")):
        written = {name: written}
    try:
        DeepSpeedJson.model_validate(written)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _asks_for_nothing(value: object, harmless: Iterable[object]) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    written = value.lower() if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
    return value is None or any(type(written) is type(item) and written == item for item in harmless)


def _placeholder(key: str, value: str, hint: str) -> Problem:
    return Problem(key, value, "is a placeholder that Hugging Face's Trainer fills in", hint)


def note_on(idle: Sequence[str]) -> list[str]:
    """Return the note on keys that have no effect; none without any."""
    return [f"without effect here, as docs/deepspeed_config.md explains: {', '.join(idle)}"] if idle else []
