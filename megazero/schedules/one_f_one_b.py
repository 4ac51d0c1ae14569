"""1F1B (Narayanan et al. 2019, 2021)."""

from megazero.schedules.action import Action, Op, Schedule
from megazero.schedules.factory import ScheduleFactory, alternate


class OneFOneB(ScheduleFactory):
    """1F1B: warm-up forwards, then alternating forwards and backwards, then the remaining backwards.

    Rank s holds the activations of at most min(pp - s, microbatches) micro-batches.
    """

    name = "1f1b"

    def build(self, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
        forwards = [Action(Op.FORWARD, index) for index in range(microbatches)]
        backwards = [Action(Op.BACKWARD, index) for index in range(microbatches)]
        ranks = tuple(alternate(forwards, backwards, min(pp - rank - 1, microbatches)) for rank in range(pp))
        return Schedule(self.name, microbatches, self.placement(pp, 1), ranks)


ONE_F_ONE_B = OneFOneB()
