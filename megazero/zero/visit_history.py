"""Which unit of stage 3 probably runs next, so that its weights are gathered in time.

    visits      (forward, 0) (forward, 1) (forward, 2) (backward, 2) (backward, 1) ...
    history     after (forward, 1), (forward, 2) came (backward, 2)

What follows is recorded as the model runs, keyed by the two visits before, and used from the second pass on.  All ranks make
the same guesses, since they run the same code.  At the edge of a pipeline's chunk the schedule knows better and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

Visit: TypeAlias = tuple[str, int]  # ("forward", "evaluation", "recomputation" or "backward", unit)


class VisitHistory:
    """Which unit follows which.  `chunk_of`: the model chunk of each unit."""

    def __init__(self, chunk_of: Sequence[int]) -> None:
        self._chunk_of = chunk_of
        self._last: tuple[Visit | None, Visit | None] = (None, None)
        self._successor: dict[tuple[Visit | None, Visit | None], Visit] = {}
        self._is_scheduled = False
        self._announced: tuple[bool, int] | None = None  # whether the schedule runs a forward next, and its first unit

    def expect(self, chunk: int, is_forward: bool) -> None:
        """Note the chunk that the schedule runs after the current one."""
        members = [index for index, owner in enumerate(self._chunk_of) if owner == chunk]
        # None for a chunk without parameters: what runs after it is not known yet
        self._announced = (is_forward, members[0] if is_forward else members[-1]) if members else None
        self._is_scheduled = True

    def forget_announcement(self) -> None:
        """What the schedule has said last does not follow."""
        self._announced = None

    def record(self, visit: Visit) -> None:
        """Note a visit."""
        self._successor[self._last] = visit
        self._last = (self._last[1], visit)

    def is_in_backward_of(self, index: int) -> bool:
        """Whether the last visit was for the backward of a unit."""
        return self._last[1] == ("backward", index)

    def upcoming(self) -> Iterator[int]:
        """The units that will probably run after the last visit's, in order, as far as that is known."""
        (before, visit), announced = self._last, self._announced
        if visit is not None and self._leaves_chunk(visit):
            self._announced = None  # it holds for this edge alone
        while visit is not None:
            following = self._successor.get((before, visit))
            if self._leaves_chunk(visit):
                following, announced = _first_visit(announced, visit), None
            if following is not None:
                yield following[1]
            before, visit = visit, following

    def _leaves_chunk(self, visit: Visit) -> bool:
        """Whether the schedule says what runs after a visit: it ends a pass over its chunk."""
        direction, index = visit
        neighbour = index + (-1 if direction == "backward" else 1)
        is_edge = not 0 <= neighbour < len(self._chunk_of) or self._chunk_of[neighbour] != self._chunk_of[index]
        return self._is_scheduled and is_edge and direction != "recomputation"  # which its backward follows


def _first_visit(announced: tuple[bool, int] | None, last: Visit) -> Visit | None:
    """The visit with which the announced pass begins; forwards of an evaluation follow one another."""
    if announced is None:
        return None
    is_forward, index = announced
    return ("evaluation" if last[0] == "evaluation" else "forward") if is_forward else "backward", index
