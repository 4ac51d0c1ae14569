"""Reads a DeepSpeed configuration, the JSON of a script, and converts it to the settings of this project.

    file or dict --> each key by itself (check_keys) --> relations between keys (config_schema) --> DeepSpeedConfig

`config_schema` and `config_keys.toml` say what happens with each key, and docs/deepspeed_config.md explains it. No key is
dropped silently: a key is honoured, or a note says why it has no effect, or it is an error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megazero.config.derive import complete_batch
from megazero.config.document import type_text
from megazero.config.problems import candidates, likely_keys
from megazero.config.rules import check_rules
from megazero.config.schema import OffloadConfig, PrecisionConfig, RunConfig, TrainingConfig, ZeroConfig
from megazero.deepspeed.config_schema import ACCUMULATION, MICRO, TRAIN, ZERO, DeepSpeedJson, honoured_keys, relations
from megazero.deepspeed.names import read_table
from megazero.registry import closest, did_you_mean
from megazero.settings import LARGEST_COUNT, ConfigError, Problem, Section, file_error, read_text

_SMALLEST_BUCKET = 1024  # bytes, as the schema has it
_BYTES_PER_ELEMENT = 4  # buckets hold fp32 gradients
_TABLE = read_table("config_keys.toml")
_SIZES = {"global_batch_size": TRAIN, "micro_batch_size": MICRO, "accumulation": ACCUMULATION}  # a run file's names


@dataclass(frozen=True)
class DeepSpeedConfig(Mapping[str, Any]):
    """The complete settings of a DeepSpeed configuration.  Used as a mapping, it is the original JSON.

    Args:
        json: the keys that set something, as written or with their defaults; all other fields follow from them.
        train_batch_size: samples in an optimizer step: micro_batch_size * accumulation * dp.
        casts_inputs: whether inputs are cast to the dtype of the weights; None if the configuration does not say.
        seed: seed of the data order; None if the configuration does not say.
        notes: a line on each key that has no effect here, or another effect.
    """

    given: Mapping[str, Any]
    json: DeepSpeedJson
    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    zero: ZeroConfig
    precision: PrecisionConfig
    casts_inputs: bool | None
    seed: int | None
    wall_clock_breakdown: bool
    notes: tuple[str, ...]

    def __getitem__(self, key: str) -> Any:
        return self.given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def load_deepspeed_config(source: str | Path | Mapping[str, Any], dp_size: int) -> DeepSpeedConfig:
    """Read a configuration from a JSON file or a mapping.

    Args:
        source: path of a JSON file, or its contents.
        dp_size: number of data-parallel ranks.

    Raises: ConfigError: lists all problems.
    """
    name = "the DeepSpeed configuration" if isinstance(source, Mapping) else str(source)
    given = source if isinstance(source, Mapping) else read_json(Path(source))
    config, checked = check_keys(given)
    problems = checked.problems or list(relations(config, dp_size))
    if not problems:
        zero, precision = _zero(config), _precision(config)
        sizes: dict[str, Any] = {ours: getattr(config, theirs) or "auto" for ours, theirs in _SIZES.items()}
        run = RunConfig(zero=zero, precision=precision, training=TrainingConfig(**sizes))
        problems = list(_broken_rules(run, dp_size))
    if problems:
        raise ConfigError(problems, name)
    batch = complete_batch(**sizes, dp=dp_size, pp=1)  # without the keys, there is no accumulation
    half = config.fp16 if config.fp16.enabled else config.bf16
    efficiency = config.data_efficiency
    return DeepSpeedConfig(
        given=given,
        json=config,
        train_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        zero=zero,
        precision=precision,
        casts_inputs=half.auto_cast if "auto_cast" in half.model_fields_set else None,
        seed=efficiency.seed if "seed" in efficiency.model_fields_set else None,
        wall_clock_breakdown=config.wall_clock_breakdown or config.flops_profiler.enabled,
        notes=(*note_on([*checked.idle, *_idle_beside_others(config)]), *_notes(config)),
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON file that contains an object.  Raises: ConfigError."""

    text, twice = read_text(path), list[str]()

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        config = json.loads(text, object_pairs_hook=read)
    except (ValueError, RecursionError) as error:
        raise file_error(path, f"is not JSON: {error}") from None
    if twice:
        raise file_error(path, f"{' and '.join(dict.fromkeys(twice))} is written twice", "keep one")
    if not isinstance(config, dict):
        raise file_error(path, "must be a JSON object", 'it starts with {"train_batch_size": ...')
    return config


