"""The keys of a run file: one TOML file is one run, one class here is one of its sections.

    [parallel]          RunConfig.parallel: ParallelConfig
    tp = 2                  .tp: 2
    schedule = "gpipe"      .schedule: "gpipe"

    [zero.offload]      RunConfig.zero.offload: OffloadConfig, a section within a section

Every key has a default, so an empty file is a run. Types are strict: neither "8" nor 8.0 is an integer, but 1 is a
number. Keys have the values of the file; `resolve` fills in open keys ("auto", or unset). Relations between keys are in
`rules`. `ActsWhere` in the type of a key says for which values of other keys it has an effect. The `#:` comment above
each key is its documentation.
"""

from itertools import permutations
from typing import Annotated, Literal, TypeGuard

from pydantic import AliasChoices, BeforeValidator, Field, field_validator, model_serializer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticKnownError

from megazero.models.activation_config import ActivationsConfig
from megazero.models.config import ModelConfig
from megazero.optim.config import LrScheduleConfig, OptimizerConfig
from megazero.schedules.registry import SCHEDULES
from megazero.settings import (
    LARGEST_COUNT,
    ActsWhere,
    Count,
    CountOrZero,
    Fraction,
    NameIn,
    PathText,
    PlaceText,
    Positive,
    PositiveOrZero,
    ProperFraction,
    Seconds,
    Section,
    Spelling,
    Text,
)

AXES = ("tp", "cp", "dp", "pp")
Auto = Literal["auto"]
Place = Literal["none", "cpu", "nvme", "auto"]
Format = Literal["fp32", "bf16", "fp16"]

_OWN_SCHEDULE = ActsWhere("parallel.schedule_file", (None,), "the file is the schedule")
_STAGE_3 = ActsWhere("zero.stage", (3,), "only stage 3 gathers parameters")
_OFFLOADED = ActsWhere(
    "zero.offload.optimizer zero.offload.parameters", ("cpu", "nvme", "auto"), "nothing is offloaded"
)
_FP16 = ActsWhere("precision.dtype", ("fp16",), "only fp16 scales the loss")
_ADAPTED_SCALE = ActsWhere("precision.loss_scale", (0.0,), "a fixed factor is not adapted")
_MANY_CHECKPOINTS = ActsWhere("checkpoint.keep_last", (), "every checkpoint is kept")
_EVALUATED = ActsWhere("data.validation_fraction data.validation_sources", (), "no sample is kept for evaluation")
_HELD_OUT = ActsWhere("data.validation_fraction", (), "no checkpoint has a validation loss")
_EVALUATED_STEPS = ActsWhere("training.eval_every_steps", (), "no checkpoint has a validation loss")
_TASKS = ActsWhere("evaluation.tasks", (), "there is no task")
_SAMPLED = ActsWhere("logging.sample_prompts", (), "there is no prompt")
_MANY_RANKS = ActsWhere("world_size", (), "there is no other rank", above=1)
_CONTEXT = ActsWhere("parallel.cp", (), "a rank has whole samples", above=1)


def _halves(what: str) -> ActsWhere:
    return ActsWhere("precision.dtype", ("bf16", "fp16"), what)


def _layout(value: object) -> object:
    """Validate "even", "cost", or a list per stage of layer counts, with "embed" at the very start and "head" at the end."""
    if value in ("even", "cost"):
        return value
    stages = [tuple(stage) if _is_list(stage) else (None,) for stage in value] if _is_list(value) else []
    for index, stage in enumerate(stages):
        words = ["embed"] * (index == 0) + ["head"] * (index == len(stages) - 1)
        if not all((type(item) is int and item >= 0) or item in words for item in stage):
            stages = []
            break
    if not stages:
        rule = 'be "even", "cost" or a list per stage such as [["embed", 4], [5], [4, "head"]]'
        raise PydanticCustomError("layout", rule)
    return tuple(stages)


