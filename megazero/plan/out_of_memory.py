"""What to say where memory has run out: what was wanted, what is free, what holds most, and which settings would fit.

wanted      by the allocation that failed, as the allocator says it
held        model state and ZeRO's buffers, as the engine counts them; on CUDA, all else is activations and working memory
missing     what was wanted, and the model state that is not there yet, beyond what is free
would fit   a setting that frees more than is missing, by the formulas of `memory_report`
"""

from __future__ import annotations

import re
import shlex
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.config import ConfigError, ResolvedRun, RunConfig
from megazero.config.load import resolve
from megazero.engine import Engine
from megazero.engine.outline import schedule_of
from megazero.models.registry import FAMILIES
from megazero.parallel_state import ParallelState
from megazero.plan.activations import RankActivations, activations_of_ranks, size_text
from megazero.plan.state_bytes import FP32_BYTES, formula_of
from megazero.plan.step_time import unit_elements
from megazero.settings import toml_value
from megazero.zero.bucket import DTYPES
from megazero.zero.bucket_sizes import DEFAULT_BYTES
from megazero.zero.offload import free_memory_bytes

POLICIES: tuple[dict[str, Any], ...] = (
    {"recompute": "selective"},
    {"recompute": ["norms", "activation", "residual"]},
    {"recompute": ["mlp"]},
    {"recompute": ["norms", "mlp"]},
    {"recompute": ["norms", "residual", "mlp"]},
    {"recompute": "full", "keep_attention": True},
    {"recompute": "full"},
)
"""What to recompute, the least first."""
MOVES: tuple[dict[str, Any], ...] = (
    {"offload": "host"},
    {"partition": True},
    {"recompute": "full", "layers": "all", "keep_attention": False, "offload": "host"},
)
"""Where what is left may lie instead, whatever is recomputed; at last both."""
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST_KINDS = 5
_USABLE = 0.9  # of what a setting frees; an allocator loses some


@dataclass(frozen=True)
class Remedy:
    """Settings as overrides in a shell, the bytes of the device that they free, and the share that a step computes more."""

    settings: str
    frees: float
    again: float | None = None

    def __str__(self) -> str:
        more = "" if self.again is None else f", computes {abs(self.again):.1%} {'less' if self.again < 0 else 'more'}"
        return f"{self.settings} (frees about {size_text(self.frees)}{more})"


def explain(error: str, run: ResolvedRun, state: ParallelState, engine: Engine | None) -> str:
    """The message for a rank whose allocator says `error`; without an engine, while that was being built."""
    device, working, arena = state.device, 0, 0
    wanted, free, held, elements = wanted_bytes(error), free_memory_bytes(device), Counter[str](), elements_of(run)
    if engine is not None:
        held.update({kind: count for kind, count in engine.memory_bytes().items() if " on " not in kind})
        arena = held.pop("activation_arena", 0)  # it is no state
        elements = sum(bucket.layout.numel for bucket in engine.sharded_model.parameters.buckets)
    to_come = max(state_bytes(run, elements) - held.total(), 0)
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        free += torch.cuda.memory_reserved(device) - allocated
        if engine is not None:
            held["activations and working memory"] = working = max(allocated - held.total(), 0)
    elif arena:
        held["activation_arena"] = arena
    lines = [f"out of memory on {device} of rank {state.rank} ({socket.gethostname()}): wanted {size_text(wanted)}"]
    lines[0] += f", free {size_text(free)}" + (
        f"; {size_text(to_come)} of model state are still to come" if to_come else ""
    )
    shown = ", ".join(
        f"{kind.replace('_', ' ')} {size_text(count)}" for kind, count in held.most_common(_MOST_KINDS) if count
    )
    lines += [f"  it holds: {shown}"] if shown else []
    rank = None if engine is None else state.at.pp
    advice = advise(run, elements, max(wanted - free + to_come, 1), working=working, rank=rank, device=device)
    return "\n".join([*lines, f"  {advice}"])


def advise(
    run: ResolvedRun, elements: int, missing: float, *, working: int, rank: int | None, device: torch.device
) -> str:
    """Which settings free so many bytes of a device.

    Args:
        elements, working: as in `remedies`.
        rank: of the pipeline; None where activations are not what is too much.
    """
    found = list(remedies(run, elements, working, device))
    if rank is not None:
        found += sorted(dict.fromkeys(recomputing(run, rank, device)), key=lambda remedy: remedy.again or 0)
        found += cutting_samples(run, rank, device)
    enough = [remedy for remedy in found if _USABLE * remedy.frees > missing]
    if enough:
        return "would fit, by the formulas: " + ", or ".join(map(str, enough))
    return (
        f"no one setting frees the {size_text(missing)} that are missing"
        + (
            f", counting on {_USABLE:.0%} of what it frees; the most is {max(found, key=lambda one: one.frees)}"
            if found
            else ""
        )
        + "; more ranks for parallel.tp, parallel.cp, parallel.pp or dp make each rank's part smaller"
    )


