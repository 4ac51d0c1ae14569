"""Reading a DeepSpeed configuration: the JSON of a script that used DeepSpeed, as the settings of this project.

    file or dict ---- each key by itself (deepspeed_check) ----+
                      rules over the keys that hold (.._rules) +-- none: DeepSpeedConfig     some: ConfigError

What becomes of each key is in `deepspeed_keys`, and for readers in docs/deepspeed_config.md. Nothing that was written is
dropped in silence: a key is honoured, or a note says why it has no effect, or it is an error.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.config.schema import OffloadConfig, PrecisionConfig, ZeroConfig
from megazero.deepspeed.config_check import Written, check_keys
from megazero.deepspeed.config_rules import (
    ACCUMULATION,
    MICRO,
    OPTIMIZER_OFFLOAD,
    PARAMETER_OFFLOAD,
    TRAIN,
    ZERO,
    broken_rules,
    device_of,
    nvme_paths,
)
from megazero.settings import LARGEST_COUNT, ConfigError, Problem

_SMALLEST_BUCKET = 1024  # bytes, as the schema has it
_BYTES_PER_ELEMENT = 4  # buckets hold fp32 gradients


@dataclass(frozen=True)
class NamedParams:
    """An "optimizer" or "scheduler" entry; what its parameters mean is for whoever builds it."""

    type: str
    """Its name, as written."""
    params: dict[str, Any]


@dataclass(frozen=True)
class EventFiles:
    """Where TensorBoard events go."""

    output_path: str | None
    """None: where the script runs."""
    job_name: str


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration asks for, complete."""

    train_batch_size: int
    """Samples in an optimizer step: micro_batch_size * accumulation * dp."""
    micro_batch_size: int
    accumulation: int
    zero: ZeroConfig
    precision: PrecisionConfig
    casts_inputs: bool | None
    """Whether inputs are cast to the format of the weights; None where it is not written."""
    grad_clip: float
    """Largest global gradient norm; 0 turns clipping off."""
    optimizer: NamedParams | None
    scheduler: NamedParams | None
    tp: int
    """Always 1: a model is not rewritten for tensor parallelism."""
    steps_per_print: int | None
    """Steps between two reports; None: never."""
    seed: int | None
    """Of the data order; None where it is not written."""
    drop_last: bool
    """Whether the loader drops an incomplete batch."""
    tensorboard: EventFiles | None
    wall_clock_breakdown: bool
    dump_state: bool
    allow_untested_optimizer: bool
    notes: tuple[str, ...]
    """One line for each key that was written but has no effect here, saying why."""


def load_deepspeed_config(source: str | Path | Mapping[str, Any], dp_size: int) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration.

    Args:
        source: the JSON file, or what was parsed from one.
        dp_size: number of data-parallel ranks, which the batch sizes are resolved for.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    name = "the DeepSpeed configuration" if isinstance(source, Mapping) else str(source)
    written = check_keys(source if isinstance(source, Mapping) else _read(Path(source)))
    problems = [*written.problems, *broken_rules(written, dp_size)]
    if problems:
        raise ConfigError(problems, name)
    train, micro, accumulation = _batch_sizes(written, dp_size)
    steps = written["steps_per_print"]
    return DeepSpeedConfig(
        train_batch_size=train,
        micro_batch_size=micro,
        accumulation=accumulation,
        zero=_zero(written),
        precision=_precision(written),
        casts_inputs=_casts_inputs(written),
        grad_clip=float(written["gradient_clipping"]),
        optimizer=_named(written, "optimizer"),
        scheduler=_named(written, "scheduler"),
        tp=1,
        steps_per_print=steps if isinstance(steps, int) else None,
        seed=written.values.get("data_efficiency.seed"),
        drop_last=written["dataloader_drop_last"],
        tensorboard=_tensorboard(written),
        wall_clock_breakdown=written["wall_clock_breakdown"] or written["flops_profiler.enabled"],
        dump_state=written["dump_state"],
        allow_untested_optimizer=written["zero_allow_untested_optimizer"],
        notes=(*written.notes(), *_conditional_notes(written)),
    )