def _fp8_layers(value: object) -> object:
    """Validate "inner", "all" or a list of layers."""
    listed = tuple(value) if _is_list(value) else ()
    if value in ("inner", "all") or (listed and all(type(layer) is int and layer >= 0 for layer in listed)):
        return listed or value
    raise PydanticCustomError("layers", 'be "inner", "all" or a list of layers from 0 such as [1, 2, 5]')


def _is_list(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return isinstance(value, list | tuple)


def _integer(value: object) -> object:
    # A literal compares by ==, so true and 1.0 would pass for 1.
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    return value


Fp8Layers = Annotated[Literal["inner", "all"] | tuple[int, ...], BeforeValidator(_fp8_layers)]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_integer)]
Layout = Annotated[
    Literal["even", "cost"] | tuple[tuple[int | Literal["embed", "head"], ...], ...], BeforeValidator(_layout)
]


Ctas = Annotated[int, Field(ge=0, le=32)]


class NcclMaxCtas(Section):
    """Largest number of GPU cores that NCCL may use for the groups of an axis; 0: NCCL chooses. See docs/speed.md."""

    #: Groups of tensor parallelism; layers wait for their sums and gathers.
    tp: Ctas = 0
    #: Groups that exchange heads, keys and values of attention.
    cp: Ctas = 0
    #: Groups that reduce gradients and gather weights while the model computes.
    dp: Ctas = 0
    #: Groups that exchange tokens between experts; layers wait for them.
    ep: Ctas = 0
    #: Messages between pipeline stages, sent while the model computes.
    pp: Ctas = 4


class ParallelConfig(Section):
    """How the model and the data are spread over the ranks: tp * cp * pp * dp = world size."""

    #: Tensor-parallel degree: ranks that split every matrix.
    tp: Count = 1
    #: Context-parallel degree: ranks that split the tokens of every sample.
    cp: Count = 1
    #: Attention over cp: "ulysses" exchanges heads for tokens, "ring" passes keys and values on. "auto": the fewest bytes.
    cp_method: Annotated[Literal["auto", "ulysses", "ring", "hybrid"], _CONTEXT] = "auto"
    #: For "hybrid": ranks that exchange heads; rings of cp / cp_ulysses ranks pass keys and values on.
    cp_ulysses: Annotated[Count | None, _CONTEXT] = None
    #: Pipeline-parallel degree: number of stages the layers are cut into.
    pp: Count = 1
    #: Data-parallel degree: number of model replicas. "auto" fills the world.
    dp: Count | Auto = "auto"
    #: Expert-parallel degree: consecutive ranks among the tp * cp * dp ranks of a stage that hold different experts.
    ep: Count = 1
    #: Split activations between the tensor-parallel regions over tp, by sequence position.
    sequence_parallel: Annotated[bool, ActsWhere("parallel.tp", (), "nothing is split over tp", above=1)] = False
    #: Overlap the forward's exchanges over tp with products: in "pieces" over a network, by "symmetric" memory over NVLink.
    tp_overlap: Annotated[
        Literal["none", "pieces", "symmetric"],
        ActsWhere("parallel.sequence_parallel", (), "nothing is gathered or scattered over tp"),
        ActsWhere("precision.fp8", ("none",), "each piece would round its weight to fp8 anew"),
    ] = "none"
    #: Order of forward and backward passes in the pipeline.
    schedule: Annotated[str, NameIn(SCHEDULES), _OWN_SCHEDULE] = "1f1b"
    #: A CSV file with your own schedule, in place of `schedule`; it fixes pp, accumulation and the chunks.
    schedule_file: Annotated[
        PathText | None, ActsWhere("elastic.enabled", (False,), "a schedule of your own fixes pp and accumulation")
    ] = None
    #: Order of the ranks of the chunks in `schedule_file`: the same for each chunk ("loop"), or there and back ("v").
    schedule_placement: Annotated[
        Literal["loop", "v"], ActsWhere("parallel.schedule_file", (), "a named schedule has its own")
    ] = "loop"
    #: Model chunks on each pipeline rank: 2 or more for interleaved and interleaved-pairs; zbv and dualpipev have two.
    virtual_stages: Annotated[Count, _OWN_SCHEDULE] = 1
    #: How layers are split into stages: "even", by "cost" (with the head's), or a list: [["embed", 4], [5], [4, "head"]].
    layout: Annotated[Layout, ActsWhere("parallel.pp parallel.virtual_stages", (), "there is one stage", above=1)] = (
        "even"
    )
    #: Order of the axes, from the one whose ranks are closest together to the one whose ranks are farthest apart.
    order: Annotated[str, _MANY_RANKS] = "tp-cp-dp-pp"
    #: Longest time for which a collective may wait for a rank, before the run ends.
    timeout_seconds: Seconds = 600
    #: Largest number of GPU cores that NCCL may use.
    nccl_max_ctas: NcclMaxCtas = NcclMaxCtas()

    @field_validator("order")
    @classmethod
    def _order_names_every_axis(cls, order: str) -> str:
        if sorted(order.split("-")) != sorted(AXES):
            choices = {"choices": ["-".join(axes) for axes in permutations(AXES)]}
            raise PydanticCustomError("axis_order", "be tp, cp, dp and pp, each once and joined by -", choices)
        return order

    @property
    def ulysses(self) -> int:
        """Ulysses degree of a resolved run.  At cp 1 it is 1, and `cp_ulysses` is for other shapes of an elastic run."""
        return (self.cp_ulysses or 1) if self.cp > 1 else 1


