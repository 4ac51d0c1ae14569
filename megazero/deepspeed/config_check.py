"""What is written in a DeepSpeed configuration, held against the table of keys, each key by itself.

    {"zero_optimization": {"stage": 2, "overlap_com": true}}
        zero_optimization.stage          a key of the table, of the right type   -> values
        zero_optimization.overlap_com    no key of it                            -> a problem, with the likeliest key

A key that is wrong, or that a misspelt one probably meant, is remembered, so that no rule is judged over it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megazero.deepspeed.config_keys import keys_by_path
from megazero.deepspeed.config_kinds import Key, KeyStatus
from megazero.settings import Problem

_MANY = 3  # so many keys of one name say nothing about which was meant
_OFF_WHEN_FALSE = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")

# What Hugging Face's Trainer writes over "auto", where it is more than its argument of the same name.
_TRAINER = {
    "train_batch_size": "per_device_train_batch_size * gradient_accumulation_steps * number of GPUs",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "[adam_beta1, adam_beta2]",
    "optimizer.params.eps": "adam_epsilon",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "zero_optimization.reduce_bucket_size": "hidden_size * hidden_size",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 * hidden_size * hidden_size",
    "zero_optimization.stage3_param_persistence_threshold": "10 * hidden_size",
}


@dataclass(frozen=True)
class Written:
    """The keys that hold, by path from the top, and what is wrong with the others."""

    values: dict[str, Any] = field(default_factory=dict)
    """What was written, as the rest of the program reads it."""
    wrong: set[str] = field(default_factory=set)
    """Keys that are wrong, or probably meant by a name that is."""
    problems: list[Problem] = field(default_factory=list)
    keys: Mapping[str, Key] = field(default_factory=keys_by_path)
    """The table of keys."""

    def __getitem__(self, path: str) -> Any:
        """Give a key as written, or what DeepSpeed documents where it is not."""
        return self.values[path] if path in self.values else self.keys[path].default

    def __contains__(self, path: str) -> bool:
        """Tell whether a key, or anything below a table, is written."""
        return any(f"{name}.".startswith(f"{path}.") for name in self.values)

    def notes(self) -> list[str]:
        """Give a line for each key that is written and has no effect."""
        lines = []
        for path, value in self.values.items():
            key = self.keys.get(path)
            off = key is not None and path.endswith("enabled") and value == key.default
            if key is not None and key.fate is KeyStatus.NO_EFFECT and not off:
                lines.append(f"{path} has no effect: {key.text}")
        return lines


def check_keys(config: Mapping[str, Any]) -> Written:
    """Check names, types, ranges, and that nothing is asked for that is refused.

    Args:
        config: the configuration as parsed.
    """
    written = Written()
    config = _modern(config)
    _check_table(config, "", "", written)
    return written


def _modern(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the forms that older versions take as those of today."""
    modern = dict(config)
    if isinstance(stage := modern.get("zero_optimization"), bool):
        modern["zero_optimization"] = {"stage": int(stage)}
    if "bfloat16" in modern and "bf16" not in modern:
        modern["bf16"] = modern.pop("bfloat16")
    return modern


def _check_table(table: Mapping[str, Any], path: str, place: str, written: Written) -> None:
    """Check what is below one table.

    Args:
        path: of the table, as the table of keys has it.
        place: of the table, as the user wrote it.
        written: where to put what is found.
    """
    for name, value in table.items():
        here = f"{place}.{name}".removeprefix(".")
        child = _child(f"{path}.{name}".removeprefix("."), f"{path}.*", written)
        if child is None:
            problem, meant = _unknown(here, str(name), path, value, written)
            written.problems.append(problem)
            written.wrong.update(meant)
        elif child in written.keys:
            _check_value(value, child, here, written)
        elif value is not None and not (value is False and child in _OFF_WHEN_FALSE):
            _check_nested(value, child, here, written)


