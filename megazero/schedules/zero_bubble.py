"""Zero-bubble schedules: weight gradients are separate actions, which fill idle time (Qi et al. 2024)."""

from megazero.schedules.action import Action, Op, Placement, Schedule, v_shape
from megazero.schedules.factory import ScheduleFactory, Words


class ZeroBubbleH1(ScheduleFactory):
    """1F1B with separate weight gradients: rank s defers s of them to fill its idle time (section 2.1).

    Rank s holds at most pp micro-batches: pp - s as in 1F1B, and s that wait for their weight gradient.
    """

    name = "zb-h1"

    def build(self, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
        ranks = []
        for rank in range(pp):
            warmup = min(pp - rank - 1, microbatches)
            actions = [Action(Op.FORWARD, index) for index in range(warmup)]
            for index in range(microbatches):
                if warmup + index < microbatches:
                    actions.append(Action(Op.FORWARD, warmup + index))
                actions.append(Action(Op.BACKWARD, index))
                if index >= rank:
                    actions.append(Action(Op.WEIGHT, index - rank))
            actions += [Action(Op.WEIGHT, index) for index in range(max(0, microbatches - rank), microbatches)]
            ranks.append(tuple(actions))
        return Schedule(self.name, microbatches, self.placement(pp, 1), tuple(ranks))


class ZeroBubbleV(ScheduleFactory):
    """Two chunks per rank in a V, and split backwards, at 1F1B's memory ("ZB-V", section 6).

    In a V, rank s runs chunk 1 long before chunk 0's backward returns.  So 2 (pp - s) - 1 forwards of chunk 0 warm up,
    chunk 1 follows, then F0 B0 W0 F1 B1 W1 repeat, and the remaining weight gradients fill the end.  The order is for
    at least 2 pp - 1 micro-batches; with fewer, actions of missing micro-batches are left out.
    """

    name = "zbv"
    chunks = 2

    def placement(self, pp: int, chunks: int) -> Placement:
        """Return the V: the first and last stage are on rank 0."""
        return v_shape(pp)

    def build(self, pp: int, microbatches: int, chunks: int = 2) -> Schedule:
        ranks = tuple(_rank_of_v(rank, pp, microbatches) for rank in range(pp))
        return Schedule(self.name, microbatches, self.placement(pp, 2), ranks)


def _rank_of_v(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    count = max(2 * pp - 1, microbatches)
    words, forward = Words(), Op.FORWARD
    run, done = words.run, words.done
    run("F0", 2 * (pp - rank) - 1)
    run("F1 F0", rank)
    run("F1 B1 W1", pp - rank)
    while done[forward, 1] < done[forward, 0] or done[forward, 0] < count:
        run("F0 B0 W0 F1 B1 W1" if done[forward, 0] < count else "B0 W0 F1 B1 W1")
    run("B0 B1", rank)
    run("B0 W0", pp - rank)
    for chunk in (1, 0):
        run(f"W{chunk}", done[Op.BACKWARD, chunk] - done[Op.WEIGHT, chunk])
    return tuple(action for action in words.actions if action.microbatch < microbatches)


ZERO_BUBBLE_H1 = ZeroBubbleH1()
ZERO_BUBBLE_V = ZeroBubbleV()