class OffloadConfig(Section):
    """What is moved off the device between its uses."""

    #: Where optimizer state and master weights are: on the device, in host memory, in files, or by the free memory.
    optimizer: Annotated[Place, ActsWhere("zero.offload.ratio", (), "no share of the state is offloaded")] = "none"
    #: Where stage 3 keeps its shard of the weights.
    parameters: Annotated[Place, ActsWhere("zero.stage", (3,), "only stage 3 shards parameters")] = "none"
    #: Fraction of the optimizer state that is offloaded; the rest stays on the device.
    ratio: Annotated[Fraction, ActsWhere("zero.offload.optimizer", ("cpu", "nvme", "auto"), "no state moves")] = 1.0
    #: Directory for the files, on a local disk of each node; they are removed when the run ends.
    nvme_path: Annotated[
        PathText | None,
        ActsWhere(
            "zero.offload.optimizer zero.offload.parameters", ("nvme", "auto"), "no state is in files", is_noted=True
        ),
    ] = None
    #: Page-lock host memory, so that copies to and from a CUDA device overlap with the computation.
    pin_memory: Annotated[bool, _OFFLOADED] = True


class ZeroConfig(Section):
    """What data-parallel ranks shard instead of replicating it."""

    #: 0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters.
    stage: Stage = 1
    #: How long stage 3 keeps gathered weights: for one pass, until another model chunk runs, for the step.
    gather_policy: Annotated[Literal["action", "chunk", "step"], _STAGE_3] = "action"
    #: Bytes of weights that stage 3 gathers ahead of the unit in use; at least one unit, however large.
    prefetch_bytes: Annotated[CountOrZero, _STAGE_3] = 32 * 1024 * 1024
    #: When stages 2 and 3 reduce gradients: after each micro-batch, or once per step, with whole gradients until then.
    reduce: Annotated[
        Literal["micro_batch", "step"], ActsWhere("zero.stage", (2, 3), "gradients are reduced once per step")
    ] = "micro_batch"
    #: Size of a gradient bucket, in bytes of fp32 gradients; "auto": 40 MiB, or by ranks and network (docs/zero.md).
    bucket_bytes: Annotated[int, Field(ge=1024, le=LARGEST_COUNT)] | Auto = "auto"
    #: Consecutive ranks of dp * cp that shard one copy of the state; each such group has its own copy. 0: all of them.
    shard_group_size: Annotated[
        CountOrZero, ActsWhere("zero.stage", (1, 2, 3), "it has no effect where nothing is sharded")
    ] = 0
    #: Stage 3 keeps parameters with at most so many elements whole on every rank, instead of gathering them.
    persistent_elements: Annotated[
        CountOrZero, _STAGE_3, Field(validation_alias=AliasChoices("persistent_elements", "resident_elements"))
    ] = 0
    #: Ranks, such as those of a node, that hold a secondary shard of the weights (hpZ): later gathers of a step stay there.
    secondary_shard_size: Annotated[
        CountOrZero,
        _STAGE_3,
        ActsWhere("zero.gather_policy", ("action", "chunk"), "no unit is gathered twice in a step"),
    ] = 0
    #: Gather stage 3's weights in blocks of 8 bits (qwZ); masters, checkpoints and persistent parameters stay exact.
    quantized_weights: Annotated[bool, _STAGE_3, _MANY_RANKS] = False
    #: Bits of gradients on their way to the shards, in blocks, rounded at random without bias (qgZ); 0: reduce_dtype.
    quantized_gradients: Annotated[
        Literal[0, 4, 8], ActsWhere("zero.stage", (1, 2, 3), "stage 0 scatters no gradients"), _MANY_RANKS
    ] = 0
    #: What is moved off the device between its uses.
    offload: OffloadConfig = OffloadConfig()


