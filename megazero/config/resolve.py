"""From what a file says to what a run is: every rule checked, every open key given its value.

    RunConfig, world size  ->  ResolvedRun

Resolving twice changes nothing: a resolved config is itself a config, which resolves to the same run.
"""

from dataclasses import dataclass

from megazero.config.derive import complete_batch, complete_model, data_parallel_size
from megazero.config.problem import ConfigError
from megazero.config.rules import broken_rules
from megazero.config.schema import RunConfig


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a known number of ranks: global_batch_size = micro_batch_size * dp * accumulation."""

    config: RunConfig
    """The config, with model sizes and batch sizes filled in."""
    world_size: int
    """Number of ranks: tp * pp * dp."""
    dp: int
    """Data-parallel degree."""
    global_batch_size: int
    """Samples in an optimizer step."""
    micro_batch_size: int
    """Samples in one forward pass."""
    accumulation: int
    """Micro-batches in a step on each data-parallel rank."""


def resolve(config: RunConfig, world_size: int) -> ResolvedRun:
    """Check every rule and fill in the model and batch sizes left open.

    Args:
        config: the run, as written.
        world_size: number of ranks.

    Raises:
        ConfigError: a rule is broken; the error lists every one that is.
    """
    problems = broken_rules(config, world_size)
    if problems:
        raise ConfigError(problems)
    dp = data_parallel_size(config.parallel, world_size)
    written = config.training
    sizes = written.global_batch_size, written.micro_batch_size, written.accumulation
    batch = complete_batch(*sizes, dp=dp, pp=config.parallel.pp)
    filled = {
        "model": complete_model(config.model),
        "training": written.model_copy(
            update={
                "global_batch_size": batch.global_batch_size,
                "micro_batch_size": batch.micro_batch_size,
                "accumulation": batch.accumulation,
            }
        ),
    }
    return ResolvedRun(
        config=config.model_copy(update=filled),
        world_size=world_size,
        dp=dp,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
    )
