"""The rank grid under DeepSpeed's names: the axes "pipe", "data" and "model", the innermost last.

    PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)    is    RankGrid(pp=2, dp=3, tp=2)

A topology has no other axes; `RankGrid` has context parallelism too.
"""

import re
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megazero.parallel_state import Axis, ParallelState, RankGrid, parallel_state_of
from megazero.parallel_state.grid import AXES, Coordinate

_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}
# The axes of the grid's groups.  One copy of the model lies on all stages and on the ranks that share a layer.
_PARALLEL = {"pipe": ["pp"], "pipeline_model": ["pp"], "data": ["dp"], "slice": ["tp"], "tensor_model": ["tp"]}
_PARALLEL["model"] = ["tp", "pp"]


class ProcessTopology:
    """Coordinates of ranks under DeepSpeed's names.

    Args:
        axes: some of "pipe", "data" and "model", outermost first.
        dims: number of ranks along each axis.

    Attributes:
        grid: the equivalent `RankGrid`.

    Raises:
        ValueError: an axis is unknown, or there is not a size for each axis.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if unknown := [axis for axis in axes if axis not in _AXES]:
            raise ValueError(f"axis {unknown[0]!r} is not supported; the axes are {', '.join(_AXES)}")
        self.axes, self.dims = list(axes), list(dims)
        sizes = {_AXES[axis]: size for axis, size in zip(axes, dims, strict=True)}
        inner = [_AXES[axis] for axis in reversed(axes)]
        is_usual = inner == [axis for axis in AXES if axis in inner]
        order = AXES if is_usual else [*inner, *(axis for axis in AXES if axis not in inner)]
        self.grid = RankGrid(**sizes, order="-".join(order))
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.grid.world_size

    def get_axis_names(self) -> list[str]:
        """Return the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 for an axis that the topology does not have."""
        return self.grid.size(_AXES[axis]) if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the named tuple of a rank's coordinates.  Raises: ValueError for a rank outside."""
        at = self.grid.coordinate(rank)
        return self.ProcessCoord(**{axis: getattr(at, _AXES[axis]) for axis in self.axes})

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank at all coordinates.  Raises: ValueError: one is missing or outside."""
        if set(coordinates) != set(self.axes):
            raise ValueError(f"get_rank needs {', '.join(self.axes)}; filter_match takes some of them")
        at = {_AXES[axis]: index for axis, index in coordinates.items()}
        return self.grid.rank(Coordinate(**{"tp": 0, "cp": 0, "dp": 0, "pp": 0} | at))

    def filter_match(self, **coordinates: int) -> list[int]:
        """Return the ranks at some coordinates, in order."""
        ranks = range(self.world_size())
        return [rank for rank in ranks if coordinates.items() <= self.get_coord(rank)._asdict().items()]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one index of an axis, in order."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along an axis; none for an axis that the topology does not have."""
        if axis not in self.axes:
            return []
        return sorted(map(list, {self.grid.group_of(rank, _AXES[axis]) for rank in range(self.world_size())}))


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines, and data parallelism between neighbouring ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines, data parallelism, and tensor parallelism between neighbouring ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's coordinates and groups under DeepSpeed's names.

    Args:
        topology: the topology; None for data parallelism over all ranks.
        process_group: must be None, since the grid spans all ranks.
        state: existing groups; None makes them, which is collective.

    Raises:
        ValueError: the topology and the world differ in the number of ranks.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, state: ParallelState | None = None
    ) -> None:
        if process_group is not None:
            raise NotImplementedError("process_group is not supported: the grid spans all ranks; leave it out")
        self.parallel_state = state or parallel_state_of(topology.grid if topology else None)
        grid = self.parallel_state.grid
        self._topology = topology or PipeModelDataParallelTopology(grid.pp, grid.tp, grid.dp)

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topology

    def get_global_rank(self) -> int:
        """Return this rank among all."""
        return self.parallel_state.rank

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """Return the rank of a stage.  Its other coordinates are this rank's, unless given."""
        own = self._topology.get_coord(self.get_global_rank())._asdict()
        return self._topology.get_rank(**own | coordinates | {"pipe": stage_id})

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return self.parallel_state.pp.index

    def get_data_parallel_id(self) -> int:
        """Return this rank's index among the ranks with the same weights."""
        return self.parallel_state.dp.index

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """`get_<axis>_parallel_<what>`, such as get_data_parallel_world_size."""
        found = re.fullmatch(r"get_(\w+)_parallel_(rank|world_size|group|group_ranks)", name)
        if found is None or found[1] not in _PARALLEL:
            raise AttributeError(f"PipelineParallelGrid has no {name!r}; parallel_state has every axis")
        state, axes = self.parallel_state, _PARALLEL[found[1]]
        ranks = state.grid.group_of(state.rank, *axes)
        if found[2] == "group":
            return lambda: _group([getattr(state, axis) for axis in axes])
        answers = {"rank": ranks.index(state.rank), "world_size": len(ranks), "group_ranks": list(ranks)}
        return lambda: answers[found[2]]


def _group(axes: list[Axis]) -> dist.ProcessGroup:
    """Return the process group of the only axis that has several ranks.  Raises: RuntimeError: none or two have."""
    several = [axis for axis in axes if axis.size > 1]
    if len(several) != 1:
        names = " and ".join(f"{axis.name} of {axis.size}" for axis in several or axes)
        raise RuntimeError(f"there is no process group over {names} ranks")
    return several[0].process_group
