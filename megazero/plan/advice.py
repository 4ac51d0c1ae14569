"""Single settings that make a run fit when changed, and the message of a rank that runs out of memory.

change      a setting as the user types it; the plan of the changed run gives the bytes freed and the seconds added
requested   bytes of the allocation that failed, from the allocator's error text
in use      model state and ZeRO's buffers, as the engine counts them; on CUDA the rest is activations and working memory
missing     bytes requested, plus model state that is not allocated yet, minus free bytes
"""

import re
import shlex
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megazero.config import ConfigError, ResolvedRun, RunConfig
from megazero.config.load import resolve
from megazero.engine import Engine
from megazero.parallel_state import ParallelState
from megazero.plan.cluster import Cluster, some_cluster
from megazero.plan.devices import size_text
from megazero.plan.memory import COMMUNICATOR_BYTES, STATE_KINDS, RankMemory, fullest_of, memory_of
from megazero.plan.step_time import step_time_of
from megazero.settings import toml_value
from megazero.zero.storage import free_memory_bytes

#: Values of [activations] to try, from the least recomputation to the most.
_RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "selective"},
    {"recompute": ["norms", "activation", "residual"]},
    {"recompute": ["norms", "mlp"]},
    {"recompute": "full", "keep_attention": True},
    {"recompute": "full"},
)
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST_KINDS, _SHOWN = 5, 6
_USABLE = 0.9  # share of the freed bytes that can be allocated again; the rest is lost to fragmentation


@dataclass(frozen=True)
class Change:
    """A setting that reduces memory when changed.

    Args:
        settings: as the user types it on the command line: `zero.stage=2`.
        frees: bytes freed on the device that is too full.
        more: the fraction by which a step gets slower; None if the device is not known.
    """

    settings: str
    frees: int
    more: float | None = None

    def __str__(self) -> str:
        more = self.more
        time = "" if more is None else f", a step takes {abs(more):.1%} {'more' if more >= 0 else 'less'}"
        return f"{self.settings} (frees about {size_text(self.frees)}{time})"


def fitting_changes(run: ResolvedRun, cluster: Cluster, full: RankMemory, missing: float) -> list[Change]:
    """Return the changes that free `missing` bytes of a pipeline rank, the fastest first; else the one that frees most."""
    found, is_timed = list[tuple[Change, ResolvedRun]](), cluster.processors == 0
    for settings, config in _changes(run, on_cuda=is_timed):
        try:
            changed = resolve(config, cluster.ranks)
        except (ConfigError, ValueError):
            continue
        same_pipeline = changed.config.parallel.pp == run.config.parallel.pp
        then = memory_of(changed, cluster, {full.stage})[0] if same_pipeline else fullest_of(changed, cluster)
        if then.peak < full.peak:
            found.append((Change(settings, full.peak - then.peak), changed))
    enough = [(change, changed) for change, changed in found if change.frees >= missing]
    if not enough:
        return [max((change for change, _ in found), key=lambda change: change.frees)] if found else []
    if not is_timed:
        return [change for change, _ in enough][:_SHOWN]
    own = step_time_of(run, cluster).seconds
    timed = (
        Change(change.settings, change.frees, step_time_of(changed, cluster).seconds / own - 1)
        for change, changed in enough
    )
    return sorted(timed, key=lambda change: change.more or 0.0)[:_SHOWN]


def advice_text(run: ResolvedRun, cluster: Cluster, full: RankMemory, missing: float, between: str = ", or ") -> str:
    """Return a sentence that names the settings which free `missing` bytes on the device of a pipeline rank."""
    found = fitting_changes(run, cluster, full, missing)
    if found and found[0].frees >= missing:
        return "would fit, by the plan: " + between.join(map(str, found))
    most = f"; the most is {found[0]}" if found else ""
    return (
        f"no one setting frees the {size_text(missing)} that are missing{most}; more ranks for parallel.tp, parallel.cp, "
        "parallel.pp or dp make each rank's shard smaller"
    )


