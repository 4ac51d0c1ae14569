"""Relations between keys: a rule is a function of the run that yields problems.

    model.hidden_size = "1000"            wrong by itself: the rules see a run without a value for it
    a rule that reads it                  AttributeError   -> skipped, since it could only mislead
    a rule that reads training.steps      a value          -> checked

All problems are reported at once. The rules see an elastic run as it is fitted to the world. All its shapes, including that
of [parallel], are checked as written, whichever shape this world uses.

`ActsWhere` in the schema says when a key has an effect. A key that is set but has no effect is refused if another key chose
something that does not read it (betas with sgd). If a number or a switch is the reason, the key is only noted: one file
serves every shape, and an override may switch something off for a while.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

from megazero.config.derive import Fit, batch_sizes, fit, micro_batch_multiple, num_experts, ranks_of_a_sample
from megazero.config.schema import RunConfig, keys, without_key
from megazero.models.family import ModelRule
from megazero.models.registry import FAMILIES
from megazero.models.stages import heads_of_rank, layer_counts, ulysses_degrees
from megazero.optim.lr_schedule import learning_rate_factor
from megazero.optim.registry import LR_SCHEDULES, OPTIMIZERS
from megazero.registry import check_keywords, keywords_of
from megazero.schedules.action import read_schedule
from megazero.schedules.registry import SCHEDULES
from megazero.settings import (
    ActsWhere,
    ConfigError,
    Problem,
    counted,
    divisors,
    nearest_multiples,
    nearest_of,
    nearest_text,
    toml_value,
)

_MOST_PASSES = 2**20  # of a step's micro-batches through all stages
# Keys that must not exceed training.steps, and what does not happen otherwise.
_MOST_STEPS = {
    "lr_schedule.warmup_steps": "the learning rate does not reach its peak",
    "logging.pipeline_trace_step": "no pipeline is measured",
    "logging.memory_snapshot": "no memory is recorded",
}

#: A run fitted to its world, with `parallel.dp` a number -> its problems; a rule may also raise them as a ConfigError.
Rule: TypeAlias = Callable[[RunConfig], Iterable[Problem]]


def check_rules(
    config: RunConfig,
    world_size: int | None,
    further: Iterable[Rule] = (),
    varied: Collection[str] = (),
    *,
    is_whole: bool = True,
) -> tuple[Fit, list[Problem], list[str]]:
    """Fit a run to its world, check every rule, and check that every set key has an effect.

    Args:
        world_size: number of ranks; None if that is wrong by itself.
        further: rules in addition to those of this file.
        varied: keys that also take other values than here; no other key is refused because of their values.
        is_whole: False if wrong keys have no value in `config`; rules that read them are skipped.

    Returns: the fitted run; its problems; notes on keys without effect.
    """
    problems, notes, fitted, seen = list[Problem](), list[str](), Fit(config, 1), without_key(config, "parallel.dp")
    with _collecting(problems, is_whole):
        if world_size is not None:
            fitted = fit(config, world_size)
            parallel = fitted.config.parallel.model_copy(update={"dp": fitted.dp})
            seen = fitted.config.model_copy(update={"parallel": parallel})
    is_whole &= "dp" in vars(vars(seen).get("parallel", seen))  # it may be no table
    rules = [(rule, config) for rule in (*_family_rules(config), *_SHAPE_RULES, _shapes_fit_the_model)]
    for rule, run in (*rules, *((rule, seen) for rule in (*RULES, *further))):
        with _collecting(problems, is_whole):
            problems += list(rule(run))
    for key, where in _conditions(fitted.config):
        if not {key, *where.keys.split()} & {*varied}:
            with _collecting(problems, is_whole):
                _check_acts(key, where, fitted.config, world_size or 1, problems, notes)
    with _collecting(problems, is_whole):
        most = config.training.steps
        for key, effect in _MOST_STEPS.items():
            if (value := attrgetter(key)(config)) > most:
                notes.append(f"{key} = {value} exceeds training.steps = {most}: {effect}")
    return fitted, problems, notes


@contextmanager
def _collecting(problems: list[Problem], is_whole: bool) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except AttributeError:  # a key without a value was read
        if is_whole:
            raise


def _conditions(config: RunConfig) -> Iterator[tuple[str, ActsWhere]]:
    """Yield the conditions of set keys.  A key at its default counts as not set, since a run's own file has every key."""
    for section, fields in keys().items():
        for name, field in fields.items():
            key = f"{section}.{name}"
            for where in field.metadata:
                with suppress(AttributeError):
                    if isinstance(where, ActsWhere) and attrgetter(key)(config) != field.default:
                        yield key, where


