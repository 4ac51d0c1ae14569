"""A pipeline schedule as a value: one list of actions per rank, printable and comparable.

    rank 0   F0 F1 F2 F3 B0 B1 B2 B3        F3 = forward of micro-batch 3, B3 = its backward
    rank 1      F0 F1 F2 F3 B0 B1 B2 B3     F3.1 = on the rank's second model chunk

    rank 0   F0 F1 B0 W0 B1 W1              a schedule with W splits the backward: B computes the gradient of the input,
                                            W that of the weights

    rank 0   F2&B0.1&W0.1                   a pair: F2 runs beside B0.1, so that products of one hide exchanges of the
                                            other; with the weight gradient, if it follows

Virtual stages are numbered along the model; `placement` maps each to its (rank, chunk).

A user's own schedule is a file of comma-separated values, with one line per pipeline rank, in the order of execution:

    F0,F1,B0,W0,B1,W1        F0 = forward of micro-batch 0, B0 = its backward, W0 = its weight gradient
    ,F0,B0,W0,F1,B1,W1       empty cells and lines are skipped
    F0,F1,F0.1,F1.1&B0.1     actions that run together are one cell

The cells determine the number of ranks, micro-batches and chunks.  A file with only forwards is for evaluation.
Reading a schedule does not prove that it can run: `program` does that, as for every schedule.
"""

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from pathlib import Path