def _changes(run: ResolvedRun, *, on_cuda: bool) -> Iterator[tuple[str, RunConfig]]:
    """Yield each change as command-line text and as a config.  No change offloads on a CPU, where that frees nothing."""
    config = run.config
    parallel, zero, count = config.parallel, config.zero, run.accumulation

    def changed(**sections: dict[str, Any]) -> tuple[str, RunConfig]:
        tables, words = config.model_dump(), list[str]()
        tables["parallel"]["dp"] = "auto"
        tables["training"] |= {"micro_batch_size": run.micro_batch_size, "accumulation": "auto"}
        for section, values in sections.items():
            tables[section] |= values
            words += [f"{section}.{key}={_word(value)}" for key, value in values.items()]
        return shlex.join(words), RunConfig.model_validate(tables)

    own: dict[str, Any] = {"stages": []} if config.activations.stages else {}
    choices = list(_RECOMPUTE)
    choices += [{"offload": "host"}, {"recompute": "full", "offload": "host"}] if on_cuda else []
    choices += [{"partition": True}] if parallel.tp > 1 and not parallel.sequence_parallel else []
    now = config.activations.model_dump()
    for values in choices:
        if any(_word(now[key]) != _word(value) for key, value in values.items()):
            yield changed(activations=values | own)
    for stage in range(zero.stage + 1, 4):
        yield changed(zero={"stage": stage})
    if zero.offload.optimizer == "none" and on_cuda:
        offload = zero.offload.model_dump() | {"optimizer": "cpu"}
        for stage in range(zero.stage, 4):
            _, moved = changed(zero={"stage": stage, "offload": offload})
            more = f" zero.stage={stage}" if stage > zero.stage else ""
            yield f"zero.offload.optimizer=cpu{more}", moved
    if run.micro_batch_size % 2 == 0:
        yield changed(training={"micro_batch_size": run.micro_batch_size // 2, "accumulation": 2 * count})
    for axis in ("tp", "pp"):
        yield changed(parallel={axis: 2 * getattr(parallel, axis)})
    method = {} if parallel.cp_method == "hybrid" else {"cp_method": "auto"}  # the present one may not divide the heads
    yield changed(parallel={"cp": 2 * parallel.cp, **method})


def _word(value: Any) -> str:
    """Format a value for the command line, without spaces."""
    return value if isinstance(value, str) else toml_value(value).replace(" ", "")


def explain(error: str, run: ResolvedRun, state: ParallelState, engine: Engine | None) -> str:
    """Return the message of a rank that runs out of memory: what it uses, what is missing, which settings would help.

    Args:
        error: the text of the allocator's error.
        engine: this rank's engine; None if the memory ran out while the engine was being built.
    """
    device, on_cuda = state.device, state.device.type == "cuda"
    cluster = some_cluster(run, state.local_world_size, on_cuda=on_cuda)
    wanted, free, held = wanted_bytes(error), free_memory_bytes(device), Counter[str]()
    (planned,) = memory_of(run, cluster, {state.at.pp})
    if engine is not None:
        held.update({kind: count for kind, count in engine.memory_bytes().items() if " on " not in kind})
    arena = held.pop("activation_arena", 0)  # not model state
    unallocated = max(sum(planned.state.get(kind, 0) for kind in STATE_KINDS) - held.total(), 0)
    nccl = error.partition("Last error:")[2].strip()
    if nccl:
        wanted = max(wanted, COMMUNICATOR_BYTES)
    if on_cuda:
        allocated = torch.cuda.memory_allocated(device)
        free += 0 if nccl else torch.cuda.memory_reserved(device) - allocated  # NCCL cannot use torch's cached blocks
        if engine is not None:
            held["activations and working memory"] = max(allocated - held.total(), 0)
    elif arena:
        held["activation_arena"] = arena
    more = f"; {size_text(unallocated)} of model state are not allocated yet" if unallocated else ""
    lines = [f"out of memory on {device} of rank {state.rank} ({socket.gethostname()}): wanted {size_text(wanted)}"]
    lines[0] += f", free {size_text(free)}{more}"
    kinds = [f"{kind.replace('_', ' ')} {size_text(count)}" for kind, count in held.most_common(_MOST_KINDS) if count]
    lines += [f"  NCCL allocates outside of torch: {' '.join(nccl.split())}"] if nccl else []
    lines += [f"  it holds: {', '.join(kinds)}"] if kinds else []
    missing = max(wanted - free + unallocated, 1)
    return "\n".join([*lines, f"  {advice_text(run, cluster, planned, missing / _USABLE)}"])


def wanted_bytes(error: str) -> int:
    """Return the bytes of the allocation that failed; 0 if the allocator's text does not contain them."""
    found = re.search(r"(?:tried to allocate|failed to cuda [a-z ]+) ([\d.]+) ?(\w+)", error, re.IGNORECASE)
    return int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
