"""Gives values to the keys that a run file leaves open, once the number of ranks is known.

    world size = tp * cp * pp * dp                             dp follows from tp, cp and pp
    cp = Ulysses degree * ring                                 "auto": fits the heads and sends the fewest bytes
    global batch = micro-batch * dp * accumulation             in samples; two of them give the third
                 < ...                                         an elastic run adds empty samples

An elastic run is first fitted to its world: the global batch stays, and dp is as large as the number of ranks allows.

    [elastic] enabled, tp 2, pp 1, a world of 7        dp = 7 // 2 = 3: ranks 0 to 5 train, rank 6 is spare
    global_batch_size 16, micro_batch_size 1, dp 3     6 micro-batches on each: 18 samples, 2 of them empty
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.config.schema import Auto, DataConfig, ElasticShape, ParallelConfig, RunConfig
from megazero.models.registry import FAMILIES
from megazero.models.stages import context_bytes, heads_of_rank, ulysses_degrees
from megazero.schedules.registry import SCHEDULES
from megazero.settings import ConfigError, Problem, counted, divisors, nearest_multiples, nearest_text

if TYPE_CHECKING:
    from megazero.parallel_state import RankGrid

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a run, in samples: global_batch_size = micro_batch_size * dp * accumulation.

    In an elastic run the product may be larger; the samples beyond the global batch are empty.
    """

    global_batch_size: int
    micro_batch_size: int
    accumulation: int


