"""Memory by formula where `memory.py` runs the engine: in milliseconds, for the thousands of shapes of a search.

    state       N of each pipeline rank x the papers' bytes per parameter        without the padding of buckets
    buffers     stage 3: two units and what is gathered ahead; two buckets of gradients on their way
    the rest    the same passes through the same schedule as `memory_of`

The first micro-batches fill a pipeline, and nothing is fuller later, so no more of them are walked through.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.config import ResolvedRun
from megazero.engine.outline import chunks_of, kind_of
from megazero.models.stages import StageLayout, cut_by_rank
from megazero.plan.cluster import Cluster
from megazero.plan.memory import RankMemory, memory_of
from megazero.plan.state_bytes import FP32_BYTES, StateFormula, formula_of
from megazero.plan.state_trace import StateTrace
from megazero.plan.step_time import unit_elements
from megazero.zero.bucket import DTYPES

_BUCKETS = 4  # of stage 2 at once
_BUCKET_BYTES = 64 * 2**20  # about what zero/bucket_sizes.py takes
_PLACES = {"cpu": "host", "nvme": "file"}


def quick_memory_of(run: ResolvedRun, cluster: Cluster) -> tuple[RankMemory, ...]:
    """As `memory_of`, to about a percent of what it says."""
    short = _shortened(run)
    config, kind = run.config, kind_of(run.config)
    placement = kind.placement(config.parallel.pp, chunks_of(config, kind))
    ends = unit_elements(config, is_one_stage=len(placement) == 1)
    formula = formula_of(run, run.shards)
    by_rank = cut_by_rank(config.model, config.parallel.layout, placement)
    states = [_state(run, cluster, formula, [_elements(layout, ends) for layout in own]) for own in by_rank]
    return memory_of(short, cluster, states)


def _shortened(run: ResolvedRun) -> ResolvedRun:
    """With as many micro-batches as fill the pipeline twice."""
    kind = kind_of(run.config)
    step, pp = kind.microbatch_multiple(run.config.parallel.pp), run.config.parallel.pp
    enough = -(-2 * pp // step) * step
    return (
        replace(run, accumulation=min(run.accumulation, enough)) if run.config.parallel.schedule_file is None else run
    )


def _elements(layout: StageLayout, ends: tuple[int, int, int]) -> list[int]:
    """Parameters of each unit of a chunk."""
    embedding, layer, head = ends
    return [embedding] * layout.has_embedding + [layer] * len(layout.layers) + [head] * layout.has_head


def with_decided_offload(run: ResolvedRun, cluster: Cluster) -> ResolvedRun:
    """The run with `zero.offload` of `auto` decided by the memory of the cluster's devices: the least offloading that fits.

    A run's start asks what is free then, on the host too; what a node of the cluster has there is not known here.
    """
    offload = run.config.zero.offload
    asked = [key for key in ("optimizer", "parameters") if getattr(offload, key) == "auto"]
    if not asked:
        return run

    def decided(places: dict[str, str]) -> ResolvedRun:
        zero = run.config.zero.model_copy(update={"offload": offload.model_copy(update=places)})
        words = ", ".join(f"{key} {place}" for key, place in places.items())
        note = f"zero.offload auto: {words}, by the memory of {cluster.device.name}; host memory is not looked at"
        return replace(run, config=run.config.model_copy(update={"zero": zero}), notices=(*run.notices, note))

    found = decided(dict.fromkeys(asked, "none"))
    if cluster.processors:  # a CPU's memory is the host's
        return found
    for count in range(len(asked)):
        if max(one.peak for one in quick_memory_of(found, cluster)) <= cluster.device.memory_bytes:
            break
        found = decided({key: "cpu" if at <= count else "none" for at, key in enumerate(asked)})
    return found


def _state(run: ResolvedRun, cluster: Cluster, formula: StateFormula, chunks: list[list[int]]) -> StateTrace:
    """Of one pipeline rank, by the parameters of its units."""
    zero, own = run.config.zero, sum(map(sum, chunks))
    offloads = zero.offload.optimizer in ("cpu", "nvme")
    away = round(own * zero.offload.ratio) if offloads else 0
    whole, state = formula.bytes_with(own, away)
    weights = formula.weight_bytes * own // formula.shards if zero.offload.parameters in ("cpu", "nvme") else 0
    state -= weights
    largest = max((unit for units in chunks for unit in units), default=0)  # a chunk may have none
    kinds = {"state": round(state)}
    if zero.stage == 3 and formula.shards > 1:
        itemsize = DTYPES[run.config.precision.dtype].itemsize
        gathered = own if zero.gather_policy == "step" else max(2 * largest, largest + zero.prefetch_bytes // itemsize)
        gathered = sum(chunks[0]) if zero.gather_policy == "chunk" else gathered
        kinds["gather buffers"] = round(min(gathered, own) * itemsize + 2 * largest * formula.gather_bytes)
    if zero.stage >= 2 and formula.shards > 1:  # two are reduced while others are added to
        buckets = 2 * largest if zero.stage == 3 else min(_BUCKETS * _BUCKET_BYTES // FP32_BYTES, own)
        kinds["gradient buffers"] = FP32_BYTES * buckets
        kinds["gradients"] = formula.accumulate_bytes * own if zero.reduce == "step" else 0
    counted = {f"optimizer on {_PLACES[zero.offload.optimizer]}": round(whole - state) - weights} if away else {}
    counted |= {f"parameters on {_PLACES[zero.offload.parameters]}": weights} if weights else {}
    if cluster.processors:  # a CPU's memory is the host's
        kinds |= {kind: count for kind, count in counted.items() if kind.endswith("host")}
    parallel = run.config.parallel
    groups = [size > 1 for size in (parallel.tp, run.dp * parallel.cp, parallel.pp)]
    communicators = sum(groups) + (sum(groups) > 1) + (parallel.cp > 1 < run.dp)  # the world's, and that of cp alone
    return StateTrace(kinds, counted, {}, 0, {}, own, communicators)
