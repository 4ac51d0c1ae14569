"""How long a collective takes among ranks of a cluster.

    a ring through n ranks of each node      bytes that a rank sends / min(link within, n x link between) + hops x latency

Between nodes a ring uses the cards of all its ranks of a node at once.  Groups that cross the same nodes side by side have
cards of their own; a card that a node's ranks share is divided among them.  A calibrated host takes what was measured there.

Source: NCCL's rings, one for each card; Thakur et al. 2005 (2 (n - 1) / n of the bytes, log n hops of trees).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from megazero.comm.two_level import hosts_of
from megazero.config import ResolvedRun
from megazero.parallel_state import RankGrid
from megazero.plan.cluster import Cluster

_SENT_SHARE = {"all_reduce": 2.0}


@dataclass(frozen=True)
class GroupLink:
    """How the ranks of a group reach each other.

    Args:
        ranks: of the group.
        per_node: most of them on one node.
        side_by_side: groups of the axis that have ranks on one node.
    """

    cluster: Cluster
    ranks: int
    per_node: int
    side_by_side: int

    @property
    def crosses(self) -> bool:
        """Whether it leaves a node."""
        return self.ranks > self.per_node

    @property
    def bytes_per_second(self) -> float:
        """At which each rank sends in a large collective."""
        within, between = self.cluster.within.rate(), self.cluster.between
        if not self.crosses:
            return within
        cards = between.rate(self.side_by_side) * (1 if between.is_shared else self.per_node)
        return min(within, cards) if self.per_node > 1 else cards

    @property
    def latency_seconds(self) -> float:
        """Until the last rank has heard of the first."""
        inner = ceil(log2(self.per_node)) * self.cluster.within.latency_seconds if self.per_node > 1 else 0.0
        nodes = ceil(self.ranks / self.per_node)
        return inner + (ceil(log2(nodes)) * self.cluster.between.latency_seconds if nodes > 1 else 0.0)

    def seconds(self, operation: str, sent_bytes: float) -> float:
        """Of a collective in which each rank sends so much."""
        if self.ranks == 1:
            return 0.0
        if (calibration := self.cluster.device.calibration) is not None:
            if (measured := self._between_hosts(operation, sent_bytes)) is not None:
                return measured[0]
            inner = min(self.ranks, self.per_node)
            here = calibration.collective(operation, inner, sent_bytes) if inner > 1 else 0.0
            own = (here or 0.0) * min(1.0, calibration.processors / inner)  # the ranks were slowed by one another
            return own + self.link_seconds(sent_bytes) if self.crosses else own
        rounds = 2 if operation == "all_reduce" else 1
        wire = sent_bytes / self.bytes_per_second
        if (
            operation == "all_to_all" and self.crosses
        ):  # what is for another node's ranks goes through the rank's own card
            apart = sent_bytes * (self.ranks - self.per_node) / (self.ranks - 1)
            wire = max(wire, apart / self.cluster.between.rate(self.side_by_side * self.per_node))
        return rounds * self.latency_seconds + wire

    def wait_seconds(self, behind: float) -> float:
        """For the last rank of a calibrated host, where ranks meet behind so much computation of their own."""
        calibration = self.cluster.device.calibration
        if calibration is None or self.ranks == 1:
            return 0.0
        here = calibration.wait(self.ranks, self.per_node if self.crosses else 0, behind)
        return here * min(1.0, self.cluster.processors / self.per_node)  # the ranks were slowed by one another

    def work_seconds(self, operation: str, sent_bytes: float) -> float:
        """Of a rank's processor for a collective that is not waited for."""
        measured = self._between_hosts(operation, sent_bytes) if self.ranks > 1 else None
        return 0.0 if measured is None else measured[1]

    def _between_hosts(self, operation: str, sent_bytes: float) -> tuple[float, float] | None:
        """As it was measured: seconds, beside the other groups that share the link, and of the processor."""
        calibration = self.cluster.device.calibration
        if calibration is None or not self.crosses:
            return None
        found = calibration.between_hosts(operation, self.ranks, self.per_node, sent_bytes)
        if found is None:
            return None
        others = (
            (self.side_by_side - 1) * self.per_node * self._linked(sent_bytes) if self.cluster.between.is_shared else 0
        )
        return found[0] + others / self.cluster.between.rate(), found[1]

    def message_seconds(self, size: float) -> float:
        """Of a message from one rank of the group to the next."""
        side_by_side = min(self.cluster.per_node, self.cluster.ranks)
        if (calibration := self.cluster.device.calibration) is not None:
            if not self.crosses:
                return calibration.collective("send_recv", 2, size) or 0.0
            if (found := calibration.between_hosts("send_recv", 2, 1, size)) is not None:
                return found[0] + (side_by_side - 1) * size / self.cluster.between.rate()
        if self.crosses:
            return size / self.cluster.between.rate(side_by_side) + self.cluster.between.latency_seconds
        return size / self.cluster.within.rate() + self.cluster.within.latency_seconds

    def _linked(self, sent_bytes: float) -> float:
        """Bytes that a rank sends to other nodes: on two levels its own part of the node's."""
        nodes = ceil(self.ranks / self.per_node)
        return sent_bytes * self.ranks / max(1, self.ranks - 1) * (nodes - 1) / nodes / self.per_node

    def link_seconds(self, sent_bytes: float) -> float:
        """Of a calibrated host's messages to others."""
        between, nodes = self.cluster.between, ceil(self.ranks / self.per_node)
        senders = self.side_by_side * self.per_node
        return self._linked(sent_bytes) / between.rate(senders) + ceil(log2(nodes)) * between.latency_seconds


def group_link(cluster: Cluster, ranks: Sequence[int]) -> GroupLink:
    """Of a group of these global ranks."""
    by_node = Counter(rank // cluster.per_node for rank in ranks)
    most = max(by_node.values())
    return GroupLink(cluster, len(ranks), most, max(1, min(cluster.per_node, cluster.ranks) // most))


def links_of(run: ResolvedRun, cluster: Cluster) -> dict[str, GroupLink]:
    """By axis, as traffic is counted: "tp", "cp", "cp_ring", "shard", "host", "hosts", "replica", "pp", "world"."""
    parallel = run.config.parallel
    grid = RankGrid(parallel.tp, parallel.cp, run.dp, parallel.pp, parallel.order)
    same, cp = grid.group_of(0, "dp", "cp"), grid.group_of(0, "cp")
    groups = {
        "tp": grid.group_of(0, "tp"),
        "cp": cp[: parallel.ulysses],
        "cp_ring": cp[:: parallel.ulysses],
        "shard": same[: run.shards],
        "replica": same[:: run.shards],
        "pp": grid.group_of(0, "pp")[:2],
        "world": tuple(range(run.world_size)),
    }
    second = run.config.zero.secondary_shard_size
    groups["secondary"] = same[: second or 1]
    hosts = hosts_of([str(rank // cluster.per_node) for rank in groups["shard"]], 0)
    size = hosts.size if hosts is not None and hosts.count > 1 else 1
    groups |= {"host": groups["shard"][:size], "hosts": groups["shard"][::size]}
    return {axis: group_link(cluster, ranks) for axis, ranks in groups.items()}
