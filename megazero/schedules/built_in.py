"""The schedules that come with the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megazero.schedules.action import Action, ActionKind, Placement, Schedule, v_shape
from megazero.schedules.kind import ScheduleKind, alternate, check_counts
from megazero.settings import nearest_multiples


class GPipe(ScheduleKind):
    """All forwards, then all backwards in the same order; every micro-batch's activations are held (Huang et al. 2019)."""

    name = "gpipe"

    def build(self, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
        return _with_warm_up(self, pp, microbatches, 1, lambda _: microbatches)


class OneFOneB(ScheduleKind):
    """Warm-up forwards, then one forward and one backward at a time, then the rest (Narayanan et al. 2019, 2021).

    Rank s holds the activations of at most min(pp - s, microbatches) micro-batches.
    """

    name = "1f1b"

    def build(self, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
        return _with_warm_up(self, pp, microbatches, 1, lambda rank: pp - rank - 1)


class Interleaved(ScheduleKind):
    """1F1B over several model chunks per rank, in groups of pp micro-batches (Narayanan et al. 2021, section 2.2)."""

    name = "interleaved"
    chunks = None

    def microbatch_multiple(self, pp: int) -> int:
        """pp: a group that is not full would leave ranks waiting for each other."""
        return pp

    def build(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        check_counts(pp, microbatches)
        if chunks < 2:
            raise ValueError(f"interleaved needs virtual_stages of at least 2, got {chunks}; with 1 it is 1f1b")
        if microbatches % pp:
            nearest = " and ".join(map(str, nearest_multiples(microbatches, pp)))
            raise ValueError(
                f"interleaved needs micro-batches in multiples of pp={pp}, got {microbatches}; nearest: {nearest}"
            )
        return _with_warm_up(self, pp, microbatches, chunks, lambda rank: 2 * (pp - rank - 1) + (chunks - 1) * pp)


def _with_warm_up(
    kind: ScheduleKind, pp: int, microbatches: int, chunks: int, warmup: Callable[[int], int]
) -> Schedule:
    """Groups of pp micro-batches pass through the chunks; `warmup` gives the forwards with which a rank begins."""
    check_counts(pp, microbatches)

    def order(of: ActionKind, order_of_chunks: list[int]) -> list[Action]:
        groups = [range(microbatches)[first : first + pp] for first in range(0, microbatches, pp)]
        return [Action(of, index, chunk) for group in groups for chunk in order_of_chunks for index in group]

    forwards = order(ActionKind.FORWARD, list(range(chunks)))
    backwards = order(ActionKind.BACKWARD, list(reversed(range(chunks))))
    ranks = tuple(alternate(forwards, backwards, min(warmup(rank), len(forwards))) for rank in range(pp))
    return Schedule(kind.name, microbatches, kind.placement(pp, chunks), ranks)


class ZeroBubbleH1(ScheduleKind):
    """1F1B with weight gradients apart: rank s delays s of them to fill its idle time (Qi et al. 2024, section 2.1).

    Rank s holds pp - s micro-batches as in 1F1B and s that lack their weight gradient: at most pp.
    """

    name = "zb-h1"

    def build(self, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
        ranks = []
        for rank, whole in enumerate(ONE_F_ONE_B.build(pp, microbatches).ranks):
            actions: list[Action] = []
            for action in whole:
                actions.append(action)
                if action.kind is ActionKind.BACKWARD and action.microbatch >= rank:
                    actions.append(Action(ActionKind.WEIGHT, action.microbatch - rank))
            actions += [Action(ActionKind.WEIGHT, index) for index in range(max(0, microbatches - rank), microbatches)]
            ranks.append(tuple(actions))
        return Schedule(self.name, microbatches, self.placement(pp, 1), tuple(ranks))


class ZeroBubbleV(ScheduleKind):
    """Two chunks per rank in a V and split backwards, at 1F1B's memory ("ZB-V" in Qi et al. 2024, section 6).

    Down the V and up again, chunk 1 runs on rank s long before chunk 0's backward comes back: 2 (pp - s) - 1 forwards of
    chunk 0 warm up, chunk 1 follows, then F0 B0 W0 F1 B1 W1 repeat, and the weight gradients left over fill the end.  Made
    for at least 2 pp - 1 micro-batches; with fewer, those that do not exist are left out.
    """

    name = "zbv"
    chunks = 2

    def placement(self, pp: int, chunks: int) -> Placement:
        """First and last stage are on rank 0."""
        return v_shape(pp)

    def build(self, pp: int, microbatches: int, chunks: int = 2) -> Schedule:
        check_counts(pp, microbatches)
        ranks = tuple(_rank_of_v(rank, pp, microbatches) for rank in range(pp))
        return Schedule(self.name, microbatches, self.placement(pp, 2), ranks)


def _rank_of_v(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    count = max(2 * pp - 1, microbatches)
    done: Counter[tuple[ActionKind, int]] = Counter()
    actions: list[Action] = []

    def run(pattern: str, times: int = 1) -> None:
        """The next micro-batch of each: "F1" is a forward of chunk 1."""
        for word in pattern.split() * times:
            key = (ActionKind(word[0]), int(word[1]))
            actions.append(Action(key[0], done[key], key[1]))
            done[key] += 1

    forward = ActionKind.FORWARD
    run("F0", 2 * (pp - rank) - 1)
    run("F1 F0", rank)
    run("F1 B1 W1", pp - rank)
    while done[forward, 1] < done[forward, 0] or done[forward, 0] < count:
        run("F0 B0 W0 F1 B1 W1" if done[forward, 0] < count else "B0 W0 F1 B1 W1")
    run("B0 B1", rank)
    run("B0 W0", pp - rank)
    for chunk in (1, 0):
        run(f"W{chunk}", done[ActionKind.BACKWARD, chunk] - done[ActionKind.WEIGHT, chunk])
    return tuple(action for action in actions if action.microbatch < microbatches)


GPIPE, ONE_F_ONE_B, INTERLEAVED = GPipe(), OneFOneB(), Interleaved()
ZERO_BUBBLE_H1, ZERO_BUBBLE_V = ZeroBubbleH1(), ZeroBubbleV()
