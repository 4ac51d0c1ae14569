"""What each ZeRO stage keeps, sends and takes, measured beside the formulas of the papers.

    wish --plan--> runs that differ in precision, stage and offload      --measure--> report --as_json--> a file
                   on one set of ranks, one engine after another

Every step is on random tokens: neither memory nor traffic asks what the tokens say.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megazero.comm.collectives import gather_objects
from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.engine import Engine, initialize
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState
from megazero.schedules.action import Action, ActionKind
from megazero.settings import Problem
from megazero.tools.live_memory import START, live_memory
from megazero.tools.memory_formula import Keeping, sent_bytes, sent_terms, state_bytes, state_terms, state_text
from megazero.training.batches import read_batches
from megazero.training.launch import run_ranks
from megazero.zero.bucket import Bucket
from megazero.zero.loss_scaler import LossScaleError

CHOICES: dict[str, tuple[str, ...]] = {
    "stages": ("0", "1", "2", "3"),
    "precision": ("bf16", "fp16", "fp32"),
    "offload": ("none", "cpu", "nvme"),
}
POINTS = FORWARD, BACKWARD, STEP = ("forward", "backward", "step")
STATE_KINDS = ("parameters", "gradients", "optimizer")
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
_OVERFLOWS = 30  # that fp16 may have before its first step
_LR = 1e-4


@dataclass(frozen=True)
class ReportRequest:
    """What to measure.

    Args:
        stages, precisions, offloads: every combination is measured.
        steps: steps before and with the one that is measured.
        iterations: steps that are timed, after it.
        ranks: how many to start; None for `launch.nproc_per_node`.
        config: a run file, for the model and the shape; without one the model is `SMALL`.
        overrides: of its keys, `section.key=value`.
        scratch: directory for the files of "nvme", for `SMALL`; a run file names its own.

    Raises:
        ValueError: a number or a word that can not be meant.
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


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured.

    Args:
        elements: parameters of this rank's part of the model, without padding.
        distinct: those of them that count once where ranks of tp or pp hold copies.
        padding: elements beside them in the flat buffers.
        offloaded: parameters whose optimizer state is off the device.
        counted: bytes of model state and of ZeRO's working buffers by point and kind, as the engine counts them.
        live: bytes of all live tensors, by point.
        peak: most bytes of live tensors within the step.
        sent: bytes sent in the step, by axis and collective.
        seconds: of all iterations.
        skipped: steps before the measured one that overflowed.
    """

    elements: int
    distinct: int
    padding: int
    offloaded: int
    counted: dict[str, dict[str, int]]
    live: dict[str, int]
    peak: int
    sent: dict[str, dict[str, int]]
    seconds: float
    skipped: int

    def state_bytes(self) -> int:
        """Model state after a step, wherever it lies."""
        return sum(count for kind, count in self.counted[STEP].items() if kind.split(" on ")[0] in STATE_KINDS)

    def buffer_bytes(self) -> int:
        """ZeRO's working buffers after a step."""
        return sum(self.counted[STEP].values()) - self.state_bytes()

    def off_device_bytes(self) -> int:
        """The part of the model state that is in host memory or in a file."""
        return sum(count for kind, count in self.counted[STEP].items() if " on " in kind)


