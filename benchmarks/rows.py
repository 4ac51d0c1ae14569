"""The rows of the comparison: which of our shapes stands beside which peers, and what came out.

A kind is one way to split the work.  Its peers are what a user would pick for it; the fastest of them is the one to beat.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hosts_net import LOOPBACK, Network
from benchmarks.report import middle_of
from benchmarks.setting import MODELS, Setting
from benchmarks.worlds import Contender, Turn, imported, started
from megazero.config import ConfigError

OURS, SHIPPED, OVER_GLOO, FLOOR = "megazero", "megazero, its own products", "megazero over gloo", "floor"
WITH_OPTIONS = OURS + " with "
"""Before options of the configuration, separated by spaces: the name of a contender."""
CHECKED_STEPS, WARMUP_STEPS = 3, 2
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Kind:
    """One way to split the work.

    Args:
        title: for tables.
        peers: keys of `PEERS`.
        shape: of a world, what `Setting` takes.
        accumulation: micro-batches per step.
    """

    title: str
    peers: tuple[str, ...]
    shape: Callable[[int], dict[str, Any]]
    accumulation: int = 1


def _pipeline(schedule: str) -> Callable[[int], dict[str, Any]]:
    return lambda world: {"pp": world, "schedule": schedule}


KINDS = {
    "single": Kind("one device", ("plain",), lambda _: {}),
    "dp": Kind("data parallel", ("ddp",), lambda _: {"zero_stage": 0}),
    "ep": Kind("experts over ep", ("ddp",), lambda world: {"zero_stage": 0, "ep": world}),
    "zero1": Kind("ZeRO-1", ("ddp-zero-redundancy", "deepspeed-1"), lambda _: {"zero_stage": 1}),
    "zero2": Kind("ZeRO-2", ("fsdp2-no-reshard", "deepspeed-2"), lambda _: {"zero_stage": 2}),
    "zero3": Kind("ZeRO-3", ("fsdp2", "deepspeed-3"), lambda _: {"zero_stage": 3}),
    "tp": Kind("TP", ("dtensor-tp",), lambda world: {"tp": world, "sequence_parallel": False}),
    "tp-sp": Kind("TP with SP", ("dtensor-tp-sp",), lambda world: {"tp": world, "sequence_parallel": True}),
    "gpipe": Kind("GPipe", ("torch-gpipe",), _pipeline("gpipe"), 8),
    "1f1b": Kind("1F1B", ("torch-1f1b",), _pipeline("1f1b"), 8),
    "interleaved": Kind("interleaved 1F1B", ("torch-interleaved",), _pipeline("interleaved"), 8),
    "zb-h1": Kind("zero bubble", ("torch-interleaved-zero-bubble",), _pipeline("zb-h1"), 8),
    "zbv": Kind("zero bubble, V", ("torch-zbv",), _pipeline("zbv"), 8),
    "3d": Kind(
        "ZeRO-3 x TP x PP",
        ("fsdp2-tp-pp",),
        lambda world: {"tp": 2, "pp": 2, "zero_stage": 3, "sequence_parallel": True},
        8,
    ),
}

# Where each contender is made: module and name; imported on first use, since the peers are optional.
BUILDERS = {
    OURS: "contenders:megazero",
    SHIPPED: "contenders:megazero_as_shipped",
    OVER_GLOO: "contenders:megazero_over_gloo",
    FLOOR: "contenders:Floor",
    "plain": "contenders:Plain",
    "ddp": "peers.data_parallel:Replicated",
    "ddp-zero-redundancy": "peers.data_parallel:ZeroRedundancy",
    "fsdp2": "peers.data_parallel:fully_sharded",
    "fsdp2-no-reshard": "peers.data_parallel:gradients_sharded",
    "deepspeed-1": "peers.deepspeed:stage_1",
    "deepspeed-2": "peers.deepspeed:stage_2",
    "deepspeed-3": "peers.deepspeed:stage_3",
    "dtensor-tp": "peers.tensor_parallel:replicated_sequence",
    "dtensor-tp-sp": "peers.tensor_parallel:split_sequence",
    "torch-gpipe": "peers.pipelines:GPipe",
    "torch-1f1b": "peers.pipelines:OneForwardOneBackward",
    "torch-interleaved": "peers.pipelines:Interleaved",
    "torch-interleaved-zero-bubble": "peers.pipelines:InterleavedZeroBubble",
    "torch-zbv": "peers.pipelines:ZeroBubbleV",
    "fsdp2-tp-pp": "peers.combined:Combined",
}


Build = Callable[[Setting, int, Path], Contender]
"""(setting, rank, safetensors file of the initial weights) -> contender; the default process group is there."""


def builder(name: str) -> Build:
    """What makes a contender.  Raises: ContenderFailedError, when the peer is not installed."""
    if name.startswith(WITH_OPTIONS):
        return partial(builder(OURS), options=name.removeprefix(WITH_OPTIONS).split())
    build: Build = imported(BUILDERS[name])
    return build


def setting_of(kind: Kind, model: str, world: int, dtype: str = "fp32") -> Setting:
    """The work of a kind on so many ranks."""
    count = kind.accumulation
    samples = MODELS[model].micro_batch_size if count == 1 else 1
    return Setting(model, world, dtype=dtype, micro_batch_size=samples, accumulation=count, **kind.shape(world))


def possible(kind: Kind, model: str, world: int) -> bool:
    """Whether so many ranks can share the model: a layer for each pipeline stage, a head for each tp rank, whole grids."""
    try:
        setting_of(kind, model, world).config()
    except ConfigError:
        return False
    return True


@dataclass(frozen=True)
class Line:
    """One contender of a row.

    Args:
        ms: milliseconds of a step: median, least, most.
        ratio: megazero's step over this one's, median of the rounds, and its least and most; None for megazero.
        over_floor: this step over the floor's, median of the rounds; None for pipelines of more ranks than cores, whose
            bubbles cost nothing, since idle ranks leave their cores to others, and in bf16, which it does not compute in.
        tokens_per_second: all ranks together, at the median step.
        state_bytes, peak_bytes: see `Memory`; per rank.
        loopback_bytes, metered_bytes: see `Turn`.
        link_bytes, busiest_bytes: see `Turn`; None on one host.
        loss_difference: largest relative difference from megazero's losses.
        error: why there are no figures.
    """

    name: str
    ms: tuple[float, float, float] | None = None
    ratio: tuple[float, float, float] | None = None
    over_floor: float | None = None
    tokens_per_second: float | None = None
    state_bytes: int | None = None
    peak_bytes: int | None = None
    loopback_bytes: float | None = None
    metered_bytes: float | None = None
    loss_difference: float | None = None
    link_bytes: float | None = None
    busiest_bytes: float | None = None
    error: str | None = None


class LossesDifferError(RuntimeError):
    """Two contenders did not do the same work."""


def measure(
    setting: Setting, others: Sequence[str], *, rounds: int, steps: int, network: Network = LOOPBACK
) -> list[Line]:
    """megazero, others and the floor on the same work, in one interleaved run.

    Args:
        setting: the work.
        others: names of `BUILDERS`.
        rounds: in each every contender has one turn.
        steps: of a turn, after one that is not counted.
        network: where the ranks are.

    Raises:
        LossesDifferError: another's losses are not ours.
        ContenderFailedError: megazero or the floor failed; another that fails has a line that says so.
    """
    from benchmarks.contenders import floor_seconds, idle_share, write_weights

    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        write_weights(setting, weights)

        def build_of(name: str) -> Callable[[int], Contender]:
            build = builder(name)
            return lambda rank: build(setting, rank, weights)

        every = (OURS, FLOOR, *others)
        with started(every, build_of, setting, network, required=every[:2]) as (worlds, failed):
            checked = {name: world.turn(range(1, 1 + CHECKED_STEPS)) for name, world in worlds.items()}
            for name in list(worlds):
                if name not in (OURS, FLOOR):
                    _check_losses(name, checked[name], checked[OURS], LOSS_TOLERANCE[setting.dtype])
            for world in worlds.values():
                world.turn(range(10, 10 + WARMUP_STEPS))
            turns: dict[str, list[Turn]] = {name: [] for name in worlds}
            for number in range(rounds):
                names = list(worlds)
                first = number % len(names)
                for name in names[first:] + names[:first]:  # everyone comes after everyone, and first in some round
                    turns[name].append(worlds[name].turn(range(99 + number, 100 + number + steps), run_in=1))
            memory = {name: world.memory() for name, world in worlds.items()}
    idle = idle_share(setting)
    has_floor = setting.dtype == "fp32" and (setting.pp == 1 or setting.world <= (os.cpu_count() or 1))
    seconds = {
        name: [[floor_seconds(work, idle) for work in turn.works] if name == FLOOR else turn.seconds for turn in found]
        for name, found in turns.items()
    }
    medians = {name: [median(values) for values in found] for name, found in seconds.items()}
    lines = []
    for name in (OURS, *others, FLOOR):
        if name in failed:
            lines.append(Line(name, error=failed[name]))
            continue
        difference = None if name in (FLOOR, OURS) else _difference(checked[OURS], checked[name])
        ms = middle_of([value * 1e3 for values in seconds[name] for value in values])
        ratios = [ours / its for ours, its in zip(medians[OURS], medians[name], strict=True)]
        over = [its / floor for its, floor in zip(medians[name], medians[FLOOR], strict=True)]
        lines.append(
            Line(
                name,
                ms,
                None if name == OURS else middle_of(ratios),
                median(over) if has_floor else None,
                setting.tokens / ms[0] * 1e3,
                memory[name].state,
                memory[name].peak,
                median(turn.loopback_bytes for turn in turns[name]),
                turns[name][0].metered_bytes,
                difference,
                *_over_the_link(turns[name], network),
            )
        )
    return lines


def _over_the_link(turns: Sequence[Turn], network: Network) -> tuple[float | None, float | None]:
    if not network.namespaces:
        return None, None
    return median(turn.link_bytes for turn in turns), median(t.busiest_bytes for t in turns)


def _check_losses(name: str, its: Turn, ours: Turn, tolerance: float) -> None:
    if not _difference(ours, its) <= tolerance:  # also where one is not a number
        raise LossesDifferError(f"{name} has losses {its.losses}, megazero {ours.losses}: not the same work")


def _difference(a: Turn, b: Turn) -> float:
    """Largest relative difference of losses; not a number where a loss is none, or missing."""
    differences = [
        nan if x is None or y is None else abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True)
    ]
    return nan if any(map(isnan, differences)) else max(differences)
