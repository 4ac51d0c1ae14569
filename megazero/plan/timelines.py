"""What every pipeline rank does when, with the end of the step: spans without a gap, and what of the wire they wait for.

| idle | F0 | tp | F1 | tp | pp | B0 | ... | B7 | dp | idle | optimizer |
                                                 ^ what is left of the reductions; then all ranks meet for the norm
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from megazero.config import ResolvedRun
from megazero.models.registry import FAMILIES
from megazero.plan.pass_times import PassTime
from megazero.plan.zero_times import RankZero, ZeroTimes
from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.proof import RankAction, Timeline

_AXES = {"cp_ring": "cp", "shard": "dp", "replica": "dp"}


@dataclass(frozen=True)
class Span:
    """An interval of a rank's time, in seconds from the start of the step.

    Args:
        kind: "compute", "idle", "optimizer", or the axis whose communication is waited for: "tp", "cp", "dp", "pp".
        name: the action, or what is waited for.
    """

    start: float
    end: float
    kind: str
    name: str


@dataclass(frozen=True)
class StepTime:
    """Times of one step.

    Args:
        seconds: from its begin to its end.
        timelines: of each pipeline rank, in order.
        hidden: seconds of communication by axis that no rank waits for, of the rank with most of it.
        flops: the model's own, of the whole step on all ranks.
    """

    seconds: float
    timelines: tuple[tuple[Span, ...], ...]
    hidden: Mapping[str, float]
    flops: float

    @property
    def by_kind(self) -> list[dict[str, float]]:
        """Seconds of each pipeline rank by kind of span; they sum to the step."""
        found = [Counter[str]() for _ in self.timelines]
        for kinds, spans in zip(found, self.timelines, strict=True):
            for span in spans:
                kinds[span.kind] += span.end - span.start  # type: ignore[assignment]
        return [dict(kinds) for kinds in found]

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of communication by axis, of the rank that waits for it longest."""
        longest = reduce(or_, map(Counter, self.by_kind))  # the larger of both
        return {kind: seconds for kind, seconds in longest.items() if kind not in ("compute", "idle", "optimizer")}

    @property
    def idle(self) -> float:
        """Seconds of the mean rank without work."""
        return sum(kinds.get("idle", 0.0) for kinds in self.by_kind) / len(self.timelines)


def assembled(
    run: ResolvedRun,
    timeline: Timeline,
    actions: Mapping[RankAction, PassTime],
    starts: Mapping[RankAction, float],
    zero: ZeroTimes,
) -> StepTime:
    """Add the end of the step to the timelines."""
    schedule = timeline.schedule
    ends = [_reduced_at(schedule, timeline, zero.ranks[rank], rank, zero) for rank in range(schedule.pp)]
    last_wait = _last_wait(schedule, actions, zero)
    together = max(end for end, *_ in ends) + last_wait + zero.sum_seconds
    done = together + max(one.optimizer + one.gather_exposed for one in zero.ranks) * zero.stretch
    timelines, hidden = [], Counter[str]()
    for rank, one in enumerate(zero.ranks):
        end, gone = ends[rank]
        spans = list(_spans(rank, timeline, actions, starts))
        computed = spans[-1].end if spans else 0.0
        spans += _tail(computed, end, last_wait, together, done, one, zero.stretch)
        arriving = sum(span.end - span.start for span in spans if span.kind == "dp" and span.name == "weights")
        own = Counter[str]()
        for action in schedule.ranks[rank]:
            own.update(actions[rank, action].hidden)
        own["dp"] += gone + max(0.0, one.arriving - arriving)  # type: ignore[assignment]
        hidden |= own  # the larger of both
        timelines.append(tuple(spans))
    model = run.config.model
    flops = FAMILIES[model.family].flops_per_token(model) * run.global_batch_size * model.seq_len
    return StepTime(done, tuple(timelines), dict(hidden), flops)


