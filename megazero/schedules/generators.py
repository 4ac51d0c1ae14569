"""Pure functions (pp, microbatches, chunks) -> Schedule.

name         chunks  backward  placement  idle time per rank for F = B = W = 1  activations of rank s
gpipe           1    whole     loop       3 (pp - 1)                            m
1f1b            1    whole     loop       3 (pp - 1)                            min(pp - s, m)
interleaved   v > 1  whole     loop       3 (pp - 1) / v of a rank's work       2 (pp - s - 1) + (v - 1) pp + 1 chunks
zb-h1           1    split     loop       pp - 1 for m >= pp                    at most pp
zbv             2    split     V          as simulated                          at most 2 pp chunks of half size
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from megazero.schedules.action import Action, Kind, Placement, Schedule, loop, v_shape


def _check(pp: int, microbatches: int) -> None:
    if pp < 1 or microbatches < 1:
        raise ValueError(f"pp={pp} and microbatches={microbatches} must both be at least 1")


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order (Huang et al. 2019).

    Every rank holds the activations of all micro-batches.
    """
    _check(pp, microbatches)
    forwards = tuple(Action(Kind.FORWARD, index) for index in range(microbatches))
    backwards = tuple(Action(Kind.BACKWARD, index) for index in range(microbatches))
    return Schedule("gpipe", microbatches, loop(pp), (forwards + backwards,) * pp)


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""
    steady = len(forwards) - warmup
    pairs = [action for pair in zip(forwards[warmup:], backwards[:steady], strict=True) for action in pair]
    return (*forwards[:warmup], *pairs, *backwards[steady:])


def one_forward_one_backward(pp: int, microbatches: int) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn, then the rest (Narayanan et al. 2019, 2021).

    Rank s holds the activations of at most min(pp - s, microbatches) micro-batches.
    """
    _check(pp, microbatches)
    forwards = [Action(Kind.FORWARD, index) for index in range(microbatches)]
    backwards = [Action(Kind.BACKWARD, index) for index in range(microbatches)]
    ranks = tuple(_in_turn(forwards, backwards, min(pp - rank - 1, microbatches)) for rank in range(pp))
    return Schedule("1f1b", microbatches, loop(pp), ranks)


def interleaved(pp: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over several model chunks per rank, in groups of pp micro-batches (Narayanan et al. 2021, section 2.2).

    Rank s warms up with 2 (pp - s - 1) + (chunks - 1) pp forwards.

    Raises:
        ValueError: microbatches is no multiple of pp: a group that is not full would leave ranks waiting for each other.
    """
    _check(pp, microbatches)
    if chunks < 2:
        raise ValueError(f"interleaved needs virtual_stages of at least 2, got {chunks}; with 1 it is 1f1b")
    if microbatches % pp:
        low = microbatches // pp * pp
        nearest = f"{low} and {low + pp}" if low else f"{pp}"
        raise ValueError(
            f"interleaved needs micro-batches in multiples of pp={pp}, got {microbatches}; nearest: {nearest}"
        )

    def order(kind: Kind, order_of_chunks: list[int]) -> list[Action]:
        groups = range(0, microbatches, pp)
        return [Action(kind, first + i, chunk) for first in groups for chunk in order_of_chunks for i in range(pp)]

    forwards = order(Kind.FORWARD, list(range(chunks)))
    backwards = order(Kind.BACKWARD, list(reversed(range(chunks))))
    warmups = [min(2 * (pp - rank - 1) + (chunks - 1) * pp, len(forwards)) for rank in range(pp)]
    ranks = tuple(_in_turn(forwards, backwards, warmup) for warmup in warmups)
    return Schedule("interleaved", microbatches, loop(pp, chunks), ranks)


def zero_bubble_h1(pp: int, microbatches: int) -> Schedule:
    """1F1B with weight gradients apart: rank s keeps s of them back to fill its waits (Qi et al. 2024, section 2.1).

    Rank s holds pp - s micro-batches as in 1F1B and s that wait for their weight gradient: at most pp.
    """
    _check(pp, microbatches)
    ranks = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, microbatches)
        actions = [Action(Kind.FORWARD, index) for index in range(warmup)]
        for index in range(microbatches):
            if warmup + index < microbatches:
                actions.append(Action(Kind.FORWARD, warmup + index))
            actions.append(Action(Kind.BACKWARD, index))
            if index >= rank:
                actions.append(Action(Kind.WEIGHT, index - rank))
        actions += [Action(Kind.WEIGHT, index) for index in range(max(0, microbatches - rank), microbatches)]
        ranks.append(tuple(actions))
    return Schedule("zb-h1", microbatches, loop(pp), tuple(ranks))


