"""Estimates the time of a step: the timeline of every pipeline rank, from the run's schedule and the times of its units.

    rank 0   gather |F0 F1 F2 . . B0 F3 B1 ...  B7| reduce  |sum|optimizer|
                     ^ compute + tp, cp waits      ^ the rest of the reduction that the last backward does not hide

    gathers of weights     stages 0 to 2: overlap with the first forwards; stage 3: with the unit before
    reductions             bucket by bucket, overlapping with the last backward of each chunk, or with every backward
    messages               overlap with other actions; the receiver waits for a message that has not arrived

A timeline has no gap, and its last span ends with the step:

    | idle | F0 | tp | F1 | tp | pp | B0 | ... | B7 | dp | idle | optimizer |
                                                     ^ the rest of the reductions; then all ranks meet for the norm

Where ranks share processors, a waiting rank leaves its processor to others; three ranks that compute on two processors take
turns, and each takes longer.

The slowest pipeline rank gives the time of the step, and all replicas are alike.  The first step of a run takes longer,
because it records and compiles.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import ceil
from operator import or_

from megazero.config import ResolvedRun
from megazero.engine.outline import schedule_of
from megazero.models.registry import FAMILIES
from megazero.plan.cluster import Cluster
from megazero.plan.collective_times import links_of
from megazero.plan.operator_times import PassTime, UnitTime, added, unit_times
from megazero.plan.unit_trace import StageUnit, UnitKey, message_bytes, units_of
from megazero.plan.zero_times import Cost, RankZero, ZeroTimes, zero_times_of
from megazero.schedules.action import Action, Op, Schedule
from megazero.schedules.proof import Costs, RankAction, Timeline, simulate

_AXES = {"cp_ring": "cp", "shard": "dp", "replica": "dp"}


@dataclass(frozen=True)
class ActionCosts(Costs):
    """The seconds of every action, and for some actions an earliest start."""

    actions: Mapping[RankAction, float] = field(default_factory=dict)
    starts: Mapping[RankAction, float] = field(default_factory=dict)

    def of(self, action: Action, schedule: Schedule, rank: int = 0) -> float:  # noqa: ARG002
        """Return the seconds of an action on a rank."""
        return self.actions[rank, action]

    def earliest(self, rank: int, action: Action) -> float:
        """Return the earliest start of an action; 0 if it has none."""
        return self.starts.get((rank, action), 0.0)


@dataclass(frozen=True)
class Span:
    """An interval of a rank's timeline, in seconds from the start of the step.

    Args:
        activity: "compute", "idle", "optimizer", or the axis whose communication the rank waits for: "tp", "cp", "dp", "pp".
        name: the action, or a description of the wait.
    """

    start: float
    end: float
    activity: str
    name: str


@dataclass(frozen=True)
class StepTime:
    """The times of one step.

    Args:
        seconds: duration of the step.
        timelines: spans of each pipeline rank, in order.
        hidden: seconds of communication that overlap with computation, by axis, on the rank that has the most.
        flops: FLOPs of the model in the step, on all ranks.
    """

    seconds: float
    timelines: tuple[tuple[Span, ...], ...]
    hidden: Mapping[str, float]
    flops: float

    @property
    def by_activity(self) -> list[dict[str, float]]:
        """Seconds by activity, for each pipeline rank; they sum to the duration of the step."""
        found = [Counter[str]() for _ in self.timelines]
        for seconds_of, spans in zip(found, self.timelines, strict=True):
            for span in spans:
                seconds_of[span.activity] += span.end - span.start  # type: ignore[assignment]
        return [dict(seconds_of) for seconds_of in found]

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds for which a rank waits for communication, by axis, on the rank that waits longest."""
        longest = reduce(or_, map(Counter, self.by_activity))  # the larger of both
        return {axis: seconds for axis, seconds in longest.items() if axis not in ("compute", "idle", "optimizer")}


