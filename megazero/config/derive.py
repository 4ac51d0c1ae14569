"""What the keys left open become, once the number of ranks is known.

    world size = tp * pp * dp                                  dp is what tp and pp leave
    global batch = micro-batch * dp * accumulation             in samples; two give the third
                 < ...                                         an elastic run fills up with empty samples

An elastic run is first fitted to its world: the global batch stays, dp is as large as there are ranks for.

    [elastic] enabled, tp 2, pp 1, a world of 7        dp = 7 // 2 = 3: ranks 0 to 5 train, rank 6 is spare
    global_batch_size 16, micro_batch_size 1, dp 3     6 micro-batches on each: 18 samples, 2 of them empty
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megazero.config.schema import Auto, DataConfig, ParallelConfig, RunConfig
from megazero.schedules.registry import SCHEDULES
from megazero.settings import ConfigError, Problem, divisors, nearest_multiples, nearest_text


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
            hint = f'write {product}, or make one of the three "auto"'
            raise _error("training.global_batch_size", global_batch_size, rule, hint)
        return BatchSizes(product, micro_batch_size, accumulation)
    if micro_batch_size != "auto":
        divisor, name = micro_batch_size * dp, "micro_batch_size*dp"
    elif accumulation != "auto":
        divisor, name = accumulation * dp, "accumulation*dp"
    else:
        divisor, name = dp, "dp"
    if global_batch_size % divisor:
        nearest = nearest_text(nearest_multiples(global_batch_size, divisor))
        raise _error("training.global_batch_size", global_batch_size, f"must be divisible by {name}={divisor}", nearest)
    quotient = global_batch_size // divisor
    if micro_batch_size != "auto":
        return BatchSizes(global_batch_size, micro_batch_size, quotient)
    count = _count_for(quotient, pp) if accumulation == "auto" else accumulation
    return BatchSizes(global_batch_size, global_batch_size // (dp * count), count)


def padded_batch(
    global_batch_size: int, micro_batch_size: int | Auto, *, dp: int, pp: int, multiple: int
) -> BatchSizes:
    """Fill in the batch sizes of an elastic run: as few micro-batches as hold the global batch, the last ones in part.

    Micro-batches come in multiples of `multiple`. Without empty samples the sizes are those of `complete_batch`.
    """
    per_replica = -(-global_batch_size // dp)
    micro = micro_batch_size
    if micro == "auto":
        micro = -(-per_replica // _round_up(_count_for(per_replica, pp), multiple))
    return BatchSizes(global_batch_size, micro, _round_up(-(-per_replica // micro), multiple))


def batch_sizes(config: RunConfig, dp: int) -> BatchSizes:
    """Give the batch sizes of a run that is fitted to its world.

    Raises:
        ConfigError: as `complete_batch`; an elastic run fills up instead.
    """
    batch, pp = config.training, config.parallel.pp
    if config.elastic.enabled and batch.global_batch_size != "auto":
        multiple = micro_batch_multiple(config.parallel)
        return padded_batch(batch.global_batch_size, batch.micro_batch_size, dp=dp, pp=pp, multiple=multiple)
    return complete_batch(batch.global_batch_size, batch.micro_batch_size, batch.accumulation, dp=dp, pp=pp)


def micro_batch_multiple(parallel: ParallelConfig) -> int:
    """Give the number that the schedule takes micro-batches in multiples of, for the pp of this world."""
    return SCHEDULES[parallel.schedule].microbatch_multiple(parallel.pp)


def cache_directory(data: DataConfig, environment: Mapping[str, str] = os.environ) -> Path:
    """Give the directory of prepared data; XDG_CACHE_HOME is looked up in the environment."""
    if data.cache_dir is not None:
        return Path(data.cache_dir)
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megazero"


@dataclass(frozen=True)
class Fit:
    """A run fitted to a world."""

    config: RunConfig
    """The config; that of an elastic run has the degrees of this world, with dp "auto"."""
    dp: int
    """Number of model replicas."""
    spare_ranks: int = 0
    """Ranks beyond tp * pp * dp; they wait until the others are done."""
    notices: tuple[str, ...] = ()
    """What the fit changed, a line each."""


def fit(config: RunConfig, world_size: int) -> Fit:
    """Find dp, and for an elastic run tp and pp too: from elastic.shapes or as written, with dp as large as possible.

    Raises:
        ConfigError: tp * pp * dp cannot be the world size; in an elastic run, fewer ranks than tp * pp.
    """
    parallel = config.parallel
    if not config.elastic.enabled:
        return Fit(config, _data_parallel_size(parallel, world_size))
    shape = next((shape for shape in config.elastic.shapes if shape.world_size == world_size), parallel)
    tp, pp = shape.tp, shape.pp
    dp = max(world_size, 0) // (tp * pp)
    if dp == 0:
        known = sorted({shape.world_size for shape in config.elastic.shapes if shape.world_size < world_size})
        hint = f"start {tp * pp}, or add {{ world_size = {world_size}, tp = ..., pp = ... }} to elastic.shapes"
        hint += f", which has a shape for {', '.join(map(str, known))}" if known else ""
        raise _error("world_size", world_size, f"must be at least tp*pp={tp}*{pp}={tp * pp}", hint)
    group, notices = config.zero.shard_group_size, list[str]()
    if spare := world_size - tp * pp * dp:
        notices.append(f"{spare} of {world_size} ranks do not train: tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp}")
    if group and dp % group:
        notices.append(f"zero.shard_group_size={group} does not divide dp {dp}: the state is sharded over all of dp")
        group = 0
    fitted = {
        "parallel": parallel.model_copy(update={"tp": tp, "pp": pp, "dp": "auto"}),
        "zero": config.zero.model_copy(update={"shard_group_size": group}),
    }
    return Fit(config.model_copy(update=fitted), dp, spare, tuple(notices))


def _data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
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


def _count_for(per_replica: int, pp: int) -> int:
    """Give the least number of equal micro-batches that fills the pipeline."""
    return next((d for d in divisors(per_replica) if d >= pp), per_replica)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _error(key: str, value: object, rule: str, hint: str) -> ConfigError:
    return ConfigError([Problem(key, value, rule, hint)])
