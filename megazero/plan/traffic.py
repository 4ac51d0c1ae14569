"""What a rank sends in a step, by axis and kind of operation, as the one place where collectives are called counts it.

    layers       each pass of each unit, as often as the schedule runs it        unit_trace
    ZeRO         gathers, reductions, the end of the step                        state_trace
    pipeline     what the first and last unit of a chunk take and give           here

Ring collectives send (n - 1)/n of the full buffer per pass (Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megazero.config import ResolvedRun
from megazero.engine.outline import schedule_of
from megazero.models.stages import StageLayout, cut_by_rank
from megazero.parallel_state.grid import Coordinate
from megazero.plan.cluster import Cluster
from megazero.plan.fake_tensors import Message
from megazero.plan.state_trace import Sent, trace_state
from megazero.plan.unit_trace import EMBEDDING, HEAD, UnitKey, UnitTrace, message_bytes, policies_by_layer, trace_units
from megazero.schedules.action import ActionKind, Schedule

Traffic = Mapping[tuple[str, str], Sent]


def traffic_of(run: ResolvedRun, cluster: Cluster) -> tuple[Traffic, ...]:
    """Return what the first rank of each stage sends, by (axis, operation)."""
    per_node, on_cuda = cluster.per_node, cluster.processors == 0
    schedule, traces = schedule_of(run), trace_units(run, on_cuda=on_cuda, per_node=per_node)
    found = []
    for stage, chunks in enumerate(cut_by_rank(run.config.model, run.config.parallel.layout, schedule.placement)):
        first = run.grid.rank(Coordinate(0, 0, 0, stage))
        total = Counter[tuple[str, str, int]]()
        for (axis, operation), sent in trace_state(run, first, per_node=per_node, on_cuda=on_cuda).traffic.items():
            total.update({(axis, operation, field): count for field, count in enumerate(sent)})
        _add_layers(total, run, chunks, stage, traces)
        _add_messages(total, run, schedule, stage, per_node)
        keys = dict.fromkeys((axis, operation) for axis, operation, _ in total)
        found.append({key: Sent(total[*key, 0], total[*key, 1], total[*key, 2]) for key in keys})
    return tuple(found)


def busiest_links(run: ResolvedRun, cluster: Cluster, stage: int, traffic: Traffic) -> Traffic:
    """Return a stage's traffic with the bytes that its busiest rank, not its first, sends to other nodes.

    In a ring each rank sends to the next one, so one rank of each node sends all that it sends to another node:

        node 0  [0 > 1 > 2 > 3] >  node 1  [4 > 5 > 6 > 7] > 0         ranks 3 and 7 send to other nodes, 0 does not
    """
    grid = run.grid
    size = grid.tp * grid.cp * grid.dp
    ranks = [rank for rank in range(grid.world_size) if grid.coordinate(rank).pp == stage]
    ends = [rank for at, rank in enumerate(ranks) if (rank + 1) % cluster.per_node == 0 or at + 1 == size]

    def busiest(axis: str, operation: str, sent: Sent) -> int:
        if sent.link_bytes or cluster.nodes == 1:  # the first is as busy as any: two levels, or messages of a pipeline
            return sent.link_bytes
        groups = [_group(run, rank, axis, operation) for rank in ends if axis in _AXES]
        shares = [(_ranks_apart(group, cluster.per_node), len(group) - 1) for group in groups]
        apart, others = max(shares, default=(0, 1))
        if not apart:
            return 0
        return sent.sent_bytes * apart // others if operation == "all_to_all" else sent.sent_bytes

    return {key: sent._replace(link_bytes=busiest(*key, sent)) for key, sent in traffic.items()}


_AXES = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",)} | dict.fromkeys(("dp_cp", "shard", "replica"), ("dp", "cp"))


def _group(run: ResolvedRun, rank: int, axis: str, operation: str) -> tuple[int, ...]:
    """Return the ranks with which `rank` carries out an operation; cp and dp_cp may be cut in two, as in `ParallelState`."""
    whole = run.grid.group_of(rank, *_AXES[axis])
    cuts = {"shard": run.config.zero.shard_group_size, "replica": run.config.zero.shard_group_size}
    size, at = (cuts | {"cp": run.config.parallel.ulysses}).get(axis, len(whole)), whole.index(rank)
    if axis == "replica" or (axis == "cp" and operation != "all_to_all"):
        return whole[at % size :: size]
    return whole[at - at % size :][:size]


def _ranks_apart(group: Sequence[int], per_node: int) -> int:
    """Return how many ranks of a group are on other nodes than one of its ranks, at most."""
    return len(group) - min(Counter(rank // per_node for rank in group).values())


def _add_layers(
    total: Counter[tuple[str, str, int]],
    run: ResolvedRun,
    chunks: Sequence[StageLayout],
    stage: int,
    traces: Mapping[UnitKey, UnitTrace],
) -> None:
    policies = policies_by_layer(run.config, chunks, stage)
    units: list[UnitKey] = list(policies.values())
    units += [EMBEDDING] * any(one.has_embedding for one in chunks) + [HEAD] * any(one.has_head for one in chunks)
    for unit, times in Counter(units).items():
        trace = traces[unit]
        for passed in filter(None, (trace.forward, trace.backward, trace.weight)):
            for event in passed.events:
                if isinstance(event, Message):
                    for field, count in enumerate((event.sent_bytes, event.link_bytes, 1)):
                        total[event.axis, event.operation, field] += count * times * run.accumulation


def _add_messages(
    total: Counter[tuple[str, str, int]], run: ResolvedRun, schedule: Schedule, stage: int, per_node: int
) -> None:
    """Count the messages that a stage sends, and the calls that receive one."""
    nbytes, ranks = message_bytes(run), run.grid.group_of(0, "pp")
    for action in schedule.ranks[stage]:
        target = schedule.target(stage, action)
        if target is not None and target[0] != stage:
            total["pp", "send_recv", 0] += nbytes
            total["pp", "send_recv", 1] += nbytes * (ranks[target[0]] // per_node != ranks[stage] // per_node)
            total["pp", "send_recv", 2] += 1
        source = None if action.kind is ActionKind.WEIGHT else schedule.source(stage, action)
        if source is not None and source[0] != stage:
            total["pp", "send_recv", 2] += 1