class PrecisionConfig(Section):
    """Number formats."""

    #: Format of weights and activations. bf16 and fp16 keep fp32 master weights.
    dtype: Format = "bf16"
    #: Matrix products of the layers in fp8, with a scale per row or per block of 128. Weight gradients stay in `dtype`.
    fp8: Annotated[
        Literal["none", "rowwise", "blockwise"],
        ActsWhere("precision.dtype", ("fp32", "bf16"), "products in fp8 give bf16 or fp32"),
    ] = "none"
    #: Which layers multiply in fp8: "inner" (all but the first and the last), "all", or a list of layers from 0.
    fp8_layers: Annotated[
        Fp8Layers, ActsWhere("precision.fp8", ("rowwise", "blockwise"), "no product is in fp8", is_noted=True)
    ] = "inner"
    #: Format in which a rank adds up the gradients of its micro-batches.
    accumulate_dtype: Annotated[Format, _halves("gradients of fp32 weights are kept in fp32")] = "fp32"
    #: Format in which gradients travel: between data-parallel ranks, and those of keys and values around a ring of cp.
    reduce_dtype: Annotated[
        Format,
        _halves("gradients of fp32 weights travel in fp32"),
        ActsWhere("zero.quantized_gradients", (0,), "gradients travel in blocks of 4 or 8 bits"),
    ] = "fp32"
    #: Factor on the loss that keeps small gradients from vanishing; 0: adapted during the run.
    loss_scale: Annotated[PositiveOrZero, _FP16] = 0.0
    #: The adapted factor starts at 2 to this power.
    initial_scale_power: Annotated[int, Field(ge=0, le=64), _FP16, _ADAPTED_SCALE] = 16
    #: Steps without overflow after which the adapted factor doubles.
    loss_scale_window: Annotated[Count, _FP16, _ADAPTED_SCALE] = 1000
    #: Overflows until the adapted factor halves.
    hysteresis: Annotated[Count, _FP16, _ADAPTED_SCALE] = 2
    #: Whether a step without overflow restores the tolerance of `hysteresis`; otherwise only a growth does.
    consecutive_hysteresis: Annotated[bool, _FP16, _ADAPTED_SCALE] = False
    #: Smallest adapted factor; an overflow there ends the run.
    min_loss_scale: Annotated[Positive, _FP16, _ADAPTED_SCALE] = 1.0

    def fp8_of_layers(self, num_layers: int) -> dict[int, Literal["rowwise", "blockwise"]]:
        """Return how each layer that multiplies in fp8 is scaled, by layer, for a model of `num_layers` layers."""
        named = {"all": range(num_layers), "inner": range(1, num_layers - 1)}
        layers = self.fp8_layers if isinstance(self.fp8_layers, tuple) else named[self.fp8_layers]
        return {} if self.fp8 == "none" else dict.fromkeys(layers, self.fp8)