def zero_bubble_v(pp: int, microbatches: int) -> Schedule:
    """Two chunks per rank in a V and split backwards, at 1F1B's memory ("ZB-V", Qi et al. 2024, section 6).

    Down the V and up again, chunk 1 runs on rank s long before chunk 0's backward comes back: 2 (pp - s) - 1 forwards of
    chunk 0 warm up, chunk 1 follows, then F0 B0 W0 F1 B1 W1 repeat, and the weight gradients left over fill the end.  Made
    for at least 2 pp - 1 micro-batches; with fewer, those that do not exist are left out.
    """
    _check(pp, microbatches)
    return Schedule("zbv", microbatches, v_shape(pp), tuple(_rank_of_v(rank, pp, microbatches) for rank in range(pp)))


def _rank_of_v(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    count = max(2 * pp - 1, microbatches)
    done: Counter[tuple[Kind, int]] = Counter()
    actions: list[Action] = []

    def run(pattern: str, times: int = 1) -> None:
        """The next micro-batch of each: "F1" is a forward of chunk 1."""
        for word in pattern.split() * times:
            key = (Kind(word[0]), int(word[1]))
            actions.append(Action(key[0], done[key], key[1]))
            done[key] += 1

    forward = Kind.FORWARD
    run("F0", 2 * (pp - rank) - 1)
    run("F1 F0", rank)
    run("F1 B1 W1", pp - rank)
    while done[forward, 1] < done[forward, 0] or done[forward, 0] < count:
        run("F0 B0 W0 F1 B1 W1" if done[forward, 0] < count else "B0 W0 F1 B1 W1")
    run("B0 B1", rank)
    run("B0 W0", pp - rank)
    for chunk in (1, 0):
        run(f"W{chunk}", done[Kind.BACKWARD, chunk] - done[Kind.WEIGHT, chunk])
    return tuple(action for action in actions if action.microbatch < microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """A training schedule's forwards alone, for evaluation: what was free of deadlock with the backwards is so without."""
    ranks = tuple(tuple(a for a in actions if a.kind is Kind.FORWARD) for actions in schedule.ranks)
    return replace(schedule, name=f"{schedule.name}, forward only", ranks=ranks, has_backward=False)


@dataclass(frozen=True)
class Family:
    """A kind of schedule, by the name that the configuration uses.

    Args:
        generate: (pp, microbatches, chunks) -> Schedule.
        placement: (pp, chunks) -> where each virtual stage runs; what the model is cut by.
        chunks: the chunks it needs; None for any number from 2 on.
    """

    generate: Callable[[int, int, int], Schedule]
    placement: Callable[[int, int], Placement]
    chunks: int | None = 1


def family_of(schedule: Schedule) -> Family:
    """The family of one schedule, for a schedule of the user's own: it runs with its own numbers only."""

    def generate(pp: int, microbatches: int, _: int) -> Schedule:
        if (pp, microbatches) != (schedule.pp, schedule.microbatches):
            raise ValueError(
                f"schedule {schedule.name} is for pp={schedule.pp} and {schedule.microbatches} micro-batches; "
                f"the run has pp={pp} and {microbatches}"
            )
        return schedule

    return Family(generate, lambda *_: schedule.placement, schedule.chunks)


FAMILIES: dict[str, Family] = {
    "gpipe": Family(lambda pp, microbatches, _: gpipe(pp, microbatches), loop),
    "1f1b": Family(lambda pp, microbatches, _: one_forward_one_backward(pp, microbatches), loop),
    "interleaved": Family(interleaved, loop, None),
    "zb-h1": Family(lambda pp, microbatches, _: zero_bubble_h1(pp, microbatches), loop),
    "zbv": Family(lambda pp, microbatches, _: zero_bubble_v(pp, microbatches), lambda pp, _: v_shape(pp), 2),
}
"""Schedules by the name that the configuration uses."""
