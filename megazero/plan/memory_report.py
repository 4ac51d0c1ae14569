"""Measures memory, traffic and time of each ZeRO stage, and compares them with the plan.

Tokens are random, since none of these depends on them.  CUDA's allocator reports the bytes in use.  The CPU's allocator
reports each allocation and release to torch's profiler, and their sum is the live bytes.  Only allocations of this thread
inside the context are counted, so enter it before you build the engine.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

from megazero.cli._common import ProgressBar
from megazero.comm.collectives import gather_objects
from megazero.config import ConfigError, ResolvedRun, load_config
from megazero.engine import Engine, initialize
from megazero.engine.outline import elements_in, stages_of
from megazero.models.activation_config import PRESETS, ActivationsConfig
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState
from megazero.plan.cluster import some_cluster
from megazero.plan.memory import STATE_KINDS, RankMemory, memory_of
from megazero.plan.speed_probe import LR, random_batches, step_seconds
from megazero.plan.text import table_lines
from megazero.plan.traffic import traffic_of
from megazero.plan.unit_trace import trace_units
from megazero.settings import Problem, counted, toml_value
from megazero.zero.loss_scaler import LossScaleError

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
_NOTES_WIDTH = 120
_NAMES = "dtype", "ZeRO", "offload"
#: Keys of [activations] that stay at their defaults while policies are compared: they choose where activations are stored.
_ON_DEVICE = ("offload", "offload_layers", "contiguous", "stages")


#: A description of the run (the values of a combination, or a policy) and the run.
Planned: TypeAlias = tuple[Mapping[str, str | int], ResolvedRun]


@dataclass(frozen=True)
class Row:
    """The planned and measured figures of one run, by rank.

    Args:
        about: the description in `Planned`.
        axis: the axis over which the run shards its state.
    """

    about: Mapping[str, str | int]
    axis: str
    ranks: tuple[RankFigures, ...]

    @property
    def worst(self) -> RankFigures:
        """The rank with the most model state."""
        return max(self.ranks, key=lambda rank: rank.measured_state)

    @property
    def fullest(self) -> RankFigures:
        """The rank that saves the most for its backward passes."""
        return max(self.ranks, key=lambda rank: rank.planned.kept)

    @property
    def sent(self) -> int:
        """Bytes that a rank sent over the sharding axis in a step."""
        return sum(self.worst.sent.get(self.axis, {}).values())

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON: the figures of the run and of every rank, planned and measured."""
        kinds, worst = ("state", "buffer", "sent"), self.worst
        planned = dict(zip(kinds, (*worst.planned_state, worst.planned_sent), strict=True))
        measured = dict(zip(kinds, (*worst.measured_state, self.sent), strict=True))
        return {
            **self.about,
            "planned": {f"{kind}_bytes": count for kind, count in planned.items()},
            "measured": {f"{kind}_bytes": count for kind, count in measured.items()} | {"seconds": worst.seconds},
            **{f"{kind}_over_plan": measured[kind] / planned[kind] for kind in planned if planned[kind]},
            "sharded_over": self.axis,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


@dataclass(frozen=True)
class Report:
    """All measurements of a memory report.

    Args:
        on: a description of the ranks and the machine.
        of: a description of the model and the batch.
    """

    on: str
    of: str
    on_cpu: bool
    iterations: int
    rows: tuple[Row, ...]
    policies: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
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
) -> tuple[list[Planned], list[Planned]]:
    """Resolve a run for each combination of values, and a run for each activation policy.  All have the same shape.

    Args:
        varied: the values to combine, by command-line option.
        overrides: settings as on the command line, `key.sub=value`.
        config: a run file, for the model and the shape; None for the model `SMALL`.
        ranks: how many ranks to start; None for `launch.nproc_per_node`.
        started: how many ranks a launcher has started already; None without a launcher.
        scratch: directory for the files of "nvme" with `SMALL`; a run file names its own.
        policies: presets of `activations.recompute`, or regions joined by +.

    Raises:
        ConfigError: a run is invalid; the error lists all problems of all runs.
        ValueError: another argument is invalid.
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
    runs, by_policy, problems = list[Planned](), list[Planned](), dict[str, Problem]()

    def load(found: list[Planned], own: Sequence[str], **about: str | int) -> None:
        try:  # an empty file is a run: every key has a default
            found.append((about, load_config(config or os.devnull, [*overrides, *own], started, varied=_OPTION_OF_KEY)))
        except ConfigError as error:
            problems.update({str(problem): problem for problem in error.problems})

    for precision, stage, offload in dict.fromkeys(product(varied["precision"], varied["stages"], varied["offload"])):
        own = [f"zero.stage={stage}", f"zero.offload.optimizer={offload}", f"precision.dtype={precision}"]
        load(runs, own, precision=precision, stage=int(stage) if stage.isdecimal() else stage, offload=offload)
    first = [f"{key}={varied[option][0]}" for key, option in _OPTION_OF_KEY.items() if option in varied]
    first += [f"activations.{key}={toml_value(getattr(ActivationsConfig(), key))}" for key in _ON_DEVICE]
    for policy in policies:
        recompute = policy if policy in PRESETS else toml_value(policy.split("+"))
        load(by_policy, [*first, f"activations.recompute={recompute}"], policy=policy)
    if problems:
        raise ConfigError(list(problems.values()), str(config or "the report's model and the given keys"))
    return runs, by_policy


def not_measured(run: ResolvedRun) -> list[str]:
    """Return the [activations] keys that the run sets and that the measurements of policies ignore."""
    own, default = run.config.activations, ActivationsConfig()
    return [f"activations.{key}" for key in _ON_DEVICE if getattr(own, key) != getattr(default, key)]


def measure(
    run: ResolvedRun, state: ParallelState, *, runs: Sequence[Planned], policies: Sequence[Planned], iterations: int
) -> Report:
    """Measure every planned run, one engine after another over the same process groups.  Every rank calls this.

    Args:
        run: any of these runs; all have the same shape.
        state: this rank's groups and device.
        runs: the runs to measure and to time.
        policies: the runs to measure for their activations.
        iterations: number of steps to time in each of `runs`.
    """

    def measured(about: Mapping[str, str | int], own: ResolvedRun, iterations: int) -> Row:
        if state.rank == 0:
            print(", ".join(f"{name} {value}" for name, value in about.items()), file=sys.stderr, flush=True)
        row = Row(about, state.shard.name, tuple(gather_objects(measure_step(own, state, iterations), state.world)))
        bar.add(0, 1)
        return row

    # Without this, the first row would include the memory that torch allocates once, at its first use.
    measure_step(run, state, 1)
    with ProgressBar("measuring", of_bytes=False, is_shown=state.rank == 0) as bar:
        bar.add(len(runs) + len(policies), 0)
        rows = tuple(measured(about, own, iterations) for about, own in runs)
        by_policy = tuple(measured(about, own, 0) for about, own in policies)
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
        rows=rows,
        policies=by_policy,
    )


# ---- tables


def draw_text(report: Report) -> str:
    """Format the report as text: memory, traffic and time, activations, notes."""
    notes = [fill(note, _NOTES_WIDTH) for note in _notes(report)]
    tables = [*_memory(report), *_traffic(report), *(_activations(report) if report.policies else ())]
    return "\n".join([report.on, report.of, "", *tables, *notes])


def _memory(report: Report) -> Iterator[str]:
    yield "Memory in MiB of the rank with most state: state and ZeRO's buffers after a step, and the peak of live tensors"
    rows = [[*_NAMES, "state", "off device", "planned", "ratio", "buffers", "planned", "peak", "planned"]]
    for row in report.rows:
        worst = row.worst
        (state, buffers), (planned, planned_buffers) = worst.measured_state, worst.planned_state
        away = sum(count for kind, count in worst.counted.items() if " on " in kind)
        sizes = map(_mib, (buffers, planned_buffers, worst.peak, worst.planned.peak))
        about = [*map(_mib, (state, away, planned)), _ratio(state, planned)]
        rows.append([*map(str, row.about.values()), *about, *sizes])
    yield from table_lines("", rows, range(3))
    yield ""


def _traffic(report: Report) -> Iterator[str]:
    yield "Sent by that rank in a step, and time"
    pairs = sorted({(axis, name) for row in report.rows for axis, sent in row.worst.sent.items() for name in sent})
    axes = (f"{axis} {name.replace('_', '-')}" for axis, name in pairs)
    rows = [[*_NAMES, *axes, f"planned over {report.rows[0].axis}", "ratio", f"{report.iterations} steps"]]
    for row in report.rows:
        worst = row.worst
        sent = [_size(worst.sent.get(axis, {}).get(name, 0)) for axis, name in pairs]
        about = [_size(worst.planned_sent), _ratio(row.sent, worst.planned_sent), f"{worst.seconds:.2f} s"]
        rows.append([*map(str, row.about.values()), *sent, *about])
    yield from table_lines("", rows, range(3))
    yield ""


def _activations(report: Report) -> Iterator[str]:
    """Yield a table by policy: planned bytes of a layer and of the fullest rank, and what a step allocates."""
    yield "Saved for the backward passes in MiB, on the fullest rank, nothing offloaded"
    rows = [["recompute", "a layer, planned", "rank at most, planned", "a step allocates", "computes more"]]
    for row in report.policies:
        rank = row.fullest
        sizes = map(_mib, (rank.layer, rank.planned.kept, rank.allocated))
        rows.append([str(row.about["policy"]), *sizes, f"{rank.planned.again:.1%}"])
    yield from table_lines("", rows, range(1))
    yield ""


def _notes(report: Report) -> Iterator[str]:
    rows = report.rows
    yield "planned: by a trace of the engine on tensors that hold nothing; ratio: measured / planned."
    yield "Buckets are padded; padding is held and sent too."
    if report.on_cpu:
        yield (
            "Live tensors: every allocation and release of torch's CPU allocator. On the CPU the host is the device: the"
            " live bytes hold what is offloaded to the host, and its time says nothing about a GPU."
        )
    if skipped := max(rank.skipped for row in rows for rank in row.ranks):
        yield f"Under fp16 up to {skipped} steps overflowed and were skipped."


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f}"


def _size(count: float) -> str:
    return f"{count / 2**10:,.1f} KiB" if count else "-"


def _ratio(measured: float, formula: float) -> str:
    return f"{measured / formula:.4f}" if formula else "-"


# ---- one engine


_MOST_STEPS = 32  # in which fp16 may overflow before the first that updates the weights
_START = "megazero: start of a step"


@dataclass(frozen=True)
class RankFigures:
    """The planned and measured figures of one rank's step.

    Args:
        planned: the plan of the rank's memory.
        planned_sent: planned bytes that the rank sends over the sharding axis in a step.
        layer: planned bytes that the largest layer saves for its backward, in one micro-batch.
        counted: bytes of model state and ZeRO's buffers after the step by kind, as the engine counts them.
        peak: most bytes of live tensors within the step.
        allocated: `peak` minus the live bytes before the step.
        sent: bytes sent in the step, by axis and collective.
        seconds: duration of all timed steps together.
        skipped: number of steps that overflowed before the measured step.
    """

    planned: RankMemory
    planned_sent: int
    layer: int
    counted: dict[str, int]
    peak: int
    allocated: int
    sent: dict[str, dict[str, int]]
    seconds: float
    skipped: int

    @property
    def measured_state(self) -> tuple[int, int]:
        """Measured bytes of model state and ZeRO's buffers after a step, on the device and off it."""
        return _state_and_buffers(self.counted)

    @property
    def planned_state(self) -> tuple[int, int]:
        """Planned bytes of model state and ZeRO's buffers after a step, on the device and off it."""
        return _state_and_buffers(self.planned.state)