@dataclass(frozen=True)
class Row:
    """A combination, its formula, and what its ranks measured; `axis` is the one over which it shards."""

    combination: Combination
    keeping: Keeping
    axis: str
    ranks: tuple[RankFigures, ...]

    @property
    def worst(self) -> RankFigures:
        """The rank that keeps most model state."""
        return max(self.ranks, key=RankFigures.state_bytes)

    @property
    def formula_bytes(self) -> float:
        """Model state of that rank by the formula, wherever it lies."""
        worst, total = self.worst, 0.0
        for offloads, elements in ((True, worst.offloaded), (False, worst.elements - worst.offloaded)):
            terms = state_terms(self.keeping, offloads=offloads)
            total += sum(state_bytes(terms, elements, self.keeping.shards, on_device=place) for place in (True, False))
        return total

    @property
    def formula_text(self) -> str:
        """The formula, with what is off the device in brackets."""
        terms = state_terms(self.keeping, offloads=self.worst.offloaded > 0)
        return state_text(terms, self.keeping.shards)

    @property
    def sent(self) -> int:
        """Bytes that the rank with most parameters sent over the sharding axis."""
        return max((sum(rank.sent.get(self.axis, {}).values()) for rank in self.ranks), default=0)

    @property
    def formula_sent(self) -> float:
        """The same by the formula; at stage 3 a bound."""
        return max(sent_bytes(self.keeping, rank.elements) for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Time of the iterations, of the slowest rank."""
        return max(rank.seconds for rank in self.ranks)


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
        """Plain values: every rank's figures, and the formulas."""
        about = {key: value for key, value in vars(self).items() if key != "rows"}
        rows = [
            asdict(row.combination)
            | {
                "formula": {
                    "state": row.formula_text,
                    "state_bytes": row.formula_bytes,
                    "sent_bytes_per_parameter": sent_terms(row.keeping),
                    "sent_bytes": row.formula_sent,
                },
                "measured": {"state_bytes": row.worst.state_bytes(), "sent_bytes": row.sent, "seconds": row.seconds},
                "state_over_formula": ratio(row.worst.state_bytes(), row.formula_bytes),
                "sent_over_formula": ratio(row.sent, row.formula_sent),
                "sharded_over": row.axis,
                "ranks": [asdict(rank) for rank in row.ranks],
            }
            for row in self.rows
        ]
        return about | {"rows": rows}


def ratio(measured: float, formula: float) -> float | None:
    """measured / formula, or None where the formula says that there is nothing."""
    return measured / formula if formula else None


@dataclass(frozen=True)
class Plan:
    """The runs to measure; all have one shape."""

    combinations: tuple[Combination, ...]
    runs: tuple[ResolvedRun, ...]
    steps: int
    iterations: int


def plan(wish: ReportRequest, started: int | None = None) -> Plan:
    """The runs of all combinations, checked.

    Args:
        wish: what to measure.
        started: ranks that run already.

    Raises:
        ConfigError: with everything that is wrong with any of them.
        ValueError: another number of ranks runs already.
    """
    if started is not None and wish.ranks not in (None, started):
        raise ValueError(f"--ranks {wish.ranks}, but {started} ranks were started; leave it out")
    overrides = [*wish.overrides]
    if wish.config is None:
        overrides = [*SMALL, f"zero.offload.nvme_path='{wish.scratch.resolve()}'", *overrides]
    if wish.ranks is not None:
        overrides.append(f"launch.nproc_per_node={wish.ranks}")
    combinations, runs = [], []
    problems: dict[str, Problem] = {}
    for combination in _combinations(wish):
        combinations.append(combination)
        try:
            runs.append(_resolve(wish, overrides, combination, started))
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise ConfigError(list(problems.values()), str(wish.config or "the report's model and the given keys"))
    return Plan(tuple(combinations), tuple(runs), wish.steps, wish.iterations)


def _combinations(wish: ReportRequest) -> Iterator[Combination]:
    for precision in wish.precisions:
        for stage in wish.stages:
            for offload in wish.offloads:
                yield Combination(precision, int(stage), offload)


def _resolve(wish: ReportRequest, overrides: Iterable[str], one: Combination, started: int | None) -> ResolvedRun:
    varied = [
        f"zero.stage={one.stage}",
        f"zero.offload.optimizer={one.offload}",
        f"precision.dtype={one.precision}",
    ]
    # An empty file is a run: every key has a default.
    return load_config(wish.config or os.devnull, [*overrides, *varied], started)


def measure(planned: Plan) -> Report | None:
    """Measure every run on ranks that are started, or that torchrun has started.

    Returns: the report, or None when a rank failed (it has said why).
    """
    return run_ranks(planned.runs[0], partial(_measure_all, planned=planned))


def _measure_all(run: ResolvedRun, state: ParallelState, planned: Plan) -> Report:
    """The work of one rank: one engine after another over the same groups."""
    rows = []
    # What torch makes at its first use, and keeps, would look like the first row's.
    _measure(run, state, steps=1, iterations=1)
    for number, (combination, one) in enumerate(zip(planned.combinations, planned.runs, strict=True), 1):
        if state.rank == 0:
            print(f"{number}/{len(planned.runs)} {combination}", file=sys.stderr, flush=True)
        mine = _measure(one, state, planned.steps, planned.iterations)
        ranks = tuple(gather_objects(mine, state.world))
        rows.append(Row(combination, _keeping(one, state), state.shard.name, ranks))
    model = run.config.model
    parameters = sum(rank.distinct for rank in rows[0].ranks) // state.dp.size
    grid = state.grid
    return Report(
        machine=_machine(state.device),
        model=f"{model.family}, {model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size}",
        parameters=parameters,
        shape=f"{grid.world_size} ranks: tp {grid.tp}, pp {grid.pp}, dp {grid.dp}",
        batch=f"{run.accumulation} x {run.micro_batch_size} samples of {model.seq_len} random tokens on each dp rank",
        on_cpu=state.device.type == "cpu",
        steps=planned.steps,
        iterations=planned.iterations,
        rows=tuple(rows),
    )


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return f"{name} ({platform.machine()}), torch {torch.__version__}"


def _keeping(run: ResolvedRun, state: ParallelState) -> Keeping:
    zero, precision = run.config.zero, run.config.precision
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
    moments = {"adamw": 2, "adam": 2, "lion": 1, "adagrad": 1, "sgd": 1 if run.config.optimizer.momentum else 0}
    return Keeping(
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


class _RandomTokens:
    """Sample i is drawn from i alone."""

    def __init__(self, run: ResolvedRun) -> None:
        self._vocab_size, self._length = run.config.model.vocab_size, run.config.model.seq_len + 1

    def batch(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n, seq + 1]."""
        drawn = [np.random.default_rng(int(index)).integers(self._vocab_size, size=self._length) for index in indices]
        return np.stack(drawn)


def _measure(run: ResolvedRun, state: ParallelState, steps: int, iterations: int) -> RankFigures:
    gc.collect()
    live = live_memory(state.device)
    with live:
        engine = initialize(run.config, state)
        batches = read_batches(_RandomTokens(run), 0, run.global_batch_size, run.micro_batch_size, engine.share)
        for step in range(steps + _OVERFLOWS):
            counted, updated = _watched_step(engine, batches, live.mark)
            if step + 1 >= steps and updated:
                break
        else:
            raise LossScaleError(
                f"{steps + _OVERFLOWS} steps and each overflowed; set precision.initial_scale_power to a smaller number"
            )
    sent: dict[str, dict[str, int]] = {}
    for (axis, operation), count in sorted(state.traffic.sent_bytes.items()):
        if count:
            sent.setdefault(axis, {})[operation] = count
    seconds = _timed(engine, batches, iterations)
    buckets = engine.sharded_model.parameters.buckets
    figures = RankFigures(
        elements=sum(bucket.layout.numel for bucket in buckets),
        distinct=_distinct(buckets, state.at.tp),
        padding=sum(bucket.layout.padded_numel - bucket.layout.numel for bucket in buckets),
        offloaded=sum(bucket.layout.numel for bucket in buckets if bucket.master.place != "device"),
        counted=counted,
        live={point: live.live[point] for point in POINTS},
        peak=live.peak,
        sent=sent,
        seconds=seconds,
        skipped=engine.sharded_model.skipped_steps,
    )
    engine.sharded_model.close()
    del engine, buckets, batches
    gc.collect()  # hooks and modules refer to one another
    return figures


def _distinct(buckets: Sequence[Bucket], tp_rank: int) -> int:
    """Parameters without those that another rank of tp, or another stage, counts."""
    return sum(
        slot.stop - slot.start
        for bucket in buckets
        for slot in bucket.layout.slots
        if not bucket.is_second_copy and (slot.info.spec.split is not None or tp_rank == 0)
    )


def _watched_step(
    engine: Engine, batches: list[MicroBatch], mark: Callable[[str], None]
) -> tuple[dict[str, dict[str, int]], bool]:
    """One step, marked at its points; bytes by point and kind as the engine counts them, and whether weights changed."""
    counted: dict[str, dict[str, int]] = {}
    under_way: list[Action] = []

    def note(point: str) -> None:
        mark(point)
        now = engine.memory_bytes()
        now["gradients"] -= engine.sharded_model.parameters.absent_gradient_bytes()
        if sum(now.values()) >= sum(counted.get(point, {}).values()):
            counted[point] = now

    def watch(action: Action) -> None:  # before and after every action
        if under_way and under_way.pop() == action:
            if action.kind == ActionKind.FORWARD:
                note(FORWARD)
        else:
            under_way.append(action)

    engine.state.traffic.reset()
    mark(START)
    engine.watch = watch
    try:
        engine.compute_gradients(batches)
    finally:
        engine.watch = None
    note(BACKWARD)
    updated = engine.update(_LR)
    note(STEP)
    return counted, updated


def _timed(engine: Engine, batches: list[MicroBatch], iterations: int) -> float:
    state = engine.state

    def meet() -> None:
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        gather_objects(None, state.world)

    engine.train_step(batches, _LR)  # the first after measuring clears up behind it
    meet()
    start = time.perf_counter()
    for _ in range(iterations):
        engine.train_step(batches, _LR)
    meet()
    return time.perf_counter() - start