def _read(path: Path) -> Mapping[str, Any]:
    def fail(rule: str, hint: str = "", line: int | None = None) -> ConfigError:
        place = str(path) if line is None else f"{path}:{line}"
        return ConfigError([Problem(place, None, rule, hint)], str(path))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index])]
        if twice:
            raise fail(f"{' and '.join(dict.fromkeys(twice))} stands there twice", "keep one")
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        shown = error.doc.split("\n")[error.lineno - 1].strip()
        raise fail(f"is not JSON: {error.msg}", f"the line reads: {shown}", error.lineno) from None
    except UnicodeDecodeError as error:
        raise fail(f"is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise fail("must be a JSON object", 'it starts with {"train_batch_size": ...')
    return config


# ---------------------------------------------------------------------------------------------------------------------
# What the settings become


def _batch_sizes(written: Written, dp: int) -> tuple[int, int, int]:
    """Complete train_batch_size = micro * accumulation * dp; one accumulates only where that is written or implied."""
    train, micro, accumulation = (written[key] for key in (TRAIN, MICRO, ACCUMULATION))
    if train is None:
        accumulation = accumulation or 1
        return micro * accumulation * dp, micro, accumulation
    if micro is None:
        accumulation = accumulation or 1
        return train, train // (accumulation * dp), accumulation
    return train, micro, train // (micro * dp)


def _zero(written: Written) -> ZeroConfig:
    stage = written[f"{ZERO}.stage"]
    given: dict[str, object] = {"stage": stage, "reduce": "micro_batch", "offload": _offload(written)}
    if f"{ZERO}.reduce_bucket_size" in written:
        given["bucket_bytes"] = _bucket_bytes(written)
    if stage == 3:
        given["resident_elements"] = min(int(written[f"{ZERO}.stage3_param_persistence_threshold"]), LARGEST_COUNT)
    if stage > 0:
        given["shard_group_size"] = max(0, written[f"{ZERO}.mics_shard_size"])
    return ZeroConfig.model_validate(given)


def _bucket_bytes(written: Written) -> int:
    asked = _BYTES_PER_ELEMENT * int(written[f"{ZERO}.reduce_bucket_size"])
    return min(max(asked, _SMALLEST_BUCKET), LARGEST_COUNT)


def _offload(written: Written) -> OffloadConfig:
    optimizer, parameters = (device_of(written, block) for block in (OPTIMIZER_OFFLOAD, PARAMETER_OFFLOAD))
    blocks = [b for b in (OPTIMIZER_OFFLOAD, PARAMETER_OFFLOAD) if device_of(written, b) != "none"]
    pins = [written[f"{block}.pin_memory"] for block in blocks]
    path = next(iter(nvme_paths(written)), None)
    ratio = 1.0 if optimizer == "none" else float(written[f"{OPTIMIZER_OFFLOAD}.ratio"])
    tables = {"optimizer": optimizer, "parameters": parameters, "ratio": ratio, "nvme_path": path}
    return OffloadConfig.model_validate({**tables, "pin_memory": all(pins)})


def _precision(written: Written) -> PrecisionConfig:
    given = {
        "dtype": "fp16" if written["fp16.enabled"] else "bf16" if written["bf16.enabled"] else "fp32",
        "accumulate_dtype": written["data_types.grad_accum_dtype"] or "fp32",
        "reduce_dtype": written["communication_data_type"] or "fp32",
    }
    if written["fp16.enabled"]:
        whole = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
        given |= {key: written[f"fp16.{key}"] for key in whole}
        given |= {key: float(written[f"fp16.{key}"]) for key in ("loss_scale", "min_loss_scale")}
    return PrecisionConfig.model_validate(given)


def _casts_inputs(written: Written) -> bool | None:
    block = "fp16" if written["fp16.enabled"] else "bf16"
    return written.values.get(f"{block}.auto_cast")


def _named(written: Written, entry: str) -> NamedParams | None:
    kind = written[f"{entry}.type"]
    return NamedParams(kind, dict(written[f"{entry}.params"] or {})) if kind else None


def _tensorboard(written: Written) -> EventFiles | None:
    if not written["tensorboard.enabled"]:
        return None
    return EventFiles(written["tensorboard.output_path"] or None, written["tensorboard.job_name"])


def _conditional_notes(written: Written) -> Iterator[str]:
    """Tell of keys that are honoured, but not as these values or beside these others."""
    stage, bucket = written[f"{ZERO}.stage"], f"{ZERO}.reduce_bucket_size"
    if bucket in written and _bucket_bytes(written) != _BYTES_PER_ELEMENT * written[bucket]:
        yield f"{bucket} is taken as {_bucket_bytes(written) // _BYTES_PER_ELEMENT}, the nearest that a bucket can have"
    threshold = f"{ZERO}.stage3_param_persistence_threshold"
    if threshold in written and stage != 3:
        yield f"{threshold} has no effect: stage {stage} keeps all weights whole"
    for name in ("nvme_path", "pin_memory", "ratio"):
        for block in (OPTIMIZER_OFFLOAD, PARAMETER_OFFLOAD):
            if f"{block}.{name}" in written and device_of(written, block) == "none":
                yield f"{block}.{name} has no effect: its device is none"
    if written[f"{ZERO}.mics_shard_size"] > 0 and stage == 0:
        yield f"{ZERO}.mics_shard_size has no effect: stage 0 shards nothing"