def _check_acts(
    key: str, where: ActsWhere, config: RunConfig, world_size: int, problems: list[Problem], notes: list[str]
) -> None:
    """Add a problem, or a note, if a set key has no effect."""
    found = {name: world_size if name == "world_size" else attrgetter(name)(config) for name in where.keys.split()}
    if any(where.holds(value, config) for value in found.values()):
        return
    shown = " and ".join(f"{other} = {_written(value)}" for other, value in found.items())
    section, _, name = key.rpartition(".")
    value, default = attrgetter(key)(config), keys()[section][name].default
    if where.is_noted or not where.values:
        notes.append(f"{key} = {toml_value(value)} has no effect where {shown}: {where.why}")
        return
    values, other = where.values_in(config), next(iter(found))
    hint = "leave it out" + ("" if default in ((), None) else f" or write {toml_value(default)}")
    hint += f", or leave {other} out" if values == (None,) else f", or {other} = {' or '.join(map(_written, values))}"
    problems.append(Problem(key, value, f"must be {_written(default)} where {shown}: {where.why}", hint))


def _written(value: object) -> str:
    return "unset" if value is None else "empty" if value == () else toml_value(value)


def _family_rules(config: RunConfig, about: str = "") -> list[Rule]:
    """Yield the problems that the model's family has with its sizes.  `about`: only those of rules that read this key."""

    def rule_of(rule: ModelRule) -> Rule:
        return lambda config: rule.check(config.model, config.parallel.tp)

    family = vars(config.model).get("family") if "model" in vars(config) else None
    found = FAMILIES[family].rules() if family else ()
    return [rule_of(rule) for rule in found if not about or about in rule.reads]


def dp_of(config: RunConfig) -> int:
    """Return the number of model replicas in a run as rules see it."""
    assert config.parallel.dp != "auto"
    return config.parallel.dp


def _placement(config: RunConfig) -> Sequence[tuple[int, int]] | None:
    """Return the rank and chunk of every virtual stage; None if the user's own schedule does not exist for this pp.

    The start of a run and `megazero check` report why.
    """
    parallel = config.parallel
    if parallel.schedule_file is None:
        return SCHEDULES[parallel.schedule].placement(parallel.pp, _named_chunks(config))
    try:
        schedule = read_schedule(Path(parallel.schedule_file), parallel.schedule_placement)
    except (ValueError, OSError):
        return None
    return schedule.placement if schedule.pp == parallel.pp else None


def _named_chunks(config: RunConfig) -> int:
    """Return the model chunks on each rank of a named schedule."""
    return SCHEDULES[config.parallel.schedule].chunks or config.parallel.virtual_stages


def _chunks(config: RunConfig) -> int:
    """Return the model chunks on each rank; 0 if not known."""
    if config.parallel.schedule_file is None:
        return _named_chunks(config)
    return len(_placement(config) or ()) // config.parallel.pp


def _rule_kernels_take_the_heads(config: RunConfig) -> Iterator[Problem]:
    """On CUDA, attention over sequence shards or documents uses flash attention in 16 bits, which limits head sizes."""
    size = config.model.head_size
    if config.has_shards and config.launch.device == "cuda" and config.precision.dtype != "fp32" and size % 8:
        rule = f"must be a multiple of 8 on CUDA, with parallel.cp or data.document_mask: a head has {size} elements"
        yield Problem("model.head_dim", config.model.head_dim, rule, nearest_text(nearest_multiples(size, 8)))


