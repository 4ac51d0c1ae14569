"""When the actions of a schedule run where ranks share processors.

    4 ranks, 2 processors      one rank idle: 3 compute, and the two that share a processor take twice as long

Ranks that wait leave their processor to others.  All ranks of one pipeline rank and node do the same at the same time.
"""

from __future__ import annotations

from megazero.config import ResolvedRun
from megazero.plan.cluster import Cluster
from megazero.schedules.action import Action, Schedule
from megazero.schedules.proof import Costs, RankAction, Timeline

_SAME = 1 + 1e-12  # times of a long step that differ by their last digits


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