class DataSource(Section):
    """One source of text and its share in the mixture."""

    #: Path prefix of an indexed dataset, or "python-stdlib": the source code of the running Python's library.
    path: PathText
    #: Share of the samples, relative to the other sources.
    weight: Positive = 1.0

    @model_serializer
    def _as_written(self) -> str | dict[str, object]:
        return self.path if self.weight == 1.0 else {"path": self.path, "weight": self.weight}


class ValidationSource(Section):
    """A source on which the run is evaluated, with its own loss."""

    #: As in `sources`. A source that is also trained on is evaluated on its held-out windows, another one on all.
    path: PathText
    #: Name of the loss. Unset: the last component of the path.
    name: Text | None = None
    #: Steps between evaluations. Unset: training.eval_every_steps.
    every_steps: Count | None = None
    #: Samples in an evaluation. Unset: training.eval_samples.
    samples: Count | None = None

    @property
    def label(self) -> str:
        """The name of the loss on this source."""
        return self.name or self.path.rstrip("/").rpartition("/")[2]

    @model_serializer
    def _as_written(self) -> str | dict[str, object]:
        written = {key: value for key, value in vars(self).items() if value is not None}
        return self.path if len(written) == 1 else written


def _source_of(section: type[Section]) -> tuple[BeforeValidator, Spelling]:
    """Accept a source as its path, or as a table with the keys of its section."""
    keys = ", ".join(section.model_fields)

    def table(value: object) -> object:
        if not isinstance(value, str | dict | Section):
            raise PydanticCustomError("source", f"be a string or a table {{ {keys} }}")
        return {"path": value} if isinstance(value, str) else value

    return BeforeValidator(table, json_schema_input_type=str | section), Spelling(f"string or {{ {keys} }}")


Source = Annotated[DataSource, *_source_of(DataSource)]
Validated = Annotated[ValidationSource, *_source_of(ValidationSource)]


class DataConfig(Section):
    """What the model reads."""

    #: Where samples come from: "python-stdlib", a path prefix, or { path, weight }; a bare string has weight 1.
    sources: Annotated[tuple[Source, ...], Field(strict=False, min_length=1)] = (DataSource(path="python-stdlib"),)
    #: Path of a tokenizers JSON file, or "byte": a token for each byte.
    tokenizer: PathText = "byte"
    #: Token of the tokenizer that ends a document. Unset: that of the data, or else of the tokenizer (docs/data.md).
    eod_token: Text | None = None
    #: Fraction of the samples that are held out for evaluation and never trained on.
    validation_fraction: ProperFraction = 0.005
    #: Further sources to evaluate on, each with its own loss: a path, or { path, name, every_steps, samples }.
    validation_sources: Annotated[tuple[Validated, ...], Field(strict=False)] = ()
    #: Separate documents: attention and targets do not cross their borders, and positions begin at 0 in each.
    document_mask: bool = False
    #: Directory for prepared data. Unset: megazero in $XDG_CACHE_HOME, or in ~/.cache.
    cache_dir: PathText | None = None


def _steps(value: object) -> object:
    """Take 1200 or [1500, 1510]; a single step is a range of one."""
    first_last = (value, value) if type(value) is int else tuple(value) if _is_list(value) else ()
    numbers = [step for step in first_last if type(step) is int]
    if len(first_last) != 2 or len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise PydanticCustomError("steps", "be a step from 1 on, or [first, last] of a range")
    return first_last


Steps = Annotated[tuple[int, int], BeforeValidator(_steps, json_schema_input_type=int | tuple[int, int])]