def _shape_rule_ranks_split_sequence(config: RunConfig) -> Iterator[Problem]:
    parallel, length = config.parallel, config.model.seq_len
    degrees = {name: getattr(parallel, name) for name in ("cp", "tp")[: 1 + parallel.sequence_parallel]}
    degrees = {name: degree for name, degree in degrees.items() if degree > 1}
    if length % (each := prod(degrees.values())):
        by = f"parallel.{'*'.join(degrees)}={'*'.join(map(str, degrees.values()))}" + f"={each}" * (len(degrees) > 1)
        hint = nearest_text(nearest_multiples(length, each), "seq_len")
        why = " (sequence_parallel)" if "tp" in degrees else ""
        yield Problem("model.seq_len", length, f"must be divisible by {by}{why}", hint)


def _shape_rule_context_degrees_agree(config: RunConfig) -> Iterator[Problem]:
    """The Ulysses degree must fit the method: cp for ulysses, 1 for ring, and for hybrid a divisor of cp in between."""
    cp, method, ulysses = config.parallel.cp, config.parallel.cp_method, config.parallel.cp_ulysses
    between, key = divisors(cp)[1:-1], "parallel.cp_ulysses"
    where = f'where parallel.cp_method = "{method}"'
    if cp == 1:
        return
    if method == "hybrid" and not between:
        rule = f'must be "ulysses" or "ring" where parallel.cp = {cp}, which is no product of two degrees above 1'
        yield Problem("parallel.cp_method", method, rule)
    elif method == "hybrid" and ulysses not in between:
        rule = f"must divide parallel.cp={cp} and be neither 1 nor {cp} {where}"
        yield Problem(key, ulysses, rule, f"write {' or '.join(map(str, between))}")
    elif method == "auto" and ulysses is not None:
        hint = f'leave it out ({key}=unset on the command line), or parallel.cp_method = "hybrid"'
        yield Problem(key, ulysses, f"must be unset {where}, which picks it", hint)
    elif method in ("ulysses", "ring") and ulysses not in (None, degree := cp if method == "ulysses" else 1):
        yield Problem(key, ulysses, f"must be {degree} {where}", 'leave it out, or parallel.cp_method = "hybrid"')


def _shape_rule_ulysses_splits_heads(config: RunConfig) -> Iterator[Problem]:
    """Ulysses must be able to split the query heads of a tensor-parallel rank; key/value heads are split or replicated."""
    parallel, model = config.parallel, config.model
    is_whole = parallel.cp_method == "ulysses"
    degree = parallel.cp if is_whole else parallel.cp_ulysses or 1
    between = divisors(parallel.cp)[1:-1]
    heads, kv_heads = heads_of_rank(model.num_heads, model.num_kv_heads, parallel.tp)
    fitting = ulysses_degrees(heads, kv_heads)
    is_checked = is_whole or (parallel.cp_method == "hybrid" and degree in between)
    if parallel.cp == 1 or not is_checked or degree in fitting or model.num_heads % parallel.tp or heads % kv_heads:
        return  # where the heads themselves are wrong, the family says so
    rule = (
        f"must divide the {counted(heads, 'head')} of a tensor-parallel rank, and divide or multiply its "
        f"{counted(kv_heads, 'key/value head')}"
    )
    others = [other for other in between if other in fitting]
    if is_whole:
        nearest = nearest_of(degree, [other for other in fitting if other > 1])
        hint = f"{nearest_text(nearest)}, or " if nearest else ""
        hint += 'parallel.cp_method = "ring"' + (' or "hybrid"' if others else "")
        yield Problem("parallel.cp", degree, f'{rule}, where parallel.cp_method = "ulysses"', hint)
        return
    hint = f"{nearest_text(nearest_of(degree, others))}, or write" if others else "no degree does, so write"
    yield Problem("parallel.cp_ulysses", degree, rule, f'{hint} parallel.cp_method = "ring"')


