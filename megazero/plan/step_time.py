"""What a step takes: every pipeline rank's timeline, from the run's own schedule and the times of its units.

    rank 0   gather |F0 F1 F2 . . B0 F3 B1 ...  B7| reduce  |sum|optimizer|
                     ^ compute + tp, cp waits      ^ what is left of the reduction behind the last backward

    gathers of weights     of stages 0 to 2 behind the first forwards, of stage 3 behind the unit before
    reductions             bucket by bucket behind the last backward of each chunk, or behind every one
    messages               behind other actions; the receiver waits for what has not arrived

Ranks that share processors leave theirs to others while they wait; of three that compute on two, two take twice as long.

The step is that of the slowest pipeline rank; all replicas are alike.  The first step, which records and compiles, is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from megazero.config import ResolvedRun, RunConfig
from megazero.engine.outline import elements_in, schedule_of, stages_of
from megazero.plan.cluster import Cluster
from megazero.plan.collective_times import GroupLink, links_of
from megazero.plan.pass_times import PassTime, UnitTime, added, unit_times
from megazero.plan.timelines import Span, StepTime, assembled, reduced_behind
from megazero.plan.unit_trace import EMBEDDING, HEAD, Unit, UnitKey, message_bytes, units_of
from megazero.plan.zero_times import ZeroTimes, zero_times_of
from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.proof import Costs, RankAction, Timeline, simulate

_SAME = 1 + 1e-12  # times of a long step that differ by their last digits

__all__ = ["Span", "StepTime", "message_seconds", "reduced_behind", "step_time_of", "unit_elements"]


@dataclass(frozen=True)
class ActionCosts(Costs):
    """A time for every action, and for some the earliest at which they can start."""

    actions: Mapping[RankAction, float] = field(default_factory=dict)
    starts: Mapping[RankAction, float] = field(default_factory=dict)

    def of(self, action: Action, schedule: Schedule, rank: int = 0) -> float:  # noqa: ARG002
        """The given time."""
        return self.actions[rank, action]

    def earliest(self, rank: int, action: Action) -> float:
        """The given time, else 0."""
        return self.starts.get((rank, action), 0.0)


def step_time_of(
    run: ResolvedRun,
    cluster: Cluster,
    units: Mapping[UnitKey, UnitTime] | None = None,
    hop_seconds: float | None = None,
) -> StepTime:
    """Simulate a step after the first ones.

    Args:
        units, hop_seconds: in place of the run's own times of units, and of a message between pipeline ranks.

    Raises: ValueError: the cluster has other ranks than the run.
    """
    if cluster.ranks != run.world_size:
        raise ValueError(f"the cluster has {cluster.ranks} ranks, the run {run.world_size}")
    schedule, links = schedule_of(run), links_of(run, cluster)
    units = units or unit_times(run, cluster, links)
    ranks = units_of(run.config, schedule)
    chunks = {(rank, chunk): own for rank, every in enumerate(ranks) for chunk, own in enumerate(every)}
    passes = {
        (*at, kind): added(_unit_pass(unit, kind, units[unit.key], cluster) for unit in own)
        for at, own in chunks.items()
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
    }
    embedding, layer, head = unit_elements(run.config, is_one_stage=len(schedule.placement) == 1)
    ends = {EMBEDDING: embedding, HEAD: head}
    elements = {at: tuple(ends.get(unit.name, layer) for unit in own) for at, own in chunks.items()}
    zero = zero_times_of(run, cluster, links, elements)
    actions = {
        (rank, action): _with_zero(passes[rank, action.chunk, action.kind], zero, schedule, rank, action)
        for rank, every in enumerate(schedule.ranks)
        for action in every
    }
    hop = hop_seconds
    if hop is None:
        mean_action = sum(one.compute for one in actions.values()) / len(actions)
        hop = message_seconds(run, links["pp"]) + links["pp"].wait_seconds(mean_action)
    starts = {
        (rank, action): zero.ranks[rank].arrival(action.chunk, actions[rank, action].seconds)
        for rank, action in actions
        if action.microbatch == 0 and action.kind is ActionKind.FORWARD
    }
    costs = ActionCosts(actions={at: one.seconds for at, one in actions.items()}, starts=starts, hop=hop)
    timeline = simulate_shared(schedule, costs, cluster, run) if cluster.processors else simulate(schedule, costs)
    return assembled(run, timeline, actions, starts, zero)


def unit_elements(config: RunConfig, *, is_one_stage: bool) -> tuple[int, int, int]:
    """Count the parameters of the embedding, a layer and the head on a tensor-parallel rank."""
    parallel = config.parallel.model_copy(update={"layout": "even", "pp": 1, "cp": 1})
    model = config.model.model_copy(update={"num_layers": 2})
    return _unit_elements(RunConfig(model=model, parallel=parallel, precision=config.precision), is_one_stage)


@lru_cache(maxsize=64)
def _unit_elements(config: RunConfig, is_one_stage: bool) -> tuple[int, int, int]:
    stages = stages_of(config, 1 if is_one_stage else 2)
    layer = elements_in(stages[0].blocks[0])
    if is_one_stage:
        assert stages[0].embedding is not None
        embedding = elements_in(stages[0].embedding)
        return embedding, layer, elements_in(stages[0]) - embedding - 2 * layer
    return elements_in(stages[0]) - layer, layer, elements_in(stages[1]) - layer


def _unit_pass(unit: Unit, kind: ActionKind, time: UnitTime, cluster: Cluster) -> PassTime:
    """Return the time of a unit's pass, with the transfer of its activations to or from the host beside it."""
    if kind is ActionKind.WEIGHT:
        return time.weight
    one = time.forward if kind is ActionKind.FORWARD else time.backward
    if not unit.offloads:
        return one
    moving = time.kept / cluster.device.host_bandwidth
    left = max(0.0, moving - one.seconds)
    return added([one, PassTime(0.0, {"offload": left}, {"offload": moving - left})])