def remedies(run: ResolvedRun, elements: int, working: int, device: torch.device) -> Iterator[Remedy]:
    """What a run of this shape may change, the cheapest first; each is valid for this run.

    Args:
        elements: parameters of this rank's part of the model.
        working: bytes of activations and working memory.
        device: of the rank; a CPU's memory is the host's, so nothing is offloaded there.
    """
    now, zero, batch = _held(run, elements), run.config.zero, run.micro_batch_size
    for stage in range(zero.stage + 1, 4):
        if changed := _changed(run, zero={"stage": stage}):
            yield Remedy(f"zero.stage={stage}", now - _held(changed, elements))
    if batch > 1 and working:
        smaller = {"micro_batch_size": batch // 2, "accumulation": run.accumulation * 2}
        if batch % 2 == 0 and _changed(run, training=smaller):
            yield Remedy(" ".join(f"training.{key}={value}" for key, value in smaller.items()), working / 2)
    if zero.offload.optimizer == "none" and device.type != "cpu":
        for stage in range(zero.stage, 4):
            if changed := _changed(run, zero={"stage": stage, "offload": {"optimizer": "cpu"}}):
                settings = "zero.offload.optimizer=cpu" + (f" zero.stage={stage}" if stage > zero.stage else "")
                yield Remedy(settings, now - _held(changed, elements))


def cutting_samples(run: ResolvedRun, rank: int, device: torch.device) -> Iterator[Remedy]:
    """Twice the ranks for each sample, where a micro-batch is one sample and so cannot be smaller."""
    parallel, now = run.config.parallel, _kept(run, rank, device)
    if now is None or run.micro_batch_size > 1:
        return
    values: dict[str, Any] = {"cp": 2 * parallel.cp}
    settings, accumulation = f"parallel.cp={2 * parallel.cp}", 2 * run.accumulation
    if parallel.cp_method != "hybrid":  # the method of before may not fit the heads; of a hybrid one the ring is longer
        settings += " parallel.cp_method=auto"
        values |= {"cp_method": "auto", "cp_ulysses": None}
    changed = _changed(run, parallel=values, training={"accumulation": accumulation})
    if changed and (then := _kept(changed, rank, device)) and now.device > then.device:
        yield Remedy(f"{settings} training.accumulation={accumulation}", now.device - then.device)


def _kept(run: ResolvedRun, rank: int, device: torch.device) -> RankActivations | None:
    """What a pipeline rank keeps for its backward passes; None where layers are a script's own."""
    try:
        kept = activations_of_ranks(run, schedule_of(run), on_cuda=device.type == "cuda")[rank]
    except TypeError:
        return None
    return kept if device.type != "cpu" else replace(kept, device=kept.device + kept.host)


def recomputing(run: ResolvedRun, rank: int, device: torch.device) -> Iterator[Remedy]:
    """The policies for activations under which a pipeline rank keeps less on its device."""
    now = _kept(run, rank, device)
    if now is None:
        return
    moves = (one for one in MOVES if device.type != "cpu" or "offload" not in one)
    for policy in (*({"layers": "all", "keep_attention": False, **one} for one in POLICIES), *moves):
        values = _activations(run, rank, policy)
        changed = _changed(run, activations=values)
        then = None if changed is None else _kept(changed, rank, device)
        if then and now.device > then.device:
            words = {key: value if isinstance(value, str) else toml_value(value) for key, value in values.items()}
            written = shlex.join(f"activations.{key}={word.replace(' ', '')}" for key, word in words.items())
            yield Remedy(written, now.device - then.device, then.again - now.again)


def _activations(run: ResolvedRun, rank: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """The keys of [activations] to change so that a pipeline rank has these; a table of its own in `stages` hides others."""
    own = run.config.activations
    now = own.of_stage(rank).model_dump(include=set(wanted))
    change = {key: value for key, value in wanted.items() if toml_value(now[key]) != toml_value(value)}
    if not any(one.stage == rank for one in own.stages):
        return change
    tables = [one.model_dump(exclude_none=True) for one in own.stages]
    of_all = {"partition": change.pop("partition")} if "partition" in change else {}
    return of_all | ({"stages": [one | change if one["stage"] == rank else one for one in tables]} if change else {})


def _changed(run: ResolvedRun, **sections: dict[str, Any]) -> ResolvedRun | None:
    """The run with other values of some keys; None where it cannot run so."""
    tables = run.config.model_dump()
    for section, values in sections.items():
        for key, value in values.items():
            tables[section][key] = {**tables[section][key], **value} if isinstance(value, dict) else value
    try:
        return resolve(RunConfig.model_validate(tables), run.world_size)
    except (ConfigError, ValueError):
        return None


def state_bytes(run: ResolvedRun, elements: int) -> float:
    """Model state of so many parameters on the device."""
    offloads = run.config.zero.offload.optimizer != "none"
    return formula_of(run, run.shards).device_bytes(elements, offloads=offloads)


def _held(run: ResolvedRun, elements: int) -> float:
    """Model state and ZeRO's buffers at most: two buckets of gradients; at stage 3 two units of gradients and of weights."""
    zero, unit, state = run.config.zero, 0, state_bytes(run, elements)
    if zero.stage < 2 or run.shards == 1:
        return state
    if zero.stage == 3:
        unit = min(2 * max(unit_elements(run.config, is_one_stage=run.config.parallel.pp == 1)), elements)
    buckets = 2 * (DEFAULT_BYTES if zero.bucket_bytes == "auto" else zero.bucket_bytes)
    gradients = FP32_BYTES * min(max(buckets // FP32_BYTES, unit), elements)
    return state + gradients + DTYPES[run.config.precision.dtype].itemsize * unit


def wanted_bytes(error: str) -> int:
    """Bytes of the allocation that failed; 0 where the allocator does not say."""
    found = re.search(r"tried to allocate ([\d.]+) ?(\w+)", error, re.IGNORECASE)
    return int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0


def elements_of(run: ResolvedRun) -> int:
    """About the parameters of a rank's part of the model, its matrices, before it is built."""
    model, parallel = run.config.model, run.config.parallel
    matrices = FAMILIES[model.family].layer_weights(model) * model.num_layers + 2 * model.vocab_size * model.hidden_size
    return int(matrices / (parallel.tp * parallel.pp))