def _shape_rule_experts_are_dealt(config: RunConfig) -> Iterator[Problem]:
    """Every rank of ep must hold equally many whole experts, and bring its own tokens."""
    count, ep, tp = num_experts(config), config.parallel.ep, config.parallel.tp
    if not count and ep > 1:
        yield Problem("parallel.ep", ep, "must be 1 where model.num_experts is unset", "leave it out")
    elif count % ep:
        hint = nearest_text(nearest_of(ep, divisors(count)))
        yield Problem("parallel.ep", ep, f"must divide model.num_experts={count}", hint)
    if count and tp > 1 and not config.parallel.sequence_parallel:
        rule = (
            f"must be true where model.num_experts={count} and parallel.tp={tp}: ranks of tp route tokens of their own"
        )
        yield Problem("parallel.sequence_parallel", False, rule, "write true, or parallel.tp = 1")


def _shape_rule_widths_transfer(config: RunConfig) -> Iterator[Problem]:
    family, base = config.model.family, config.model.mup_base_width
    rule = "must be unset where model.num_experts is set: rates by width are for dense models"
    if base and num_experts(config):
        yield Problem("model.mup_base_width", base, rule, "leave it out")
    rule = f"must be unset where model.family={family}: its embeddings grow with the root of the width"
    if base and getattr(getattr(FAMILIES[family], "variant", None), "scales_embeddings", False):
        yield Problem("model.mup_base_width", base, rule, "leave it out, or choose another family")


def _shape_rule_qk_clip_sees_plain_attention(config: RunConfig) -> Iterator[Problem]:
    """QK-Clip: scores must depend on the weights of q and k alone, and each rank must see all keys of its heads."""
    model, parallel = FAMILIES[config.model.family].complete(config.model), config.parallel
    variant = getattr(FAMILIES[model.family], "variant", None)
    is_changed = variant is None or variant.qk_norm != "none" or variant.qkv_bias or model.attention_bias
    is_changed = is_changed or model.attn_logit_softcapping or model.kv_lora_rank
    is_cut = model.sliding_window or config.has_shards or (model.num_kv_heads or 1) % parallel.tp
    if config.optimizer.qk_clip and (is_changed or is_cut):
        rule = (
            "must be unset with biases, norms or latents of queries and keys, caps, windows, data.document_mask, "
            "parallel.cp above 1 or parallel.tp above num_kv_heads: only plain attention is clipped"
        )
        yield Problem("optimizer.qk_clip", config.optimizer.qk_clip, rule, "leave it out")


def _shape_rule_capped_attention_returns_no_log_sum_exp(config: RunConfig) -> Iterator[Problem]:
    cap, cp = config.model.attn_logit_softcapping, config.parallel.cp
    capped = f"where model.attn_logit_softcapping={cap}: its kernel returns no log-sum-exp to"
    if cap is not None and cp > 1:
        yield Problem("parallel.cp", cp, f"must be 1 {capped} merge", "shard with parallel.tp or parallel.pp instead")
    saves = any(config.activations.of_stage(stage).keep_attention for stage in range(config.parallel.pp))
    if cap is not None and saves:
        yield Problem("activations.keep_attention", True, f"must be false {capped} keep", "leave it out")


def _rule_experts_fill_the_stage(config: RunConfig) -> Iterator[Problem]:
    parallel, dp = config.parallel, dp_of(config)
    ranks = parallel.tp * parallel.cp * dp
    if ranks % parallel.ep:
        hint = nearest_text(nearest_of(parallel.ep, divisors(ranks)))
        rule = f"must divide tp*cp*dp={parallel.tp}*{parallel.cp}*{dp}={ranks}"
        yield Problem("parallel.ep", parallel.ep, rule, hint)


def _shape_rule_every_stage_has_a_layer(config: RunConfig) -> Iterator[Problem]:
    layers, pp, chunks = config.model.num_layers, config.parallel.pp, _chunks(config)
    if layers < pp * chunks and isinstance(config.parallel.layout, str):  # a list says which stages have none
        stages = f"parallel.pp={pp}" if chunks == 1 else f"parallel.pp*chunks={pp}*{chunks}={pp * chunks}"
        hint = f"the nearest num_layers is {pp * chunks}"
        hint += f", the nearest pp is {layers // chunks}" if layers >= chunks else ""
        yield Problem("model.num_layers", layers, f"must be >= {stages}, a layer for each stage", hint)


