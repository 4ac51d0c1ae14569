"""Base class of the factories of pipeline schedules; each schedule has one, which holds everything about it.

name         chunks  backward  placement  idle time per rank for F = B = W = 1  activations of rank s
gpipe           1    whole     loop       3 (pp - 1)                            m
1f1b            1    whole     loop       3 (pp - 1)                            min(pp - s, m)
interleaved   v > 1  whole     loop       3 (pp - 1) / v of a rank's work       2 (pp - s - 1) + (v - 1) pp + 1 chunks
interleaved-pairs: as interleaved, with one chunk's activations more
zb-h1           1    split     loop       pp - 1 for m >= pp                    at most pp
zbv             2    split     V          as simulated                          at most 2 pp chunks of half size
dualpipev       2    split     V          pp - 1 for m >= 2 pp                  at most 2 pp + 1 chunks of half size
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace

from megazero.schedules.action import Action, Op, Placement, Schedule, loop


class ScheduleFactory(ABC):
    """Builds a schedule of one name, for any number of ranks and micro-batches.

    To add one, call `SCHEDULES.register("mine", Mine())` in a script and set `parallel.schedule = "mine"` in its run
    file.

    Attributes:
        name: for messages and drawings.
        chunks: model chunks on each rank; None: `virtual_stages`, at least 2.
        has_pairs: forwards run beside backwards.
    """

    name: str
    chunks: int | None = 1
    has_pairs: bool = False

    @abstractmethod
    def build(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """Return the schedule for these sizes.

        Raises:
            ValueError: there is none.
        """

    def build_forward(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """Return only the forwards, for evaluation.  Raises: ValueError: as in `build`."""
        return forward_only(self.build(pp, microbatches, chunks))

    def placement(self, pp: int, chunks: int) -> Placement:
        """Return the rank and chunk of each virtual stage.  The model is cut accordingly."""
        return loop(pp, chunks)

    def microbatch_multiple(self, pp: int) -> int:
        """Return a number that must divide the number of micro-batches."""
        return 1

    def wrong_chunks(self, virtual_stages: int) -> tuple[str, str] | None:
        """Return (problem, advice) if the schedule cannot have so many virtual stages, else None.  1 counts as unset."""
        if self.chunks is None:
            return (f"{self.name} needs at least 2 chunks per rank", "write 2") if virtual_stages < 2 else None
        if virtual_stages in (1, self.chunks):
            return None
        if self.chunks == 1:
            rule = f"the schedule {self.name} has one chunk per rank"
            return rule, 'write 1, or parallel.schedule = "interleaved"'
        return f"{self.name} has {self.chunks} chunks per rank", f"write {self.chunks}, or leave it out"

    def chunks_of(self, virtual_stages: int) -> int:
        """Return the chunks per rank.  Raises: ValueError, this number of virtual stages does not fit."""
        if wrong := self.wrong_chunks(virtual_stages):
            raise ValueError(f"virtual_stages={virtual_stages}: {wrong[0]}; {wrong[1]}")
        return self.chunks or virtual_stages


class GivenSchedule(ScheduleFactory):
    """A user's own schedule, for example from a file.  It fits only its own numbers of ranks and micro-batches."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.name, self.chunks = schedule, schedule.name, schedule.chunks
        self.has_pairs = bool(schedule.beside)

    def placement(self, pp: int, chunks: int) -> Placement:
        """Return the schedule's own placement."""
        return self.schedule.placement

    def build(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """Return the schedule itself.  Raises: ValueError, the sizes are not its own."""
        own = self.schedule
        if (pp, microbatches) != (own.pp, own.microbatches):
            hint = f"the run has pp={pp} and {microbatches}"
            raise ValueError(f"schedule {own.name} is for pp={own.pp} and {own.microbatches} micro-batches; {hint}")
        return own

    def build_forward(self, pp: int, microbatches: int, chunks: int) -> Schedule:
        """Return the forwards of the schedule, repeated for any number of micro-batches.  Raises: ValueError, pp is not
        its own.
        """
        return forward_only(self.build(pp, self.schedule.microbatches, chunks), microbatches)


class Words:
    """Writes a rank's actions as words: "F0 B1" is a forward of chunk 0 and a backward of chunk 1, each of the next
    micro-batch of its type and chunk.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[Op, int]] = Counter()

    def run(self, text: str, times: int = 1) -> None:
        """Append the actions of some words, `times` times."""
        for word in text.split() * times:
            op, chunk = Op(word[0]), int(word[1])
            self.actions.append(Action(op, self.done[op, chunk], chunk))
            self.done[op, chunk] += 1


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """Return the warm-up forwards, then alternate forwards and backwards (1F1B), then append the remaining backwards."""
    steady = len(forwards) - warmup
    pairs = [action for pair in zip(forwards[warmup:], backwards[:steady], strict=True) for action in pair]
    return (*forwards[:warmup], *pairs, *backwards[steady:])


def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """Return the forwards of a training schedule, for evaluation.  Without the backwards they cannot deadlock either.

    Args:
        microbatches: None: as many as the schedule has; if more, its forwards repeat, and the last round may be
            shorter.
    """
    count = microbatches or schedule.microbatches
    firsts = range(0, count, schedule.microbatches)  # micro-batch of each round

    def forwards(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        own = [action for action in actions if action.op is Op.FORWARD]
        every = (replace(action, microbatch=first + action.microbatch) for first in firsts for action in own)
        return tuple(action for action in every if action.microbatch < count)

    ranks = tuple(map(forwards, schedule.ranks))
    name = f"{schedule.name}, forward only"
    return replace(schedule, name=name, microbatches=count, ranks=ranks, has_backward=False, beside=frozenset())
