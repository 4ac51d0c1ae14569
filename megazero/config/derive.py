"""What the keys left open become, once the number of ranks is known.

    world size = tp * pp * dp                                  dp is what tp and pp leave
    global batch = micro-batch * dp * accumulation             in samples; two give the third
                 < ...                                         an elastic run fills up with empty samples

An elastic run is first fitted to its world: the global batch stays, dp is as large as there are ranks for.

    [elastic] enabled, tp 2, pp 1, a world of 7        dp = 7 // 2 = 3: ranks 0 to 5 train, rank 6 is spare
    global_batch_size 16, micro_batch_size 1, dp 3     6 micro-batches on each: 18 samples, 2 of them empty

These are pure functions of numbers. A combination that no value can complete raises a ConfigError with one problem.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megazero.config.schema import Auto, DataConfig, ElasticShape, ParallelConfig, RunConfig
from megazero.models.config import ModelConfig
from megazero.models.registry import FAMILIES
from megazero.schedules.registry import SCHEDULES
from megazero.settings import ConfigError, Problem, divisors, nearest_multiples, nearest_text


def complete_model(model: ModelConfig) -> ModelConfig:
    """Fill in the model sizes that are unset.

    Args:
        model: the section as written.
    """
    return FAMILIES[model.family].complete(model)


def chunks_per_rank(parallel: ParallelConfig) -> int:
    """Give the number of model chunks on each pipeline rank.

    Args:
        parallel: the section as written.
    """
    return SCHEDULES[parallel.schedule].chunks or parallel.virtual_stages


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Give the number of model replicas.

    Args:
        parallel: the section as written.
        world_size: number of ranks.

    Raises:
        ConfigError: tp * pp * dp cannot be the world size.
    """
    replica = parallel.tp * parallel.pp
    divides = world_size > 0 and world_size % replica == 0
    if parallel.dp == "auto":
        if not divides:
            nearest = nearest_text(nearest_multiples(max(world_size, 0), replica))
            raise _error("world_size", world_size, f"must be divisible by tp*pp={replica}", nearest)
        return world_size // replica
    total = replica * parallel.dp
    if total != world_size:
        rule = f"tp*pp*dp={parallel.tp}*{parallel.pp}*{parallel.dp}={total} must be the world size, {world_size}"
        hint = f'write {world_size // replica} or "auto"' if divides else f"start {total} ranks"
        raise _error("parallel.dp", parallel.dp, rule, hint)
    return parallel.dp


@dataclass(frozen=True)
class BatchSizes:
    """A complete triple: global_batch_size = micro_batch_size * dp * accumulation, in samples.

    In an elastic run the product may be larger; the samples beyond the global batch are empty.
    """

    global_batch_size: int
    micro_batch_size: int
    accumulation: int


