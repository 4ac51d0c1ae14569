"""Which ranks communicate: the grid (arithmetic), and one rank with its groups.

RankGrid ---> ParallelState ---> Axis "tp", "dp", "pp", ...      every parallel layer and every collective takes an axis
"""

from megazero.parallel_state.axis import Axis
from megazero.parallel_state.grid import RankGrid
from megazero.parallel_state.state import Links, ParallelState, parallel_state_of

__all__ = ["Axis", "Links", "ParallelState", "RankGrid", "parallel_state_of"]
