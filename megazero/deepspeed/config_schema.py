"""The keys of a DeepSpeed configuration that set something here, and the relations between them.

    {"zero_optimization": {"stage": 2}}     DeepSpeedJson.zero_optimization: ZeroBlock, .stage = 2

Names, types and defaults are those of the reference of DeepSpeed 0.19 (docs/_pages/config-json.md), with a few keys of
older versions. Types are strict, as in a run file. JSON has one type of number, so numbers of elements may also be
written as 5e8. docs/deepspeed_config.md says what each key sets, and config_keys.toml has the keys that set nothing.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from megazero.config.schema import Stage, is_section
from megazero.settings import LARGEST_COUNT, Count, CountOrZero, Fraction, PositiveOrZero, Problem, Section, Spelling


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _never(value: object) -> object:
    is_never = isinstance(value, int | float) and value > LARGEST_COUNT  # people write 2**63, or Infinity
    return None if is_never else value


Format = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_lower)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_lower)]
Elements = Annotated[int, BeforeValidator(_whole), Field(ge=0), Spelling("integer >= 0, also written as 5e8")]
BucketElements = Annotated[int, BeforeValidator(_whole), Field(ge=1), Spelling("integer >= 1, also written as 5e8")]
PrintSteps = Annotated[Count | None, BeforeValidator(_never), Spelling("integer >= 1 or null or Infinity")]
Parameters = Annotated[dict[str, Any], Spelling("table")]


class NamedBlock(Section):
    """An optimizer or a learning-rate schedule.  Its name and parameters are checked when it is built."""

    type: str | None = None
    params: Parameters | None = None


class Fp16Block(Section):
    """Training in fp16, and its loss scale."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: PositiveOrZero = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=64)] = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Count = 1


class Bf16Block(Section):
    """Training in bf16."""

    enabled: bool = False
    auto_cast: bool = False


class DataTypesBlock(Section):
    """The dtype of gradients."""

    grad_accum_dtype: Format | None = None


class OffloadParamBlock(Section):
    """Where stage 3 stores its shards of the weights."""

    device: Device | None = None
    nvme_path: str | None = None
    pin_memory: bool = True

    @property
    def if_on(self) -> Self | None:
        """Return this block, or None if nothing is offloaded, as DeepSpeed's engine does."""
        return None if self.device in (None, "none") else self


class OffloadOptimizerBlock(OffloadParamBlock):
    """Where optimizer state is stored."""

    ratio: Fraction = 1.0


class ZeroBlock(Section):
    """What data-parallel ranks shard, and how."""

    stage: Stage = 0
    reduce_bucket_size: BucketElements = 500_000_000
    stage3_param_persistence_threshold: Elements = 100_000
    stage3_prefetch_bucket_size: Elements = 50_000_000
    mics_shard_size: Annotated[int, Field(ge=-1)] = -1
    zero_hpz_partition_size: Annotated[int, Field(ge=0)] = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    offload_optimizer: OffloadOptimizerBlock = OffloadOptimizerBlock()
    offload_param: OffloadParamBlock = OffloadParamBlock()

    @property
    def offloads(self) -> dict[str, OffloadParamBlock]:
        """The two offload blocks."""
        return {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_param}

    def nvme_paths(self) -> list[str]:
        """Return the distinct directories that the two blocks name for their files."""
        paths = [block.nvme_path for block in self.offloads.values() if block.device == "nvme"]
        return list(dict.fromkeys(path for path in paths if path))


class CheckpointingBlock(Section):
    """Where the arguments of `deepspeed.checkpointing.checkpoint`, and of recomputed pipeline layers, are stored."""

    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    partition_activations: bool = False


class TensorboardBlock(Section):
    """TensorBoard events."""

    enabled: bool = False
    output_path: str | None = None
    job_name: str = "DeepSpeedJobName"


class FlopsProfilerBlock(Section):
    """The profiler of DeepSpeed."""

    enabled: bool = False


class DataEfficiencyBlock(Section):
    """The order of samples."""

    seed: CountOrZero = 1234


class DeepSpeedJson(Section):
    """All keys that set something here."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    dataloader_drop_last: bool = False
    optimizer: NamedBlock = NamedBlock()
    scheduler: NamedBlock = NamedBlock()
    gradient_clipping: PositiveOrZero = 1.0
    zero_allow_untested_optimizer: bool = False
    communication_data_type: Format | None = None
    steps_per_print: PrintSteps = 10
    wall_clock_breakdown: bool = False
    dump_state: bool = False
    fp16: Fp16Block = Fp16Block()
    bf16: Bf16Block = Bf16Block()
    data_types: DataTypesBlock = DataTypesBlock()
    zero_optimization: ZeroBlock = ZeroBlock()
    activation_checkpointing: CheckpointingBlock = CheckpointingBlock()
    tensorboard: TensorboardBlock = TensorboardBlock()
    flops_profiler: FlopsProfilerBlock = FlopsProfilerBlock()
    data_efficiency: DataEfficiencyBlock = DataEfficiencyBlock()


def honoured_keys(model: type[Section] = DeepSpeedJson, prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key that sets something, by its path from the top."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            found |= honoured_keys(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


# Relations between keys
TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ZERO = "zero_optimization"


def relations(config: DeepSpeedJson, dp: int) -> Iterator[Problem]:
    """Yield the problems with combinations of keys that the rules of run files do not find."""
    zero, has_half_weights = config.zero_optimization, config.fp16.enabled or config.bf16.enabled
    if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
        rule = f"must be given: samples in a step, {MICRO} * {ACCUMULATION} * {dp=}"
        yield Problem(TRAIN, None, rule, f"write it, or {MICRO}, with {ACCUMULATION} or without")
    if config.fp16.enabled and config.bf16.enabled:
        yield Problem("bf16.enabled", True, "cannot be together with fp16.enabled", "keep one of them")
    formats = {
        "communication_data_type": config.communication_data_type,
        "data_types.grad_accum_dtype": config.data_types.grad_accum_dtype,
    }
    for key, value in formats.items():
        if value not in (None, "fp32") and not has_half_weights:
            yield Problem(key, value, "must be fp32: gradients of fp32 weights stay in fp32", "leave it out")
    for name, named in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        if named.params is not None and not named.type:
            yield Problem(f"{name}.type", None, "must be given, since parameters are", "name it")
    for name, block in zero.offloads.items():
        if name in zero.model_fields_set and block.device is None:
            yield Problem(f"{ZERO}.{name}.device", None, "must be given", 'write "cpu", "nvme" or "none"')
        if block.device == "nvme" and not block.nvme_path:
            yield Problem(f"{ZERO}.{name}.nvme_path", None, "must be given for nvme", "name a local directory")
    if len(paths := zero.nvme_paths()) > 1:
        rule = f"must be {ZERO}.offload_optimizer.nvme_path={paths[0]}: one directory holds the files of both"
        yield Problem(f"{ZERO}.offload_param.nvme_path", paths[1], rule, "write the same directory twice")