def _with_zero(one: PassTime, zero: ZeroTimes, schedule: Schedule, rank: int, action: Action) -> PassTime:
    """Add to a pass the waits for its weights and for reductions whose buffers it needs."""
    of_rank = zero.ranks[rank]
    first = action.microbatch == 0
    last = action.microbatch == schedule.microbatches - 1
    wire, calls = of_rank.beside(action, is_first=first, is_last=last)
    if not wire:
        return one
    if not zero.overlaps:  # whoever computes copies
        left = wire + calls * zero.sharing.wait_seconds(one.compute / calls)
        return added([one, PassTime(0.0, {"dp": left})])
    ahead = of_rank.ahead(action, is_first=first)
    beside = max(0.0, wire - ahead)
    left = ahead + max(0.0, beside - one.seconds)
    return added([one, PassTime(0.0, {"dp": left}, {"dp": wire - left})])


def message_seconds(run: ResolvedRun, link: GroupLink) -> float:
    """Return the seconds of a message between neighbouring stages."""
    return link.message_seconds(message_bytes(run)) if run.config.parallel.pp > 1 else 0.0


# ---- where ranks share processors


def simulate_shared(schedule: Schedule, costs: Costs, cluster: Cluster, run: ResolvedRun) -> Timeline:
    """As `proof.simulate`, with fewer processors than ranks.  Pipeline ranks lie apart, so nodes have some of them each."""
    node_of, copies = _nodes(cluster, run)
    return played(schedule, costs, cluster.processors, node_of, copies)


def _nodes(cluster: Cluster, run: ResolvedRun) -> tuple[list[int], list[int]]:
    """Return each pipeline rank's node, and how many of its ranks are there."""
    pp = run.config.parallel.pp
    each = run.world_size // pp
    return [rank * each // cluster.per_node for rank in range(pp)], [min(each, cluster.per_node)] * pp


def played(schedule: Schedule, costs: Costs, processors: int, node_of: list[int], copies: list[int]) -> Timeline:
    """Simulate events in order of time; between them, actions advance at their node's speed.

    Args:
        node_of: of each pipeline rank.
        copies: ranks of it on its node.
    """
    at, left, now = [0] * schedule.pp, dict[int, float](), 0.0
    known: dict[RankAction, float] = {}
    begun: dict[int, float] = {}
    spans: dict[RankAction, tuple[float, float]] = {}
    while any(at[rank] < len(actions) for rank, actions in enumerate(schedule.ranks)):
        arrivals = []
        for rank, actions in enumerate(schedule.ranks):
            if rank in left or at[rank] == len(actions):
                continue
            ready = _ready_at(schedule, costs, rank, actions[at[rank]], known)
            if ready is not None and ready <= now * _SAME + 1e-15:
                begun[rank], left[rank] = now, costs.of(actions[at[rank]], schedule, rank)
            elif ready is not None:
                arrivals.append(ready)
        busy: dict[int, int] = {}
        for rank in left:
            busy[node_of[rank]] = busy.get(node_of[rank], 0) + copies[rank]
        speed = {rank: 1.0 / -(-busy[node_of[rank]] // processors) for rank in left}
        ends = {rank: now + left[rank] / speed[rank] for rank in left}
        following = min([*ends.values(), *arrivals])
        for rank in list(left):
            left[rank] -= (following - now) * speed[rank]
            if ends[rank] <= following * _SAME + 1e-12:
                action = schedule.ranks[rank][at[rank]]
                spans[rank, action] = (begun[rank], following)
                known[rank, action] = following
                del left[rank]
                at[rank] += 1
        now = following
    return Timeline(schedule, spans)


def _ready_at(
    schedule: Schedule, costs: Costs, rank: int, action: Action, known: dict[RankAction, float]
) -> float | None:
    """Return when an action's input has arrived; None while it is not computed."""
    source = schedule.source(rank, action)
    earliest = costs.earliest(rank, action)
    if source is None:
        return earliest
    if source not in known:
        return None
    return max(earliest, known[source] + (costs.hop if source[0] != rank else 0.0))