def _shape_rule_layout_is_of_this_model(config: RunConfig) -> Iterator[Problem]:
    layout, stages, layers = config.parallel.layout, config.parallel.pp * _chunks(config), config.model.num_layers
    counts = [] if isinstance(layout, str) else layer_counts(layout)
    if not counts or not stages:
        return
    if (len(counts), sum(counts)) != (stages, layers):
        rule = f"must have {stages} stages with model.num_layers={layers} layers in all"
        yield Problem("parallel.layout", layout, rule, f"it has {len(counts)} with {sum(counts)}")
        return
    placement = _placement(config) or ()
    holds = {rank for (rank, _), count in zip(placement, counts, strict=True) if count}
    holds |= {placement[0][0], placement[-1][0]}  # those with the embedding and the head
    for rank in sorted(set(range(config.parallel.pp)) - holds):
        yield Problem("parallel.layout", layout, f"must leave pipeline rank {rank} a layer, or the embedding or head")


def _rule_schedule_has_its_chunks(config: RunConfig) -> Iterator[Problem]:
    parallel, chunks = config.parallel, config.parallel.virtual_stages
    if parallel.schedule_file is None and (wrong := SCHEDULES[parallel.schedule].wrong_chunks(chunks)):
        yield Problem("parallel.virtual_stages", chunks, *wrong)


def _rule_activations_name_layers_and_ranks(config: RunConfig) -> Iterator[Problem]:
    """[activations] must name existing layers and pipeline ranks, each once."""
    own, count, pp = config.activations, config.model.num_layers, config.parallel.pp
    tables = {"activations": own, **{f"activations.stages[{index}]": stage for index, stage in enumerate(own.stages)}}
    for table, choices in tables.items():
        for name in ("layers", "offload_layers"):
            chosen = getattr(choices, name)
            key, hint = f"{table}.{name}", f"model.num_layers={count}"
            if isinstance(chosen, int) and chosen > count:
                yield Problem(key, chosen, f"must be <= {hint}", 'write "all" for every layer')
            if isinstance(chosen, tuple) and len({*chosen} & {*range(count)}) != len(chosen):
                yield Problem(key, chosen, f"must name layers below {hint}, each once", "layers count from 0")
    ranks = [table.stage for table in own.stages]
    for index, rank in enumerate(ranks):
        if rank in ranks[:index]:
            yield Problem(f"activations.stages[{index}].stage", rank, "must not be that of another table", "keep one")
        elif rank >= pp and not config.elastic.enabled:  # another shape may have the rank
            rule = f"must be below parallel.pp={pp}, a rank of the pipeline"
            yield Problem(f"activations.stages[{index}].stage", rank, rule, "ranks count from 0")


def _rule_batch_sizes_agree(config: RunConfig) -> Iterable[Problem]:
    batch_sizes(config, dp_of(config))  # raises what is wrong
    return ()


def _rule_batch_ramp_ends_at_the_batch(config: RunConfig) -> Iterator[Problem]:
    ramp, full = config.training.batch_ramp, 0
    with suppress(ConfigError):
        full = batch_sizes(config, dp_of(config)).global_batch_size
    if ramp is None or not full:
        return
    if ramp.start >= full:
        yield Problem("training.batch_ramp.start", ramp.start, f"must be below training.global_batch_size={full}")
    elif (missing := full - ramp.start) % ramp.increment:
        rule = f"must divide global_batch_size - start = {full} - {ramp.start} = {missing}"
        hint = nearest_text(nearest_of(ramp.increment, divisors(missing)))
        yield Problem("training.batch_ramp.increment", ramp.increment, rule, hint)


