"""Pure functions (pp, microbatches) -> Schedule."""

from __future__ import annotations

from collections.abc import Callable

from megazero.schedules.action import Action, Kind, Schedule, straight


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
    return Schedule("gpipe", microbatches, straight(pp), (forwards + backwards,) * pp)


def one_forward_one_backward(pp: int, microbatches: int) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn, then the rest (Narayanan et al. 2019, 2021).

    Rank s holds the activations of at most min(pp - s, microbatches) micro-batches.
    """
    _check(pp, microbatches)
    ranks = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, microbatches)
        actions = [Action(Kind.FORWARD, index) for index in range(warmup)]
        for index in range(microbatches - warmup):
            actions += [Action(Kind.FORWARD, warmup + index), Action(Kind.BACKWARD, index)]
        actions += [Action(Kind.BACKWARD, index) for index in range(microbatches - warmup, microbatches)]
        ranks.append(tuple(actions))
    return Schedule("1f1b", microbatches, straight(pp), tuple(ranks))


def forward_only(pp: int, microbatches: int) -> Schedule:
    """Forwards in order, for evaluation."""
    _check(pp, microbatches)
    forwards = tuple(Action(Kind.FORWARD, index) for index in range(microbatches))
    return Schedule("forward_only", microbatches, straight(pp), (forwards,) * pp, has_backward=False)


GENERATORS: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Schedules by the name that the configuration uses."""
