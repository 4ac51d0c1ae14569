"""What the rest of the package asks of a kind of schedule; everything about a kind is known to its class alone.

name         chunks  backward  placement  idle time per rank for F = B = W = 1  activations of rank s
gpipe           1    whole     loop       3 (pp - 1)                            m
1f1b            1    whole     loop       3 (pp - 1)                            min(pp - s, m)
interleaved   v > 1  whole     loop       3 (pp - 1) / v of a rank's work       2 (pp - s - 1) + (v - 1) pp + 1 chunks
zb-h1           1    split     loop       pp - 1 for m >= pp                    at most pp
zbv             2    split     V          as simulated                          at most 2 pp chunks of half size
dualpipev       2    split     V          pp - 1 for m >= 2 pp                  at most 2 pp + 1 chunks of half size
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace

from megazero.schedules.action import Action, ActionKind, Placement, Schedule, loop


class ScheduleKind(ABC):
    """A way to order the actions of a step, for any number of ranks and micro-batches.

    A script adds one with `SCHEDULES.register("mine", Mine())`, and its run file says `parallel.schedule = "mine"`.

    Attributes:
        name: for messages and drawings.
        chunks: model chunks on each rank; None for as many as `virtual_stages` says, from 2 on.
        has_pairs: forwards run beside backwards of another chunk.
    """

    name: str
    chunks: int | None = 1
    has_pairs: bool = False

    @abstractmethod
    def build(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """The schedule for these numbers.

        Raises:
            ValueError: there is none for them.
        """

    def build_forward(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """The forwards alone, for evaluation.  Raises: ValueError, as `build`."""
        return forward_only(self.build(pp, microbatches, chunks))

    def placement(self, pp: int, chunks: int) -> Placement:
        """Where each virtual stage runs; the model is cut by it."""
        return loop(pp, chunks)

    def microbatch_multiple(self, pp: int) -> int:
        """The number of micro-batches must be a multiple of it."""
        return 1

    def wrong_chunks(self, virtual_stages: int) -> tuple[str, str] | None:
        """What is wrong with a number of virtual stages, and what to write instead; 1 means that it was left out."""
        if self.chunks is None:
            return (f"{self.name} needs at least 2 chunks per rank", "write 2") if virtual_stages < 2 else None
        if virtual_stages in (1, self.chunks):
            return None
        if self.chunks == 1:
            rule = f"the schedule {self.name} has one chunk per rank"
            return rule, 'write 1, or parallel.schedule = "interleaved"'
        return f"{self.name} has {self.chunks} chunks per rank", f"write {self.chunks}, or leave it out"

    def chunks_of(self, virtual_stages: int) -> int:
        """Chunks per rank.  Raises: ValueError where there are none for this number of virtual stages."""
        if wrong := self.wrong_chunks(virtual_stages):
            raise ValueError(f"virtual_stages={virtual_stages}: {wrong[0]}; {wrong[1]}")
        return self.chunks or virtual_stages


class GivenSchedule(ScheduleKind):
    """A user's own schedule, from a file for example: it fits only its own numbers of ranks and micro-batches."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.name, self.chunks = schedule, schedule.name, schedule.chunks
        self.has_pairs = bool(schedule.beside)

    def placement(self, pp: int, chunks: int) -> Placement:
        """The placement of the schedule."""
        return self.schedule.placement

    def build(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """The schedule itself.  Raises: ValueError for other numbers than its own."""
        own = self.schedule
        if (pp, microbatches) != (own.pp, own.microbatches):
            raise ValueError(
                f"schedule {own.name} is for pp={own.pp} and {own.microbatches} micro-batches; "
                f"the run has pp={pp} and {microbatches}"
            )
        return own

    def build_forward(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """For any number of micro-batches: its own forwards, again and again.  Raises: ValueError for another pp."""
        return forward_only(self.build(pp, self.schedule.microbatches, chunks), microbatches)


def check_counts(pp: int, microbatches: int) -> None:
    """Raises: ValueError for no rank or no micro-batch."""
    if pp < 1 or microbatches < 1:
        raise ValueError(f"pp={pp} and microbatches={microbatches} must both be at least 1")


class Words:
    """Actions of a rank written as words: "F0 B1" is a forward of chunk 0 and a backward of chunk 1, each of the next
    micro-batch of its kind and chunk."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[ActionKind, int]] = Counter()

    def run(self, text: str, times: int = 1) -> None:
        """Append the actions of some words, several times."""
        for word in text.split() * times:
            kind, chunk = ActionKind(word[0]), int(word[1])
            self.actions.append(Action(kind, self.done[kind, chunk], chunk))
            self.done[kind, chunk] += 1


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """Warm-up forwards, then one forward and one backward at a time, then the backwards that are left."""
    steady = len(forwards) - warmup
    pairs = [action for pair in zip(forwards[warmup:], backwards[:steady], strict=True) for action in pair]
    return (*forwards[:warmup], *pairs, *backwards[steady:])


def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """The forwards of a training schedule, for evaluation.  Without the backwards it is free of deadlock as well.

    `microbatches`: None for as many as the schedule has; for more it begins again, and the last round may be cut short.
    """
    count, per_round = microbatches or schedule.microbatches, schedule.microbatches

    def forwards(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        own = [action for action in actions if action.kind is ActionKind.FORWARD]
        every = (
            replace(action, microbatch=first + action.microbatch)
            for first in range(0, count, per_round)
            for action in own
        )
        return tuple(action for action in every if action.microbatch < count)

    ranks = tuple(map(forwards, schedule.ranks))
    name = f"{schedule.name}, forward only"
    return replace(schedule, name=name, microbatches=count, ranks=ranks, has_backward=False, beside=frozenset())