def _rule_micro_batches_fill_the_schedule(config: RunConfig) -> Iterator[Problem]:
    multiple, count = micro_batch_multiple(config.parallel), 0
    with suppress(ConfigError):  # the rule above reports it
        count = batch_sizes(config, dp_of(config)).accumulation
    if count % multiple:
        name = f"parallel.pp={multiple}" if multiple == config.parallel.pp else str(multiple)
        rule = f"{config.parallel.schedule} needs micro-batches in multiples of {name}"
        yield Problem("training.accumulation", count, rule, nearest_text(nearest_multiples(count, multiple)))


def _rule_passes_can_be_listed(config: RunConfig) -> Iterator[Problem]:
    """The number of passes is limited, since the schedule lists all of them and is proved before it runs."""
    stages, count = config.parallel.pp * max(1, _chunks(config)), 0
    with suppress(ConfigError):
        count = batch_sizes(config, dp_of(config)).accumulation
    if count * stages > _MOST_PASSES:
        rule = (
            f"must be at most {_MOST_PASSES // stages:,} with {counted(stages, 'stage')}, each of which has all passes"
        )
        yield Problem("training.accumulation", count, rule, "larger micro-batches need fewer passes")


def _rule_shard_groups_fill_dp(config: RunConfig) -> Iterator[Problem]:
    size, cp, dp = config.zero.shard_group_size, config.parallel.cp, dp_of(config)
    if size and dp * cp % size:
        nearest = nearest_text(nearest_of(size, divisors(dp * cp)))
        rule = f"must divide dp={dp}" if cp == 1 else f"must divide dp*cp={dp}*{cp}={dp * cp}"
        yield Problem("zero.shard_group_size", size, rule, nearest)


def _rule_second_copies_fill_shard_groups(config: RunConfig) -> Iterator[Problem]:
    zero = config.zero
    shards = zero.shard_group_size or dp_of(config) * config.parallel.cp
    size = zero.secondary_shard_size
    if size and (size in (1, shards) or shards % size):
        choices = divisors(shards)[1:-1]
        rule = f"must divide the {shards} ranks that share the state into two groups or more, of 2 or more"
        hint = nearest_text(nearest_of(size, choices)) if choices else "write 0"
        yield Problem("zero.secondary_shard_size", size, rule, hint)


def _rule_storage_is_known(config: RunConfig) -> Iterator[Problem]:
    for key in ("directory", "resume"):
        url = getattr(config.checkpoint, key)
        if url is None or "://" not in url:
            continue
        import fsspec  # only where a URL asks for it: it takes a moment

        try:
            fsspec.get_filesystem_class(url.partition("://")[0])
        except (ValueError, ImportError) as error:
            rule = "must be the URL of a file system that fsspec knows, with its package installed"
            yield Problem(f"checkpoint.{key}", url, rule, str(error))


def _rule_nvme_has_a_path(config: RunConfig) -> Iterator[Problem]:
    offload = config.zero.offload
    users = [key for key in ("optimizer", "parameters") if getattr(offload, key) == "nvme"]
    if users and offload.nvme_path is None:
        rule = f'must be set where zero.offload.{" and ".join(users)} = "nvme"'
        yield Problem("zero.offload.nvme_path", None, rule, "name a directory on a local disk of each node")


def _rule_options_are_of_a_registered_optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    if not OPTIMIZERS.is_built_in(optimizer.name):
        own = OPTIMIZERS[optimizer.name]
        for key in sorted({"lr", "weight_decay"} & set(dict(optimizer.options))):
            rule = f"must not have {key}: the lr schedule and the parameter groups set it in every step"
            yield Problem("optimizer.options", dict(optimizer.options), rule, f"write optimizer.{key}")
        try:
            check_keywords(optimizer.name, own.settings(optimizer), keywords_of(own.cls, positional=1))
        except ValueError as error:
            yield Problem("optimizer.options", dict(optimizer.options), str(error))
    elif optimizer.options:
        rule = f'must be empty where optimizer.name = "{optimizer.name}": only an optimizer of your own has options'
        yield Problem("optimizer.options", dict(optimizer.options), rule, "write the keys of [optimizer]")