def _check_nested(value: object, path: str, place: str, written: Written) -> None:
    """Check what stands where a table, or a list of tables, is expected."""
    items = _is_table(f"{path}[]", written)
    if items and isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            _check_table(item, f"{path}[]", f"{place}[{index}]", written)
    elif not items and isinstance(value, Mapping):
        written.values.setdefault(path, {})
        _check_table(value, path, place, written)
    else:
        rule = "must be a list of tables" if items else "must be a table"
        names = ", ".join(_names(f"{path}[]" if items else path, written))
        written.problems.append(Problem(place, value, rule, f"its keys are {names}"))
        written.wrong.update(name for name in written.keys if name.startswith(path))


def _check_value(value: object, path: str, place: str, written: Written) -> None:
    key = written.keys[path]
    if value is None and key.default is None:
        return
    if isinstance(value, str) and value.lower() == "auto" and not key.kind.accepts(value):
        written.problems.append(_placeholder(path, place, value, key))
        written.wrong.add(path)
    elif not key.kind.accepts(value):
        near = " or ".join(dict.fromkeys(map(json.dumps, key.kind.near(value))))
        default = "leave it out" if key.default is None else f"the default is {json.dumps(key.default)}"
        hint = f"write {near}" if near else default
        written.problems.append(Problem(place, value, key.kind.must(), hint))
        written.wrong.add(path)
    else:
        written.values[path] = key.kind.canonical(value)
        if isinstance(value, Mapping) and key.fate is KeyStatus.HONOURED:  # parameters, checked by who reads them
            found = [name for name, item in value.items() if item == "auto"]
            written.problems.extend(_placeholder(f"{path}.{name}", f"{place}.{name}", "auto") for name in found)
        if key.fate is KeyStatus.REFUSED and not _asks_for_nothing(written.values[path], key):
            written.problems.append(Problem(place, value, f"is not supported: {key.text}", "leave it out"))


def _asks_for_nothing(value: object, key: Key) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value == key.default or value in key.harmless


def _placeholder(path: str, place: str, value: str, key: Key | None = None) -> Problem:
    argument = _TRAINER.get(path, path.rpartition(".")[2])
    rule = f"is a placeholder for what Hugging Face's Trainer computes or was given ({argument})"
    if key is None:
        return Problem(place, value, rule, "write the value itself")
    what = "leave it out" if key.fate is KeyStatus.NO_EFFECT else f"write the value itself: {key.kind}"
    return Problem(place, value, rule, what)


def _unknown(place: str, name: str, home: str, value: object, written: Written) -> tuple[Problem, list[str]]:
    """Describe a key that is not in the table, and give the keys that it probably meant."""
    siblings = _names(home, written)
    same = [path for path in written.keys if path.rpartition(".")[2] == name]
    if 0 < len(same) <= _MANY:
        meant = same
    elif close := get_close_matches(name, siblings, n=1):
        meant = [f"{home}.{close[0]}".removeprefix(".")]
    else:
        last = {path.rpartition(".")[2] for path in written.keys}
        close = get_close_matches(name, sorted(last), n=1)
        meant = [path for path in written.keys if close and path.rpartition(".")[2] == close[0]]
    if not 0 < len(meant) <= _MANY:
        hint = f"the keys of {home} are {', '.join(siblings)}" if home else "docs/deepspeed_config.md lists every key"
        return Problem(place, value, "unknown key", hint), []
    paths = {path for path in written.keys for prefix in meant if f"{path}.".startswith(f"{prefix}.")}
    return Problem(place, value, "unknown key", f"did you mean {' or '.join(meant)}?"), sorted(paths)


def _child(path: str, wildcard: str, written: Written) -> str | None:
    """Find a path in the table of keys: as it is, or below a name of the user's own."""
    found = (p for p in (path, wildcard) if p in written.keys or _is_table(p, written) or _is_table(f"{p}[]", written))
    return next(found, None)


def _is_table(path: str, written: Written) -> bool:
    return any(name.startswith(f"{path}.") for name in written.keys)


def _names(path: str, written: Written) -> list[str]:
    """Give the names directly below a table of the table of keys."""
    below = [name.removeprefix(f"{path}.") for name in written.keys if not path or name.startswith(f"{path}.")]
    return list(dict.fromkeys(name.split(".")[0].removesuffix("[]") for name in below))