def step_time_of(
    run: ResolvedRun,
    cluster: Cluster,
    units: Mapping[UnitKey, UnitTime] | None = None,
    hop_seconds: float | None = None,
    micro_batches: int | None = None,
) -> StepTime:
    """Simulate a step of a run that has passed its first steps.

    Args:
        units: times of the units; None to compute them for the cluster.
        hop_seconds: time of a message between pipeline ranks; None for that of the cluster.
        micro_batches: micro-batches of a step; None for those of the run.

    Raises: ValueError: the cluster and the run differ in the number of ranks.
    """
    if cluster.ranks != run.world_size:
        raise ValueError(f"the cluster has {cluster.ranks} ranks, the run {run.world_size}")
    schedule = schedule_of(run if micro_batches is None else replace(run, accumulation=micro_batches))
    links = links_of(run, cluster)
    units = units or unit_times(run, cluster, links)
    passes = {
        (rank, chunk, op): added(_unit_pass(unit, op, units[unit.key], cluster) for unit in own)
        for rank, chunks in enumerate(units_of(run.config, schedule))
        for chunk, own in enumerate(chunks)
        for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
    }
    zero = zero_times_of(run, cluster, links)
    actions = {
        (rank, action): _with_zero(passes[rank, action.chunk, action.op], zero, schedule, rank, action)
        for rank, every in enumerate(schedule.ranks)
        for action in every
    }
    hop = links["pp"].message_seconds(message_bytes(run)) if hop_seconds is None else hop_seconds
    starts = {
        (rank, action): zero.ranks[rank].arrival(action.chunk, actions[rank, action].seconds)
        for rank, action in actions
        if action.microbatch == 0 and action.op is Op.FORWARD
    }
    costs = ActionCosts(actions={at: passed.seconds for at, passed in actions.items()}, starts=starts, hop=hop)
    timeline = simulate(schedule, costs)
    if cluster.processors:  # pipeline ranks lie apart, so nodes have some of them each
        each = run.world_size // schedule.pp
        node_of = [rank * each // cluster.per_node for rank in range(schedule.pp)]
        timeline = taking_turns(timeline, costs, cluster.processors, node_of, min(each, cluster.per_node))
    return _assembled(run, timeline, actions, starts, zero)


def _unit_pass(unit: StageUnit, op: Op, time: UnitTime, cluster: Cluster) -> PassTime:
    """Return the time of a unit's pass; transfers of its activations to or from the host overlap with it."""
    if op is Op.WEIGHT:
        return time.weight
    passed = time.forward if op is Op.FORWARD else time.backward
    if not unit.offloads:
        return passed
    return passed.beside("offload", time.saved_bytes / cluster.device.host_bandwidth)


def _with_zero(passed: PassTime, zero: ZeroTimes, schedule: Schedule, rank: int, action: Action) -> PassTime:
    """Add the collectives of ZeRO that overlap with a pass."""
    wire = zero.ranks[rank].cost(action, schedule.microbatches - 1).wire
    if not zero.overlaps:  # the processor that computes also copies
        return added([passed, PassTime(0.0, {"dp": wire})])
    return passed.beside("dp", wire)


# ---- the end of the step


def _assembled(
    run: ResolvedRun,
    timeline: Timeline,
    actions: Mapping[RankAction, PassTime],
    starts: Mapping[RankAction, float],
    zero: ZeroTimes,
) -> StepTime:
    """Add the end of the step to the timelines."""
    schedule = timeline.schedule
    ends = [_reduced_at(schedule, timeline, zero.ranks[rank], rank, zero) for rank in range(schedule.pp)]
    together = max(end for end, _ in ends) + zero.sum_seconds
    done = together + max(rank_zero.optimizer + rank_zero.gather_exposed for rank_zero in zero.ranks) * zero.stretch
    timelines, hidden = [], Counter[str]()
    for rank, rank_zero in enumerate(zero.ranks):
        end, gone = ends[rank]
        spans = list(_spans(rank, timeline, actions, starts))
        computed = spans[-1].end if spans else 0.0
        spans += _tail(computed, end, together, done, rank_zero, zero.stretch)
        arriving = sum(span.end - span.start for span in spans if span.activity == "dp" and span.name == "weights")
        own = Counter[str]()
        for action in schedule.ranks[rank]:
            own.update(actions[rank, action].hidden)
        own["dp"] += gone + max(0.0, rank_zero.arriving - arriving)  # type: ignore[assignment]
        hidden |= own  # the larger of both
        timelines.append(tuple(spans))
    model = run.config.model
    flops = FAMILIES[model.family].flops_per_token(model) * run.global_batch_size * model.seq_len
    return StepTime(done, tuple(timelines), dict(hidden), flops)


def _reduced_at(
    schedule: Schedule, timeline: Timeline, rank_zero: RankZero, rank: int, zero: ZeroTimes
) -> tuple[float, float]:
    """Return when the reduction of a rank's gradients ends, and how many seconds of it are hidden.

    The last backward of each chunk completes its buckets one after another, and they are reduced in this order.
    """
    own = schedule.ranks[rank]
    computed = timeline.spans[rank, own[-1]][1]
    last = Op.WEIGHT if schedule.splits_backward else Op.BACKWARD
    free = total = 0.0
    for action in own:
        if action.op is not last or action.microbatch != schedule.microbatches - 1:
            continue
        seconds, count = rank_zero.reductions.get(action.chunk, Cost())
        start, end = timeline.spans[rank, action]
        free = reduced_behind(start, end, seconds, count, free)
        total += seconds
    if not zero.overlaps:  # the processor that computes also copies
        return computed + total * zero.stretch, 0.0
    left = max(0.0, free - computed)
    return computed + left, max(0.0, total - left)


def reduced_behind(start: float, end: float, seconds: float, buckets: int, free: float) -> float:
    """Return when the reductions of a backward end.  Buckets are assumed to be equal and to complete at equal intervals.

    Args:
        start, end: times at which the backward starts and ends.
        seconds: duration of all its reductions.
        buckets: number of its buckets.
        free: time at which the earlier reductions end.
    """
    if not seconds:
        return free
    each = (end - start) / buckets
    return max(free + seconds, start + each + seconds, end + seconds / buckets)  # waits before the first, or the last


def _spans(
    rank: int, timeline: Timeline, actions: Mapping[RankAction, PassTime], starts: Mapping[RankAction, float]
) -> Iterable[Span]:
    """Yield the spans of a rank's actions: the idle time before each, its computation, its waits."""
    clock = 0.0
    for action in timeline.schedule.ranks[rank]:
        start, end = timeline.spans[rank, action]
        if start > clock + 1e-12:
            yield from _idle(rank, action, clock, start, starts.get((rank, action), 0.0), timeline)
        passed = actions[rank, action]
        stretch = (end - start) / passed.seconds if passed.seconds else 1.0
        clock = start + passed.compute * stretch
        yield Span(start, clock, "compute", str(action))
        for axis, seconds in passed.exposed.items():
            if seconds:
                yield Span(clock, clock + seconds * stretch, _AXES.get(axis, axis), str(action))
                clock += seconds * stretch
        clock = end


def _idle(rank: int, action: Action, clock: float, start: float, arrival: float, timeline: Timeline) -> Iterable[Span]:
    """Split the gap before an action: idle until its input is computed, then a wait for the message or the weights."""
    source = timeline.schedule.source(rank, action)
    sent = clock if source is None else min(max(clock, timeline.spans[source][1]), start)
    if sent > clock:
        yield Span(clock, sent, "idle", "")
    if start <= sent:
        return
    if start == arrival:
        yield Span(sent, start, "dp", "weights")
    else:
        yield Span(sent, start, "pp" if source is not None and source[0] != rank else "idle", str(action))


def _tail(
    computed: float, reduced: float, together: float, done: float, rank_zero: RankZero, stretch: float
) -> Iterable[Span]:
    """Yield the spans at the end of a step: reductions, optimizer, weights."""
    stepped = together + rank_zero.optimizer * stretch
    clock = computed
    for end, activity, name in (
        (reduced, "dp", "gradients"),
        (together, "idle", "norm, loss"),
        (stepped, "optimizer", ""),
        (stepped + rank_zero.gather_exposed * stretch, "dp", "weights"),
        (done, "idle", ""),
    ):
        if end > clock:
            yield Span(clock, end, activity, name)
            clock = end


# ---- where ranks share processors


def taking_turns(timeline: Timeline, costs: Costs, processors: int, node_of: Sequence[int], copies: int) -> Timeline:
    """Stretch a timeline for nodes with fewer processors than ranks, whose ranks take turns.

    While the pipeline fills, fewer ranks of a node compute, so that they wait less.

    Args:
        timeline: the timeline in which every rank has its own processor.
        costs: seconds of every action.
        processors: processors of a node.
        node_of: node of each pipeline rank.
        copies: replicas of a pipeline rank on its node.
    """
    schedule, whole, stages = timeline.schedule, timeline.makespan, Counter[int](node_of)
    work = [sum(costs.of(action, schedule, rank) for action in own) for rank, own in enumerate(schedule.ranks)]
    of_node = {node: sum(own for own, at in zip(work, node_of, strict=True) if at == node) for node in stages}
    busy = max(work / stages[node] * ceil(stages[node] * copies / processors) for node, work in of_node.items())
    turns, every = ceil(copies / processors), processors * len(stages)
    filling = (whole - max(work)) * turns * (every - 1) / every
    ratio = max(whole * turns, busy + filling) / whole
    spans = {action: (start * ratio, end * ratio) for action, (start, end) in timeline.spans.items()}
    return Timeline(schedule, spans)
