"""GPipe (Huang et al. 2019)."""

from megazero.schedules.action import Action, Op, Schedule
from megazero.schedules.factory import ScheduleFactory


class GPipe(ScheduleFactory):
    """All forwards, then all backwards in the same order.  Every rank holds the activations of all micro-batches."""

    name = "gpipe"

    def build(self, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
        ops = (Op.FORWARD, Op.BACKWARD)
        actions = tuple(Action(op, index) for op in ops for index in range(microbatches))
        return Schedule(self.name, microbatches, self.placement(pp, 1), (actions,) * pp)


GPIPE = GPipe()
