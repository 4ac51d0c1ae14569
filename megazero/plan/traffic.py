"""Plans the bytes that a rank sends in a step, by axis and operation, as the collective calls of a run count them.

    layers       each pass of each unit, times how often the schedule runs it    unit_trace
    ZeRO         gathers, reductions, the end of the step                        state_trace
    pipeline     messages from the last unit of a chunk to the first of the next     here

Ring collectives send (n - 1)/n of the full buffer per pass (Rajbhandari et al. 2020, section 7).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from megazero.config import ResolvedRun
from megazero.engine.outline import schedule_of
from megazero.parallel_state.grid import Coordinate
from megazero.plan.cluster import Cluster
from megazero.plan.collective_times import link_of, links_of
from megazero.plan.fake_tensors import Message
from megazero.plan.state_trace import Sent, trace_state
from megazero.plan.unit_trace import message_bytes, trace_units, units_of
from megazero.schedules.action import Op, Schedule

Traffic = Mapping[tuple[str, str], Sent]


def traffic_of(run: ResolvedRun, cluster: Cluster) -> tuple[Traffic, ...]:
    """Return the traffic of the first rank of each stage in a step, by (axis, operation)."""
    per_node, on_cuda = cluster.per_node, cluster.processors == 0
    schedule, traces = schedule_of(run), trace_units(run, on_cuda=on_cuda, per_node=per_node)
    found = []
    for stage, chunks in enumerate(units_of(run.config, schedule)):
        first = run.grid.rank(Coordinate(0, 0, 0, stage))
        total = defaultdict(Sent, trace_state(run, first, per_node=per_node, on_cuda=on_cuda).traffic)
        for key, units in Counter(unit.key for own in chunks for unit in own).items():
            trace = traces[key]
            for passed in filter(None, (trace.forward, trace.backward, trace.weight)):
                for event in passed.events:
                    if isinstance(event, Message):
                        place, sent = (event.axis, event.operation), Sent(event.sent_bytes, event.link_bytes, 1)
                        total[place] = total[place].plus(sent, units * run.accumulation)
        messages = _messages(run, schedule, stage, per_node)
        found.append(total | ({("pp", "send_recv"): messages} if messages.calls else {}))
    return tuple(found)


def busiest_links(run: ResolvedRun, cluster: Cluster, traffic: Traffic) -> Traffic:
    """Return a stage's traffic with the link bytes of its busiest rank instead of its first rank.

    In a ring, each rank sends to the next one, so one rank of each node sends all its bytes to another node:

        node 0  [0 > 1 > 2 > 3] >  node 1  [4 > 5 > 6 > 7] > 0         ranks 3 and 7 send to other nodes, 0 does not
    """
    links = links_of(run, cluster)

    def busiest(axis: str, operation: str, sent: Sent) -> int:
        # In two-level collectives and in messages of the pipeline, the first rank is as busy as any.
        if sent.link_bytes or axis == "pp" or axis not in links:
            return sent.link_bytes
        if not (link := link_of(links, axis, operation)).crosses:
            return 0
        outside = link.ranks - (link.fewest or link.per_node)  # on other nodes than one of its ranks
        return sent.sent_bytes * outside // (link.ranks - 1) if operation == "all_to_all" else sent.sent_bytes

    return {key: sent._replace(link_bytes=busiest(*key, sent)) for key, sent in traffic.items()}


def _messages(run: ResolvedRun, schedule: Schedule, stage: int, per_node: int) -> Sent:
    """Sum up the messages that a stage sends in a step, and count the calls that receive one."""
    nbytes, ranks, total = message_bytes(run), run.grid.group_of(0, "pp"), Sent()
    for action in schedule.ranks[stage]:
        target = schedule.target(stage, action)
        if target is not None and target[0] != stage:
            crosses = ranks[target[0]] // per_node != ranks[stage] // per_node
            total = total.plus(Sent(nbytes, nbytes * crosses, 1))
        source = None if action.op is Op.WEIGHT else schedule.source(stage, action)
        if source is not None and source[0] != stage:
            total = total.plus(Sent(calls=1))
    return total
