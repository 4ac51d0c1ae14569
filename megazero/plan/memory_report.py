"""Memory, traffic and time of each ZeRO stage, measured beside the plan."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.comm.collectives import gather_objects
from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.engine.outline import elements_in, stages_of
from megazero.models.activation_config import PRESETS, ActivationsConfig, layer_policies
from megazero.parallel_state import ParallelState
from megazero.plan.measured_step import ActivationFigures, RankFigures, measure_activations, measure_step
from megazero.settings import Problem, counted, toml_value

SMALL = """
    model.hidden_size=128 model.num_layers=4 model.num_heads=4 model.ffn_hidden_size=384 model.vocab_size=512
    model.seq_len=32 zero.bucket_bytes=262144 zero.prefetch_bytes=0 training.micro_batch_size=1 training.accumulation=1
    launch.nproc_per_node=4
"""
_OPTION_OF_KEY = {
    "activations.recompute": "activations",
    "zero.stage": "stages",
    "zero.offload.optimizer": "offload",
    "precision.dtype": "precision",
}
_ON_DEVICE = ("offload", "offload_layers", "contiguous", "stages")
"""Keys of [activations] that stay at their default while policies are measured: what is kept, wherever it lies."""


class Combination(NamedTuple):
    """One engine to measure."""

    precision: str
    stage: int
    offload: str

    def __str__(self) -> str:
        return f"{self.precision}, ZeRO {self.stage}, offload {self.offload}"


@dataclass(frozen=True)
class Row:
    """One combination's figures, planned and measured, by rank; `axis` is the one over which it shards."""

    combination: Combination
    axis: str
    ranks: tuple[RankFigures, ...]

    @property
    def worst(self) -> RankFigures:
        """The rank with most model state."""
        return max(self.ranks, key=RankFigures.state_bytes)

    @property
    def sent(self) -> int:
        """Bytes that the rank with most parameters sent over the sharding axis."""
        return max(sum(rank.sent.get(self.axis, {}).values()) for rank in self.ranks)

    @property
    def planned_sent(self) -> int:
        """Bytes that a rank sends over the sharding axis, by the plan."""
        return max(rank.planned_sent for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Time of the iterations on the slowest rank."""
        return max(rank.seconds for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return the largest figures, planned and measured, and every rank's."""
        state, planned = self.worst.state_bytes(), self.worst.planned_bytes()
        return self.combination._asdict() | {
            "planned": {
                "state_bytes": planned,
                "sent_bytes": self.planned_sent,
                "gather_buffers": self.worst.gather_buffers,
                "most_buffer_bytes": self.worst.most_buffer_bytes(),
            },
            "measured": {
                "state_bytes": state,
                "buffer_bytes": self.worst.buffer_bytes(),
                "sent_bytes": self.sent,
                "seconds": self.seconds,
            },
            "state_over_plan": state / planned if planned else None,
            "sent_over_plan": self.sent / self.planned_sent if self.planned_sent else None,
            "sharded_over": self.axis,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


@dataclass(frozen=True)
class PolicyRow:
    """A policy for activations, and each rank's figures under it."""

    policy: str
    ranks: tuple[ActivationFigures, ...]

    @property
    def fullest(self) -> ActivationFigures:
        """The rank that keeps most."""
        return max(self.ranks, key=lambda rank: rank.planned)


@dataclass(frozen=True)
class Report:
    """Everything that was measured, and on what."""

    machine: str
    model: str
    parameters: int
    shape: str
    batch: str
    on_cpu: bool
    steps: int
    iterations: int
    rows: tuple[Row, ...]
    policies: tuple[PolicyRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        rows = {"rows": [row.as_json() for row in self.rows], "policies": [asdict(row) for row in self.policies]}
        return vars(self) | rows


def plan(
    varied: Mapping[str, Sequence[str]],
    overrides: Sequence[str] = (),
    *,
    config: Path | None = None,
    ranks: int | None = None,
    started: int | None = None,
    scratch: Path = Path(),
    policies: Sequence[str] = (),
) -> tuple[dict[Combination, ResolvedRun], dict[str, ResolvedRun]]:
    """Resolve the run of each combination, and one for each activation policy; all have the same shape.

    Args:
        varied: by option, which values of its key to combine.
        config: a run file, for the model and the shape; without one the model is `SMALL`.
        ranks, started: how many to start, None for `launch.nproc_per_node`; how many run already.
        scratch: directory for the files of "nvme" with `SMALL`; a run file names its own.
        policies: a preset of `activations.recompute` each, or regions with + between them.

    Raises: ConfigError with everything that is wrong with any of the runs; ValueError for any other argument.
    """
    if not all(varied.values()):
        raise ValueError(f"{' and '.join(f'--{option}' for option in varied)} must name one or more each")
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in _OPTION_OF_KEY:
            raise ValueError(f"{text}: the report varies {key}; use --{_OPTION_OF_KEY[key]}")
    if started is not None and ranks not in (None, started):
        raise ValueError(f"--ranks {ranks}, but {started} ranks were started; leave it out")
    if config is None:
        overrides = [*SMALL.split(), f"zero.offload.nvme_path='{scratch.resolve()}'", *overrides]
    if ranks is not None:
        overrides = [*overrides, f"launch.nproc_per_node={ranks}"]
    runs: dict[Combination, ResolvedRun] = {}
    by_policy: dict[str, ResolvedRun] = {}
    problems: dict[str, Problem] = {}

    def load(own: Sequence[str]) -> ResolvedRun | None:
        try:  # an empty file is a run: every key has a default
            return load_config(config or os.devnull, [*overrides, *own], started, varied=_OPTION_OF_KEY)
        except ConfigError as error:
            problems.update({str(problem): problem for problem in error.problems})
            return None

    for precision, stage, offload in product(varied["precision"], varied["stages"], varied["offload"]):
        own = [f"zero.stage={stage}", f"zero.offload.optimizer={offload}", f"precision.dtype={precision}"]
        if run := load(own):
            runs[Combination(precision, int(stage), offload)] = run
    first = [f"{key}={varied[option][0]}" for key, option in _OPTION_OF_KEY.items() if option in varied]
    first += [f"activations.{key}={toml_value(getattr(ActivationsConfig(), key))}" for key in _ON_DEVICE]
    for policy in policies:
        recompute = policy if policy in PRESETS else toml_value(policy.split("+"))
        if run := load([*first, f"activations.recompute={recompute}"]):
            by_policy[_row_name(policy, run)] = run
    if problems:
        raise ConfigError(list(problems.values()), str(config or "the report's model and the given keys"))
    return runs, by_policy


def _row_name(policy: str, run: ResolvedRun) -> str:
    """Return a policy's name as it is written, or as log lines have it if other keys act on it."""
    parallel, every = run.config.parallel, run.config.activations.model_copy(update={"layers": "all"})
    (own,) = layer_policies(every, [0], 0, cuts=parallel.tp > 1 and not parallel.sequence_parallel).values()
    return own.name if own.keep_attention or own.partition else policy


def not_measured(run: ResolvedRun) -> list[str]:
    """Return the [activations] keys of a run that its rows leave out."""
    own, default = run.config.activations, ActivationsConfig()
    return [f"activations.{key}" for key in _ON_DEVICE if getattr(own, key) != getattr(default, key)]


def measure(
    run: ResolvedRun,
    state: ParallelState,
    *,
    runs: dict[Combination, ResolvedRun],
    policies: dict[str, ResolvedRun],
    steps: int,
    iterations: int,
) -> Report:
    """Measure every planned run, one engine after another over the same groups.  Called on every rank.

    `run` is any of them, for the shape; `steps` and `iterations` as for `measure_step`.
    """
    rows = []
    # What torch allocates at its first use, and holds, would otherwise be counted in the first row.
    measure_step(run, state, steps=1, iterations=1)
    for number, (combination, one) in enumerate(runs.items(), 1):
        if state.rank == 0:
            print(f"{number}/{len(runs)} {combination}", file=sys.stderr, flush=True)
        ranks = gather_objects(measure_step(one, state, steps, iterations), state.world)
        rows.append(Row(combination, state.shard.name, tuple(ranks)))
    kept = []
    for policy, one in policies.items():
        if state.rank == 0:
            print(f"activations {policy}", file=sys.stderr, flush=True)
        kept.append(PolicyRow(policy, tuple(gather_objects(measure_activations(one, state), state.world))))
    model, grid, device = run.config.model, state.grid, state.device
    context = f"cp {grid.cp}, " if grid.cp > 1 else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return Report(
        machine=f"{name} ({platform.machine()}), torch {torch.__version__}",
        model=f"{model.family}, {model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size}",
        parameters=sum(map(elements_in, stages_of(run.config, tp=1))),
        shape=f"{counted(grid.world_size, 'rank')}: tp {grid.tp}, {context}pp {grid.pp}, dp {grid.dp}",
        batch=f"{run.accumulation} x {run.micro_batch_size} samples of {model.seq_len} random tokens on each dp rank",
        on_cpu=device.type == "cpu",
        steps=steps,
        iterations=iterations,
        rows=tuple(rows),
        policies=tuple(kept),
    )
