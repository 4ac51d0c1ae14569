"""Which one key of a run file, changed, makes a run fit: each as an override to type, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config import ConfigError, ResolvedRun, RunConfig
from megazero.config.load import resolve
from megazero.plan.activations import size_text
from megazero.plan.cluster import Cluster
from megazero.plan.quick_memory import quick_memory_of
from megazero.plan.step_time import step_time_of

_SHOWN = 6


def fitting_changes(run: ResolvedRun, cluster: Cluster) -> Iterator[str]:
    """`activations.recompute=selective: 61.2 GiB, a step of 8.31 s (1.4% more)`."""
    own = step_time_of(run, cluster).seconds
    found = []
    for overrides, config in _changes(run):
        try:
            other = resolve(config, cluster.ranks)
        except ConfigError:
            continue
        peak = max(one.peak for one in quick_memory_of(other, cluster))
        if peak <= cluster.device.memory_bytes:
            found.append((step_time_of(other, cluster).seconds, peak, overrides))
    for seconds, peak, overrides in sorted(found)[:_SHOWN]:
        change = seconds / own - 1
        more = f"{abs(change):.1%} {'more' if change >= 0 else 'less'}"
        yield f"{overrides}: {size_text(peak)}, a step of {seconds:.3f} s ({more})"


def _changes(run: ResolvedRun) -> Iterator[tuple[str, RunConfig]]:
    """Each change as overrides and as a config."""
    config = run.config
    batch = {"micro_batch_size": run.micro_batch_size, "accumulation": "auto"}
    free = config.model_copy(update={"training": config.training.model_copy(update=batch)})
    free = free.model_copy(update={"parallel": config.parallel.model_copy(update={"dp": "auto"})})

    def changed(section: str, **values: object) -> RunConfig:
        return free.model_copy(update={section: getattr(free, section).model_copy(update=values)})

    for name in ("selective", "full"):
        yield f"activations.recompute={name}", changed("activations", recompute=name)
    yield "activations.offload=host", changed("activations", offload="host")
    for stage in range(config.zero.stage + 1, 4):
        yield f"zero.stage={stage}", changed("zero", stage=stage)
    offload = config.zero.offload.model_copy(update={"optimizer": "cpu"})
    yield "zero.offload.optimizer=cpu", changed("zero", offload=offload)
    if run.micro_batch_size % 2 == 0:
        half = run.micro_batch_size // 2
        yield f"training.micro_batch_size={half}", changed("training", micro_batch_size=half)
    for axis in ("tp", "cp", "pp"):
        size = 2 * getattr(config.parallel, axis)
        yield f"parallel.{axis}={size}", changed("parallel", **{axis: size})
