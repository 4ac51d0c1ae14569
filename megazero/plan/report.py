"""The plan of a run as one value, and as plain values for `--json`.

run file, cluster -> memory, time, traffic  -> use of the devices -> checkpoints, failures -> days, dollars
                     of each pipeline rank                                                    Plan
"""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from math import inf

from megazero.config import ResolvedRun
from megazero.engine.outline import elements_in, stages_of
from megazero.plan import cost as costs
from megazero.plan.cluster import Cluster
from megazero.plan.correction import shape_of
from megazero.plan.memory import RankMemory, memory_of, with_decided_offload
from megazero.plan.search import Candidate, Need, SearchResult
from megazero.plan.state_trace import Sent
from megazero.plan.step_time import StepTime, step_time_of
from megazero.plan.traffic import busiest_links, traffic_of
from megazero.plan.zero_times import moments_of
from megazero.zero.sharding import DTYPES


@dataclass(frozen=True)
class Assumptions:
    """The inputs of a plan that no run file contains.

    Args:
        tokens: tokens of the whole run; None for those of `training.steps`.
        dollars_per_hour: price of one device; None without a price.
        failures_per_device_hour: failures of one device in an hour.
        restart_seconds: time from a failure until the run trains again.
        storage_bandwidth: bytes per second that each node writes while all nodes write.
        step_ratio: measured / planned seconds of a step, from another run.
    """

    tokens: float | None = None
    dollars_per_hour: float | None = None
    failures_per_device_hour: float = costs.FAILURES_PER_DEVICE_HOUR
    restart_seconds: float = costs.RESTART_SECONDS
    storage_bandwidth: float = costs.STORAGE_BANDWIDTH_PER_NODE
    step_ratio: float = 1.0


@dataclass(frozen=True)
class Plan:
    """The plan of a run on a cluster.

    Args:
        parameters: number of parameters of the model.
        memory: the memory of each pipeline rank.
        traffic: the traffic of each pipeline rank.
        cost: time and price of the whole run, with the time that failures cost.
    """

    run: ResolvedRun
    cluster: Cluster
    parameters: int
    memory: tuple[RankMemory, ...]
    time: StepTime
    traffic: tuple[Mapping[tuple[str, str], Sent], ...]
    throughput: costs.Throughput
    checkpoint: costs.Checkpoint
    failures: costs.Failures | None
    cost: costs.RunCost

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank that needs the most memory."""
        return max(self.memory, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits its device."""
        return self.fullest.peak <= self.cluster.device.memory_bytes

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds by activity on the pipeline rank that idles least; they sum to the duration of the step."""
        return min(self.time.by_activity, key=lambda seconds_of: seconds_of.get("idle", 0.0))


def plan_of(run: ResolvedRun, cluster: Cluster, assumptions: Assumptions) -> Plan:
    """Plan a run on a cluster.

    Raises: ValueError: the cluster and the run differ in the number of ranks, or the schedule cannot run.
    """
    run = with_decided_offload(run, cluster)
    time = scaled(step_time_of(run, cluster), assumptions.step_ratio)
    device, precision = cluster.device, run.config.precision
    (parameters,) = map(elements_in, stages_of(run.config, tp=1))
    tokens = run.global_batch_size * run.config.model.seq_len
    peak = device.peak_flops.get(precision.dtype)
    use = costs.throughput(time.seconds, tokens, time.flops, cluster.ranks, peak)
    saved = costs.checkpoint_cost(
        parameters,
        weight_bytes=DTYPES[run.config.precision.dtype].itemsize,
        moments=moments_of(run.config),
        ranks=cluster.ranks,
        nodes=cluster.nodes,
        host_bandwidth=device.host_bandwidth,
        storage_bandwidth=assumptions.storage_bandwidth,
        asynchronous=run.config.checkpoint.asynchronous,
    )
    rate = assumptions.failures_per_device_hour
    lost = costs.failures(rate, cluster.ranks, saved, assumptions.restart_seconds, time.seconds)
    every = assumptions.tokens or run.config.training.steps * tokens
    cost = costs.run_cost(
        every, use.tokens_per_second, cluster.ranks, lost.lost_share if lost else 0.0, assumptions.dollars_per_hour
    )
    sent = tuple(busiest_links(run, cluster, traffic) for traffic in traffic_of(run, cluster))
    return Plan(run, cluster, parameters, memory_of(run, cluster), time, sent, use, saved, lost, cost)


def scaled(time: StepTime, ratio: float) -> StepTime:
    """Return the times of a step multiplied by `ratio`."""
    timelines = tuple(
        tuple(replace(span, start=span.start * ratio, end=span.end * ratio) for span in spans)
        for spans in time.timelines
    )
    hidden = {axis: seconds * ratio for axis, seconds in time.hidden.items()}
    return replace(time, seconds=time.seconds * ratio, timelines=timelines, hidden=hidden)


def as_plain(plan: Plan, found: SearchResult | None = None) -> dict[str, object]:
    """Return a plan, and the result of a search if given, as plain values for JSON.

    Times are in seconds and sizes in bytes; docs/plan.md lists the keys.
    """
    time, run = plan.time, plan.run
    return {
        "cluster": {
            "device": plan.cluster.device.name,
            "ranks": plan.cluster.ranks,
            "per_node": plan.cluster.per_node,
            "memory_bytes": plan.cluster.device.memory_bytes,
            "within": plan.cluster.within.name,
            "between": plan.cluster.between.name,
        },
        "run": {"parameters": plan.parameters, **shape_of(run)},
        "fits": plan.fits,
        "memory": [asdict(rank) for rank in plan.memory],
        "step": {
            "seconds": time.seconds,
            "breakdown": plan.breakdown,
            "exposed": time.exposed,
            "hidden": dict(time.hidden),
            "flops": time.flops,
            "timelines": [[[*astuple(span)] for span in spans] for spans in time.timelines],
        },
        **{name: asdict(getattr(plan, name)) for name in ("throughput", "checkpoint", "cost")},
        "traffic": [
            {f"{axis} {operation}": sent._asdict() for (axis, operation), sent in of_rank.items()}
            for of_rank in plan.traffic
        ],
        "failures": asdict(plan.failures) if plan.failures else None,
        "search": None if found is None else found_as_json(found),
    }


def found_as_json(found: SearchResult) -> dict[str, object]:
    """Return the result of a search as plain values for JSON."""

    def need(own: Need) -> dict[str, object]:
        return {"peak": own.peak, "where": own.where, "seconds": own.seconds if own.seconds < inf else None}

    def plain(candidate: Candidate) -> dict[str, object]:
        return asdict(candidate.choice) | {"text": str(candidate.choice)} | need(candidate)

    best = zip(map(plain, found.best), found.limits, strict=True)
    return {
        "best": [shape | {"limits": limits} for shape, limits in best],
        **{name: list(map(plain, getattr(found, name))) for name in ("front", "computed")},
        "least": found.least and plain(found.least),
        "own": found.own and need(found.own),
        "counted": {"refused": found.refused, **found.counted},
    }
