"""Which ranks communicate: the grid (arithmetic), the groups, and the state of one rank.

RankGrid ---> ParallelState ---> Axis "tp", "dp", "pp", ...      every parallel layer and every collective takes an axis
"""

from megazero.parallel_state.grid import RankGrid
from megazero.parallel_state.groups import Axis
from megazero.parallel_state.state import ParallelState, parallel_state_of

__all__ = ["Axis", "ParallelState", "RankGrid", "parallel_state_of"]