class BatchRamp(Section):
    """A global batch that grows to `training.global_batch_size` in equal increments, each for equally many samples.

    Source: Megatron-LM, `--rampup-batch-size start increment samples`.
    """

    #: Samples in the first steps.
    start: Count
    #: Samples by which the batch grows; a divisor of global_batch_size - start.
    increment: Count
    #: Samples of the run after which the batch has its full size.
    samples: Count

    def size(self, consumed: int, full: int) -> int:
        """Return the global batch size after `consumed` samples of the run; `full` is `global_batch_size`."""
        return min(
            full, self.start + self.increment * (consumed * ((full - self.start) // self.increment) // self.samples)
        )


class TrainingConfig(Section):
    """The run: its length, its directory, its batches. global_batch_size = micro_batch_size * dp * accumulation."""

    #: Directory for everything that the run writes.
    run_dir: PathText = "runs/default"
    #: Optimizer steps.
    steps: Count = 1000
    #: Seed for initial weights, data order and dropout.
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1234
    #: Samples in an optimizer step. "auto": follows from micro_batch_size and accumulation.
    global_batch_size: Count | Auto = "auto"
    #: Grow the global batch from `start` by `increment` until `samples` are consumed (docs/recipes.md). Unset: constant.
    batch_ramp: Annotated[
        BatchRamp | None, ActsWhere("parallel.schedule_file", (None,), "a schedule of your own fixes accumulation")
    ] = None
    #: Samples in one forward pass. "auto": follows from the other two, or 1.
    micro_batch_size: Count | Auto = "auto"
    #: Micro-batches in a step on each data-parallel rank. "auto": follows from the other two, or fills the pipeline.
    accumulation: Annotated[Count | Auto, ActsWhere("elastic.enabled", (False,), "it follows dp, which changes")] = (
        "auto"
    )
    #: Steps between evaluations, unless a validation source says otherwise; 0: never.
    eval_every_steps: Annotated[CountOrZero, _EVALUATED] = 0
    #: Validation samples in an evaluation, unless a validation source says otherwise.
    eval_samples: Annotated[
        Count, ActsWhere("training.eval_every_steps data.validation_sources", (), "nothing is evaluated")
    ] = 64
    #: If a loss or gradient is not finite: stop, skip the update, or go back to the last checkpoint and use new data.
    on_non_finite: Literal["stop", "skip", "rollback"] = "stop"
    #: Number of such steps in a row (skip), or of rollbacks (rollback), after which the run stops nevertheless.
    non_finite_limit: Annotated[
        Count, ActsWhere("training.on_non_finite", ("skip", "rollback"), "the run stops at the first")
    ] = 3
    #: Compile transformer blocks and loss with torch.compile, at the first step. "auto": on CUDA only.
    compile: bool | Auto = "auto"
    #: Most bytes of logits on a rank: a micro-batch that fits saves them for the backward, others compute them twice.
    logits_chunk_bytes: Count = 2**32
    #: Weight of the z-loss, the mean of logsumexp(logits)^2, which keeps logits near 0 (PaLM: 1e-4); not in `loss`.
    z_loss_coef: PositiveOrZero = 0.0
    #: Steps whose samples are skipped, single or as [first, last]: skip_steps = [1200, [1500, 1510]].
    skip_steps: Annotated[tuple[Steps, ...], Field(strict=False)] = ()
    #: Your own callbacks, by the names under which they are registered; see launch.extensions.
    callbacks: Annotated[tuple[Text, ...], Field(strict=False)] = ()


class EvaluationConfig(Section):
    """Tasks of lm-evaluation-harness during a run. The engine itself computes the log-likelihoods, on any shape."""

    #: Names of tasks: multiple choice and perplexity. Needs the extra `eval` on the first rank's machine.
    tasks: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    #: Steps between two evaluations of the tasks; the tasks are evaluated after the last step, too.
    every_steps: Annotated[CountOrZero, _TASKS] = 0
    #: Directory with your own task files.
    include_path: Annotated[PathText | None, _TASKS] = None
    #: Largest number of documents of each task. Unset: all.
    limit: Annotated[Count | None, _TASKS] = None


class AverageConfig(Section):
    """An average of the weights, sharded like them: evaluated as well, and saved with each checkpoint."""

    #: "ema": decay * average + (1 - decay) * weights after each step; "saves": the mean of the weights of the last saves.
    kind: Literal["none", "ema", "saves"] = "none"
    #: Decay of the EMA in a step.
    decay: Annotated[ProperFraction, ActsWhere("average.kind", ("ema",), "nothing decays")] = 0.999
    #: Number of saves in the mean: the last ones of the run, by checkpoint.save_every_steps; before, the newest save alone.
    last: Annotated[Count, ActsWhere("average.kind", ("saves",), "no saves are averaged")] = 5


class CheckpointConfig(Section):
    """Saving and resuming."""

    #: Directory that all ranks share, or a URL such as s3://bucket/run. Unset: run_dir/checkpoints.
    directory: PlaceText | None = None
    #: Steps between checkpoints; 0: only at the end.
    save_every_steps: CountOrZero = 0
    #: Where a run starts: "auto": at its newest checkpoint, if any; "never": at step 0; or the path or URL of a step.
    resume: PlaceText = "auto"
    #: What a resumed run may change. A change begins a new phase of the run: see docs/phases.md.
    accept_changes: Annotated[
        tuple[Literal["data", "document_mask", "seq_len", "rope", "lr_schedule", "batch"], ...], Field(strict=False)
    ] = ()
    #: Continue to train while a checkpoint is written from a copy in host memory.
    asynchronous: bool = True
    #: Largest copy on each rank; a larger state is written while training waits. "auto": half of the free memory.
    host_memory_bytes: Annotated[
        CountOrZero | Auto, ActsWhere("checkpoint.asynchronous", (), "training waits for every save")
    ] = "auto"
    #: Longest time for which the ranks may wait for each other while a checkpoint is written.
    timeout_seconds: Seconds = 3600
    #: What is checked of every file before a load, and before older checkpoints are removed: its hash, or its size alone.
    verify: Literal["hash", "size"] = "hash"
    #: If the newest checkpoint of the run is damaged: stop, or fall back to the newest intact one.
    on_damage: Literal["stop", "fallback"] = "stop"
    #: Checkpoints to keep, the newest first; older ones are removed. 0: all of them.
    keep_last: CountOrZero = 0
    #: Also keep every checkpoint whose step is a multiple of this; 0: none.
    keep_every_steps: Annotated[CountOrZero, _MANY_CHECKPOINTS] = 0
    #: Also keep so many checkpoints with the lowest validation loss, among those saved at the step of an evaluation.
    keep_best: Annotated[CountOrZero, _MANY_CHECKPOINTS, _HELD_OUT, _EVALUATED_STEPS] = 0


class ElasticShape(Section):
    """A shape for one world size."""

    #: Ranks.
    world_size: Count
    #: Tensor-parallel degree.
    tp: Count = 1
    #: Context-parallel degree.
    cp: Count = 1
    #: Pipeline-parallel degree.
    pp: Count = 1


class ElasticConfig(Section):
    """Continue a run with fewer or more ranks, under torchrun --nnodes MIN:MAX."""

    #: Fit the run to the number of ranks: dp follows, global_batch_size stays, spare ranks wait.
    enabled: bool = False
    #: Shapes for certain world sizes, { world_size, tp, cp, pp }; others keep the degrees of [parallel].
    shapes: Annotated[
        tuple[ElasticShape, ...],
        Field(strict=False),
        ActsWhere("elastic.enabled", (True,), "the shape is that of [parallel]"),
    ] = ()


class LoggingConfig(Section):
    """Reports during the run."""

    #: Steps between two printed lines, if the output is no terminal; on a terminal, the line is redrawn at every step.
    every_steps: Count = 10
    #: Step whose pipeline is measured; a picture and a trace are written to the run directory. 0: none.
    pipeline_trace_step: CountOrZero = 0
    #: Steps to profile; rank 0 and the slowest rank write traces for Perfetto to the run directory (docs/logging.md).
    profile_steps: Annotated[Steps | None, Spelling("step or [first, last]")] = None
    #: Step whose CUDA memory is recorded, for pytorch.org/memory_viz; then also when memory runs out. 0: none.
    memory_snapshot: Annotated[
        CountOrZero, ActsWhere("launch.device", ("auto", "cuda"), "torch has snapshots of CUDA's memory only")
    ] = 0
    #: Also write TensorBoard events to run_dir.
    tensorboard: bool = True
    #: Further loggers of every number: "wandb", "mlflow", "trackio", or your own by name (docs/logging.md).
    loggers: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    #: Project of wandb and trackio, experiment of mlflow.
    project: Annotated[Text, ActsWhere("logging.loggers", (), "no logger has projects")] = "megazero"
    #: Report a loss that exceeds the recent mean by so many standard deviations; 0: never.
    loss_spike_sigmas: PositiveOrZero = 6.0
    #: Peak dense FLOP/s of one device in precision.dtype, for the MFU. Unset: of known GPUs by name; no MFU for others.
    peak_flops: Positive | None = None
    #: Texts that the model continues during the run with its likeliest tokens, on any shape.
    sample_prompts: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    #: Steps between two samples; the model samples after the last step, too.
    sample_every_steps: Annotated[Count, _SAMPLED] = 1000
    #: Tokens of a sample; each token takes a forward of one micro-batch.
    sample_tokens: Annotated[Count, _SAMPLED] = 32
    #: Steps between two comparisons of the ranks' own computing times; 0: never.
    straggler_every_steps: Annotated[CountOrZero, _MANY_RANKS] = 50
    #: A rank is reported if its computing time is so many times the median.
    straggler_ratio: Annotated[
        float, Field(gt=1), ActsWhere("logging.straggler_every_steps", (), "nothing is compared"), _MANY_RANKS
    ] = 1.3


class LaunchConfig(Section):
    """How the command starts ranks if torchrun has not."""

    #: Ranks to start on this machine.
    nproc_per_node: Count = 1
    #: Where to compute. "auto": on CUDA, with a device for each rank of the machine; without CUDA, on the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: Python files (paths ending in .py) or modules that register your own code; every rank imports them first.
    extensions: Annotated[tuple[PathText, ...], Field(strict=False)] = ()


class RunConfig(Section):
    """The contents of a run file."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    activations: ActivationsConfig = ActivationsConfig()
    zero: ZeroConfig = ZeroConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    average: AverageConfig = AverageConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    elastic: ElasticConfig = ElasticConfig()
    logging: LoggingConfig = LoggingConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def has_shards(self) -> bool:
        """Whether attention runs over shards of a sample: a sequence split over ranks, or documents."""
        return self.parallel.cp > 1 or self.data.document_mask


def sections(outer: type[Section] = RunConfig, prefix: str = "") -> dict[str, type[Section]]:
    """Return the class of each section of a run file, by name: "zero", then "zero.offload" within it, and so on."""
    found: dict[str, type[Section]] = {}
    for name, field in outer.model_fields.items():
        if is_section(field.annotation):
            found |= {prefix + name: field.annotation, **sections(field.annotation, f"{prefix}{name}.")}
    return found


def keys() -> dict[str, dict[str, FieldInfo]]:
    """Return the keys of each section, by its name; sections within a section are not among its keys."""
    return {
        name: {key: field for key, field in section.model_fields.items() if not is_section(field.annotation)}
        for name, section in sections().items()
    }


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    """Whether a field with this annotation is itself a section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def without_key(config: RunConfig, key: str) -> RunConfig:
    """Return a copy in which a key or section, such as "zero.stage" or "zero", has no value: reading it raises
    AttributeError.
    """
    copy = section = config.model_copy()
    *outer, last = key.split(".")
    for name in outer:
        if name not in vars(section):
            return copy
        vars(section)[name] = section = vars(section)[name].model_copy()
    vars(section).pop(last, None)
    return copy
