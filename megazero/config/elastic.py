"""A run on whatever ranks there are: the shape that a world gets, and what is left over.

    [elastic] enabled, tp 2, pp 1, a world of 7        dp = 7 // 2 = 3: ranks 0 to 5 train, rank 6 is spare
    global_batch_size 16, micro_batch_size 1, dp 3     6 micro-batches on each: 18 samples, 2 of them empty

The global batch stays what it is on every world, and so does the run. These are pure functions of the config and a
number of ranks; where elastic.enabled is false they change nothing.
"""

from dataclasses import dataclass

from megazero.config.schema import ElasticShape, RunConfig
from megazero.settings import ConfigError, Problem


@dataclass(frozen=True)
class Fit:
    """A run fitted to a world."""

    config: RunConfig
    """The config, with the degrees of this world; dp is "auto"."""
    world_size: int
    """Ranks that train: tp * pp * dp."""
    spare_ranks: int
    """Ranks beyond these, which wait until the others are done."""
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
    group, notices = config.zero.shard_group_size, []
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
    """Give (tp, pp) for a number of ranks.

    Args:
        config: the run, as written.
        world_size: ranks that were started.
    """
    for shape in config.elastic.shapes:
        if shape.world_size == world_size:
            return shape.tp, shape.pp
    return config.parallel.tp, config.parallel.pp


def with_shape(config: RunConfig, shape: ElasticShape) -> RunConfig:
    """Give the run with the degrees of one of its shapes.

    Args:
        config: the run, as written.
        shape: one of elastic.shapes.
    """
    parallel = config.parallel.model_copy(update={"tp": shape.tp, "pp": shape.pp})
    return config.model_copy(update={"parallel": parallel})


def _too_few(config: RunConfig, world_size: int, tp: int, pp: int) -> Problem:
    known = sorted({shape.world_size for shape in config.elastic.shapes if shape.world_size < world_size})
    hint = f"start {tp * pp}, or add {{ world_size = {world_size}, tp = ..., pp = ... }} to elastic.shapes"
    hint += f", which has a shape for {', '.join(map(str, known))}" if known else ""
    return Problem("world_size", world_size, f"must be at least tp*pp={tp}*{pp}={tp * pp}", hint)
