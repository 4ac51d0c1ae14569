"""Memory, traffic and time of each ZeRO stage, measured beside the formulas of the papers.

request --plan--> runs that differ in precision, stage and offload     --measure--> report --as_json--> a file
                  on one set of ranks, one engine after another
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megazero.comm.collectives import gather_objects
from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.parallel_state import ParallelState
from megazero.settings import Problem
from megazero.tools.measured_step import RankFigures, measure_step
from megazero.tools.memory_formula import StateFormula, state_bytes, state_text

CHOICES: dict[str, tuple[str, ...]] = {
    "stages": ("0", "1", "2", "3"),
    "precision": ("bf16", "fp16", "fp32"),
    "offload": ("none", "cpu", "nvme"),
}
SMALL = (
    "model.hidden_size=128",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.ffn_hidden_size=384",
    "model.vocab_size=512",
    "model.seq_len=32",
    "zero.bucket_bytes=262144",
    "training.micro_batch_size=1",
    "training.accumulation=1",
    "launch.nproc_per_node=4",
)
_VARIED = {"zero.stage": "--stages", "zero.offload.optimizer": "--offload", "precision.dtype": "--precision"}


@dataclass(frozen=True)
class ReportRequest:
    """What to measure.

    Args:
        stages, precisions, offloads: every combination is measured.
        steps: the number of the step that is measured.
        iterations: steps that are timed after it.
        ranks: how many to start; None for `launch.nproc_per_node`.
        config: a run file, for the model and the shape; without one the model is `SMALL`.
        overrides: of its keys, `section.key=value`.
        scratch: directory for the files of "nvme" with `SMALL`; a run file names its own.

    Raises:
        ValueError: an unknown word or a number that is too small.
    """

    stages: Sequence[str] = CHOICES["stages"]
    precisions: Sequence[str] = ("bf16", "fp16")
    offloads: Sequence[str] = ("none", "cpu")
    steps: int = 2
    iterations: int = 20
    ranks: int | None = None
    config: Path | None = None
    overrides: Sequence[str] = ()
    scratch: Path = Path()

    def __post_init__(self) -> None:
        for option, words in (("stages", self.stages), ("precision", self.precisions), ("offload", self.offloads)):
            _check_words(option, words)
        for option, count in (("steps", self.steps), ("iterations", self.iterations), ("ranks", self.ranks)):
            if count is not None and count < 1:
                raise ValueError(f"--{option} {count} must be at least 1")
        for text in self.overrides:
            key = text.partition("=")[0].strip()
            if key in _VARIED:
                raise ValueError(f"{text}: the report varies {key}; use {_VARIED[key]}")


def _check_words(option: str, words: Sequence[str]) -> None:
    choices = CHOICES[option]
    for word in words:
        if word not in choices:
            close = get_close_matches(word, choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"--{option} {','.join(words)}: {word!r} is none of {', '.join(choices)}{hint}")
    if not words or len(set(words)) != len(words):
        raise ValueError(f"--{option} {','.join(words)!r} must name one or more of {', '.join(choices)}, each once")


@dataclass(frozen=True)
class Combination:
    """One engine to measure."""

    precision: str
    stage: int
    offload: str

    def __str__(self) -> str:
        return f"{self.precision}, ZeRO {self.stage}, offload {self.offload}"

    def overrides(self) -> list[str]:
        """Its keys of the configuration."""
        return [
            f"zero.stage={self.stage}",
            f"zero.offload.optimizer={self.offload}",
            f"precision.dtype={self.precision}",
        ]


@dataclass(frozen=True)
class Row:
    """A combination, its formula, and what its ranks measured; `axis` is the one over which it shards."""

    combination: Combination
    formula: StateFormula
    axis: str
    ranks: tuple[RankFigures, ...]

    @property
    def worst(self) -> RankFigures:
        """The rank with most model state."""
        return max(self.ranks, key=RankFigures.state_bytes)

    @property
    def formula_bytes(self) -> float:
        """Model state of that rank by the formula, on the device and off it."""
        worst, total = self.worst, 0.0
        for offloads, elements in ((True, worst.offloaded), (False, worst.elements - worst.offloaded)):
            terms = self.formula.state_terms(offloads=offloads)
            total += sum(state_bytes(terms, elements, self.formula.shards, on_device=on) for on in (True, False))
        return total

    @property
    def formula_text(self) -> str:
        """The formula, with what is off the device in brackets."""
        terms = self.formula.state_terms(offloads=self.worst.offloaded > 0)
        return state_text(terms, self.formula.shards)

    @property
    def sent(self) -> int:
        """Bytes that the rank with most parameters sent over the sharding axis."""
        return max((sum(rank.sent.get(self.axis, {}).values()) for rank in self.ranks), default=0)

    @property
    def formula_sent(self) -> float:
        """The same by the formula; at stage 3 a bound."""
        return max(self.formula.sent_bytes(rank.elements) for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Time of the iterations on the slowest rank."""
        return max(rank.seconds for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Plain values: the formula, the largest figures, and every rank's."""
        return asdict(self.combination) | {
            "formula": {
                "state": self.formula_text,
                "state_bytes": self.formula_bytes,
                "sent_bytes_per_parameter": self.formula.sent_terms(),
                "sent_bytes": self.formula_sent,
            },
            "measured": {"state_bytes": self.worst.state_bytes(), "sent_bytes": self.sent, "seconds": self.seconds},
            "state_over_formula": ratio(self.worst.state_bytes(), self.formula_bytes),
            "sent_over_formula": ratio(self.sent, self.formula_sent),
            "sharded_over": self.axis,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


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

    def as_json(self) -> dict[str, Any]:
        """Plain values, every rank's figures among them."""
        return vars(self) | {"rows": [row.as_json() for row in self.rows]}


def ratio(measured: float, formula: float) -> float | None:
    """measured / formula, or None if the formula gives 0."""
    return measured / formula if formula else None


@dataclass(frozen=True)
class Plan:
    """The run of each combination; all have one shape."""

    runs: tuple[tuple[Combination, ResolvedRun], ...]
    steps: int
    iterations: int


def plan(request: ReportRequest, started: int | None = None) -> Plan:
    """The runs of all combinations, checked.

    Args:
        request: what to measure.
        started: ranks that run already.

    Raises:
        ConfigError: with everything that is wrong with any of them.
        ValueError: another number of ranks runs already.
    """
    if started is not None and request.ranks not in (None, started):
        raise ValueError(f"--ranks {request.ranks}, but {started} ranks were started; leave it out")
    overrides = [*request.overrides]
    if request.config is None:
        overrides = [*SMALL, f"zero.offload.nvme_path='{request.scratch.resolve()}'", *overrides]
    if request.ranks is not None:
        overrides.append(f"launch.nproc_per_node={request.ranks}")
    runs = []
    problems: dict[str, Problem] = {}
    for precision, stage, offload in product(request.precisions, request.stages, request.offloads):
        one = Combination(precision, int(stage), offload)
        try:  # an empty file is a run: every key has a default
            runs.append((one, load_config(request.config or os.devnull, [*overrides, *one.overrides()], started)))
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise ConfigError(list(problems.values()), str(request.config or "the report's model and the given keys"))
    return Plan(tuple(runs), request.steps, request.iterations)


def measure(run: ResolvedRun, state: ParallelState, planned: Plan) -> Report:
    """Measure every planned run on this rank, one engine after another over the same groups.  Called on every rank.

    Args:
        run: any of the planned runs, for the shape.
        state: this rank.
        planned: what to measure.
    """
    rows = []
    # What torch allocates at its first use, and holds, would otherwise be counted in the first row.
    measure_step(run, state, steps=1, iterations=1)
    for number, (combination, one) in enumerate(planned.runs, 1):
        if state.rank == 0:
            print(f"{number}/{len(planned.runs)} {combination}", file=sys.stderr, flush=True)
        mine = measure_step(one, state, planned.steps, planned.iterations)
        rows.append(Row(combination, _formula(one, state), state.shard.name, tuple(gather_objects(mine, state.world))))
    model, grid, device = run.config.model, state.grid, state.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return Report(
        machine=f"{name} ({platform.machine()}), torch {torch.__version__}",
        model=f"{model.family}, {model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size}",
        parameters=sum(rank.distinct for rank in rows[0].ranks) // state.dp.size,
        shape=f"{grid.world_size} ranks: tp {grid.tp}, pp {grid.pp}, dp {grid.dp}",
        batch=f"{run.accumulation} x {run.micro_batch_size} samples of {model.seq_len} random tokens on each dp rank",
        on_cpu=device.type == "cpu",
        steps=planned.steps,
        iterations=planned.iterations,
        rows=tuple(rows),
    )


def _formula(run: ResolvedRun, state: ParallelState) -> StateFormula:
    zero, precision = run.config.zero, run.config.precision
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
    moments = {"adamw": 2, "adam": 2, "lion": 1, "adagrad": 1, "sgd": 1 if run.config.optimizer.momentum else 0}
    return StateFormula(
        stage=zero.stage,
        shards=state.shard.size,
        weight_bytes=sizes[precision.dtype],
        accumulate_bytes=sizes[precision.accumulate_dtype],
        reduce_bytes=sizes[precision.reduce_dtype],
        moments=moments[run.config.optimizer.name],
        micro_batches=run.accumulation,
        reduces_each=zero.reduce == "micro_batch",
        gathers_each=zero.gather_policy != "step",
    )