def _state_and_buffers(kinds: Mapping[str, int]) -> tuple[int, int]:
    state = sum(count for kind, count in kinds.items() if kind.split(" on ")[0] in STATE_KINDS)
    return state, sum(kinds.values()) - state


def measure_step(run: ResolvedRun, state: ParallelState, iterations: int) -> RankFigures:
    """Build an engine, measure its second step, and time `iterations` more.  Every rank calls this.

    Raises: LossScaleError: every step overflowed under fp16.
    """
    cluster = some_cluster(run, state.local_world_size, on_cuda=state.device.type == "cuda")
    (planned,) = memory_of(run, cluster, {state.at.pp})
    traffic = traffic_of(run, cluster)[state.at.pp]
    units = trace_units(run, on_cuda=cluster.processors == 0, per_node=cluster.per_node)
    gc.collect()
    with live_memory(state.device) as live:
        engine = initialize(run.config, state)
        batches = random_batches(run, engine.batch_slice)
        for step in range(_MOST_STEPS):
            counted, updated = watched_step(engine, batches, live.start)
            if step and updated:
                break
        else:
            raise LossScaleError(
                f"{_MOST_STEPS} steps and each overflowed; set precision.initial_scale_power to a smaller number"
            )
    sent: dict[str, dict[str, int]] = defaultdict(dict)
    for (axis, operation), count in sorted(state.traffic.sent_bytes.items()):
        sent[axis] |= {operation: count} if count else {}
    figures = RankFigures(
        planned=planned,
        planned_sent=sum(sent.sent_bytes for (axis, _), sent in traffic.items() if axis == state.shard.name),
        layer=max((trace.forward.net_bytes for key, trace in units.items() if not isinstance(key, str)), default=0),
        counted=counted,
        peak=live.peak,
        allocated=live.peak - live.before,
        sent=dict(sent),
        seconds=_timed(engine, batches, state, iterations),
        skipped=engine.sharded_model.skipped_steps,
    )
    engine.sharded_model.close()
    del engine, batches
    gc.collect()  # hooks and modules refer to one another
    return figures