def _last_wait(schedule: Schedule, actions: Mapping[RankAction, PassTime], zero: ZeroTimes) -> float:
    """Return how long a rank waits for the slowest of those that share its state."""
    computed = max(sum(actions[rank, one].compute for one in own) for rank, own in enumerate(schedule.ranks))
    meets = not zero.overlaps and any(one.each_reduces or one.each_gathers for one in zero.ranks)
    behind = computed / len(schedule.ranks[0]) if meets else computed
    return zero.sharing.wait_seconds(behind) * zero.stretch


def _reduced_at(
    schedule: Schedule, timeline: Timeline, one: RankZero, rank: int, zero: ZeroTimes
) -> tuple[float, float]:
    """Return when a rank's gradients are reduced, and the hidden seconds of it.

    The last backward of each chunk completes its buckets one after another; they are reduced in this order.
    """
    own = schedule.ranks[rank]
    computed = timeline.spans[rank, own[-1]][1]
    kind = ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
    free = total = 0.0
    for action in own:
        if action.kind is not kind or action.microbatch != schedule.microbatches - 1:
            continue
        seconds, count = one.reduction(action.chunk), one.buckets(action.chunk)
        start, end = timeline.spans[rank, action]
        free = reduced_behind(start, end, seconds, count, free)
        total += seconds
    if not zero.overlaps:  # whoever computes copies
        return computed + total * zero.stretch, 0.0
    left = max(0.0, free - computed)
    return computed + left, max(0.0, total - left)


def reduced_behind(start: float, end: float, seconds: float, buckets: int, free: float) -> float:
    """Return when a backward's reductions end; each of its equal buckets is complete after its part of the backward.

    Args:
        start, end: of the backward.
        seconds: of all its reductions.
        free: when the reductions before it end.
    """
    if not seconds:
        return free
    for index in range(buckets):
        complete = start + (end - start) * (index + 1) / buckets
        free = max(free, complete) + seconds / buckets
    return free


def _spans(
    rank: int, timeline: Timeline, actions: Mapping[RankAction, PassTime], starts: Mapping[RankAction, float]
) -> Iterable[Span]:
    """Yield the spans of a rank's actions: idle time before each, its computation, its waits."""
    clock = 0.0
    for action in timeline.schedule.ranks[rank]:
        start, end = timeline.spans[rank, action]
        if start > clock + 1e-12:
            yield from _idle(rank, action, clock, start, starts.get((rank, action), 0.0), timeline)
        one = actions[rank, action]
        stretch = (end - start) / one.seconds if one.seconds else 1.0
        clock = start + one.compute * stretch
        yield Span(start, clock, "compute", str(action))
        for axis, seconds in one.exposed.items():
            if seconds:
                yield Span(clock, clock + seconds * stretch, _AXES.get(axis, axis), str(action))
                clock += seconds * stretch
        clock = end


def _idle(rank: int, action: Action, clock: float, start: float, arrival: float, timeline: Timeline) -> Iterable[Span]:
    """Split a gap before an action: idle until its input is computed, then waiting for the message or the weights."""
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
    computed: float, reduced: float, last_wait: float, together: float, done: float, one: RankZero, stretch: float
) -> Sequence[Span]:
    """Return the spans at the end of a step: reductions, the slowest rank, optimizer, weights."""
    spans = []
    if reduced > computed:
        spans.append(Span(computed, reduced, "dp", "gradients"))
    if last_wait:
        spans.append(Span(reduced, reduced + last_wait, "dp", "the last rank"))
        reduced += last_wait
    if together > reduced:
        spans.append(Span(reduced, together, "idle", "norm, loss"))
    stepped = together + one.optimizer * stretch
    gathered = stepped + one.gather_exposed * stretch
    spans.append(Span(together, stepped, "optimizer", ""))
    if one.gather_exposed:
        spans.append(Span(stepped, gathered, "dp", "weights"))
    if done > gathered:
        spans.append(Span(gathered, done, "idle", ""))
    return spans
