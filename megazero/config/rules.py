"""What ties several keys together: a table of rules, each naming the keys it reads.

    keys that are wrong by themselves      {model.hidden_size, ...}
    rule reads                             {model.hidden_size, model.num_heads}   -> left out: it could only mislead
    rule reads                             {training.steps, ...}                  -> checked

So every rule that can be judged is judged, and all problems are told at once.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter

from megazero.config.derive import (
    chunks_per_rank,
    complete_batch,
    data_parallel_size,
    ffn_hidden_size,
    layer_counts,
)
from megazero.config.problem import ConfigError, Problem, divisors, nearest_multiples, nearest_of, nearest_text
from megazero.config.schema import RunConfig
from megazero.config.values import toml_value


@dataclass(frozen=True)
class Rule:
    """A relation between keys."""

    reads: tuple[str, ...]
    """The keys it looks at, as `section.key`, and `world_size`."""
    check: Callable[[RunConfig, int], Iterator[Problem]]
    """(config, world size) -> what is wrong."""


def broken_rules(config: RunConfig, world_size: int, wrong_keys: Collection[str] = ()) -> list[Problem]:
    """Check every rule that reads no key already known to be wrong.

    Args:
        config: the run; where a key is wrong, any value of the right type.
        world_size: number of ranks.
        wrong_keys: what rules may read whose value means nothing here.
    """
    judged = [rule for rule in RULES if not set(rule.reads) & set(wrong_keys)]
    return [problem for rule in judged for problem in rule.check(config, world_size)]


def _heads_split_hidden(config: RunConfig, _: int) -> Iterator[Problem]:
    model = config.model
    rotary = model.family == "llama"
    step, name = (2 * model.num_heads, "2*num_heads") if rotary else (model.num_heads, "num_heads")
    if model.hidden_size % step:
        why = " (rotary positions turn pairs of a head's elements)" if rotary else ""
        nearest = nearest_text(nearest_multiples(model.hidden_size, step))
        yield Problem("model.hidden_size", model.hidden_size, f"must divide by {name}={step}{why}", nearest)


def _tp_splits_heads(config: RunConfig, _: int) -> Iterator[Problem]:
    yield from _tp_splits("num_heads", config.model.num_heads, config.parallel.tp)


def _tp_splits_ffn(config: RunConfig, _: int) -> Iterator[Problem]:
    yield from _tp_splits("ffn_hidden_size", ffn_hidden_size(config.model), config.parallel.tp)


def _tp_splits_sequence(config: RunConfig, _: int) -> Iterator[Problem]:
    if config.parallel.sequence_parallel:
        yield from _tp_splits("seq_len", config.model.seq_len, config.parallel.tp, " (sequence_parallel)")


def _tp_splits(key: str, value: int, tp: int, why: str = "") -> Iterator[Problem]:
    if value % tp:
        nearest = nearest_text(nearest_multiples(value, tp), key)
        other = nearest_text(nearest_of(tp, divisors(value)), "tp")
        yield Problem(f"model.{key}", value, f"must divide by parallel.tp={tp}{why}", f"{nearest}, {other}")


def _kv_heads_fit(config: RunConfig, _: int) -> Iterator[Problem]:
    heads, kv_heads, tp = config.model.num_heads, config.model.num_kv_heads, config.parallel.tp
    if kv_heads is None:
        return
    if config.model.family == "gpt2":
        if kv_heads != heads:
            rule = f"must be num_heads={heads}: gpt2 has no grouped-query attention"
            yield Problem("model.num_kv_heads", kv_heads, rule, "leave it out")
        return
    tp_fits = heads % tp == 0  # if not, that is told of num_heads, and kv heads need only divide heads
    if heads % kv_heads or (tp_fits and kv_heads % tp):
        rule = f"must divide num_heads={heads}" + (f" and be a multiple of parallel.tp={tp}" if tp_fits else "")
        valid = [d for d in divisors(heads) if not tp_fits or d % tp == 0]
        yield Problem("model.num_kv_heads", kv_heads, rule, nearest_text(nearest_of(kv_heads, valid)))


def _gpt2_ties_embeddings(config: RunConfig, _: int) -> Iterator[Problem]:
    if config.model.family == "gpt2" and config.model.tie_embeddings is False:
        rule = "must be true for gpt2: its output layer is the embedding table"
        yield Problem("model.tie_embeddings", False, rule, "leave it out")


def _every_stage_has_a_layer(config: RunConfig, _: int) -> Iterator[Problem]:
    layers, pp, chunks = config.model.num_layers, config.parallel.pp, chunks_per_rank(config.parallel)
    if layers < pp * chunks:
        stages = f"parallel.pp={pp}" if chunks == 1 else f"parallel.pp*chunks={pp}*{chunks}={pp * chunks}"
        hint = f"the nearest num_layers is {pp * chunks}"
        hint += f", the nearest pp is {layers // chunks}" if layers >= chunks else ""
        yield Problem("model.num_layers", layers, f"must be >= {stages}, a layer for each stage", hint)


def _layout_is_of_this_model(config: RunConfig, _: int) -> Iterator[Problem]:
    layout = config.parallel.layout
    if isinstance(layout, str):
        return
    counts, stages = layer_counts(layout), config.parallel.pp * chunks_per_rank(config.parallel)
    if len(counts) != stages or sum(counts) != config.model.num_layers:
        rule = f"must have {stages} stages with model.num_layers={config.model.num_layers} layers in all"
        hint = f"it has {len(counts)} with {sum(counts)}"
        yield Problem("parallel.layout", layout, rule, hint)


def _schedule_has_its_chunks(config: RunConfig, _: int) -> Iterator[Problem]:
    schedule, chunks = config.parallel.schedule, config.parallel.virtual_stages
    if schedule == "interleaved" and chunks < 2:
        yield Problem("parallel.virtual_stages", chunks, "interleaved needs at least 2 chunks per rank", "write 2")
    if schedule == "zbv" and chunks > 2:
        yield Problem("parallel.virtual_stages", chunks, "zbv has two chunks per rank", "write 2, or leave it out")
    if schedule not in ("interleaved", "zbv") and chunks != 1:
        rule = f"the schedule {schedule} has one chunk per rank"
        yield Problem("parallel.virtual_stages", chunks, rule, 'write 1, or parallel.schedule = "interleaved"')


def _interleaved_has_full_groups(config: RunConfig, world_size: int) -> Iterator[Problem]:
    pp, batch = config.parallel.pp, config.training
    if config.parallel.schedule != "interleaved":
        return
    try:
        dp = data_parallel_size(config.parallel, world_size)
        sizes = batch.global_batch_size, batch.micro_batch_size, batch.accumulation
        count = complete_batch(*sizes, dp=dp, pp=pp).accumulation
    except ConfigError:
        return  # told by the rules of the batch
    if count % pp:
        hint = nearest_text(nearest_multiples(count, pp))
        rule = f"interleaved needs micro-batches in multiples of parallel.pp={pp}"
        yield Problem("training.accumulation", count, rule, hint)


def _world_is_filled(config: RunConfig, world_size: int) -> Iterator[Problem]:
    try:
        data_parallel_size(config.parallel, world_size)
    except ConfigError as error:
        yield from error.problems


def _batch_sizes_agree(config: RunConfig, world_size: int) -> Iterator[Problem]:
    try:
        dp = data_parallel_size(config.parallel, world_size)
    except ConfigError:
        return  # told by _world_is_filled
    batch = config.training
    sizes = batch.global_batch_size, batch.micro_batch_size, batch.accumulation
    try:
        complete_batch(*sizes, dp=dp, pp=config.parallel.pp)
    except ConfigError as error:
        yield from error.problems


def _evaluation_has_samples(config: RunConfig, _: int) -> Iterator[Problem]:
    every, fraction = config.training.eval_every_steps, config.data.validation_fraction
    if every and not fraction:
        rule = f"must be > 0 where training.eval_every_steps={every} asks for evaluations"
        yield Problem("data.validation_fraction", fraction, rule, "write 0.005, or training.eval_every_steps = 0")


def _shard_groups_fill_dp(config: RunConfig, world_size: int) -> Iterator[Problem]:
    size = config.zero.shard_group_size
    try:
        dp = data_parallel_size(config.parallel, world_size)
    except ConfigError:
        return  # told by _world_is_filled
    if size and dp % size:
        nearest = nearest_text(nearest_of(size, divisors(dp)))
        yield Problem("zero.shard_group_size", size, f"must divide dp={dp}", nearest)


def _nvme_has_a_path(config: RunConfig, _: int) -> Iterator[Problem]:
    offload = config.zero.offload
    users = [key for key in ("optimizer", "parameters") if getattr(offload, key) == "nvme"]
    if users and offload.nvme_path is None:
        rule = f'must be set where zero.offload.{" and ".join(users)} = "nvme"'
        yield Problem("zero.offload.nvme_path", None, rule, "name a directory on a local disk of each node")


def _loss_scale_starts_above_its_least(config: RunConfig, _: int) -> Iterator[Problem]:
    least, start = config.precision.min_loss_scale, 2.0**config.precision.initial_scale_power
    if least > start:
        rule = f"must be <= 2**initial_scale_power={start}"
        yield Problem("precision.min_loss_scale", least, rule, f"write {start} or less")


def _only_with(key: str, unused: object, other: str, allowed: tuple[object, ...], why: str) -> Rule:
    """Make the rule that a key stays at its unused value unless another key has one of the allowed values."""

    def check(config: RunConfig, _: int) -> Iterator[Problem]:
        value, found = attrgetter(key)(config), attrgetter(other)(config)
        if value != unused and found not in allowed:
            rule = f"must be {toml_value(unused)} where {other} = {toml_value(found)}: {why}"
            hint = f"write {toml_value(unused)}, or {other} = {' or '.join(map(toml_value, allowed))}"
            yield Problem(key, value, rule, hint)

    return Rule((key, other), check)


_WORLD = ("world_size", "parallel.tp", "parallel.pp", "parallel.dp")
_CHUNKS = ("parallel.virtual_stages", "parallel.schedule")
_HALF = ("precision.dtype", ("bf16", "fp16"))
_BATCH = ("training.global_batch_size", "training.micro_batch_size", "training.accumulation")
RULES = (
    Rule(("model.family", "model.hidden_size", "model.num_heads"), _heads_split_hidden),
    Rule(("model.num_heads", "parallel.tp"), _tp_splits_heads),
    Rule(("model.family", "model.num_heads", "model.num_kv_heads", "parallel.tp"), _kv_heads_fit),
    Rule(("model.family", "model.hidden_size", "model.ffn_hidden_size", "parallel.tp"), _tp_splits_ffn),
    Rule(("model.seq_len", "parallel.sequence_parallel", "parallel.tp"), _tp_splits_sequence),
    Rule(("model.family", "model.tie_embeddings"), _gpt2_ties_embeddings),
    Rule(("model.num_layers", "parallel.pp", *_CHUNKS), _every_stage_has_a_layer),
    Rule(_CHUNKS, _schedule_has_its_chunks),
    Rule(("parallel.layout", "model.num_layers", "parallel.pp", *_CHUNKS), _layout_is_of_this_model),
    Rule(_WORLD, _world_is_filled),
    Rule((*_WORLD, *_BATCH), _batch_sizes_agree),
    Rule((*_WORLD, *_BATCH, *_CHUNKS), _interleaved_has_full_groups),
    Rule(("training.eval_every_steps", "data.validation_fraction"), _evaluation_has_samples),
    Rule((*_WORLD, "zero.shard_group_size"), _shard_groups_fill_dp),
    _only_with("zero.shard_group_size", 0, "zero.stage", (1, 2, 3), "it has no effect where nothing is sharded"),
    _only_with("zero.resident_elements", 0, "zero.stage", (3,), "only stage 3 gathers parameters"),
    _only_with("zero.offload.parameters", "none", "zero.stage", (3,), "only stage 3 shards parameters"),
    _only_with("zero.offload.ratio", 1.0, "zero.offload.optimizer", ("cpu", "nvme", "auto"), "no state is offloaded"),
    Rule(tuple(f"zero.offload.{key}" for key in ("optimizer", "parameters", "nvme_path")), _nvme_has_a_path),
    _only_with("precision.accumulate_dtype", "fp32", *_HALF, "gradients of fp32 weights are kept in fp32"),
    _only_with("precision.reduce_dtype", "fp32", *_HALF, "gradients of fp32 weights travel in fp32"),
    _only_with("precision.loss_scale", 0.0, "precision.dtype", ("fp16",), "only fp16 scales the loss"),
    Rule(("precision.min_loss_scale", "precision.initial_scale_power"), _loss_scale_starts_above_its_least),
    _only_with("optimizer.momentum", 0.0, "optimizer.name", ("sgd",), "only sgd has momentum"),
)
