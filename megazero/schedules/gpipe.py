"""GPipe (Huang et al. 2019)."""

from megazero.schedules.action import Action, ActionKind, Schedule
from megazero.schedules.kind import ScheduleKind


class GPipe(ScheduleKind):
    """All forwards, then all backwards in the same order.  Every rank holds the activations of all micro-batches."""

    name = "gpipe"

    def build(self, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        actions = tuple(Action(kind, index) for kind in kinds for index in range(microbatches))
        return Schedule(self.name, microbatches, self.placement(pp, 1), (actions,) * pp)


GPIPE = GPipe()