def _timed(engine: Engine, batches: list[MicroBatch], state: ParallelState, iterations: int) -> float:
    """Return the seconds of `iterations` steps.  One more step runs before them, to clean up after the measurement."""

    def synchronize() -> None:
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        gather_objects(None, state.world)

    seconds = [step_seconds(engine, batches, synchronize) for _ in range(iterations + 1)] if iterations else []
    return sum(seconds[1:])


def watched_step(engine: Engine, batches: list[MicroBatch], start: Callable[[], object]) -> tuple[dict[str, int], bool]:
    """Run a step; return the engine's count of bytes by kind after it, and whether it updated the weights.

    Args:
        start: called when the step begins.
    """
    gc.collect()
    model = engine.sharded_model
    model.reducer.begin_step(len(batches))  # frees the gradients that the step allocates anew
    engine.state.traffic.reset()
    start()
    engine.compute_gradients(batches)
    updated, counted = engine.update(LR), engine.memory_bytes()
    counted["gradients"] -= model.parameters.absent_gradient_bytes()
    return counted, updated


# ---- live memory


@dataclass
class LiveMemory:
    """The measurements of `live_memory`; they are complete when its context ends.

    Args:
        start: call it when a step begins.
        before: bytes of live tensors when the last step began.
        peak: most bytes of live tensors since then.
    """

    start: Callable[[], object]
    before: int = 0
    peak: int = 0


