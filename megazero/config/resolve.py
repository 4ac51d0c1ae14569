"""From what a file says to what a run is: every rule checked, every open key given its value.

    RunConfig, world size  ->  fitted to the world where it is elastic  ->  ResolvedRun

Resolving twice changes nothing: a resolved config is itself a config, which resolves to the same run.
"""

from dataclasses import dataclass, field

from megazero.config.derive import BatchSizes, batch_sizes, complete_model, data_parallel_size
from megazero.config.elastic import fit
from megazero.config.rules import broken_rules
from megazero.config.schema import RunConfig
from megazero.settings import ConfigError


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a known number of ranks: global_batch_size = micro_batch_size * dp * accumulation.

    An elastic run may have more room than samples; `read_batches` leaves the rest empty.
    """

    config: RunConfig
    """The config, with model sizes and batch sizes filled in, and an elastic one with the degrees of this world."""
    written: RunConfig = field(compare=False)
    """What its file says: as `config`, but an elastic run has the shape that it was written with, for any world."""
    world_size: int
    """Number of ranks that train: tp * pp * dp."""
    dp: int
    """Data-parallel degree."""
    global_batch_size: int
    """Samples in an optimizer step."""
    micro_batch_size: int
    """Samples in one forward pass."""
    accumulation: int
    """Micro-batches in a step on each data-parallel rank."""
    spare_ranks: int = 0
    """Ranks of an elastic run beyond those that train."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """What a user of an elastic run should know of its fit to this world, a line each."""


def resolve(config: RunConfig, world_size: int) -> ResolvedRun:
    """Check every rule and fill in the model and batch sizes left open.

    Args:
        config: the run, as written.
        world_size: number of ranks that were started.

    Raises:
        ConfigError: a rule is broken; the error lists every one that is.
    """
    problems = broken_rules(config, world_size)
    if problems:
        raise ConfigError(problems)
    fitted = fit(config, world_size)
    dp = data_parallel_size(fitted.config.parallel, fitted.world_size)
    batch = batch_sizes(fitted.config, dp)
    sizes: dict[str, object] = {
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
    }
    if config.elastic.enabled:
        sizes = {}  # they follow dp, which another world changes
    filled = {
        "model": complete_model(config.model),
        "training": config.training.model_copy(update=sizes),
    }
    return ResolvedRun(
        config=fitted.config.model_copy(update=filled),
        written=config.model_copy(update=filled),
        world_size=fitted.world_size,
        dp=dp,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        spare_ranks=fitted.spare_ranks,
        notices=(*fitted.notices, *_empty_samples(batch, dp)),
    )


def _empty_samples(batch: BatchSizes, dp: int) -> list[str]:
    room, samples = batch.micro_batch_size * batch.accumulation * dp, batch.global_batch_size
    if room == samples:
        return []
    return [
        f"{room - samples} of {room} samples of each step are empty: global_batch_size={samples} does not divide by "
        f"dp {dp} x micro_batch_size {batch.micro_batch_size}"
        + (f" x {batch.accumulation} micro-batches" if samples % (dp * batch.micro_batch_size) == 0 else "")
    ]