def _zero(config: DeepSpeedJson) -> ZeroConfig:
    zero = config.zero_optimization
    given: dict[str, object] = {"stage": zero.stage, "reduce": "micro_batch", "offload": _offload(config)}
    if "reduce_bucket_size" in zero.model_fields_set:
        given["bucket_bytes"] = _bucket_bytes(config)
    if zero.stage == 3:
        given["persistent_elements"] = min(zero.stage3_param_persistence_threshold, LARGEST_COUNT)
        if "stage3_prefetch_bucket_size" in zero.model_fields_set:
            itemsize = 2 if config.fp16.enabled or config.bf16.enabled else 4
            given["prefetch_bytes"] = min(itemsize * zero.stage3_prefetch_bucket_size, LARGEST_COUNT)
        given["quantized_weights"] = zero.zero_quantized_weights
        given["secondary_shard_size"] = zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else 0
    if zero.stage > 0:
        given["shard_group_size"] = max(0, zero.mics_shard_size)
        given["quantized_gradients"] = 4 if zero.zero_quantized_gradients else 0
    return ZeroConfig.model_validate(given)


def _broken_rules(run: RunConfig, dp: int) -> Iterator[Problem]:
    """Yield the violations of the rules of run files, under the names of a DeepSpeed configuration."""
    for problem in check_rules(run, dp)[1]:
        if problem.key in _TABLE["words"]:
            texts = [problem.key, problem.rule, problem.hint]
            for ours, theirs in _TABLE["words"].items():
                texts = [text.replace(ours, theirs) for text in texts]
            yield Problem(texts[0], problem.value, *texts[1:])


def _bucket_bytes(config: DeepSpeedJson) -> int:
    asked = _BYTES_PER_ELEMENT * config.zero_optimization.reduce_bucket_size
    return min(max(asked, _SMALLEST_BUCKET), LARGEST_COUNT)


def _offload(config: DeepSpeedJson) -> OffloadConfig:
    zero = config.zero_optimization
    optimizer, parameters = (block.device or "none" for block in zero.offloads.values())
    return OffloadConfig.model_validate(
        {
            "optimizer": optimizer,
            "parameters": parameters,
            "ratio": 1.0 if optimizer == "none" else zero.offload_optimizer.ratio,
            "nvme_path": next(iter(zero.nvme_paths()), None),
            "pin_memory": all(block.pin_memory for block in zero.offloads.values() if block.if_on),
        }
    )


def _precision(config: DeepSpeedJson) -> PrecisionConfig:
    fp16 = config.fp16
    given: dict[str, object] = {
        "dtype": "fp16" if fp16.enabled else "bf16" if config.bf16.enabled else "fp32",
        "accumulate_dtype": config.data_types.grad_accum_dtype or "fp32",
        "reduce_dtype": config.communication_data_type or "fp32",
    }
    if fp16.enabled:
        given |= fp16.model_dump(exclude={"enabled", "auto_cast"})
    return PrecisionConfig.model_validate(given)


