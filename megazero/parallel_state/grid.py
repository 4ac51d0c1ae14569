"""The grid of ranks, and which ranks belong together; arithmetic only, without processes.

order "tp-cp-dp-pp", tp=2 dp=2 pp=2            pp 0            pp 1
rank = tp + 2*dp + 4*pp                     dp 0   dp 1     dp 0   dp 1
                                      tp 0   0      2        4      6
                                      tp 1   1      3        5      7
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Coordinate:
    """The position of a rank on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class RankGrid:
    """Sizes of the parallel axes and the order in which ranks fill them, innermost (nearest neighbours) first.

    Args:
        tp, cp, dp, pp: degree of tensor, context, data and pipeline parallelism.
        order: the four axes joined by "-", innermost first.
        ep: degree of expert parallelism: `ep` consecutive ranks of a stage together hold all experts.
        cp_ulysses: Ulysses degree of context parallelism; the ring has cp / cp_ulysses ranks.
        shard_group_size: ranks of dp*cp, next to each other, that share one copy of the sharded state; 0: all of them.

    Raises:
        ValueError: a degree is below 1, `order` is not a permutation of the axes, or a part does not divide its whole:
            `ep` the ranks of a stage, `cp_ulysses` cp, `shard_group_size` dp*cp.

    Source: Narayanan et al. 2021, section 3 (tensor parallelism inside a node, pipeline across nodes).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "tp-cp-dp-pp"
    ep: int = 1
    cp_ulysses: int = 1
    shard_group_size: int = 0

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ValueError(f"{axis}={self.size(axis)} must be at least 1")
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ValueError(f"order={self.order!r} must name each of {', '.join(AXES)} once, joined by '-'")
        if self.ep < 1 or self.tp * self.cp * self.dp % self.ep:
            raise ValueError(f"ep={self.ep} must divide tp*cp*dp={self.tp * self.cp * self.dp}")
        if self.cp_ulysses < 1 or self.cp % self.cp_ulysses:
            raise ValueError(f"cp_ulysses={self.cp_ulysses} must divide cp={self.cp}")
        same, names = self.dp * self.cp, "dp" if self.cp == 1 else f"dp*cp={self.dp}*{self.cp}"
        if self.shard_group_size and same % self.shard_group_size:
            raise ValueError(f"shard_group_size={self.shard_group_size} must divide {names}={same}")

    def size(self, axis: str) -> int:
        """Return the degree of one axis."""
        return int(getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.size(axis) for axis in AXES)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= self.size(axis)
        return strides

    def coordinate(self, rank: int) -> Coordinate:
        """Return the position of `rank` on each axis.  Raises: ValueError, the rank is outside the grid."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the grid of {self.world_size} ranks")
        return Coordinate(**{axis: rank // self._strides[axis] % self.size(axis) for axis in AXES})

    def rank(self, at: Coordinate) -> int:
        """Return the rank at a coordinate.  Raises: ValueError, the coordinate is outside the grid."""
        for axis in AXES:
            if not 0 <= getattr(at, axis) < self.size(axis):
                raise ValueError(f"{axis}={getattr(at, axis)} is outside the grid, whose {axis} is {self.size(axis)}")
        return sum(getattr(at, axis) * self._strides[axis] for axis in AXES)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return `rank` and the ranks that differ from it only on `axes`, in rank order.

        Raises:
            ValueError: an axis is unknown or repeated.
        """
        if unknown := [axis for axis in axes if axis not in AXES]:
            raise ValueError(f"unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
        if len(set(axes)) != len(axes):
            raise ValueError(f"axes {', '.join(axes)} name one more than once")
        at = self.coordinate(rank)
        steps = ([(i - getattr(at, axis)) * self._strides[axis] for i in range(self.size(axis))] for axis in axes)
        return tuple(sorted(rank + sum(combination) for combination in itertools.product(*steps)))

    def expert_table(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of this rank's stage by the experts that they hold: row i has the ranks with the i-th group
        of experts.

        A column has all experts.  It consists of consecutive ranks, so that tokens stay within a host where possible.
        """
        ranks = self.group_of(rank, "tp", "cp", "dp")
        return tuple(ranks[index :: self.ep] for index in range(self.ep))

    def lies_within(self, axis: str, block: int, cut: int = 0) -> bool:
        """Whether every group over `axis` lies within one block of `block` consecutive ranks.

        Args:
            cut: divide groups into this many consecutive ranks of the axis first; 0: whole groups.
        """
        # Groups fill stretches of stride x size ranks, and any block border inside a stretch splits one of its groups.
        size = cut or self.size(axis)
        stretch = self._strides[axis] * size
        return size == 1 or self.world_size <= block or block % stretch == 0


@dataclass(frozen=True)
class Hosts:
    """The position of a rank in a group that spans `count` hosts with `size` ranks each: rank `local` of host `host`."""

    count: int
    size: int
    host: int
    local: int

    @property
    def others(self) -> list[int]:
        """The other hosts, the next one first, so that the ranks do not all begin with the same host."""
        return [(self.host + step) % self.count for step in range(1, self.count)]


def hosts_of(names: Sequence[object], index: int) -> Hosts | None:
    """Return the hosts of a group; None unless every host has equally many ranks, next to each other.

    Args:
        names: each rank's host, by name or number.
        index: index of this rank in the group.
    """
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(names)]
    if len(sizes) > len(set(names)) or len(set(sizes)) > 1:
        return None
    return Hosts(len(sizes), sizes[0], index // sizes[0], index % sizes[0])