def live_memory(device: torch.device) -> AbstractContextManager[LiveMemory]:
    """Measure the bytes of live tensors on a device within a `with` block."""
    return _cuda_memory(device) if device.type == "cuda" else _profiled_memory()


@contextmanager
def _cuda_memory(device: torch.device) -> Iterator[LiveMemory]:
    already = torch.cuda.memory_allocated(device)

    def start() -> None:
        torch.cuda.reset_peak_memory_stats(device)
        memory.before = torch.cuda.memory_allocated(device) - already

    memory = LiveMemory(start)
    yield memory
    memory.peak = torch.cuda.max_memory_allocated(device) - already


@contextmanager
def _profiled_memory() -> Iterator[LiveMemory]:
    def start() -> None:
        with torch.profiler.record_function(_START):
            pass

    memory = LiveMemory(start)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # above every level of the profiler's own messages
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    activities = {torch.profiler.ProfilerActivity.CPU}
    _prepare_profiler(config, activities)
    # `torch.profiler` is this with all operators too, which cost more time than the step.
    _enable_profiler(config, activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]  # missing from torch's stub
    try:
        yield memory
    finally:
        events: list[Any] = _disable_profiler().events()
    now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        if event.name() == _START:
            memory.before = memory.peak = now
        memory.peak = max(memory.peak, now)