def complete_batch(
    global_batch_size: int | Auto, micro_batch_size: int | Auto, accumulation: int | Auto, *, dp: int, pp: int
) -> BatchSizes:
    """Fill in the batch sizes that are "auto".

    Two sizes give the third. With fewer, the step gets as many micro-batches as pipeline stages, so that every stage has
    work and micro-batches stay large; a size that follows from nothing is 1.

    Args:
        global_batch_size: samples of a step.
        micro_batch_size: samples of a micro-batch.
        accumulation: micro-batches of a step on each data-parallel rank.
        dp, pp: degrees.

    Raises:
        ConfigError: the sizes contradict each other; the error has the numbers and the nearest that do not.
    """
    given = {"micro_batch_size": micro_batch_size, "accumulation": accumulation}
    sizes = {name: size for name, size in given.items() if size != "auto"} | {"dp": dp}
    product, name = prod(sizes.values()), "*".join(sizes)
    if global_batch_size == "auto":
        micro, count = sizes.get("micro_batch_size", 1), sizes.get("accumulation", pp)
        return BatchSizes(micro * dp * count, micro, count)
    if len(sizes) == 3 and global_batch_size != product:
        rule = f"must be micro_batch_size*dp*accumulation={micro_batch_size}*{dp}*{accumulation}={product}"
        hint = f'write {product}, or make one of the three "auto"'
        raise _error("training.global_batch_size", global_batch_size, rule, hint)
    if global_batch_size % product:
        nearest = nearest_text(nearest_multiples(global_batch_size, product))
        raise _error("training.global_batch_size", global_batch_size, f"must be divisible by {name}={product}", nearest)
    per_replica = global_batch_size // dp
    if micro_batch_size != "auto":
        return BatchSizes(global_batch_size, micro_batch_size, per_replica // micro_batch_size)
    count = sizes.get("accumulation", _count_for(per_replica, pp))
    return BatchSizes(global_batch_size, per_replica // count, count)


def padded_batch(
    global_batch_size: int, micro_batch_size: int | Auto, *, dp: int, pp: int, multiple: int
) -> BatchSizes:
    """Fill in the batch sizes of an elastic run: the fewest micro-batches that hold the global batch.

    If no sample is empty, the sizes are those of `complete_batch`.

    Args:
        multiple: the number of micro-batches must be a multiple of this.
    """
    per_replica = -(-global_batch_size // dp)
    micro = micro_batch_size
    if micro == "auto":
        micro = -(-per_replica // _round_up(_count_for(per_replica, pp), multiple))
    return BatchSizes(global_batch_size, micro, _round_up(-(-per_replica // micro), multiple))


def batch_sizes(config: RunConfig, dp: int) -> BatchSizes:
    """Return the batch sizes of a run that is fitted to its world.

    Raises:
        ConfigError: the sizes contradict each other.  An elastic run gets empty samples instead.
    """
    batch, pp = config.training, config.parallel.pp
    if config.elastic.enabled and batch.global_batch_size != "auto":
        multiple = micro_batch_multiple(config.parallel)
        return padded_batch(batch.global_batch_size, batch.micro_batch_size, dp=dp, pp=pp, multiple=multiple)
    return complete_batch(batch.global_batch_size, batch.micro_batch_size, batch.accumulation, dp=dp, pp=pp)


def micro_batch_multiple(parallel: ParallelConfig) -> int:
    """Return a number that must divide the number of micro-batches of a step, for this schedule and pp."""
    return SCHEDULES[parallel.schedule].microbatch_multiple(parallel.pp)


def num_experts(config: RunConfig) -> int:
    """Return the number of experts of a layer, 0 for a dense model."""
    return FAMILIES[config.model.family].complete(config.model).num_experts or 0


def cache_directory(data: DataConfig, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for prepared data: `data.cache_dir`, or a folder below XDG_CACHE_HOME or ~/.cache."""
    if data.cache_dir is not None:
        return Path(data.cache_dir)
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megazero"


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a known number of ranks: global_batch_size = micro_batch_size * dp * accumulation.

    In an elastic run the product may be larger; the samples beyond the global batch are empty.

    Args:
        config: with model and batch sizes filled in; of an elastic run with the degrees of this world.
        written: as `config`, but an elastic run has the degrees of its file, which are for any world.
        world_size: number of ranks that train: tp * cp * pp * dp.
        dp: data-parallel degree.
        global_batch_size: samples in an optimizer step; fewer while `training.batch_ramp` grows it, see `samples_after`.
        micro_batch_size: samples in one forward pass.
        accumulation: micro-batches in a step on each data-parallel rank.
        spare_ranks: ranks of an elastic run beyond those that train.
        notices: what the user should know, a line each: what fitting the run to this world changed or chose; keys without
            effect.
    """

    config: RunConfig
    written: RunConfig = field(compare=False)
    world_size: int
    dp: int
    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    spare_ranks: int = 0
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the state where ZeRO shards it."""
        return self.config.zero.shard_group_size or self.dp * self.config.parallel.cp

    def samples_after(self, consumed: int, steps: int = 1) -> int:
        """Samples consumed after further steps: each takes the global batch, or less while it ramps up."""
        ramp = self.config.training.batch_ramp
        while ramp is not None and steps and consumed < ramp.samples:
            consumed, steps = consumed + ramp.size(consumed, self.global_batch_size), steps - 1
        return consumed + steps * self.global_batch_size

    @property
    def grid(self) -> "RankGrid":
        """The grid of ranks."""
        from megazero.parallel_state import RankGrid  # imports torch, which reading a run file does not need

        parallel, group = self.config.parallel, self.config.zero.shard_group_size
        degrees = parallel.tp, parallel.cp, self.dp, parallel.pp
        return RankGrid(*degrees, parallel.order, parallel.ep, parallel.ulysses, group)


@dataclass(frozen=True)
class Fit:
    """A run fitted to a world.

    Args:
        config: the run with cp_method and cp_ulysses filled in; an elastic run has the degrees of this world and dp "auto".
        dp: number of model replicas.
        spare_ranks: ranks beyond tp * cp * pp * dp; they wait until the others are done.
        notices: a line on each change and choice.
    """

    config: RunConfig
    dp: int
    spare_ranks: int = 0
    notices: tuple[str, ...] = ()


def fit(config: RunConfig, world_size: int) -> Fit:
    """Find dp, and for an elastic run tp, cp and pp from elastic.shapes or as written, with dp as large as possible.

    Raises:
        ConfigError: tp * cp * pp * dp cannot be the world size; in an elastic run, there are fewer ranks than tp * cp * pp.
    """
    parallel = config.parallel
    if not config.elastic.enabled:
        dp = _data_parallel_size(parallel, world_size)
        chosen, why = _with_context_method(config)
        return Fit(chosen, dp, notices=why)
    shape = next((shape for shape in config.elastic.shapes if shape.world_size == world_size), parallel)
    names, numbers, each = ranks_of_a_sample(shape)
    dp = max(world_size, 0) // each
    if dp == 0:
        known = sorted({shape.world_size for shape in config.elastic.shapes if shape.world_size < world_size})
        hint = f"start {each}, or add {{ world_size = {world_size}, tp = ..., pp = ... }} to elastic.shapes"
        hint += f", which has a shape for {', '.join(map(str, known))}" if known else ""
        raise _error("world_size", world_size, f"must be at least {names}={numbers}={each}", hint)
    group, notices = config.zero.shard_group_size, list[str]()
    if spare := world_size - each * dp:
        degrees = " x ".join(f"{name} {getattr(shape, name)}" for name in names.split("*"))
        notices.append(f"{spare} of {world_size} ranks do not train: {degrees} x dp {dp} = {each * dp}")
    if group and dp * shape.cp % group:
        among, every = (f"dp {dp}", "dp") if shape.cp == 1 else (f"dp {dp} x cp {shape.cp}", "dp x cp")
        notices.append(f"zero.shard_group_size={group} does not divide {among}: state is sharded over all of {every}")
        group = 0
    second, shards = config.zero.secondary_shard_size, group or dp * shape.cp
    if second and (second >= shards or shards % second):
        effect = f"does not divide {shards} ranks into groups: weights have no secondary shard"
        notices.append(f"zero.secondary_shard_size={second} {effect}")
        second = 0
    ep = gcd(parallel.ep, ranks := shape.tp * shape.cp * dp)
    if ep < parallel.ep:
        advice = f"experts are dealt to {ep}"
        notices.append(f"parallel.ep={parallel.ep} does not divide the {ranks} ranks of a stage: {advice}")
    shapes = config.elastic.shapes
    if shape.cp > 1 and parallel.cp_method == "auto":  # what is picked below is for this cp; the file keeps all shapes
        shapes = tuple(other for other in shapes if other.cp == shape.cp)
    fitted = {
        "elastic": config.elastic.model_copy(update={"shapes": shapes}),
        "parallel": parallel.model_copy(
            update={"tp": shape.tp, "cp": shape.cp, "pp": shape.pp, "dp": "auto", "ep": ep}
        ),
        "zero": config.zero.model_copy(update={"shard_group_size": group, "secondary_shard_size": second}),
    }
    chosen, why = _with_context_method(config.model_copy(update=fitted))
    return Fit(chosen, dp, spare, (*notices, *why))


def ranks_of_a_sample(shape: ParallelConfig | ElasticShape) -> tuple[str, str, int]:
    """Return the names, the values and the product of the degrees that share one sample: tp, pp, and cp if above 1."""
    names = ("tp", "cp", "pp") if shape.cp > 1 else ("tp", "pp")
    degrees = [getattr(shape, name) for name in names]
    return "*".join(names), "*".join(map(str, degrees)), prod(degrees)


def _with_context_method(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Fill in cp_method and cp_ulysses; return the run with notices on the choices.  At cp 1, nothing changes."""
    parallel, why = config.parallel, tuple[str, ...]()
    cp, method, ulysses = parallel.cp, parallel.cp_method, parallel.cp_ulysses
    if cp == 1:
        return config, ()
    if method == "auto":
        sent, heads = _bytes_by_ulysses(config)
        ulysses = min(sent, key=lambda degree: (sent[degree], -degree))
        method = "ulysses" if ulysses == cp else "ring" if ulysses == 1 else "hybrid"
        of_each = "; ".join(f"{degree} x {cp // degree}: {count:,}" for degree, count in sent.items())
        fewest = f"{ulysses} x {cp // ulysses} sends the fewest bytes per rank, layer and sample ({of_each})"
        why = (f"cp_method auto takes {method}: of the Ulysses x ring degrees that fit {heads} of a rank, {fewest}",)
    elif method != "hybrid":
        ulysses = cp if method == "ulysses" else 1
    chosen = parallel.model_copy(update={"cp_method": method, "cp_ulysses": ulysses})
    return config.model_copy(update={"parallel": chosen}), why


def _bytes_by_ulysses(config: RunConfig) -> tuple[dict[int, int], str]:
    """Return the bytes that a rank sends per layer and sample, by Ulysses degree, largest first; and its heads in words."""
    model, parallel = config.model, config.parallel
    heads, kv_heads = heads_of_rank(model.num_heads, model.num_kv_heads, parallel.tp)
    fitting = [1, *(degree for degree in ulysses_degrees(heads, kv_heads) if degree > 1 and parallel.cp % degree == 0)]
    sent = {degree: sum(sent_by_attention(config, 1, degree).values()) for degree in reversed(fitting)}
    return sent, f"{counted(heads, 'head')} and {counted(kv_heads, 'key/value head')}"


def sent_by_attention(config: RunConfig, batch: int, ulysses: int) -> dict[str, int]:
    """Return the bytes that a rank sends per layer for a micro-batch of `batch` samples, by operation.

    Args:
        ulysses: Ulysses degree; see `context_bytes`.
    """
    model, parallel, precision = config.model, config.parallel, config.precision
    heads, kv_heads = heads_of_rank(model.num_heads, model.num_kv_heads, parallel.tp)
    return context_bytes(
        model.seq_len,
        batch,
        heads=heads,
        kv_heads=kv_heads,
        head_size=model.head_size,
        ulysses=ulysses,
        ring=parallel.cp // ulysses,
        itemsize=_BYTES[precision.dtype],
        gradient_itemsize=_BYTES[precision.reduce_dtype],
    )


def _data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    names, numbers, replica = ranks_of_a_sample(parallel)
    divides = world_size > 0 and world_size % replica == 0
    if parallel.dp == "auto":
        if not divides:
            nearest = nearest_text(nearest_multiples(max(world_size, 0), replica))
            raise _error("world_size", world_size, f"must be divisible by {names}={replica}", nearest)
        return world_size // replica
    total = replica * parallel.dp
    if total != world_size:
        rule = f"{names}*dp={numbers}*{parallel.dp}={total} must be the world size, {world_size}"
        hint = f'write {world_size // replica} or "auto"' if divides else f"start {total} ranks"
        raise _error("parallel.dp", parallel.dp, rule, hint)
    return parallel.dp


def _count_for(per_replica: int, pp: int) -> int:
    """Return the smallest number of equal micro-batches that fills the pipeline."""
    return next((d for d in divisors(per_replica) if d >= pp), per_replica)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _error(key: str, value: object, rule: str, hint: str) -> ConfigError:
    return ConfigError([Problem(key, value, rule, hint)])