def _idle_beside_others(config: DeepSpeedJson) -> Iterator[str]:
    """Yield the keys that are set but have no effect because of other keys."""
    zero, fp16 = config.zero_optimization, config.fp16
    rows: list[tuple[bool, str, Section, str]] = [
        (zero.stage != 3, ZERO, zero, "without stage 3"),
        (zero.stage == 0, ZERO, zero, "at stage 0"),
        *((not block.if_on, f"{ZERO}.{name}", block, "without a device") for name, block in zero.offloads.items()),
        (not fp16.enabled, "fp16", fp16, "without fp16"),
        (fp16.enabled, "bf16", config.bf16, "beside fp16"),
        (fp16.enabled and fp16.loss_scale > 0, "fp16", fp16, "with a constant scale"),
        (not config.tensorboard.enabled, "tensorboard", config.tensorboard, "without events"),
    ]
    for is_idle, path, section, where in rows:
        keys = section.model_fields_set & {*_TABLE["idle"][where].split()}
        yield from (f"{path}.{key}" for key in sorted(keys) if is_idle)


def _notes(config: DeepSpeedJson) -> Iterator[str]:
    """Yield notes on keys that have another effect than in DeepSpeed, with these values or these other keys."""
    zero, bucket = config.zero_optimization, _bucket_bytes(config)
    if "reduce_bucket_size" in zero.model_fields_set and bucket != _BYTES_PER_ELEMENT * zero.reduce_bucket_size:
        taken = bucket // _BYTES_PER_ELEMENT
        yield f"{ZERO}.reduce_bucket_size is taken as {taken}, the nearest that a bucket can have"
    if config.flops_profiler.enabled:
        yield "flops_profiler.enabled is taken as wall_clock_breakdown: operations are not counted by module"
    if zero.zero_quantized_gradients and zero.stage and config.communication_data_type is not None:
        yield "communication_data_type acts on sums over groups alone: gradients are quantized on their way to the shards"


# ---------------------------------------------------------------------------------------------------------------------
# Each key by itself: is it known, may it be written here, is its value taken?
#
#    {"zero_optimization": {"stage": 2, "overlap_comm": true, "overlap_com": true}}
#        zero_optimization.stage           sets something (config_schema)      -> its value, checked by pydantic
#        zero_optimization.overlap_comm    has no effect (config_keys.toml)    -> the note on such keys
#        zero_optimization.overlap_com     unknown                             -> a problem, with the likeliest key

UNCHECKED: list[str] = _TABLE["unchecked"].split()
NO_EFFECT = [f"{block}.{name}".lstrip(".") for block, names in _TABLE["no_effect"].items() for name in names.split()]
#: By key, the values that ask for nothing; null, {} and {"enabled": false} never do.
REFUSED: dict[str, list[object]] = _TABLE["refused"]
_OFF_WHEN_FALSE = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_ON_BY_DEFAULT = "timers.throughput.enabled"
_ARTICLES = {"integer": "an ", "number": "a ", "string": "a ", "table": "a "}

_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_OTHER_NAMES = {name: f"stage3_{name}" for name in _TABLE["prefixed"].split()}


def check_keys(config: Mapping[str, Any]) -> tuple[DeepSpeedJson, KeyCheck]:
    """Check each key of a parsed configuration; return the valid keys, the others at their defaults, and what was found."""
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
    """Reads tables, and collects problems and keys without effect.

    Args:
        idle: the keys that are written and have no effect.
    """

    problems: list[Problem] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    honoured: dict[str, FieldInfo] = field(default_factory=honoured_keys)

    def read_table(self, table: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the valid keys of the table at a path that set something.  The path of the top is empty."""
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
        """Return whether a key that sets something has a value that it takes; report the problem if it has not."""
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
        """Return the names directly below a table; none if there is no such table."""
        start = f"{path}." if path else ""
        below = [key.removeprefix(start) for key in (*self.honoured, *NO_EFFECT, *REFUSED) if key.startswith(start)]
        return list(dict.fromkeys(name.partition(".")[0] for name in below))


def _errors(key: str, value: object) -> list[ErrorDetails]:
    """Return pydantic's errors for one value alone."""
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
