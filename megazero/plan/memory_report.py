"""Memory, traffic and time of each ZeRO stage, measured beside the plan."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.cli._common import Bar
from megazero.comm.collectives import gather_objects
from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.engine.outline import elements_in, stages_of
from megazero.models.activation_config import PRESETS, ActivationsConfig
from megazero.parallel_state import ParallelState
from megazero.plan.measured_step import RankFigures, measure_step
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
#: Keys of [activations] that stay at their default while policies are measured: what is kept, wherever it lies.
_ON_DEVICE = ("offload", "offload_layers", "contiguous", "stages")


class Combination(NamedTuple):
    """One engine to measure."""

    precision: str
    stage: int
    offload: str


@dataclass(frozen=True)
class Row:
    """The figures of one run, planned and measured, by rank.

    Args:
        about: what the run is, by name: a combination's values, or a policy.
        axis: the one over which it shards.
    """

    about: Mapping[str, str | int]
    axis: str
    ranks: tuple[RankFigures, ...]

    @property
    def worst(self) -> RankFigures:
        """The rank with most model state."""
        return max(self.ranks, key=lambda rank: rank.measured_state)

    @property
    def fullest(self) -> RankFigures:
        """The rank that saves most for its backward passes."""
        return max(self.ranks, key=lambda rank: rank.planned.kept)

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
        kinds = "state", "buffer", "sent"
        planned = dict(zip(kinds, (*self.worst.planned_state, self.planned_sent), strict=True))
        measured = dict(zip(kinds, (*self.worst.measured_state, self.sent), strict=True))
        return {
            **self.about,
            "planned": {f"{kind}_bytes": count for kind, count in planned.items()},
            "measured": {f"{kind}_bytes": count for kind, count in measured.items()} | {"seconds": self.seconds},
            **{f"{kind}_over_plan": measured[kind] / planned[kind] for kind in planned if planned[kind]},
            "sharded_over": self.axis,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


@dataclass(frozen=True)
class Report:
    """Everything that was measured, and on what.

    Args:
        on: the ranks and the machine; of: the model and the batch.
    """

    on: str
    of: str
    on_cpu: bool
    iterations: int
    rows: tuple[Row, ...]
    policies: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return vars(self) | {name: [row.as_json() for row in getattr(self, name)] for name in ("rows", "policies")}


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
            by_policy[policy] = run
    if problems:
        raise ConfigError(list(problems.values()), str(config or "the report's model and the given keys"))
    return runs, by_policy


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
    iterations: int,
) -> Report:
    """Measure every planned run, one engine after another over the same groups.  Called on every rank.

    `run` is any of them, for the shape; `iterations` as for `measure_step`.
    """

    def measured(name: str, about: Mapping[str, str | int], own: ResolvedRun, iterations: int) -> Row:
        if state.rank == 0:
            print(name, file=sys.stderr, flush=True)
        row = Row(about, state.shard.name, tuple(gather_objects(measure_step(own, state, iterations), state.world)))
        bar.add(0, 1)
        return row

    # What torch allocates at its first use, and holds, would otherwise be counted in the first row.
    measure_step(run, state, 1)
    rows = []
    with Bar("measuring", of_bytes=False, is_shown=state.rank == 0) as bar:
        bar.add(len(runs) + len(policies), 0)
        for number, (combination, own) in enumerate(runs.items(), 1):
            name = "{}/{} {}, ZeRO {}, offload {}".format(number, len(runs), *combination)
            rows.append(measured(name, combination._asdict(), own, iterations))
        by_policy = [measured(f"activations {policy}", {"policy": policy}, own, 0) for policy, own in policies.items()]
    model, grid, device = run.config.model, state.grid, state.device
    parameters = sum(map(elements_in, stages_of(run.config, tp=1)))
    context = f"cp {grid.cp}, " if grid.cp > 1 else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return Report(
        on=f"{counted(grid.world_size, 'rank')}: tp {grid.tp}, {context}pp {grid.pp}, dp {grid.dp} on {name} "
        f"({platform.machine()}), torch {torch.__version__}",
        of=f"{model.family}, {model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size}: "
        f"{parameters:,} parameters; {run.accumulation} x {run.micro_batch_size} samples of {model.seq_len} random tokens "
        "on each dp rank",
        on_cpu=device.type == "cpu",
        iterations=iterations,
        rows=tuple(rows),
        policies=tuple(by_policy),
    )
