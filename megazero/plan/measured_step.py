"""Memory, traffic and time of one engine's step on random tokens: neither memory nor traffic depends on them.

CUDA's allocator knows how much is allocated.  The CPU's reports every allocation and release to torch's profiler: their sum
is what is live.  Only what this thread allocates inside the context is counted: enter it before building.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

from megazero.comm.collectives import gather_objects
from megazero.config import ResolvedRun
from megazero.engine import Engine, initialize
from megazero.models.gpt import MicroBatch
from megazero.parallel_state import ParallelState
from megazero.plan.cluster import some_cluster
from megazero.plan.memory import STATE_KINDS, RankMemory, memory_of
from megazero.plan.speed_probe import LR, random_batches, step_seconds
from megazero.plan.traffic import traffic_of
from megazero.plan.unit_trace import trace_units
from megazero.zero.loss_scaler import LossScaleError

_MOST_STEPS = 32  # in which fp16 may overflow before the first that updates the weights
_START = "megazero: start of a step"


@dataclass(frozen=True)
class RankFigures:
    """One rank's step, planned and measured.

    Args:
        elements, padding: parameters of this rank's part of the model, and further elements of the flat buffers.
        planned: memory by the plan; planned_sent: bytes of a step over the sharding axis.
        layer: planned bytes that the largest layer saves for its backward, in one micro-batch.
        counted: bytes of model state and ZeRO's buffers after the step by kind, as the engine counts them.
        peak: most bytes of live tensors within the step.
        allocated: most bytes that the step added to those before it.
        sent: bytes sent in the step, by axis and collective.
        seconds: of all timed steps.
        skipped: steps before the measured one that overflowed.
    """

    elements: int
    padding: int
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
        """Model state and ZeRO's buffers after a step, on the device and off it."""
        return _state_and_buffers(self.counted)

    @property
    def planned_state(self) -> tuple[int, int]:
        """The same by the plan."""
        return _state_and_buffers(self.planned.state)


def _state_and_buffers(kinds: Mapping[str, int]) -> tuple[int, int]:
    state = sum(count for kind, count in kinds.items() if kind.split(" on ")[0] in STATE_KINDS)
    return state, sum(kinds.values()) - state


def measure_step(run: ResolvedRun, state: ParallelState, iterations: int) -> RankFigures:
    """Build an engine, measure its second step, and time `iterations` steps after it.  Called on every rank.

    Raises: LossScaleError where fp16 overflowed in every step.
    """
    cluster = some_cluster(run, state.local_world_size, on_cuda=state.device.type == "cuda")
    (planned,) = memory_of(run, cluster, {state.at.pp})
    traffic = traffic_of(run, cluster)[state.at.pp]
    units = trace_units(run, on_cuda=cluster.processors == 0, per_node=cluster.per_node)
    gc.collect()
    with live_memory(state.device) as live:
        engine = initialize(run.config, state)
        batches = random_batches(run, engine.share)
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
    buckets = engine.sharded_model.parameters.buckets
    figures = RankFigures(
        elements=sum(bucket.layout.numel for bucket in buckets),
        padding=sum(bucket.layout.padded_numel - bucket.layout.numel for bucket in buckets),
        planned=planned,
        planned_sent=sum(one.sent_bytes for (axis, _), one in traffic.items() if axis == state.shard.name),
        layer=max((trace.forward.kept for key, trace in units.items() if not isinstance(key, str)), default=0),
        counted=counted,
        peak=live.peak,
        allocated=live.peak - live.before,
        sent=dict(sent),
        seconds=_timed(engine, batches, state, iterations),
        skipped=engine.sharded_model.skipped_steps,
    )
    engine.sharded_model.close()
    del engine, buckets, batches
    gc.collect()  # hooks and modules refer to one another
    return figures


def _timed(engine: Engine, batches: list[MicroBatch], state: ParallelState, iterations: int) -> float:
    """Return the seconds of `iterations` steps; one before them cleans up after measuring."""

    def synchronize() -> None:
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        gather_objects(None, state.world)

    seconds = [step_seconds(engine, batches, synchronize) for _ in range(iterations + 1)] if iterations else []
    return sum(seconds[1:])


def watched_step(engine: Engine, batches: list[MicroBatch], start: Callable[[], object]) -> tuple[dict[str, int], bool]:
    """Run a step; return the bytes by kind that the engine counts after it, and whether it updated the weights.

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
    """What `live_memory` measures; complete after its context.

    Args:
        start: begins a step.
        before: bytes of live tensors when the last step began.
        peak: most bytes of live tensors since then.
    """

    start: Callable[[], object]
    before: int = 0
    peak: int = 0


def live_memory(device: torch.device) -> AbstractContextManager[LiveMemory]:
    """Measure the tensors on a device."""
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
