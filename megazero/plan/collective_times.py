"""Estimates how long a collective takes among ranks of a cluster.

    a ring through n ranks of each node      bytes that a rank sends / min(link within, n x link between) + hops x latency

Between nodes, a ring uses the network cards of all its ranks on a node at once, and the node with the fewest ranks sets the
pace; a shift by one rank, like a message, uses one card.  Groups that cross the same nodes at the same time use different
cards, or share the card of the node.  The slowest group of an axis gives its time.  On a calibrated host, the times that
were measured there are used.

Source: NCCL's rings, one for each card; Thakur et al. 2005 (2 (n - 1) / n of the bytes, log n hops of trees).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2

from megazero.config import ResolvedRun
from megazero.parallel_state import RankGrid
from megazero.parallel_state.grid import hosts_of
from megazero.plan.cluster import Cluster


@dataclass(frozen=True)
class GroupLink:
    """The links between the ranks of a group.

    Args:
        ranks: number of ranks in the group.
        per_node: ranks of the group on the node that has the most.
        side_by_side: groups of the axis that leave the same node; if none leaves, groups on that node.
        fewest: ranks of the group on the node that has the fewest; 0 if every node has equally many.
    """

    cluster: Cluster
    ranks: int
    per_node: int
    side_by_side: int
    fewest: int = 0

    @property
    def crosses(self) -> bool:
        """Whether the group spans several nodes."""
        return self.ranks > self.per_node

    @property
    def bytes_per_second(self) -> float:
        """The rate at which each rank sends in a large collective, in bytes per second."""
        within, between = self.cluster.within.rate(), self.cluster.between
        if not self.crosses:
            return within
        cards = between.rate(self.side_by_side) * (1 if between.is_shared else self.fewest or self.per_node)
        return min(within, cards) if self.per_node > 1 else cards

    @property
    def latency_seconds(self) -> float:
        """Seconds until a signal from the first rank has reached the last."""
        inner = ceil(log2(self.per_node)) * self.cluster.within.latency_seconds if self.per_node > 1 else 0.0
        nodes = ceil(self.ranks / self.per_node)
        return inner + (ceil(log2(nodes)) * self.cluster.between.latency_seconds if nodes > 1 else 0.0)

    def seconds(self, operation: str, sent_bytes: float) -> float:
        """Return the seconds of a collective in which each rank sends `sent_bytes`."""
        if self.ranks == 1:
            return 0.0
        if (calibration := self.cluster.calibration) is not None:
            inner = min(self.ranks, self.per_node)
            here = calibration.collective(operation, inner, sent_bytes) if inner > 1 else 0.0
            # Ranks that share cores slow each other down.
            own = (here or 0.0) * min(1.0, calibration.processors / inner)
            return own + self.link_seconds(sent_bytes) if self.crosses else own
        if operation == "ring_shift":
            return self._to_the_next(sent_bytes, self.side_by_side)
        rounds = 2 if operation == "all_reduce" else 1
        wire = sent_bytes / self.bytes_per_second
        if operation == "all_to_all" and self.crosses:
            # Rows for ranks of other nodes go through the rank's own card.
            leaving = sent_bytes * (self.ranks - self.per_node) / (self.ranks - 1)
            wire = max(wire, leaving / self.cluster.between.rate(self.side_by_side * self.per_node))
        return rounds * self.latency_seconds + wire

    def message_seconds(self, size: float) -> float:
        """Return the seconds of a message of `size` bytes from one rank of the group to the next."""
        if not self.crosses and (calibration := self.cluster.calibration) is not None:
            return calibration.collective("send_recv", 2, size) or 0.0
        return self._to_the_next(size, min(self.cluster.per_node, self.cluster.ranks))

    def _to_the_next(self, size: float, senders: int) -> float:
        """Return the seconds of a message to the next rank, while `senders` ranks of a node send to other nodes."""
        link = self.cluster.between if self.crosses else self.cluster.within
        return size / link.rate(senders if self.crosses else 1) + link.latency_seconds

    def link_seconds(self, sent_bytes: float) -> float:
        """Return the seconds that a two-level collective of a calibrated host spends on messages to other hosts."""
        between, nodes = self.cluster.between, ceil(self.ranks / self.per_node)
        linked = sent_bytes * self.ranks / (self.ranks - 1) * (nodes - 1) / nodes / self.per_node  # of each rank
        return linked / between.rate(self.side_by_side * self.per_node) + ceil(log2(nodes)) * between.latency_seconds


def link_of(links: Mapping[str, GroupLink], axis: str, operation: str) -> GroupLink:
    """Return the link that an operation uses.  The axis "cp" covers Ulysses and the ring; only the ring shifts."""
    return links["cp_ring" if operation == "ring_shift" else axis]


def links_of(run: ResolvedRun, cluster: Cluster) -> dict[str, GroupLink]:
    """Return the link of each axis, by the axis names of `ParallelState` and by "cp_ring", "host" and "hosts"."""
    parallel, per_node = run.config.parallel, cluster.per_node
    groups = _groups(run.grid, parallel.ulysses, run.shards, run.config.zero.secondary_shard_size or 1, per_node)
    return {axis: GroupLink(cluster, *place) for axis, place in groups.items()}


@lru_cache(maxsize=512)
def _groups(grid: RankGrid, ulysses: int, shards: int, second: int, per_node: int) -> dict[str, tuple[int, ...]]:
    """Return, by axis, the fields of `GroupLink` for the slowest group of the axis."""
    at = [grid.coordinate(rank) for rank in range(grid.world_size)]

    def cut(size: int, *axes: str, across: bool = False) -> list[tuple[int, ...]]:
        """Return all groups over the axes, cut into groups of `size` ranks: consecutive ranks, or with `across` strided."""
        found = []
        for rank in (rank for rank, place in enumerate(at) if not any(getattr(place, axis) for axis in axes)):
            whole = grid.group_of(rank, *axes)
            count = len(whole) // size
            found += [whole[i::count] if across else whole[i * size : (i + 1) * size] for i in range(count)]
        return found

    same, cp, pp = grid.dp * grid.cp, grid.cp, cut(grid.pp, "pp")
    experts = [grid.expert_table(ranks[0]) for ranks in cut(grid.tp * same, "tp", "cp", "dp")]
    first = grid.group_of(0, "dp", "cp")[:shards]
    hosts = hosts_of([str(rank // per_node) for rank in first], 0)
    size = hosts.size if hosts is not None and hosts.count > 1 else 1
    groups = {
        "tp": cut(grid.tp, "tp"),
        "cp": cut(ulysses, "cp"),
        "cp_ring": cut(cp // ulysses, "cp", across=True),
        "dp": cut(grid.dp, "dp"),
        "dp_cp": cut(same, "dp", "cp"),
        "shard": cut(shards, "dp", "cp"),
        "replica": cut(same // shards, "dp", "cp", across=True),
        "secondary": cut(second, "dp", "cp"),
        "host": cut(size, "dp", "cp"),
        "hosts": [ranks[i::size] for ranks in cut(shards, "dp", "cp") for i in range(size)],
        "ep": [column for table in experts for column in zip(*table, strict=True)],
        "edp": [row for table in experts for row in table],
        "pp": [pair for ranks in pp for pair in pairwise(ranks)] if grid.pp > 1 else pp,
        "world": [tuple(range(grid.world_size))],
    }
    return {axis: _slowest(own, per_node) for axis, own in groups.items()}


def _slowest(groups: Iterable[Sequence[int]], per_node: int) -> tuple[int, ...]:
    """Return the fields of `GroupLink` for the slowest group: the fewest ranks on a node, if possible over several nodes."""
    nodes = [Counter(rank // per_node for rank in group) for group in groups]
    leaving = [own for own in nodes if len(own) > 1] or nodes
    slowest = min(leaving, key=lambda own: (min(own.values()), max(own.values())))
    beside = Counter(node for own in leaving for node in own)
    return slowest.total(), max(slowest.values()), max(beside.values()), min(slowest.values())