def _rule_own_lr_schedule_answers(config: RunConfig) -> Iterator[Problem]:
    """A learning-rate schedule of a script is called for some steps, to report its errors before the run starts."""
    section, steps = config.lr_schedule, config.training.steps
    if LR_SCHEDULES.is_built_in(section.name):
        return
    for step in sorted({min(step, steps - 1) for step in (0, 1, steps // 2, steps)}):
        try:
            learning_rate_factor(section, step, steps)
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            rule = f"its function fails for step {step + 1} of {steps}: {text}"
            yield Problem("lr_schedule.name", section.name, rule)
            return


def _rule_decay_ends_after_the_warmup(config: RunConfig) -> Iterator[Problem]:
    """A decay must not end within the warm-up: the rate would stay at its peak."""
    end, warmup = config.lr_schedule.end_step, config.lr_schedule.warmup_steps
    if end is not None and end <= warmup + 1:
        yield Problem("lr_schedule.end_step", end, f"must be above lr_schedule.warmup_steps + 1 = {warmup + 1}")


def _rule_averaged_saves_are_regular(config: RunConfig) -> Iterator[Problem]:
    if config.average.kind == "saves" and not config.checkpoint.save_every_steps:
        rule = 'must be above 0 where average.kind = "saves": the mean is of the weights of these steps'
        yield Problem("checkpoint.save_every_steps", 0, rule, "write the steps between two saves")


def _rule_validation_sources_are_held_out(config: RunConfig) -> Iterator[Problem]:
    data, key = config.data, "data.validation_sources"
    trained_on = {source.path for source in data.sources}
    labels = Counter(source.label for source in data.validation_sources)
    for label in (label for label, count in labels.items() if count > 1):
        yield Problem(key, label, "must be the name of one source", "give each a name: { path, name }")
    for index, source in enumerate(data.validation_sources):
        if not (source.every_steps or config.training.eval_every_steps):
            rule = "must be set where training.eval_every_steps = 0"
            yield Problem(f"{key}[{index}].every_steps", None, rule, "write the steps between its evaluations")
        if source.path in trained_on and not data.validation_fraction:
            rule = "must not be among data.sources where data.validation_fraction = 0: nothing of it is held out"
            yield Problem(f"{key}[{index}].path", source.path, rule)


def _rule_shapes_fill_their_worlds(config: RunConfig) -> Iterator[Problem]:
    for index, shape in enumerate(config.elastic.shapes):
        names, numbers, each = ranks_of_a_sample(shape)
        if each > shape.world_size:
            rule = f"must be at least {names}={numbers}={each}"
            yield Problem(f"elastic.shapes[{index}].world_size", shape.world_size, rule)
    for world_size, count in Counter(shape.world_size for shape in config.elastic.shapes).items():
        if count > 1:
            yield Problem("elastic.shapes", None, f"has {count} shapes for world_size = {world_size}", "keep one")


def _shapes_fit_the_model(config: RunConfig) -> Iterator[Problem]:
    """Check every elastic shape before it is needed."""
    for index, shape in enumerate(config.elastic.shapes):
        degrees = shape.model_dump(exclude={"world_size"})
        if degrees == config.parallel.model_dump(include=set(degrees)):
            continue  # reported for the keys themselves
        if shape.cp != config.parallel.cp and config.parallel.cp_method != "hybrid":
            degrees["cp_ulysses"] = None  # it follows cp
        parallel = config.parallel.model_copy(update=degrees)
        for rule in (*_family_rules(config, "parallel.tp"), *_SHAPE_RULES):
            for problem in rule(config.model_copy(update={"parallel": parallel})):
                key = problem.key if problem.value is None else f"{problem.key} = {toml_value(problem.value)}"
                yield Problem(f"elastic.shapes[{index}]", shape, f"{key} {problem.rule}", problem.hint)


def _rule_partitioned_inputs_are_not_saved_whole(config: RunConfig) -> Iterator[Problem]:
    """Recomputing the residual stream starts from the whole input of a layer; a shard of it would be saved in addition."""
    own = config.activations
    regions = [own.of_stage(rank).regions for rank in (-1, *(table.stage for table in own.stages))]
    if own.partition and any("residual" in each and "block" not in each for each in regions):
        rule = "must be false where residual is recomputed, which starts from the whole input of a layer"
        yield Problem("activations.partition", True, rule, "leave residual out of activations.recompute, or name block")


def _rule_fp8_layers_are_of_this_model(config: RunConfig) -> Iterator[Problem]:
    precision, count = config.precision, config.model.num_layers
    chosen = precision.fp8_of_layers(count)
    if precision.fp8 != "none" and (not chosen or max(chosen) >= count):
        rule = f"must name one layer or more, below model.num_layers={count}"
        yield Problem("precision.fp8_layers", precision.fp8_layers, rule, 'write "all" for every layer')


def _shape_rule_fp8_takes_the_sizes(config: RunConfig) -> Iterator[Problem]:
    """See `wrong_size`; a layer of a script's own checks itself."""
    model, tp, scaling = config.model, config.parallel.tp, config.precision.fp8
    if scaling == "none":
        return
    from megazero.layers.fp8_sizes import wrong_size  # what few runs need

    of_heads = "hidden_size" if model.head_dim is None else "head_dim"
    keys_and_values = [(model.num_kv_heads or model.num_heads) * model.head_size] * 2
    matrices: dict[str, tuple[list[int], int]] = {
        "hidden_size": ([], model.hidden_size),
        of_heads: ([model.attention_size], 0),
        "num_kv_heads": (keys_and_values, 0),
        "ffn_hidden_size": ([model.ffn_hidden_size or 0], 0),
    }
    if num_experts(config):  # tp cuts no expert
        matrices["expert_hidden_size" if model.expert_hidden_size else "ffn_hidden_size"] = ([], model.expert_size)
    for key, sizes in matrices.items():
        if wrong := wrong_size(*sizes, tp, scaling):
            size, step = wrong
            rule = f"must give multiples of {step} features where precision.fp8 = {scaling} and parallel.tp={tp}"
            nearest = nearest_text(nearest_multiples(size, step))
            yield Problem(f"model.{key}", getattr(model, key), rule, f"it gives {size}; {nearest}")


def _shape_rule_logits_chunks_hold_some_tokens(config: RunConfig) -> Iterator[Problem]:
    """A chunk is a pass of the head: of a few tokens each a sample has thousands, which check would trace for minutes."""
    training, model = config.training, config.model
    tokens = min(128, -(-model.seq_len // 16))
    rows = -(-model.vocab_size // config.parallel.tp)
    least = tokens * rows * (4 if config.precision.dtype == "fp32" else 2)
    if training.logits_chunk_bytes < least:
        rule = f"must be >= {least}: the logits of {tokens} tokens, {rows} on a rank for each"
        yield Problem("training.logits_chunk_bytes", training.logits_chunk_bytes, rule, f"write {least} or more")


def _rule_loss_scale_starts_above_its_least(config: RunConfig) -> Iterator[Problem]:
    least, start = config.precision.min_loss_scale, 2.0**config.precision.initial_scale_power
    if least > start:
        rule = f"must be <= 2**initial_scale_power={start}"
        yield Problem("precision.min_loss_scale", least, rule, f"write {start} or less")


def _rule_elastic_runs_change_their_world(config: RunConfig) -> Iterator[Problem]:
    if config.elastic.enabled and config.training.global_batch_size == "auto":
        rule = "must be a number where elastic.enabled = true: it stays while dp changes"
        yield Problem("training.global_batch_size", "auto", rule, "write the samples of an optimizer step")
    if config.elastic.enabled and config.checkpoint.resume == "never":
        rule = "must not be never where elastic.enabled = true: such a run starts again whenever machines come or go"
        yield Problem("checkpoint.resume", "never", rule, "write auto, or elastic.enabled = false")


# Every function with such a name is checked: for each shape of an elastic run, or once for the run.
_SHAPE_RULES: tuple[Rule, ...] = tuple(rule for name, rule in [*globals().items()] if name.startswith("_shape_rule_"))
RULES: tuple[Rule, ...] = tuple(rule for name, rule in [*globals().items()] if name.startswith("_rule_"))