def complete_batch(
    global_batch_size: int | Auto, micro_batch_size: int | Auto, accumulation: int | Auto, *, dp: int, pp: int
) -> BatchSizes:
    """Fill in the batch sizes that are "auto".

    Two sizes give the third. With fewer there are as many micro-batches as pipeline stages, so that every stage has
    work and micro-batches stay large; a size that nothing says is 1.

    Args:
        global_batch_size: samples in an optimizer step.
        micro_batch_size: samples in one forward pass.
        accumulation: micro-batches in a step on each data-parallel rank.
        dp: data-parallel degree.
        pp: pipeline-parallel degree.

    Raises:
        ConfigError: the sizes contradict each other; the error has the numbers and the nearest that do not.
    """
    if global_batch_size == "auto":
        micro = 1 if micro_batch_size == "auto" else micro_batch_size
        count = pp if accumulation == "auto" else accumulation
        return BatchSizes(micro * dp * count, micro, count)

    if micro_batch_size != "auto" and accumulation != "auto":
        product = micro_batch_size * dp * accumulation
        if global_batch_size != product:
            rule = f"must be micro_batch_size*dp*accumulation={micro_batch_size}*{dp}*{accumulation}={product}"
            raise _error(
                "training.global_batch_size",
                global_batch_size,
                rule,
                f'write {product}, or make one of the three "auto"',
            )
        return BatchSizes(product, micro_batch_size, accumulation)

    if micro_batch_size != "auto":
        count = _divide(global_batch_size, micro_batch_size * dp, "micro_batch_size*dp")
        return BatchSizes(global_batch_size, micro_batch_size, count)
    if accumulation != "auto":
        micro = _divide(global_batch_size, accumulation * dp, "accumulation*dp")
        return BatchSizes(global_batch_size, micro, accumulation)
    per_replica = _divide(global_batch_size, dp, "dp")
    count = next((d for d in divisors(per_replica) if d >= pp), per_replica)
    return BatchSizes(global_batch_size, per_replica // count, count)


def padded_batch(
    global_batch_size: int, micro_batch_size: int | Auto, *, dp: int, pp: int, multiple: int
) -> BatchSizes:
    """Fill in the batch sizes of an elastic run: as few micro-batches as hold the global batch, the last ones in part.

    Without empty samples the sizes are those of `complete_batch`.

    Args:
        global_batch_size: samples in an optimizer step, whatever dp is.
        micro_batch_size: samples in one forward pass.
        dp: data-parallel degree.
        pp: pipeline-parallel degree.
        multiple: micro-batches come in multiples of it.
    """
    per_replica = -(-global_batch_size // dp)
    micro = micro_batch_size
    if micro == "auto":
        count = next((d for d in divisors(per_replica) if d >= pp), per_replica)
        micro = -(-per_replica // _round_up(count, multiple))
    return BatchSizes(global_batch_size, micro, _round_up(-(-per_replica // micro), multiple))


def micro_batch_multiple(parallel: ParallelConfig) -> int:
    """Give the number that the schedule takes micro-batches in multiples of.

    Args:
        parallel: the section, with the pp of this world.
    """
    return SCHEDULES[parallel.schedule].microbatch_multiple(parallel.pp)


def batch_sizes(config: RunConfig, dp: int) -> BatchSizes:
    """Give the batch sizes of a run.

    Args:
        config: the run, fitted to its world.
        dp: data-parallel degree.

    Raises:
        ConfigError: as `complete_batch`; an elastic run fills up instead.
    """
    batch, parallel = config.training, config.parallel
    if config.elastic.enabled and batch.global_batch_size != "auto":
        multiple = micro_batch_multiple(parallel)
        return padded_batch(batch.global_batch_size, batch.micro_batch_size, dp=dp, pp=parallel.pp, multiple=multiple)
    return complete_batch(batch.global_batch_size, batch.micro_batch_size, batch.accumulation, dp=dp, pp=parallel.pp)


def cache_directory(data: DataConfig, environment: Mapping[str, str] = os.environ) -> Path:
    """Give the directory of prepared data; XDG_CACHE_HOME is looked up in the environment."""
    if data.cache_dir is not None:
        return Path(data.cache_dir).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megazero"


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _divide(global_batch_size: int, divisor: int, name: str) -> int:
    if global_batch_size % divisor:
        nearest = nearest_text(nearest_multiples(global_batch_size, divisor))
        raise _error("training.global_batch_size", global_batch_size, f"must be divisible by {name}={divisor}", nearest)
    return global_batch_size // divisor


def _error(key: str, value: object, rule: str, hint: str) -> ConfigError:
    return ConfigError([Problem(key, value, rule, hint)])


# ---------------------------------------------------------------------------------------------------------------------
# Elastic runs


@dataclass(frozen=True)
class Fit:
    """A run fitted to a world."""

    config: RunConfig
    """The config, with the degrees of this world; dp is "auto"."""
    world_size: int
    """Ranks that train: tp * pp * dp."""
    spare_ranks: int
    """Ranks beyond these; they wait until the others are done."""
    notices: tuple[str, ...]
    """What the fit changed, a line each."""


def fit(config: RunConfig, world_size: int) -> Fit:
    """Fit a run to a world: tp and pp from elastic.shapes or as written, as large a dp as there are ranks for.

    Args:
        config: the run, as written.
        world_size: ranks that were started.

    Raises:
        ConfigError: fewer ranks than tp * pp.
    """
    if not config.elastic.enabled:
        return Fit(config, world_size, 0, ())
    tp, pp = shape_of(config, world_size)
    dp = max(world_size, 0) // (tp * pp)
    if dp == 0:
        raise ConfigError([_too_few(config, world_size, tp, pp)])
    group, notices = config.zero.shard_group_size, list[str]()
    if spare := world_size - tp * pp * dp:
        notices.append(f"{spare} of {world_size} ranks do not train: tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp}")
    if group and dp % group:
        notices.append(f"zero.shard_group_size={group} does not divide dp {dp}: the state is sharded over all of dp")
        group = 0
    parallel = config.parallel.model_copy(update={"tp": tp, "pp": pp, "dp": "auto"})
    zero = config.zero.model_copy(update={"shard_group_size": group})
    fitted = config.model_copy(update={"parallel": parallel, "zero": zero})
    return Fit(fitted, tp * pp * dp, spare, tuple(notices))


def shape_of(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Give (tp, pp) for the number of ranks that were started, of the run as written."""
    for shape in config.elastic.shapes:
        if shape.world_size == world_size:
            return shape.tp, shape.pp
    return config.parallel.tp, config.parallel.pp


def with_shape(config: RunConfig, shape: ElasticShape) -> RunConfig:
    """Give the run with the degrees of one of its elastic.shapes."""
    parallel = config.parallel.model_copy(update={"tp": shape.tp, "pp": shape.pp})
    return config.model_copy(update={"parallel": parallel})


def _too_few(config: RunConfig, world_size: int, tp: int, pp: int) -> Problem:
    known = sorted({shape.world_size for shape in config.elastic.shapes if shape.world_size < world_size})
    hint = f"start {tp * pp}, or add {{ world_size = {world_size}, tp = ..., pp = ... }} to elastic.shapes"
    hint += f", which has a shape for {', '.join(map(str, known))}" if known else ""
    return Problem("world_size", world_size, f"must be at least tp*pp={tp}*{pp}={tp * pp}", hint)