class Op(StrEnum):
    """Type of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND = "SEND"
    OPEN = "OPEN"  # allocate the memory for a message, which may arrive once the receive is posted
    RECV = "RECV"


@dataclass(frozen=True)
class Action:
    """A forward, a backward or a weight gradient of one micro-batch on one model chunk."""

    op: Op
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class MessageAction:
    """One side of a message between pipeline ranks: its send, the allocation of its memory, or its receive.

    Args:
        op: SEND, OPEN or RECV.
        carries: the forward or backward whose result is sent, in the sender's numbering of chunks.
        lands: the action that uses the result, in the receiver's numbering.
        peer: the other pipeline rank.
    """

    op: Op
    carries: Action
    lands: Action
    peer: int

    def goes_down(self, rank: int) -> bool:
        """Whether the message goes from a lower to a higher pipeline rank; `rank` is the one that executes this action."""
        return (rank < self.peer) == (self.op is Op.SEND)

    def __str__(self) -> str:
        return f"{self.op.value}({self.carries}{'->' if self.op is Op.SEND else '<-'}{self.peer})"


#: (pipeline rank, chunk) of each virtual stage.
Placement = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank, in order.

    Args:
        microbatches: number of micro-batches in a step.
        placement: where each virtual stage runs.
        ranks: the actions of each pipeline rank.
        has_backward: False for evaluation.
        beside: (rank, forward) of each pair: the forward runs beside the backward after it, and beside that backward's
            weight gradient if it is next.
    """

    name: str
    microbatches: int
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]
    has_backward: bool = True
    beside: frozenset[tuple[int, Action]] = frozenset()

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def chunks(self) -> int:
        """Number of model chunks of each rank."""
        return len(self.placement) // self.pp

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backwards compute only the input's gradient, and weight gradients are separate actions."""
        return any(action.op is Op.WEIGHT for actions in self.ranks for action in actions)

    @cached_property
    def _stage_of(self) -> dict[tuple[int, int], int]:
        """Virtual stage by (pipeline rank, chunk)."""
        return {place: stage for stage, place in enumerate(self.placement)}

    @cached_property
    def waiting_losses(self) -> int:
        """The largest number of micro-batches that at some time have a loss but no backward yet."""
        rank, chunk = self.placement[-1]
        change = {Op.FORWARD: 1, Op.BACKWARD: -1}
        return max(accumulate(change.get(action.op, 0) for action in self.ranks[rank] if action.chunk == chunk))

    @cached_property
    def _pairs(self) -> dict[tuple[int, Action], tuple[Action, ...]]:
        """The actions of each pair, in order, by (rank, action)."""
        pairs: dict[tuple[int, Action], tuple[Action, ...]] = {}
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                if (rank, action) in self.beside:
                    pair = actions[index : index + 3]
                    if pair[2:] != (replace(pair[1], op=Op.WEIGHT),):
                        pair = pair[:2]
                    pairs |= {(rank, member): pair for member in pair}
        return pairs

    def together(self, rank: int, action: Action) -> tuple[Action, ...]:
        """Return the actions that run together, in order: those of the pair that contains `action`, or `action` alone."""
        return self._pairs.get((rank, action), (action,))

    def needs(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """Return the (rank, action)s that must end before an action starts.  The first action of a pair waits for the
        inputs of the whole pair.
        """
        together = self.together(rank, action)
        sources = [self.source(rank, each) for each in together] if action == together[0] else []
        own = {(rank, each) for each in together[1:]}
        return [self.last_together(*source) for source in sources if source is not None and source not in own]

    def last_together(self, rank: int, action: Action) -> tuple[int, Action]:
        """Return the (rank, action) after which the result of `action` exists.  Results of a pair exist when the whole
        pair has ended.
        """
        return rank, self.together(rank, action)[-1]

    def source(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Return the (rank, action) whose result `action` needs, or None for the first forward.

        A forward needs the forward of the previous stage.  A backward needs the backward of the next stage, or on the
        last stage its own forward.  A weight gradient needs its own backward.
        """
        if action.op is Op.WEIGHT:
            return rank, Action(Op.BACKWARD, action.microbatch, action.chunk)
        is_forward = action.op is Op.FORWARD
        if neighbour := self._neighbour(rank, action, -1 if is_forward else 1):
            return neighbour
        return None if is_forward else (rank, Action(Op.FORWARD, action.microbatch, action.chunk))

    def target(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """Return the (rank, action) that uses the result of `action`, on another rank or the same one, or None."""
        if action.op is Op.WEIGHT:
            return None
        return self._neighbour(rank, action, 1 if action.op is Op.FORWARD else -1)

    def _neighbour(self, rank: int, action: Action, step: int) -> tuple[int, Action] | None:
        """Return the same action on the virtual stage `step` further on, or None if there is no such stage."""
        stage = self._stage_of[rank, action.chunk] + step
        if not 0 <= stage < len(self.placement):
            return None
        other, chunk = self.placement[stage]
        return other, Action(action.op, action.microbatch, chunk)


def loop(pp: int, chunks: int = 1) -> Placement:
    """Return the placement that assigns stages to ranks in order, once per chunk (Narayanan et al. 2021, section 2.2)."""
    return tuple((rank, chunk) for chunk in range(chunks) for rank in range(pp))


def v_shape(pp: int) -> Placement:
    """Return the placement that goes down the ranks and back up, so that the first and last stage share a rank (Qi et
    al. 2024b).
    """
    return (*((rank, 0) for rank in range(pp)), *((rank, 1) for rank in reversed(range(pp))))


_CELL = re.compile(r"([FBW])([0-9]{1,7})(?:\.([0-9]{1,3}))?")
_TOGETHER = ("F", "B", "W", "FB", "FBW")
_EXPECTED = "expected F, B or W with a micro-batch, as F0, and after a dot the chunk where it is not 0, as F0.1"
_PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {"loop": loop, "v": lambda pp, _: v_shape(pp)}


def read_schedule(path: Path, placement: str = "loop") -> Schedule:
    """Read a schedule from a file.  Its name is that of the file, without the suffix.

    Args:
        path: the file.
        placement: "loop" assigns stages to the ranks in order, once per chunk; "v" goes down the ranks and back up.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a table of actions; the message names line and cell.
    """
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement={placement} must be {' or '.join(_PLACEMENTS)}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            rows = [row for texts in reader if (row := _row(f"{path}, line {reader.line_num}", texts))]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text; expected lines such as F0,F1,B0,B1") from None
    except csv.Error as error:
        raise ValueError(f"{path} is no table of comma-separated values: {error}") from None
    cells = [cell for row in rows for joined in row for cell in joined]
    if not cells:
        raise ValueError(f"{path} holds no action; a line is a rank, such as F0,F1,B0,B1")
    microbatches = _count("micro-batch", ((action.microbatch, at, action) for at, action in cells))
    chunks = _count("chunk", ((action.chunk, at, action) for at, action in cells))
    if placement == "v" and chunks != 2:
        raise ValueError(f"{path}: placement v has two chunks on each rank, 0 and 1; the file has {chunks}")
    return Schedule(
        name=path.stem,
        microbatches=microbatches,
        placement=_PLACEMENTS[placement](len(rows), chunks),
        ranks=tuple(tuple(action for joined in row for _, action in joined) for row in rows),
        has_backward=any(action.op is not Op.FORWARD for _, action in cells),
        beside=frozenset((rank, joined[0][1]) for rank, row in enumerate(rows) for joined in row if len(joined) > 1),
    )


def _row(line: str, texts: list[str]) -> list[list[tuple[str, Action]]]:
    """Return the actions of a line, grouped by cell.  Each comes with its position as a text."""
    row = []
    for number, text in enumerate(map(str.strip, texts), 1):
        at = f"{line}, cell {number}"
        found = [_CELL.fullmatch(word) for word in text.split("&")]
        if not text:
            continue
        if not all(found) or "".join(match[1] for match in found if match) not in _TOGETHER:
            raise ValueError(f"{at}: got {text[:40]!r}; {_EXPECTED}")
        actions = [match.groups() for match in found if match]
        row.append([(at, Action(Op(op), int(index), int(chunk or 0))) for op, index, chunk in actions])
    return row


def _count(what: str, cells: Iterable[tuple[int, str, Action]]) -> int:
    """Return the number of micro-batches or chunks, and check that every number below the highest is used.

    Args:
        what: "micro-batch" or "chunk", for the message.
        cells: (number, position in words, action) of each cell.
    """
    found = {index: (at, action) for index, at, action in cells}
    highest = max(found)
    if len(found) <= highest:
        at, action = found[highest]
        missing = next(index for index in range(highest) if index not in found)
        hint = "expected numbers from 0 on without a gap"
        raise ValueError(f"{at}: got {action}, but {what} {missing} is nowhere; {hint}")
    return highest + 1
